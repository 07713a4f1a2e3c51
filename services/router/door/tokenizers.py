"""Tokenizers of chat prompts, message by message; and what stands in for one where there is none.

reference   the reference engine's: one token a byte
none        no tokenizer: the bytes of what is said, four to a token, in place of tokens. Nothing but lengths leaves the router.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from kvc.core.blocks import TOKEN_BYTES
from kvc.engine.tokens import MESSAGE_START, ChatError, encode_one, encode_text
from kvc.errors import InvalidField

if TYPE_CHECKING:
    from services.router.door.conversations import MessageTokenizer

TokenizerName = Literal["reference", "none"]
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="deterministic").encode
_QUOTE: Final = b'"'
_WRITTEN_QUOTE: Final = b"\\u0022"
_SHOWN_CHARS: Final = 64


def tokenizer_of(name: TokenizerName) -> MessageTokenizer:
    """The tokenizer of a setting."""
    return ReferenceTokenizer() if name == "reference" else ByteTokenizer()


class ReferenceTokenizer:
    """The reference engine's: one token a byte, special tokens around messages."""

    estimates = False

    def __init__(self) -> None:
        """Nothing to load."""
        self._generation_prompt = MESSAGE_START.to_bytes(TOKEN_BYTES, "little") + encode_text("assistant\n")

    def message(self, raw: bytes | msgspec.Raw) -> bytes:
        """Packed tokens of one message.

        Raises:
            InvalidField: it is no chat message.
        """
        try:
            return encode_one(decoded(raw), "messages")
        except ChatError as error:
            raise InvalidField(str(error), field=error.field) from None

    def generation_prompt(self) -> bytes:
        """Packed tokens before the reply."""
        return self._generation_prompt

    def text(self, text: str) -> bytes:
        """Packed tokens of plain text.

        Raises:
            InvalidField: it holds lone surrogates.
        """
        return encode_text(_utf8(text))


class ByteTokenizer:
    """None: what is said, as bytes. Marks for caching say nothing, and a text is the list of one part that it may be written as."""

    estimates = True

    def message(self, raw: bytes | msgspec.Raw) -> bytes:
        """The bytes of one message.

        Raises:
            InvalidField: it is no chat message.
        """
        message = decoded(raw)
        if not isinstance(message, dict):
            raise InvalidField("a message is an object", field="messages")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidField("a non-empty string is needed", field="messages.role")
        if isinstance(content, list):
            message["content"] = _said(content)
        try:
            data = _encode(message)
        except (UnicodeEncodeError, RecursionError) as error:
            raise InvalidField(f"cannot be encoded: {error}", field="messages") from None
        return data + bytes(-len(data) % TOKEN_BYTES)

    def generation_prompt(self) -> bytes:
        """Nothing is known of it."""
        return b""

    def text(self, text: str) -> bytes:
        """The bytes of plain text, in whole tokens.

        Raises:
            InvalidField: it holds lone surrogates.
        """
        data = _utf8(text)
        return data[: len(data) - len(data) % TOKEN_BYTES]


def decoded(raw: bytes | msgspec.Raw) -> Any:
    """A message as an object.

    Raises:
        InvalidField: it is not JSON, or a key occurs twice in one of its objects: two readers of such a message need not agree on it.
    """
    try:
        message = _decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidField(f"not JSON: {error}", field="messages") from None
    # Each string has two marks, and a mark inside a string is one more. Of a key that comes twice one string is missing in the object.
    written = bytes(raw)
    if written.count(_QUOTE) != _quotes(message) or _WRITTEN_QUOTE in written:
        _check_once(written)
    return message


def _quotes(value: Any) -> int:
    """Quotation marks that writing a value takes."""
    count, rest = 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            count += 2 + one.count('"')
        elif isinstance(one, dict):
            rest += one
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return count


def _check_once(written: bytes) -> None:
    try:
        json.loads(written, object_pairs_hook=_once, parse_int=str, parse_float=str)
    except RecursionError:
        raise InvalidField("nested too deeply", field="messages") from None


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidField("a key occurs twice", field=f"messages.{name[:_SHOWN_CHARS]}")
        seen.add(name)


def _said(parts: list[Any]) -> str | list[Any]:
    """The content of a message without marks for caching."""
    bare = [{name: part[name] for name in part if name != "cache_control"} if isinstance(part, dict) else part for part in parts]
    only = bare[0] if len(bare) == 1 else None
    if isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] == "text" and isinstance(only["text"], str):
        return only["text"]
    return bare


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidField("not encodable as UTF-8", field="text") from None
