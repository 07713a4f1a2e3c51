"""Algorithm 1, Route: which decode worker is asked (docs/spec.md ROUTE-1 to ROUTE-11).

The score is a tuple compared lexicographically. O(|D| log blocks): overlap is found by bisection, because resident[d] is closed
under prefixes; nothing here looks at capacity (R19). Most workers cost one look: a worker that lacks the block it needs to come up to
the primary score of another candidate cannot win, and the pinned worker, which wins most often, sets that mark first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvc.core.members import matched_blocks
from kvc.core.types import WorkerRef
from kvc.core.value import value

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvc.core.members import SessionState, WorkerState
    from kvc.core.state import Sigma
    from kvc.core.types import Turn

Score = tuple[float, ...]
_NO_BLOCK = -1  # resident nowhere: hashes are unsigned


@value(frozen=True, slots=True)
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


@value(frozen=True, slots=True)
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
    worker, overlap = choose(turn, sigma, exclude)
    if worker is None:
        return Routing(None)
    return Routing(worker.ref, overlap, sigma.rejects(turn.session_id, worker.ref.worker_id) >= sigma.params.tau_reject)


def choose(turn: Turn, sigma: Sigma, exclude: AbstractSet[WorkerRef]) -> tuple[WorkerState | None, int]:
    """As `route`, for those who go on with the worker: it, and its overlap."""
    session = sigma.session(turn.session_id)
    rejects = session.rejects if session is not None else {}
    tau = sigma.params.tau_reject
    best: WorkerState | None = None
    best_score: Score = ()
    best_overlap = 0
    least: WorkerState | None = None
    least_rejects = 0
    # The pinned worker comes first: it wins every tie, because what it ties with is not sticky.
    pinned = _pinned(session, sigma, exclude)
    if pinned is not None:
        best, best_overlap = pinned, overlap_blocks(turn, pinned, sigma)
        best_score = score_of(pinned, session, best_overlap, sigma)
    needed, gate = _needed(turn, sigma, best_score)
    for worker in sigma.decode_workers():
        if worker is pinned or (gate is not None and best is not None and gate not in worker.resident):
            continue
        if worker.why_not or worker.ref in exclude:
            continue
        refusals = rejects.get(worker.ref.worker_id, 0) if rejects else 0
        if refusals >= tau:
            if least is None or refusals < least_rejects:
                least, least_rejects = worker, refusals
            continue
        overlap = overlap_blocks(turn, worker, sigma, needed)
        score = score_of(worker, session, overlap, sigma)
        if best is None or score > best_score:
            best, best_score, best_overlap = worker, score, overlap
            needed, gate = _needed(turn, sigma, score)
    if best is None and least is not None:
        return least, overlap_blocks(turn, least, sigma)
    return best, best_overlap


def _pinned(session: SessionState | None, sigma: Sigma, exclude: AbstractSet[WorkerRef]) -> WorkerState | None:
    """The worker that served the session last, if it is a candidate."""
    if session is None or session.pin is None or session.pin in exclude:
        return None
    worker = sigma.worker(session.pin)
    if worker is None or worker.why_not or session.rejects.get(session.pin.worker_id, 0) >= sigma.params.tau_reject:
        return None
    return worker


def _needed(turn: Turn, sigma: Sigma, score: Score) -> tuple[int, int | None]:
    """Overlap without which a worker that is not pinned stays below the primary component of `score`, and the last block of it.

    Rounded down, so that no worker that ties is lost; (0, None): any worker may come up to it.
    """
    needed = math.floor(score[0] - max(0.0, sigma.params.load_floor_bonus)) if score else 0
    if needed <= 0 or turn.confirmed is not None:
        return 0, None
    last = _apart(turn, sigma) + needed - 1
    return needed, turn.chain[last] if last < len(turn.chain) else _NO_BLOCK


def overlap_blocks(turn: Turn, worker: WorkerState, sigma: Sigma, least: int = 0) -> int:
    """overlap(d), line 6: resident leading blocks, without those of more than `shared_after` live sessions when exclusive (R14).

    `least`: overlap that is known to be there.
    """
    apart = _apart(turn, sigma)
    return max(0, matched_blocks(turn, worker, apart + least) - apart)


def _apart(turn: Turn, sigma: Sigma) -> int:
    """Leading blocks that do not count."""
    return turn.shared_blocks if sigma.params.overlap == "exclusive" else 0


def _beside_overlap(worker: WorkerState, session: SessionState | None, sigma: Sigma) -> float:
    """What line 9 adds to the overlap: the sticky bonus, and the bonus of a worker without turns in flight."""
    params = sigma.params
    sticky = params.alpha if session is not None and session.pin == worker.ref else 0.0
    return sticky + (params.load_floor_bonus if worker.inflight == 0 else 0.0)


def score_of(worker: WorkerState, session: SessionState | None, overlap: int, sigma: Sigma) -> Score:
    """The tuple of line 10, with the ties of R26 in place of inflight and assigned when placement is by open tokens."""
    sticky = 1 if session is not None and session.pin == worker.ref else 0
    primary = overlap + _beside_overlap(worker, session, sigma)
    if sigma.params.placement == "paper":
        return (primary, sticky, -worker.inflight, -worker.assigned)
    return (primary, sticky, -placement_load(worker, sigma), -worker.assigned)


def placement_load(worker: WorkerState, sigma: Sigma) -> float:
    """R26: tokens of all open sessions on the worker over K_d, plus a weight for each turn in flight or asked about.

    A question counts from the moment it is asked: else a burst that arrives within one round trip sees the same numbers and piles up.
    """
    return worker.load + sigma.params.inflight_weight * (worker.inflight + worker.asked)


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
                resident_blocks=matched_blocks(turn, worker),
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
