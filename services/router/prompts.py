"""Prompts as the router sees them: packed tokens, their chain, and the session's identity."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvc.checks import MAX_HASHES_BYTES
from kvc.core.blocks import TOKEN_BYTES, PrefixDigests, hash_chain, pack_tokens, unpack_hashes
from kvc.engine.tokens import encode_text
from kvc.errors import InvalidField, TooLarge

if TYPE_CHECKING:
    from kvc.core.blocks import Chain
    from kvc.v1 import router_pb2

MAX_TOKEN_ID = 2**31 - 1
MAX_NEW_TOKENS = 1_048_576
"""Longest reply that a request may ask for."""


def tokens_of(request: router_pb2.DispatchRequest | router_pb2.RouteRequest, max_tokens: int) -> bytes:
    """The prompt as packed little-endian u32 ids.

    Raises:
        InvalidField: no prompt, an id out of range, a torn packed prompt; names the field.
        TooLarge: more than `max_tokens` tokens.
    """
    kind = request.WhichOneof("prompt")
    if kind == "input_ids":
        _bounded(len(request.input_ids.ids), max_tokens, kind)
        packed = pack_tokens(request.input_ids.ids[:])
        if not ids_in_range(packed):
            raise InvalidField(f"token ids must be at most {MAX_TOKEN_ID}", field="input_ids.ids")
    elif kind == "packed_input_ids":
        packed = request.packed_input_ids
        if len(packed) % TOKEN_BYTES:
            raise InvalidField(f"{len(packed)} bytes is no multiple of {TOKEN_BYTES}", field="packed_input_ids")
        _bounded(len(packed) // TOKEN_BYTES, max_tokens, kind)
        if not ids_in_range(packed):
            raise InvalidField(f"token ids must be at most {MAX_TOKEN_ID}", field="packed_input_ids")
    elif kind == "text":
        _bounded(len(request.text), max_tokens, kind)  # a character is at least one token
        packed = encode_text(request.text)
        _bounded(len(packed) // TOKEN_BYTES, max_tokens, kind)
    else:
        raise InvalidField("one of input_ids, text or packed_input_ids is needed", field="prompt")
    if not packed:
        raise InvalidField("must not be empty", field=kind)
    return packed


def _bounded(tokens: int, max_tokens: int, field: str) -> None:
    if tokens > max_tokens:
        raise TooLarge(f"at least {tokens} tokens are more than the {max_tokens} that are taken", field=field)


def ids_in_range(packed: bytes) -> bool:
    """True when no id is above MAX_TOKEN_ID: its top byte would be above 0x7F."""
    return packed[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()


def hashes_of(packed: bytes) -> Chain:
    """A chain given as block hashes.

    Raises:
        InvalidField: empty, or not a multiple of 8 bytes.
        TooLarge: more than MAX_HASHES_BYTES.
    """
    if not packed:
        raise InvalidField("must not be empty", field="block_hashes")
    if len(packed) > MAX_HASHES_BYTES:
        raise TooLarge(f"{len(packed)} bytes are more than {MAX_HASHES_BYTES}", field="block_hashes")
    try:
        return unpack_hashes(packed)
    except ValueError as error:
        raise InvalidField(str(error), field="block_hashes") from None


class Chains:
    """Block hash chains of prompts, extended by the append. The hash seed is the mesh's, known once a worker is."""

    def __init__(self, block_tokens: int) -> None:
        """Starts without a seed."""
        self._block_tokens = block_tokens
        self._digests: PrefixDigests | None = None

    def use_seed(self, seed: int) -> None:
        """Sets the seed; another one forgets every session."""
        if self._digests is None or self._digests.seed != seed:
            self._digests = PrefixDigests(self._block_tokens, seed)

    @property
    def seed(self) -> int | None:
        """The hash seed of the mesh's model; None until a worker is known."""
        return self._digests.seed if self._digests is not None else None

    @property
    def seeded(self) -> bool:
        """True once a worker is known."""
        return self._digests is not None

    def chain(self, session_id: str, tokens: bytes, previous: Chain | None) -> Chain:
        """The chain of a session's prompt; empty while no worker is known."""
        return self._digests.chain(session_id, tokens, previous) if self._digests is not None else array("Q")

    def fresh(self, tokens: bytes) -> Chain:
        """The chain of a prompt, without remembering it; empty while no worker is known."""
        return hash_chain(tokens, self._block_tokens, self._digests.seed) if self._digests is not None else array("Q")

    def forget(self, session_id: str) -> None:
        """Drops a session."""
        if self._digests is not None:
            self._digests.forget(session_id)
