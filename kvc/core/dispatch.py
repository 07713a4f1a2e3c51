"""Algorithm 3, Dispatch, as a generator (docs/spec.md DISP-1 to DISP-24).

    sweep:   route -> Ask -> Admitted            -> Decision
                          -> Refused             -> count it, next worker, at most epsilon answers a sweep
                          -> Unreachable         -> health, next worker
    then:    a worker not asked that has room    -> Decision(Fallback)               R3, R27
             terminal everywhere                 -> GaveUp(EXCEEDS_CAPACITY)         R23
             WaitForRoom -> room                 -> next sweep                       R28
                         -> queue full           -> GaveUp(QUEUE_FULL)
                         -> waited long enough   -> Decision(Fallback)
                         -> deadline             -> GaveUp(DEADLINE)

The driver performs what is yielded and sends the answer back; the live router, the simulator and the tests drive the same object.
Every write to Σ happens here, between two yields, through `Sigma.apply`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvc.core import events as ev
from kvc.core.admit import fits_empty
from kvc.core.cost import choose_executor
from kvc.core.prefill import matched_tokens, prefill_offer
from kvc.core.route import choose, overlap_blocks
from kvc.core.types import (
    Admission,
    Attempt,
    Decision,
    Executor,
    Facts,
    GaveUp,
    Give,
    Mode,
    PrefillOffer,
    Probe,
    Reason,
    Rejection,
    Turn,
    WorkerRef,
)
from kvc.core.value import value

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvc.core.members import WorkerState
    from kvc.core.state import Sigma


@value(frozen=True, slots=True)
class Ask:
    """Ask a worker for admission; the answer is Admitted, Refused or Unreachable."""

    worker: WorkerRef
    attempt: Attempt
    turn: Turn
    offer: PrefillOffer | None


@value(frozen=True, slots=True)
class WaitForRoom:
    """Every worker refused, or none is there: wait in the bounded queue (R28); the answer is Resumed.

    Attributes:
        prefill_tokens: what places the turn in the queue.
        at_least_s: pause hint of the workers: do not resume earlier (R15).
        jitter_s: add a uniformly drawn share of this to the pause (R16, full jitter).
        at_most_s: longest wait; what remains of queue_wait_s.
    """

    prefill_tokens: int
    at_least_s: float
    jitter_s: float
    at_most_s: float


@value(frozen=True, slots=True)
class Pause:
    """The worker is busy with the session's previous turn: pause, then ask it again. The answer is Resumed."""

    worker: WorkerRef
    at_least_s: float
    jitter_s: float


@value(frozen=True, slots=True)
class Admitted:
    """Answer to Ask: yes."""

    admission: Admission
    facts: Facts
    elapsed_s: float = 0.0


@value(frozen=True, slots=True)
class Refused:
    """Answer to Ask: no."""

    rejection: Rejection
    facts: Facts | None = None
    elapsed_s: float = 0.0


@value(frozen=True, slots=True)
class Unreachable:
    """Answer to Ask: nobody answered in time (`gone` False) or nobody is there (True)."""

    error: str
    gone: bool
    elapsed_s: float = 0.0


@value(frozen=True, slots=True)
class Resumed:
    """Answer to WaitForRoom and Pause. `why`: room may be there; waited at_most_s; the queue is full; the request's deadline passed."""

    why: Literal["room", "waited", "full", "deadline"]
    waited_s: float = 0.0


Effect = Ask | WaitForRoom | Pause
Answer = Admitted | Refused | Unreachable | Resumed
Dispatch = Generator[Effect, Answer, Decision | GaveUp]
_WITH_FACTS = (Admitted, Refused)
_NONE: frozenset[WorkerRef] = frozenset()


@dataclass(slots=True)
class _Run:
    """What one dispatch has seen."""

    avoid: frozenset[WorkerRef]
    probes: list[Probe] = field(default_factory=list)
    refused: set[WorkerRef] = field(default_factory=set)
    gone: set[WorkerRef] = field(default_factory=set)
    terminal: set[WorkerRef] = field(default_factory=set)
    overlap_blocks: int = 0
    retry_after_s: float = 0.0
    queued_s: float = 0.0
    next_attempt: int = 0

    def attempt(self, request_id: str) -> Attempt:
        number = self.next_attempt
        self.next_attempt += 1
        return Attempt(request_id, number)


