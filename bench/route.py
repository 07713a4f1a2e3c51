"""Route in process: one call with prompts of 100,000 tokens (4,167 blocks), beside the same decision by set intersection.

Three kinds of turn. `returning`: the session is pinned, its old prompt is on its worker and in part on another. `scattered`: the router
does not know the session (it was restarted), and every worker holds some part of the prompt. `rising`: every worker holds a little more
than the one that joined before it, so that each overlap has to be bisected; no traffic does that, it is the upper bound.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from bench.report import Row
from bench.timing import time_calls
from bench.world import BLOCK_TOKENS, Mesh, MeshSize, random_chain
from kvc.core.route import Routing, Score, route, score_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvc.core.state import Sigma
    from kvc.core.types import Turn, WorkerRef

NAME = "route"
BARS_US = {8: 100.0, 64: 300.0}
"""p99 by |D|."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: `calls` a round, the oracle's fewer ones in one round; `scattered` prompts of that kind."""

    mesh: MeshSize = field(default_factory=MeshSize)
    decoders: tuple[int, ...] = (4, 8, 64)
    calls: int = 1000
    rounds: int = 9
    oracle_calls: int = 30
    scattered: int = 2


def by_sets(turn: Turn, sigma: Sigma) -> Routing:
    """Algorithm 1 as the paper writes it: overlap is the size of an intersection of sets."""
    session = sigma.session(turn.session_id)
    prompt = set(turn.chain[turn.shared_blocks :])
    best: WorkerRef | None = None
    best_score: Score = ()
    best_overlap = 0
    for worker in sigma.decode_workers():
        if worker.why_not:
            continue
        overlap = len(prompt & worker.resident)
        score = score_of(worker, session, overlap, sigma)
        if best is None or score > best_score:
            best, best_score, best_overlap = worker.ref, score, overlap
    return Routing(best, best_overlap)


def measure(size: Size | None = None) -> list[Row]:
    """All rows.

    Raises:
        AssertionError: Route and the oracle disagree.
    """
    size = size or Size()
    rows: list[Row] = []
    for decoders in size.decoders:
        mesh = Mesh(replace(size.mesh, decoders=decoders), random.Random(decoders))
        mesh.add_sessions()
        own = size.mesh.prefix_blocks - size.mesh.shared_blocks - size.mesh.append_blocks
        scattered = [_unknown(mesh, [mesh.rng.randrange(own) for _ in range(decoders)]) for _ in range(size.scattered)]
        rising = _unknown(mesh, [own * (number + 1) // decoders for number in range(decoders)])
        mesh.fill()
        returning = [mesh.turn(name, chain) for name, chain in mesh.chains.items()]
        bar = BARS_US.get(decoders)
        rows += _rows(f"|D| = {decoders}, returning", returning, mesh.sigma, size, bar)
        rows += _rows(f"|D| = {decoders}, scattered", scattered, mesh.sigma, size, bar)
        rows += _rows(f"|D| = {decoders}, rising", [rising], mesh.sigma, size)
    return rows


def _unknown(mesh: Mesh, held: Sequence[int]) -> Turn:
    """A turn of a session that Σ does not know; `held`: blocks of its own, beyond the shared ones, on each worker."""
    chain = random_chain(mesh.rng, mesh.size.prefix_blocks - mesh.size.shared_blocks, mesh.shared)
    for worker, blocks in enumerate(held):
        mesh.hold(worker, chain, mesh.size.shared_blocks + blocks)
    return mesh.sigma.preview("unknown", chain, len(chain) * BLOCK_TOKENS)


def _rows(what: str, turns: Sequence[Turn], sigma: Sigma, size: Size, bar: float | None = None) -> list[Row]:
    for turn in turns:
        found, expected = route(turn, sigma), by_sets(turn, sigma)
        assert (found.ref, found.overlap_blocks) == (expected.ref, expected.overlap_blocks), f"{what}: {found} is not {expected}"
    timing = time_calls(lambda index: partial(route, turns[index % len(turns)], sigma), size.calls, size.rounds)
    oracle = time_calls(lambda index: partial(by_sets, turns[index % len(turns)], sigma), size.oracle_calls, 1)
    return [
        Row(NAME, f"{what}, p50", timing.p50_us, "µs", baseline=oracle.cpu_p50_us, baseline_name="set intersection", cpu=timing.cpu_p50_us),
        Row(NAME, f"{what}, p99", timing.p99_us, "µs", bar=bar, cpu=timing.cpu_p99_us, detail=timing.detail),
    ]
