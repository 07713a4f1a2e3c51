"""Small values for core tests: turns whose block hashes are written as words."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import xxhash

from kvc.core.types import Role, Turn, WorkerInfo, WorkerRef

if TYPE_CHECKING:
    from collections.abc import Sequence


def blocks(*words: str) -> array[int]:
    """A chain whose i-th block is named by the i-th word; equal words at a depth chain to equal hashes, as in a real prompt."""
    chain = array("Q")
    parent = 0
    for word in words:
        parent = xxhash.xxh3_64_intdigest(word.encode(), parent)
        chain.append(parent)
    return chain


def run(name: str, count: int, after: Sequence[int] = ()) -> array[int]:
    """`count` blocks called name0, name1 ... chained after `after`."""
    chain = array("Q", after)
    parent = chain[-1] if chain else 0
    for index in range(count):
        parent = xxhash.xxh3_64_intdigest(f"{name}{index}".encode(), parent)
        chain.append(parent)
    return chain


def turn(session_id: str = "s", chain: array[int] | None = None, input_tokens: int | None = None, **fields: Any) -> Turn:
    """A turn; its input is the chain's blocks of 24 tokens unless told, without output reserve."""
    chain = array("Q") if chain is None else chain
    values: dict[str, Any] = {"turn_index": 0, "output_reserve_tokens": 0} | fields
    return Turn(session_id=session_id, chain=chain, input_tokens=len(chain) * 24 if input_tokens is None else input_tokens, **values)


def worker(worker_id: str, epoch: int = 1, **fields: Any) -> WorkerInfo:
    """A decode worker of the model "m"."""
    values: dict[str, Any] = {
        "role": Role.DECODE,
        "model": "m",
        "capacity_tokens": 92_104,
        "page_tokens": 1,
        "block_tokens": 24,
        "engine_url": f"http://{worker_id}",
    } | fields
    return WorkerInfo(ref=WorkerRef(worker_id, epoch), **values)