def dispatch(turn: Turn, sigma: Sigma, request_id: str, *, first_attempt: int = 0, avoid: frozenset[WorkerRef] = frozenset()) -> Dispatch:
    """Decides how a turn runs.

    Args:
        turn: the turn; TurnArrived must be applied already.
        sigma: Σ; read and written between yields.
        request_id: names the attempts.
        first_attempt: number of the first attempt; a request that is dispatched again counts on.
        avoid: workers that failed this request already.

    Yields:
        Ask, WaitForRoom or Pause.

    Returns:
        A Decision, whose attempt is open in Σ until TurnEnded; or GaveUp.
    """
    run = _Run(avoid, gone=set(avoid), next_attempt=first_attempt)
    if avoid and not _eligible(sigma, run):
        avoid = frozenset()
        run.gone.clear()
    sweep = 0
    while True:
        ended = yield from _sweep(turn, sigma, request_id, run)
        if ended is not None:
            return ended
        if _never_fits(turn, sigma, run):
            return _give_up(Give.EXCEEDS_CAPACITY, run)
        candidates = _able(turn, sigma, run)
        worker = _fallback_now(turn, sigma, candidates, run)
        if worker is not None:
            return _fallback(turn, sigma, request_id, run, worker)
        resumed = yield _wait(turn, sigma, run, sweep)
        assert isinstance(resumed, Resumed), f"{type(resumed).__name__} does not answer WaitForRoom"
        run.queued_s += resumed.waited_s
        if resumed.why == "deadline":
            return _give_up(Give.DEADLINE, run)
        if resumed.why == "full":
            return _give_up(Give.QUEUE_FULL if candidates else Give.NO_WORKER, run)
        if resumed.why == "waited":
            worker = _fallback_worker(turn, sigma, _able(turn, sigma, run), run)
            return _give_up(Give.NO_WORKER, run) if worker is None else _fallback(turn, sigma, request_id, run, worker)
        run.refused.clear()
        run.gone = set(avoid)
        run.retry_after_s = 0.0
        sweep += 1


def _sweep(turn: Turn, sigma: Sigma, request_id: str, run: _Run) -> Generator[Effect, Answer, Decision | GaveUp | None]:
    """Lines 3-23: asks at most epsilon workers. None when none admitted. A worker that is busy with the session is asked again."""
    answers = 0
    # At least one question is always allowed: most turns never count the workers.
    limit = _epsilon(sigma, run) if sigma.params.paper_epsilon or sigma.params.epsilon is not None else None
    again: WorkerRef | None = None
    while limit is None or answers < limit:
        worker = _next_worker(turn, sigma, run, again)
        if worker is None:
            return None
        ref = worker.ref
        attempt = run.attempt(request_id)
        prefill, offer = prefill_offer(turn, sigma, worker, run.avoid)
        sigma.apply(ev.Asked(attempt, ref, again is None))
        again = None
        facts: Facts | None = None
        try:
            answer = yield Ask(ref, attempt, turn, offer)
            if isinstance(answer, _WITH_FACTS):
                facts = answer.facts
        finally:  # also when the dispatch is closed while it waits
            sigma.apply(ev.Answered(attempt, facts))
        if sigma.worker(ref) is None and not isinstance(answer, Unreachable):
            # That life ended while it answered: the answer is void, and so is a ticket it gave.
            answer = Unreachable("STALE_EPOCH", gone=True, elapsed_s=getattr(answer, "elapsed_s", 0.0))
        if isinstance(answer, Admitted):
            run.probes.append(Probe(ref, True, None, "", answer.elapsed_s))  # noqa: FBT003 - positions cost half of names, here
            return _decide(turn, sigma, run, worker, attempt, answer, prefill)
        if limit is None:
            limit = _epsilon(sigma, run)
        if isinstance(answer, Unreachable):
            run.probes.append(Probe(ref, admitted=False, error=answer.error, elapsed_s=answer.elapsed_s))
            run.gone.add(ref)
            sigma.apply(ev.WorkerUnreachable(ref, answer.gone))
            limit = min(limit, _epsilon(sigma, run) + answers)
            continue
        assert isinstance(answer, Refused), f"{type(answer).__name__} does not answer Ask"
        run.probes.append(Probe(ref, admitted=False, reason=answer.rejection.reason, elapsed_s=answer.elapsed_s))
        if not _note_refusal(turn, sigma, run, ref, answer):
            answers += 1
            continue
        again = ref
        resumed = yield Pause(ref, run.retry_after_s, sigma.params.backoff_base_s)
        assert isinstance(resumed, Resumed), f"{type(resumed).__name__} does not answer Pause"
        run.queued_s += resumed.waited_s
        if resumed.why == "deadline":
            return _give_up(Give.DEADLINE, run)
    return None


