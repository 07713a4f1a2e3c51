"""What a KV cache of the reference engine holds: a number that stands for everything before it.

Tokens t_0 .. t_{n-1} have the running state S_0 = salt(model), S_{k+1} = (S_k * 2^32 + t_k + 1) mod PRIME. A page on a device stores
`(S_end - S_start) mod PRIME`, so the state of a context is the salt plus the sum of the stored values of every page that holds it:
a corrupt, stale, foreign or missing page changes the state, and with it every token generated from it on. The state does not
depend on the page size.

The next token is xxh3-64 of the state, mapped into the vocabulary of the request. A client that knows the prompt computes the
whole reply with `expected_output` and thereby checks the KV that produced it.
"""

from __future__ import annotations

import sys
from array import array
from itertools import accumulate, pairwise
from typing import NamedTuple

import xxhash

from kvc.core.blocks import TOKEN_BYTES

PRIME = 2**64 - 59
STATE_BYTES = 8

_WORD_BITS = 8 * TOKEN_BYTES
_RUN_TOKENS = 1024


class Vocab(NamedTuple):
    """A contiguous range of token ids that output is drawn from."""

    first: int
    size: int


TEXT_VOCAB = Vocab(first=ord(" ") + 3, size=ord("~") - ord(" ") + 1)
"""Output of requests that came as text: printable ASCII bytes."""

IDS_VOCAB = Vocab(first=259, size=2**31 - 1 - 259)
"""Output of requests that came as token ids."""


def salt(model: str) -> int:
    """State of the empty context of a model."""
    return xxhash.xxh3_64_intdigest(model.encode()) % PRIME


def advance(state: int, packed_tokens: bytes) -> int:
    """State after a run of packed little-endian u32 tokens, in O(run) without a loop over tokens."""
    words = _big_endian(packed_tokens)
    step = _RUN_TOKENS * TOKEN_BYTES
    for start in range(0, len(words), step):
        run = words[start : start + step]
        bits = 8 * len(run)
        state = ((state << bits) + int.from_bytes(run, "big") + _ones(bits)) % PRIME
    return state


def page_values(state: int, packed_tokens: bytes, page_tokens: int) -> tuple[array[int], int]:
    """Stored values of the full pages of a run that starts in `state`.

    Returns:
        One value a page, and the state after the last full page.
    """
    words = _big_endian(packed_tokens)
    step = page_tokens * TOKEN_BYTES
    bits = 8 * step
    ones = _ones(bits)
    from_bytes = int.from_bytes
    states = list(
        accumulate(
            (from_bytes(words[start : start + step], "big") + ones for start in range(0, len(words) - step + 1, step)),
            lambda before, run: ((before << bits) + run) % PRIME,
            initial=state,
        )
    )
    values = array("Q", [(after - before) % PRIME for before, after in pairwise(states)])
    return values, states[-1]


def state_of(start: int, values: array[int]) -> int:
    """State after the pages with these stored values, from the state before them: reads every page."""
    return (start + sum(values)) % PRIME


def next_token(state: int, vocab: Vocab) -> int:
    """The token that follows a context in this state."""
    return vocab.first + xxhash.xxh3_64_intdigest(state.to_bytes(STATE_BYTES, "little")) % vocab.size


def generate(state: int, count: int, vocab: Vocab) -> tuple[list[int], int]:
    """The next `count` tokens.

    Returns:
        The tokens, and the state after all of them.
    """
    digest = xxhash.xxh3_64_intdigest
    first, size = vocab
    tokens: list[int] = []
    append = tokens.append
    for _ in range(count):
        token = first + digest(state.to_bytes(8, "little")) % size
        append(token)
        state = ((state << 32) + token + 1) % PRIME
    return tokens, state


def expected_output(packed_prompt: bytes, count: int, vocab: Vocab, model_salt: int) -> list[int]:
    """What a correct engine answers to a prompt: the first `count` output tokens."""
    return generate(advance(model_salt, packed_prompt), count, vocab)[0]


def _big_endian(packed_tokens: bytes) -> bytes:
    words = array("I")
    words.frombytes(packed_tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def _ones(bits: int) -> int:
    """1 in each of the words: the `+ 1` of the recurrence, which makes runs of token 0 visible."""
    return ((1 << bits) - 1) // ((1 << _WORD_BITS) - 1)
