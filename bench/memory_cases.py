"""Memory cases, each in a process of its own: `python -m bench.memory_cases CASE JSON` builds, measures its resident set, prints JSON."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from bench.world import BLOCK_TOKENS, Mesh, MeshSize, random_chain
from kvc.core import events as ev
from kvc.core.blocks import PrefixDigests
from kvc.core.forest import Forest
from kvc.core.params import params_for
from kvc.core.reblock import Reblocker
from kvc.core.state import Sigma
from kvc.core.types import Attempt, Executor, Mode
from kvc.engine.reference.node import Removed, Stored
from kvc.engine.reference.radix import RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable

Numbers = dict[str, float]
NO_CAP_BYTES = 1 << 50
PAGE_TOKENS = 16


def resident_bytes() -> int:
    """Physical memory of this process, after a collection.

    Raises:
        FileNotFoundError: no /proc here: memory is measured on Linux only.
    """
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forest(sessions: int, blocks: int, shared_blocks: int, turns: int) -> Numbers:
    """Chains of `blocks` blocks that share their first ones, each grown in `turns` appends of equal length, without a cap."""
    rng = random.Random(1)
    shared = random_chain(rng, shared_blocks)
    held = Forest(NO_CAP_BYTES)
    held.update("first", random_chain(rng, blocks, shared))
    held.remove("first")
    before = resident_bytes()
    for number in range(sessions):
        chain = random_chain(rng, blocks - shared_blocks, shared)
        for turn in range(1, turns + 1):
            held.update(f"session-{number}", chain[: blocks * turn // turns])
    grown = resident_bytes() - before
    distinct = shared_blocks + sessions * (blocks - shared_blocks)
    return {"rss_bytes": grown, "held_bytes": held.held_bytes, "distinct_blocks": distinct, "owned_blocks": sessions * blocks}


def capped(sessions: int, blocks: int, turns: int) -> Numbers:
    """Sigma with its default cap, and more sessions than it holds; every tenth of them comes back before the last arrives."""
    rng = random.Random(1)
    sigma = Sigma(params_for("default"))
    before = resident_bytes()
    order: dict[str, None] = {}
    for number in range(sessions):
        name = f"session-{number}"
        chain = random_chain(rng, blocks)
        for turn in range(1, turns + 1):
            prompt = chain[: blocks * turn // turns]
            sigma.apply(ev.TurnArrived(name, prompt, len(prompt) * BLOCK_TOKENS))
        order[name] = None
        back = f"session-{number // 10 * 10}"
        known = sigma.forest.chain(back)
        if number % 10 == 9 and known is not None:
            sigma.apply(ev.TurnArrived(back, known, blocks * BLOCK_TOKENS))
            order[back] = order.pop(back)
    grown = resident_bytes() - before
    held = list(sigma.forest.sessions())
    newest = list(order)[len(order) - len(held) :]
    return {
        "rss_bytes": grown,
        "held_bytes": sigma.forest.held_bytes,
        "cap_bytes": sigma.forest.max_bytes,
        "sessions_held": len(held),
        "sessions_forgotten": sessions - len(held),
        "out_of_order": sum(one != other for one, other in zip(held, newest, strict=True)),
    }


def sessions(count: int) -> Numbers:
    """What a router keeps of a session beside its chain: Σ's entry and the digest of its prompt, after a turn that was served."""
    mesh = Mesh(MeshSize(decoders=1, prefillers=0), random.Random(1))
    ref = mesh.decoders[0]
    digests = PrefixDigests(BLOCK_TOKENS, 0)
    chain = random_chain(mesh.rng, 1)
    mesh.sigma.apply(ev.TurnArrived("first", chain, BLOCK_TOKENS))
    before = resident_bytes()
    forest_before = mesh.sigma.forest.held_bytes
    for number in range(count):
        mesh.serve(f"session-{number}", chain, ref)
        digests.chain(f"session-{number}", b"\0" * 4 * BLOCK_TOKENS, None)
    return {"rss_bytes": resident_bytes() - before, "held_bytes": mesh.sigma.forest.held_bytes - forest_before}


def entries(count: int) -> Numbers:
    """Sessions that all own one and the same block: what an entry costs."""
    held = Forest(NO_CAP_BYTES)
    chain = random_chain(random.Random(1), 1)
    held.update("first", chain)
    before = resident_bytes()
    for number in range(count):
        held.update(f"session-{number:032}", chain)
    return {"rss_bytes": resident_bytes() - before}


