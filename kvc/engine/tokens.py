"""The tokenizer of the reference engine: one token a byte, and special tokens between messages.

Token id = byte + 3. The ids 0 (padding), 1 (message start) and 2 (message end) never come from text, so a chat prompt is the
concatenation of its messages and an append to a conversation is an append to its tokens. Ids from 259 on have no text; traces
use them.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any, Final

import msgspec

from kvc.core.blocks import TOKEN_BYTES

PAD: Final = 0
MESSAGE_START: Final = 1
MESSAGE_END: Final = 2
FIRST_BYTE: Final = 3
VOCAB_SIZE: Final = 2**31 - 1

_LOW = bytes((byte + FIRST_BYTE) & 0xFF for byte in range(256))
_HIGH = bytes((byte + FIRST_BYTE) >> 8 for byte in range(256))
_START = MESSAGE_START.to_bytes(TOKEN_BYTES, "little")
_END = MESSAGE_END.to_bytes(TOKEN_BYTES, "little")


class ChatError(ValueError):
    """A chat message cannot be rendered; `field` is its path in the request."""

    def __init__(self, message: str, field: str) -> None:
        """Keeps the path of the field at fault."""
        super().__init__(message)
        self.field = field


def encode_text(text: str | bytes) -> bytes:
    """Packed little-endian u32 tokens of a text.

    Raises:
        UnicodeEncodeError: the text holds lone surrogates.
    """
    if isinstance(text, str):  # no byte of UTF-8 is above 0xf4, so every token fits in a byte
        return text.encode().translate(_LOW).decode("latin-1").encode("utf-32-le")
    data = text
    packed = bytearray(TOKEN_BYTES * len(data))
    packed[0::TOKEN_BYTES] = data.translate(_LOW)
    packed[1::TOKEN_BYTES] = data.translate(_HIGH)
    return bytes(packed)


def decode_tokens(token_ids: list[int] | array[int]) -> str:
    """Text of token ids: special tokens and ids without text give nothing, broken UTF-8 gives U+FFFD."""
    last = FIRST_BYTE + 256
    return bytes(token - FIRST_BYTE for token in token_ids if FIRST_BYTE <= token < last).decode(errors="replace")


def unpack_tokens(packed: bytes) -> array[int]:
    """Token ids from their packed form."""
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
        tokens.byteswap()
    return tokens


def encode_message(role: str, content: str) -> bytes:
    """Packed tokens of one chat message."""
    return _START + encode_text(f"{role}\n{content}") + _END


def encode_chat(messages: list[dict[str, Any]]) -> bytes:
    """Packed tokens of a conversation, ready for the assistant's answer.

    Args:
        messages: OpenAI's or Anthropic's chat messages; text, tool calls and tool results. Tool calls become part of the message's text.

    Raises:
        ChatError: a message is malformed.
    """
    parts = [encode_one(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return b"".join(parts) + _START + encode_text("assistant\n")


def encode_one(message: Any, path: str) -> bytes:
    """Packed tokens of one chat message given as a decoded object; `path` names it in errors.

    Raises:
        ChatError: it is malformed.
    """
    if not isinstance(message, dict):
        raise ChatError(f"{path}: a message is an object", path)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatError(f"{path}.role: a non-empty string is needed", f"{path}.role")
    try:
        text = _content_text(message.get("content"), f"{path}.content")
        if message.get("tool_calls"):
            text += _canonical(message["tool_calls"])
        return encode_message(role, text)
    except UnicodeEncodeError as error:
        raise ChatError(f"{path}: not encodable as UTF-8", path) from error


def _canonical(value: Any) -> str:
    """JSON that does not depend on the order in which a client writes its keys."""
    return msgspec.json.encode(value, order="deterministic").decode()


def _content_text(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{path}: a string or a list of parts is needed", path)
    return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    """Text of a part: of a text its words, of a tool's call and of its result what the model would read."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if kind == "tool_use":
        return _canonical({name: part.get(name) for name in ("id", "name", "input")})
    if kind == "tool_result":
        known = _canonical({name: part[name] for name in ("tool_use_id", "is_error") if part.get(name)})
        return known + _content_text(part.get("content"), f"{path}.content")
    raise ChatError(f"{path}: only parts of type text, tool_use and tool_result are supported", path)
