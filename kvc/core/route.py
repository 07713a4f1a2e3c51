"""Algorithm 1, Route: which decode worker is asked (docs/spec.md ROUTE-1 to ROUTE-11).

The score is a tuple compared lexicographically. O(|D| log blocks): overlap is found by bisection, because resident[d] is closed
under prefixes; nothing here looks at capacity (R19).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc.core.blocks import resident_blocks

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvc.core.state import SessionState, Sigma, WorkerState
    from kvc.core.types import Turn, WorkerRef

Score = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker with the components of its score. `excluded` says why it was no candidate, or is empty."""

    ref: WorkerRef
    overlap_blocks: int
    resident_blocks: int
    sticky: bool
    inflight: int
    assigned: int
    rejects: int
    placement_load: float
    score: Score
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class Routing:
    """What Algorithm 1 chose. `degenerate`: every candidate was blacklisted and the least rejected was taken (line 4)."""

    ref: WorkerRef | None
    overlap_blocks: int = 0
    degenerate: bool = False


def route(turn: Turn, sigma: Sigma, exclude: AbstractSet[WorkerRef] = frozenset()) -> Routing:
    """Chooses the decode worker to ask.

    Args:
        turn: the turn; its session's chain must be applied to Σ already (TurnArrived).
        sigma: Σ, read only.
        exclude: workers that are no candidates in this dispatch (R2).

    Returns:
        The best candidate; no worker when none is eligible.
    """
    session = sigma.session(turn.session_id)
    tau = sigma.params.tau_reject
    best: WorkerState | None = None
    best_score: Score = ()
    best_overlap = 0
    least: WorkerState | None = None
    least_rejects = 0
    for worker in sigma.decode_workers():
        if worker.why_not or worker.ref in exclude:
            continue
        rejects = session.rejects.get(worker.ref.worker_id, 0) if session is not None else 0
        if rejects >= tau:
            if least is None or rejects < least_rejects:
                least, least_rejects = worker, rejects
            continue
        overlap = overlap_blocks(turn, worker, sigma)
        score = score_of(worker, session, overlap, sigma)
        if best is None or score > best_score:
            best, best_score, best_overlap = worker, score, overlap
    if best is not None:
        return Routing(best.ref, best_overlap)
    if least is not None:
        return Routing(least.ref, overlap_blocks(turn, least, sigma), degenerate=True)
    return Routing(None)


def overlap_blocks(turn: Turn, worker: WorkerState, sigma: Sigma) -> int:
    """overlap(d), line 6: resident leading blocks, without those of more than `shared_after` live sessions when exclusive (R14)."""
    resident = resident_blocks(turn.chain, worker.resident)
    if sigma.params.overlap == "exclusive":
        return max(0, resident - turn.shared_blocks)
    return resident


def score_of(worker: WorkerState, session: SessionState | None, overlap: int, sigma: Sigma) -> Score:
    """The tuple of line 10, with the ties of R26 in place of inflight and assigned when placement is by open tokens."""
    params = sigma.params
    sticky = 1 if session is not None and session.pin == worker.ref else 0
    bonus = params.load_floor_bonus if worker.inflight == 0 else 0.0
    primary = overlap + params.alpha * sticky + bonus
    if params.placement == "paper":
        return (primary, sticky, -worker.inflight, -worker.assigned)
    return (primary, sticky, -placement_load(worker, sigma), -worker.assigned)


def placement_load(worker: WorkerState, sigma: Sigma) -> float:
    """R26: tokens of all open sessions on the worker over K_d, plus a weight for each turn in flight."""
    return worker.load + sigma.params.inflight_weight * worker.inflight


def explain(turn: Turn, sigma: Sigma, exclude: AbstractSet[WorkerRef] = frozenset()) -> list[Candidate]:
    """Every decode worker with its score, best first; those that are no candidates come last with the reason."""
    session = sigma.session(turn.session_id)
    rows = []
    for worker in sigma.decode_workers():
        overlap = overlap_blocks(turn, worker, sigma)
        rejects = sigma.rejects(turn.session_id, worker.ref.worker_id)
        excluded = worker.why_not or ("tried" if worker.ref in exclude else "blacklisted" if rejects >= sigma.params.tau_reject else "")
        rows.append(
            Candidate(
                ref=worker.ref,
                overlap_blocks=overlap,
                resident_blocks=resident_blocks(turn.chain, worker.resident),
                sticky=session is not None and session.pin == worker.ref,
                inflight=worker.inflight,
                assigned=worker.assigned,
                rejects=rejects,
                placement_load=placement_load(worker, sigma),
                score=score_of(worker, session, overlap, sigma),
                excluded=excluded,
            )
        )
    return sorted(rows, key=lambda row: (not row.excluded, row.score), reverse=True)
