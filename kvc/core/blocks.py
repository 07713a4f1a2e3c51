"""Chained block hashes: the identity of a prompt prefix (R17), computed once and extended by the append.

A prompt is cut into blocks of `block_tokens` tokens; the partial last block has no hash. hash_i = xxh3_64(block_i as little-endian
u32 ids, seed = hash_{i-1}), hash_{-1} = chain_seed(model, tokenizer, lora). A hash therefore names the whole prefix up to its block,
is the same in every process, and a set of resident hashes that is closed under prefixes can be bisected: if block i of a chain is
resident, so are all before it.
"""

from __future__ import annotations

import sys
from array import array
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

TOKEN_BYTES = 4
HASH_BYTES = 8
_RUN_BLOCKS = 32

Chain: TypeAlias = "array[int]"
"""array("Q"): one u64 a block."""


def chain_seed(model: str, tokenizer: str = "", lora: str = "") -> int:
    """Seed of the chain: prompts of different models, tokenizers or adapters never share a hash.

    Returns:
        An unsigned 64-bit integer.
    """
    return xxhash.xxh3_64_intdigest(f"{model}\x00{tokenizer}\x00{lora}".encode())


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


def extend_blocks(chain: array[int], tokens: bytes | memoryview, block_tokens: int, seed: int) -> None:
    """Appends the hashes of the full blocks of `tokens`, which begin where `chain` ends. Mutates `chain`.

    Args:
        chain: hashes of all blocks before.
        tokens: packed tokens after them.
        block_tokens: tokens a block.
        seed: chain_seed.
    """
    step = block_tokens * TOKEN_BYTES
    parent = chain[-1] if chain else seed
    digest = xxhash.xxh3_64_intdigest
    view = memoryview(tokens)
    first = 0
    if len(tokens) >= step * _RUN_BLOCKS:  # many blocks are cut at once: twice as fast as one slice a block
        runs = _runs_of(step)
        first = len(tokens) // runs.size * runs.size
        chain.fromlist([parent := digest(block, parent) for run in runs.iter_unpack(view[:first]) for block in run])
    for start in range(first, len(tokens) - step + 1, step):
        parent = digest(view[start : start + step], parent)
        chain.append(parent)


@lru_cache(maxsize=16)
def _runs_of(step: int) -> Struct:
    """Cuts bytes into runs of blocks of `step` bytes."""
    return Struct(f"{step}s" * _RUN_BLOCKS)


def extend_chain(chain: array[int], tokens: bytes, block_tokens: int, seed: int) -> None:
    """Appends the hashes of the full blocks of `tokens` that `chain` does not have yet. Mutates `chain`.

    Args:
        chain: hashes of the leading blocks of the same prompt.
        tokens: the whole prompt, packed.
        block_tokens: tokens a block.
        seed: chain_seed.
    """
    extend_blocks(chain, memoryview(tokens)[len(chain) * block_tokens * TOKEN_BYTES :], block_tokens, seed)


def hash_chain(tokens: bytes, block_tokens: int, seed: int) -> array[int]:
    """All block hashes of a packed prompt."""
    chain = array("Q")
    extend_chain(chain, tokens, block_tokens, seed)
    return chain


def common_blocks(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix of two chains, by bisection: whatever names the whole prefix up to it, as block hashes do."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def resident_blocks(chain: array[int], resident: Container[int], least: int = 0) -> int:
    """Leading blocks of `chain` in `resident`, which must be closed under prefixes. O(log blocks).

    Args:
        chain: the prompt.
        resident: blocks held.
        least: leading blocks that need no look, because they are resident or the caller does not count them.

    Returns:
        At least `least`.
    """
    high = len(chain)
    if least >= high or chain[least] not in resident:
        return least
    if chain[high - 1] in resident:
        return high
    low = least + 1
    while low < high:
        middle = (low + high) // 2
        if chain[middle] in resident:
            low = middle + 1
        else:
            high = middle
    return low


class PrefixDigests:
    """Recognises prompts that only append.

    Such a turn costs one digest of the old prompt (tens of microseconds per 100k tokens) and the hashes of its new blocks. Holds
    16 bytes a session; the chains themselves live in kvc.core.forest.
    """

    def __init__(self, block_tokens: int, seed: int, max_sessions: int = 200_000) -> None:
        """Starts empty.

        Args:
            block_tokens: tokens a block.
            seed: chain_seed.
            max_sessions: least recently used sessions beyond this are forgotten and hashed anew when they return.
        """
        self.block_tokens = block_tokens
        self.seed = seed
        self.max_sessions = max_sessions
        self._digest: dict[str, tuple[int, bytes]] = {}

    def chain(self, session_id: str, tokens: bytes, previous: array[int] | None) -> array[int]:
        """The chain of a session's new prompt.

        Args:
            session_id: the session.
            tokens: the whole prompt, packed.
            previous: the session's chain so far, which is extended in place when the prompt only appends; None when unknown.
        """
        covered, digest = self._digest.pop(session_id, (0, b""))
        if previous is None or covered != len(previous) or not self._covers(tokens, covered, digest):
            previous = array("Q")
        extend_chain(previous, tokens, self.block_tokens, self.seed)
        self._digest[session_id] = (len(previous), self._digest_of(tokens, len(previous)))
        if len(self._digest) > self.max_sessions:
            del self._digest[next(iter(self._digest))]
        return previous

    def forget(self, session_id: str) -> None:
        """Drops a session; an unknown one is fine."""
        self._digest.pop(session_id, None)

    def __len__(self) -> int:
        """Sessions known."""
        return len(self._digest)

    def _covers(self, tokens: bytes, blocks: int, digest: bytes) -> bool:
        return blocks * self.block_tokens * TOKEN_BYTES <= len(tokens) and self._digest_of(tokens, blocks) == digest

    def _digest_of(self, tokens: bytes, blocks: int) -> bytes:
        return xxhash.xxh3_128_digest(memoryview(tokens)[: blocks * self.block_tokens * TOKEN_BYTES])
