"""Token ids of blocks: traces have block ids only, engines want tokens.

Token k of block b is `table[k] + word`, the words being 30-bit halves of b, so that two blocks with different ids differ in one of
their first two tokens and equal ids give equal tokens, in every process. A block is built by one big-integer multiplication: about a
quarter of a microsecond for 24 tokens, 1-2 ms for a prompt of 100,000.
"""

from __future__ import annotations

from functools import lru_cache

import xxhash

from kvc.core.blocks import TOKEN_BYTES

FIRST_TOKEN = 259  # below: special tokens and bytes of text
LAST_TOKEN = 2**31 - 2
_WORD_BITS = 30
_WORD = (1 << _WORD_BITS) - 1
_BITS = 8 * TOKEN_BYTES
_SPREAD = LAST_TOKEN - FIRST_TOKEN - _WORD
_TAIL_TOKENS = 64


class Pattern:
    """Turns numbers into runs of `width` >= 2 tokens; equal numbers, equal tokens."""

    __slots__ = ("_base", "_bytes", "_even", "_odd", "width")

    def __init__(self, width: int, domain: str) -> None:
        """Precomputes the table.

        Args:
            width: tokens a run.
            domain: patterns of different domains give different tokens.
        """
        table = [FIRST_TOKEN + xxhash.xxh3_64_intdigest(f"{domain}/{k}".encode()) % _SPREAD for k in range(width)]
        self.width = width
        self._bytes = width * TOKEN_BYTES
        self._base = int.from_bytes(b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in table), "little")
        self._even = sum(1 << (_BITS * k) for k in range(0, width, 2))
        self._odd = sum(1 << (_BITS * k) for k in range(1, width, 2))

    def tokens(self, number: int) -> bytes:
        """The run of a number in [0, 2^64), packed."""
        if number >> (2 * _WORD_BITS):
            number = xxhash.xxh3_64_intdigest(number.to_bytes(8, "little")) >> 4
        low = number & _WORD
        return (self._base + low * self._even + (low ^ (number >> _WORD_BITS)) * self._odd).to_bytes(self._bytes, "little")


@lru_cache(maxsize=16)
def block_pattern(block_tokens: int) -> Pattern:
    """The pattern of native blocks of a size."""
    return Pattern(block_tokens, "block")


@lru_cache(maxsize=1)
def _tail_pattern() -> Pattern:
    return Pattern(_TAIL_TOKENS, "tail")


def tail_tokens(request_id: str, count: int) -> bytes:
    """`count` packed tokens that no other request has."""
    pattern = _tail_pattern()
    start = xxhash.xxh3_64_intdigest(request_id.encode()) >> 5
    runs = [pattern.tokens(start + k) for k in range(-(-count // _TAIL_TOKENS))]
    return b"".join(runs)[: count * TOKEN_BYTES]
