"""Checks of single values from outside. Each returns the value, or raises `InvalidField` naming the field and the allowed range.

No gRPC and no protobuf: the engine's side of the link uses the same checks as the services.
"""

from __future__ import annotations

import math
from urllib.parse import urlsplit

from kvc.core.blocks import HASH_BYTES
from kvc.errors import InvalidField

MAX_SESSION_ID_BYTES = 256
MAX_ID_CHARS = 128
MAX_TOKENS = 2**31 - 1
MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1
MAX_HASHES_BYTES = 8 * 1024 * 1024 + 64
MAX_DEADLINE_MS = 60_000
MAX_TRACEPARENT_BYTES = 64
MAX_CAPABILITIES = 64
MAX_NAME_BYTES = 512
MAX_URL_BYTES = 2048


def session_id(value: str, field: str = "session_id") -> str:
    """A session id: 1 to 256 bytes of UTF-8, any characters."""
    return text(value, field, 1, MAX_SESSION_ID_BYTES)


def identifier(value: str, field: str, *, empty: bool = False) -> str:
    """A request id, worker id or ticket: 1 to 128 printable ASCII characters; `empty` allows none."""
    if len(value) <= MAX_ID_CHARS and value.isascii() and value.isprintable() and (value or empty):
        return value
    raise InvalidField(f"must be {0 if empty else 1} to {MAX_ID_CHARS} printable ASCII characters", field=field)


def text(value: str, field: str, low_bytes: int, high_bytes: int) -> str:
    """Text of `low_bytes` to `high_bytes` bytes of UTF-8."""
    try:
        size = len(value.encode()) if len(value) <= high_bytes else len(value)
    except UnicodeEncodeError:
        raise InvalidField("is not valid UTF-8", field=field) from None
    if not low_bytes <= size <= high_bytes:
        raise InvalidField(f"must be {low_bytes} to {high_bytes} bytes of UTF-8, is {size}", field=field)
    return value


def url(value: str, field: str, high_bytes: int) -> str:
    """An http or https base URL with a host."""
    text(value, field, 1, high_bytes)
    try:
        parts = urlsplit(value)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not (good and value.isascii() and value.isprintable()) or " " in value:
        raise InvalidField("must be an http:// or https:// URL", field=field)
    return value


def count(value: int, field: str, low: int, high: int) -> int:
    """An integer from `low` to `high`, both allowed."""
    if not low <= value <= high:
        raise InvalidField(f"must be {low} to {high}, is {_short(value)}", field=field)
    return value


def amount(value: float, field: str) -> float:
    """A finite number that is 0 or more."""
    if not (math.isfinite(value) and value >= 0):
        raise InvalidField(f"must be finite and at least 0, is {value}", field=field)
    return value


def rate(value: float, field: str) -> float:
    """A finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidField(f"must be finite and above 0, is {value}", field=field)
    return value


def packed_chain(packed: bytes, field: str, input_tokens: int, block_tokens: int) -> bytes:
    """Packed block hashes of a prompt of `input_tokens` tokens: at most one for each of its full blocks."""
    if len(packed) > MAX_HASHES_BYTES:
        raise InvalidField(f"must be at most {MAX_HASHES_BYTES} bytes, is {len(packed)}", field=field)
    if len(packed) % HASH_BYTES:
        raise InvalidField(f"must be packed unsigned 64-bit integers, but {len(packed)} bytes is no multiple of {HASH_BYTES}", field=field)
    blocks, most = len(packed) // HASH_BYTES, input_tokens // block_tokens
    if blocks > most:
        raise InvalidField(f"has {blocks} blocks, but {input_tokens} tokens make {most} full blocks of {block_tokens}", field=field)
    return packed


def _short(value: int) -> str:
    # int.__str__ refuses very long integers; nobody needs all their digits.
    return str(value) if abs(value) < 10**30 else "out of any range"