def _next_worker(turn: Turn, sigma: Sigma, run: _Run, again: WorkerRef | None) -> WorkerState | None:
    """Line 4: the worker that was busy with the session, while it may be asked; else Route's choice among those not tried (R2)."""
    busy = sigma.worker(again) if again is not None else None
    if busy is not None and not busy.why_not:
        return busy
    exclude: AbstractSet[WorkerRef] = _NONE
    if run.gone or run.terminal or run.refused:
        exclude = run.gone | run.terminal | (run.refused if sigma.params.exclude_tried else _NONE)
    worker, run.overlap_blocks = choose(turn, sigma, exclude)
    return worker


def _note_refusal(turn: Turn, sigma: Sigma, run: _Run, ref: WorkerRef, answer: Refused) -> bool:
    """Lines 21-22. True when the worker is only busy with the session's previous turn, and should be asked again."""
    rejection = answer.rejection
    sigma.apply(ev.Refused(turn.session_id, ref, rejection.reason))
    run.retry_after_s = max(run.retry_after_s, rejection.retry_after_s)
    if rejection.reason is Reason.SESSION_BUSY:
        return True
    if rejection.terminal:
        run.terminal.add(ref)
    elif rejection.reason in (Reason.STALE_EPOCH, Reason.DRAINING):
        run.gone.add(ref)
    else:
        run.refused.add(ref)
    return False


def _decide(
    turn: Turn, sigma: Sigma, run: _Run, worker: WorkerState, attempt: Attempt, answer: Admitted, prefill: WorkerState | None
) -> Decision:
    """Lines 8-19: an admission starts the turn. A prefill worker that left meanwhile is replaced; without any, D prefills itself."""
    admission = answer.admission
    remote = prefill if admission.executor is Executor.PREFILL else None
    if remote is not None and (sigma.worker(remote.ref) is not remote or remote.why_not):
        remote, _ = prefill_offer(turn, sigma, worker, run.avoid)
    executor = Executor.PREFILL if remote is not None else Executor.LOCAL
    decision = Decision(
        mode=admission.mode,
        executor=executor,
        decode=worker.ref,
        prefill=remote.ref if remote is not None else None,
        attempt=attempt,
        admission=admission,
        probes=tuple(run.probes),
        overlap_blocks=run.overlap_blocks,
        queued_s=run.queued_s,
    )
    _start(turn, sigma, decision, remote)
    return decision


def _fallback(turn: Turn, sigma: Sigma, request_id: str, run: _Run, worker: WorkerState) -> Decision:
    """Lines 26-29: plain prefill/decode disaggregation; no ticket, the engine queues the turn until it fits (R23)."""
    prefill, offer = prefill_offer(turn, sigma, worker, run.avoid)
    known = worker.facts
    facts = Facts(
        worker.info.capacity_tokens,
        matched_tokens=matched_tokens(turn, worker),
        prefill_tokens_per_s=worker.info.prefill_tokens_per_s,
        prefill_backlog_s=known.prefill_backlog_s if known is not None else 0.0,
        running=known.running if known is not None else 0,
    )
    executor = choose_executor(facts, turn.input_tokens, sigma.params, offer)
    remote = prefill if executor is Executor.PREFILL else None
    sigma.apply(ev.Assigned(worker.ref))
    decision = Decision(
        mode=Mode.FALLBACK,
        executor=executor,
        decode=worker.ref,
        prefill=remote.ref if remote is not None else None,
        attempt=run.attempt(request_id),
        admission=None,
        probes=tuple(run.probes),
        overlap_blocks=overlap_blocks(turn, worker, sigma),
        queued_s=run.queued_s,
    )
    _start(turn, sigma, decision, remote)
    return decision