def nodes(count: int, branches: int) -> Numbers:
    """Sessions of which each `branches` share a block and then part: what a node costs, with that of entries in it."""
    rng = random.Random(1)
    held = Forest(NO_CAP_BYTES)
    held.update("first", random_chain(rng, 1))
    before = resident_bytes()
    start = held.held_bytes
    prefix = random_chain(rng, 1)
    for number in range(count):
        if number % branches == 0:
            prefix = random_chain(rng, 1)
        held.update(f"session-{number:032}", random_chain(rng, 1, prefix))
    return {
        "rss_bytes": resident_bytes() - before,
        "held_bytes": held.held_bytes - start,
        "nodes": count + (count // branches if branches > 1 else 0),
    }


def residency(decoders: int, capacity_tokens: int) -> Numbers:
    """Workers whose pools are full, as their events say."""
    mesh = Mesh(MeshSize(decoders=decoders, prefillers=0, capacity_tokens=capacity_tokens), random.Random(1))
    before = resident_bytes()
    mesh.fill()
    grown = resident_bytes() - before
    held = sum(len(worker.resident) for worker in mesh.sigma.decode_workers())
    return {"rss_bytes": grown, "blocks": held, "bound_blocks": decoders * (capacity_tokens // BLOCK_TOKENS)}


def estimate(decoders: int, capacity_tokens: int, count: int, blocks: int) -> Numbers:
    """Workers without events, on which sessions of many times their pools are served: the largest residency that Σ believes in."""
    mesh = Mesh(MeshSize(decoders=decoders, prefillers=0, capacity_tokens=capacity_tokens), random.Random(1))
    most = 0
    for number in range(count):
        ref = mesh.decoders[number % decoders]
        name = f"session-{number}"
        chain = random_chain(mesh.rng, blocks)
        tokens = blocks * BLOCK_TOKENS
        mesh.sigma.apply(ev.TurnArrived(name, chain, tokens))
        mesh.sigma.apply(ev.Started(Attempt(name, 0), name, ref, Mode.SEED, Executor.LOCAL, tokens))
        mesh.sigma.apply(ev.TurnEnded(Attempt(name, 0), ev.End.COMPLETED, tokens, 1))
        most = max(most, sum(len(worker.resident) for worker in mesh.sigma.decode_workers()))
    return {"blocks": most, "bound_blocks": decoders * (capacity_tokens // BLOCK_TOKENS), "served_blocks": count * blocks}


def followed(capacity_tokens: int, count: int, blocks: int, shared_blocks: int) -> Numbers:
    """A worker's pool with eviction and its page events, re-blocked into Σ as its agent does: the largest residency that Σ believes in."""
    rng = random.Random(1)
    mesh = Mesh(MeshSize(decoders=1, prefillers=0, capacity_tokens=capacity_tokens), rng)
    ref, worker = mesh.decoders[0], next(iter(mesh.sigma.decode_workers()))
    tree, reblocker = RadixTree(PAGE_TOKENS, 1), Reblocker(BLOCK_TOKENS, 2)
    pages = blocks * BLOCK_TOKENS // PAGE_TOKENS
    shared = rng.randbytes(4 * shared_blocks * BLOCK_TOKENS)
    most = 0
    for _ in range(count):
        prompt = shared + rng.randbytes(4 * blocks * BLOCK_TOKENS - len(shared))
        _, matched = tree.match(prompt, pages)
        tree.evict(max(0, tree.total_pages + pages - matched - capacity_tokens // PAGE_TOKENS))
        tree.insert(prompt, pages, 0, array("Q", bytes(8 * pages)))
        for change in tree.changes:
            if isinstance(change, Stored):
                added = reblocker.stored(change.hashes, change.parent, change.tokens)
                mesh.sigma.apply(ev.ResidencyChanged(ref, stored=tuple(added)))
            elif isinstance(change, Removed):
                mesh.sigma.apply(ev.ResidencyChanged(ref, removed=tuple(reblocker.removed(change.hashes))))
        tree.changes.clear()
        most = max(most, len(worker.resident))
    return {"blocks": most, "bound_blocks": capacity_tokens // BLOCK_TOKENS, "served_blocks": count * blocks}


CASES: dict[str, Callable[..., Numbers]] = {
    function.__name__: function for function in (forest, capped, sessions, entries, nodes, residency, estimate, followed)
}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](**json.loads(sys.argv[2]))))
