"""Hashing of prompts, in CPU time: a cold prompt of 100,000 tokens, an append, an engine's pages, and the overlap with one worker."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from bench.report import Row
from bench.timing import always, time_calls
from bench.world import BLOCK_TOKENS
from kvc.core.blocks import PrefixDigests, hash_chain, pack_tokens, resident_blocks
from kvc.core.reblock import Reblocker

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "blocks"
SEED = 7
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    prompt_tokens: int = 100_000
    append_tokens: int = 2_000
    resident_blocks: int = 16_666
    calls: int = 100
    rounds: int = 5


def measure(size: Size | None = None) -> list[Row]:
    """All rows."""
    size = size or Size()
    rng = random.Random(SEED)
    ids = [rng.randrange(200_000) for _ in range(size.prompt_tokens)]
    old = pack_tokens(ids)
    new = old + rng.randbytes(4 * size.append_tokens)

    def once(call: Callable[[], object]) -> float:
        return time_calls(always(call), size.calls, size.rounds).cpu_p50_us

    floor_us = once(partial(xxhash.xxh3_64_intdigest, old))
    pack_us = once(partial(pack_tokens, ids))
    cold_us = once(partial(hash_chain, old, BLOCK_TOKENS, SEED))
    again_us = once(partial(hash_chain, new, BLOCK_TOKENS, SEED))
    append_us = time_calls(partial(_append, old, new), size.calls, size.rounds).cpu_p50_us
    pages_us = once(partial(_reblock, old))
    chain = hash_chain(old, BLOCK_TOKENS, SEED)
    held = set(array("Q", rng.randbytes(8 * size.resident_blocks))) | set(chain[: len(chain) // 2])
    sets_us = once(lambda: len(held & set(chain)))
    bisect_us = once(partial(resident_blocks, chain, held))
    prompt, append = f"{size.prompt_tokens:,} tokens", f"{size.append_tokens:,} tokens"
    return [
        Row(NAME, f"hash {prompt}, cold", cold_us, "µs", baseline=floor_us, baseline_name="one digest of all bytes"),
        Row(NAME, f"append {append} to {prompt}", append_us, "µs", baseline=again_us, baseline_name="hash all anew"),
        Row(NAME, f"pack {prompt} from a list", pack_us, "µs", baseline=cold_us, baseline_name="hash them"),
        Row(NAME, f"re-block {prompt} in pages of {PAGE_TOKENS}", pages_us, "µs", baseline=cold_us, baseline_name="hash them"),
        Row(
            NAME,
            f"overlap of {len(chain):,} blocks with {len(held):,}",
            bisect_us,
            "µs",
            baseline=sets_us,
            baseline_name="set intersection",
        ),
    ]


def _append(old: bytes, new: bytes, _: int) -> Callable[[], object]:
    digests = PrefixDigests(BLOCK_TOKENS, SEED)
    chain = digests.chain("session", old, None)
    return partial(digests.chain, "session", new, chain)


def _reblock(tokens: bytes) -> int:
    reblocker = Reblocker(BLOCK_TOKENS, SEED)
    pages = len(tokens) // (4 * PAGE_TOKENS)
    reblocker.stored(range(1, pages + 1), 0, tokens[: 4 * PAGE_TOKENS * pages])
    return len(reblocker)
