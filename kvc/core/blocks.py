"""Chained block hashes: the identity of a prompt prefix (R17), computed once and extended by the append.

A prompt is cut into blocks of `block_tokens` tokens; the partial last block has no hash. hash_i = xxh3_64(block_i as little-endian
u32 ids, seed = hash_{i-1}), hash_{-1} = chain_seed(model, tokenizer, lora). A hash therefore names the whole prefix up to its block,
is the same in every process, and a set of resident hashes that is closed under prefixes can be bisected: if block i of a chain is
resident, so are all before it.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Container

TOKEN_BYTES = 4
HASH_BYTES = 8

Chain = array  # array("Q"): one u64 a block


def chain_seed(model: str, tokenizer: str = "", lora: str = "") -> int:
    """Seed of the chain: prompts of different models, tokenizers or adapters never share a hash.

    Returns:
        An unsigned 64-bit integer.
    """
    return xxhash.xxh3_64_intdigest("\x00".join((model, tokenizer, lora)).encode())


def pack_tokens(token_ids: list[int] | array[int]) -> bytes:
    """Token ids as little-endian u32, 4 bytes each.

    Raises:
        OverflowError: an id is negative or above 2^32 - 1.
        TypeError: an id is no integer.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> array[int]:
    """A chain from its wire form.

    Raises:
        ValueError: the length is no multiple of 8.
    """
    if len(packed) % HASH_BYTES:
        msg = f"block_hashes: {len(packed)} bytes is no multiple of {HASH_BYTES}"
        raise ValueError(msg)
    chain = array("Q")
    chain.frombytes(packed)
    if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
        chain.byteswap()
    return chain


def pack_hashes(chain: array[int]) -> bytes:
    """The wire form of a chain: little-endian u64, 8 bytes a block."""
    if sys.byteorder == "big":  # pragma: no cover - no such machine in CI
        chain = array("Q", chain)
        chain.byteswap()
    return chain.tobytes()


def extend_chain(chain: array[int], tokens: bytes, block_tokens: int, seed: int) -> None:
    """Appends the hashes of the full blocks of `tokens` that `chain` does not have yet. Mutates `chain`.

    Args:
        chain: hashes of the leading blocks of the same prompt.
        tokens: the whole prompt, packed.
        block_tokens: tokens a block.
        seed: chain_seed.
    """
    step = block_tokens * TOKEN_BYTES
    parent = chain[-1] if chain else seed
    digest = xxhash.xxh3_64_intdigest
    append = chain.append
    view = memoryview(tokens)
    for start in range(len(chain) * step, len(tokens) - step + 1, step):
        parent = digest(view[start : start + step], parent)
        append(parent)


def hash_chain(tokens: bytes, block_tokens: int, seed: int) -> array[int]:
    """All block hashes of a packed prompt."""
    chain = array("Q")
    extend_chain(chain, tokens, block_tokens, seed)
    return chain


def common_blocks(one: array[int], other: array[int]) -> int:
    """Length of the common prefix of two chains, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def resident_blocks(chain: array[int], resident: Container[int]) -> int:
    """Leading blocks of `chain` in `resident`, which must be closed under prefixes. O(log blocks)."""
    high = len(chain)
    if not high or chain[0] not in resident:
        return 0
    if chain[high - 1] in resident:
        return high
    low = 1
    while low < high:
        middle = (low + high) // 2
        if chain[middle] in resident:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(slots=True)
class _Known:
    """Last prompt of a session: its chain and the digest of the bytes the chain covers."""

    chain: array[int]
    digest: bytes


@dataclass(slots=True)
class ChainCache:
    """Chains of live sessions, least recently used first out, bounded in bytes.

    A turn that only appends costs one digest of the old prompt (tens of microseconds per 100k tokens) and the hashes of the new
    blocks; a rewritten prompt is hashed anew.

    Attributes:
        block_tokens: tokens a block.
        seed: chain_seed.
        max_bytes: cap on the bytes held, `entry_bytes` counted for each session.
        held_bytes: bytes held now.
    """

    block_tokens: int
    seed: int
    max_bytes: int = 256 * 1024 * 1024
    entry_bytes: int = 400
    held_bytes: int = 0
    _known: dict[str, _Known] = field(default_factory=dict)

    def chain(self, session_id: str, tokens: bytes) -> array[int]:
        """The chain of a session's new prompt. The result is shared with the cache: callers do not mutate it."""
        known = self._known.pop(session_id, None)
        covered = 0
        if known is not None:
            self.held_bytes -= self._cost(known)
            covered = len(known.chain) * self.block_tokens * TOKEN_BYTES
        if known is not None and covered <= len(tokens) and xxhash.xxh3_128_digest(memoryview(tokens)[:covered]) == known.digest:
            # A turn in flight may still hold the old array: extend a copy (a memcpy of 8 bytes a block).
            chain = known.chain[:]
            extend_chain(chain, tokens, self.block_tokens, self.seed)
        else:
            chain = hash_chain(tokens, self.block_tokens, self.seed)
        covered = len(chain) * self.block_tokens * TOKEN_BYTES
        self._keep(session_id, _Known(chain, xxhash.xxh3_128_digest(memoryview(tokens)[:covered])))
        return chain

    def forget(self, session_id: str) -> None:
        """Drops a session. Mutates; unknown sessions are fine."""
        known = self._known.pop(session_id, None)
        if known is not None:
            self.held_bytes -= self._cost(known)

    def __len__(self) -> int:
        """Sessions held."""
        return len(self._known)

    def _keep(self, session_id: str, known: _Known) -> None:
        self._known[session_id] = known
        self.held_bytes += self._cost(known)
        while self.held_bytes > self.max_bytes and len(self._known) > 1:
            oldest = next(iter(self._known))
            self.held_bytes -= self._cost(self._known.pop(oldest))

    def _cost(self, known: _Known) -> int:
        return len(known.chain) * HASH_BYTES + self.entry_bytes