def _start(turn: Turn, sigma: Sigma, decision: Decision, prefill: WorkerState | None) -> None:
    work = turn.input_tokens - matched_tokens(turn, prefill) if prefill is not None else 0
    tokens = turn.input_tokens + turn.output_reserve_tokens
    session_id, ref, prefill_ref = turn.session_id, decision.decode, decision.prefill
    sigma.apply(ev.Started(decision.attempt, session_id, ref, decision.mode, decision.executor, tokens, prefill_ref, work))


def _eligible(sigma: Sigma, run: _Run) -> list[WorkerState]:
    return [worker for worker in sigma.decode_workers() if not worker.why_not and worker.ref not in run.gone]


def _epsilon(sigma: Sigma, run: _Run) -> int:
    """R1: max(1, eligible - 1); the paper's |D| - 1."""
    params = sigma.params
    if params.epsilon is not None:
        return params.epsilon
    if params.paper_epsilon:
        return sum(1 for _ in sigma.decode_workers()) - 1
    return max(1, len(_eligible(sigma, run)) - 1)


def _able(turn: Turn, sigma: Sigma, run: _Run) -> list[WorkerState]:
    """Eligible workers that could hold the turn if they were empty (R23)."""
    return [worker for worker in _eligible(sigma, run) if _could_hold(turn, sigma, worker, run)]


def _never_fits(turn: Turn, sigma: Sigma, run: _Run) -> bool:
    """True when no worker of the mesh, reachable now or not, could ever hold the turn (R23)."""
    workers = list(sigma.decode_workers())
    return bool(workers) and not any(_could_hold(turn, sigma, worker, run) for worker in workers)


def _could_hold(turn: Turn, sigma: Sigma, worker: WorkerState, run: _Run) -> bool:
    info = worker.info
    return worker.ref not in run.terminal and fits_empty(turn, sigma.params, info.capacity_tokens, info.max_input_tokens)


def _fallback_now(turn: Turn, sigma: Sigma, workers: list[WorkerState], run: _Run) -> WorkerState | None:
    """The worker to fall back to instead of waiting: without a queue any, else one that was not asked and reports room (R3, R28)."""
    if sigma.params.queue_limit == 0:
        return _fallback_worker(turn, sigma, workers, run)
    need = turn.input_tokens + turn.output_reserve_tokens
    rho = sigma.params.rho
    # Compared as Admit compares, so that what Admit takes to the token fits here, too.
    free = [
        worker
        for worker in workers
        if worker.ref not in run.refused and worker.info.capacity_tokens - worker.room_tokens + need <= rho * worker.info.capacity_tokens
    ]
    return _fallback_worker(turn, sigma, free, run)


def _fallback_worker(turn: Turn, sigma: Sigma, workers: list[WorkerState], run: _Run) -> WorkerState | None:
    """R3 and R27: not one that refused this dispatch while another exists; None when there is no worker at all."""
    if sigma.params.fallback == "round_robin":
        return workers[sigma.decode_cursor % len(workers)] if workers else None
    pool = [worker for worker in workers if worker.ref not in run.refused] or workers
    if sigma.params.fallback == "rejects":
        return min(pool, key=lambda d: (sigma.rejects(turn.session_id, d.ref.worker_id), d.inflight), default=None)
    return max(pool, key=lambda d: d.room_tokens, default=None)


def _wait(turn: Turn, sigma: Sigma, run: _Run, sweep: int) -> WaitForRoom:
    params = sigma.params
    missing = turn.input_tokens - max((matched_tokens(turn, worker) for worker in _eligible(sigma, run)), default=0)
    return WaitForRoom(
        prefill_tokens=missing,
        at_least_s=run.retry_after_s,
        jitter_s=min(params.backoff_cap_s, params.backoff_base_s * 2.0 ** min(sweep, 16)),
        at_most_s=max(0.0, params.queue_wait_s - run.queued_s),
    )


def _give_up(why: Give, run: _Run) -> GaveUp:
    return GaveUp(why, tuple(run.probes), run.retry_after_s, run.queued_s)
