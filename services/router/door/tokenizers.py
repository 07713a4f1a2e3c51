"""Tokenizers of chat prompts, message by message."""

from __future__ import annotations

import msgspec

from kvc.core.blocks import TOKEN_BYTES
from kvc.engine.tokens import MESSAGE_START, ChatError, encode_one, encode_text
from kvc.errors import InvalidField

_decode = msgspec.json.Decoder().decode


class ReferenceTokenizer:
    """The reference engine's: one token a byte, special tokens around messages."""

    def __init__(self) -> None:
        """Nothing to load."""
        self._generation_prompt = MESSAGE_START.to_bytes(TOKEN_BYTES, "little") + encode_text("assistant\n")

    def message(self, raw: bytes | msgspec.Raw) -> bytes:
        """Packed tokens of one message.

        Raises:
            InvalidField: it is no chat message.
        """
        try:
            return encode_one(_decode(raw), "messages")
        except ChatError as error:
            raise InvalidField(str(error), field=error.field) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidField(f"not JSON: {error}", field="messages") from None

    def generation_prompt(self) -> bytes:
        """Packed tokens before the reply."""
        return self._generation_prompt

    def text(self, text: str) -> bytes:
        """Packed tokens of plain text.

        Raises:
            InvalidField: it holds lone surrogates.
        """
        try:
            return encode_text(text)
        except UnicodeEncodeError:
            raise InvalidField("not encodable as UTF-8", field="text") from None
