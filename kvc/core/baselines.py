"""Baseline policies with the same interface as Algorithm 3, for comparison: no admission, no local append-prefill (seed 000 section 5).

round_robin   vanilla P/D disaggregation: the next decode and the next prefill worker, whatever they hold
sticky        the same, but a session stays on the decode worker it was first given
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvc.core import events as ev
from kvc.core.dispatch import Resumed, WaitForRoom
from kvc.core.members import matched_blocks
from kvc.core.prefill import prefill_pool
from kvc.core.types import Attempt, Decision, Executor, GaveUp, Give, Mode

if TYPE_CHECKING:
    from kvc.core.dispatch import Dispatch
    from kvc.core.members import WorkerState
    from kvc.core.state import Sigma
    from kvc.core.types import Turn, WorkerRef

Baseline = Literal["sticky", "round_robin"]


def baseline(
    policy: Baseline, turn: Turn, sigma: Sigma, request_id: str, *, first_attempt: int = 0, avoid: frozenset[WorkerRef] = frozenset()
) -> Dispatch:
    """Decides without asking anybody; waits only while no worker is there.

    Args:
        policy: which baseline.
        turn: the turn; TurnArrived must be applied already.
        sigma: Σ; read and written between yields.
        request_id: names the attempt.
        first_attempt: number of the attempt.
        avoid: workers that failed this request already.

    Yields:
        WaitForRoom while no decode worker is eligible.

    Returns:
        A Decision in mode Fallback, or GaveUp.
    """
    queued_s = 0.0
    while not (workers := [worker for worker in sigma.decode_workers() if not worker.why_not]):
        resumed = yield WaitForRoom(turn.input_tokens, 0.0, sigma.params.backoff_base_s, max(0.0, sigma.params.queue_wait_s - queued_s))
        assert isinstance(resumed, Resumed), f"{type(resumed).__name__} does not answer WaitForRoom"
        queued_s += resumed.waited_s
        if resumed.why != "room":
            return GaveUp(Give.DEADLINE if resumed.why == "deadline" else Give.NO_WORKER, queued_s=queued_s)
    worker = _choose(policy, turn, sigma, [worker for worker in workers if worker.ref not in avoid] or workers)
    prefill = _prefill(turn, sigma, worker, avoid)
    attempt = Attempt(request_id, first_attempt)
    executor = Executor.LOCAL if prefill is None else Executor.PREFILL
    sigma.apply(ev.Assigned(worker.ref))
    sigma.apply(
        ev.Started(
            attempt=attempt,
            session_id=turn.session_id,
            ref=worker.ref,
            mode=Mode.FALLBACK,
            executor=executor,
            tokens=turn.input_tokens + turn.output_reserve_tokens,
            prefill=prefill.ref if prefill is not None else None,
            prefill_tokens=turn.input_tokens if prefill is not None else 0,
        )
    )
    return Decision(
        mode=Mode.FALLBACK,
        executor=executor,
        decode=worker.ref,
        prefill=prefill.ref if prefill is not None else None,
        attempt=attempt,
        admission=None,
        overlap_blocks=matched_blocks(turn, worker),
        queued_s=queued_s,
    )


def _choose(policy: Baseline, turn: Turn, sigma: Sigma, workers: list[WorkerState]) -> WorkerState:
    session = sigma.session(turn.session_id)
    if policy == "sticky" and session is not None and session.pin is not None:
        pinned = next((worker for worker in workers if worker.ref == session.pin), None)
        if pinned is not None:
            return pinned
    return workers[sigma.decode_cursor % len(workers)]


def _prefill(turn: Turn, sigma: Sigma, decode: WorkerState, avoid: frozenset[WorkerRef]) -> WorkerState | None:
    """The next prefill worker; one that failed this request rather than none, because the baselines never prefill locally when P can."""
    pool = prefill_pool(turn, sigma, decode, avoid) or prefill_pool(turn, sigma, decode)
    return pool[sigma.prefill_cursor % len(pool)] if pool else None
