"""The router: owns Σ, drives the dispatch generator, runs turns and accounts for their end exactly once.

    Dispatch request
      -> SessionGate            one turn of a session at a time (R21)
      -> TurnArrived, turn      chain extended by the append
      -> _decide                kvc.core.dispatch; Ask -> AdmissionPort, WaitForRoom -> RoomQueue, Pause -> sleep
      -> Runner                 prefill and decode workers; before the first token a failed worker is replaced
      -> TurnEnded              completed, failed or cancelled; notifies the RoomQueue

Everything runs on one event loop and Σ changes only between awaits (architecture rule 2).
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc.core import events as ev
from kvc.core.baselines import baseline
from kvc.core.dispatch import Ask, Pause, Resumed, WaitForRoom, dispatch
from kvc.core.state import Sigma
from kvc.core.types import Decision, GaveUp, Give, WorkerRef
from kvc.errors import DeadlineExceeded, Exhausted, InvalidField, KvcError, Precondition, TooLarge, Unavailable
from services.router.ports import EngineChunk, EngineError
from services.router.prompts import Chains
from services.router.runner import Job, PrefillFailedError, Runner
from services.router.waiting import RoomQueue, SessionGate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvc.core.dispatch import Answer, Dispatch, Effect
    from kvc.core.types import Turn
    from kvc.runtime.clock import Clock
    from kvc.v1 import types_pb2
    from services.router.config import RouterConfig
    from services.router.janitor import Janitor
    from services.router.ports import AdmissionPort, EnginePort

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """A validated Dispatch request. `deadline_s` is by the router's clock."""

    request_id: str
    session_id: str
    tokens: bytes
    text: str | None
    input_tokens: int
    max_new_tokens: int
    temperature: float
    deadline_s: float
    close_session: bool = False
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a turn. Times in seconds; `mesh_s`: before the first chunk, not spent waiting for engines or for room."""

    last: EngineChunk
    decision: Decision
    ttft_s: float
    latency_s: float
    mesh_s: float


Output = Decision | EngineChunk | Result


class Observer:
    """What metrics and logs see; every method may be overridden."""

    def decided(self, request: Request, decision: Decision | GaveUp, decide_s: float) -> None:
        """Dispatch returned."""

    def ended(self, request: Request, decision: Decision, end: ev.End, result: Result | None, error: BaseException | None) -> None:
        """A turn that was started ended."""

    def retried(self, request: Request, decision: Decision, error: EngineError) -> None:
        """A worker failed before the first token."""


class Router:
    """Algorithms 1 and 3 over ports."""

    def __init__(
        self,
        config: RouterConfig,
        admission: AdmissionPort,
        engines: EnginePort,
        clock: Clock,
        janitor: Janitor,
        observer: Observer | None = None,
    ) -> None:
        """Starts with an empty Σ."""
        self.config = config
        self.sigma = Sigma(config.params, config.requests.chain_bytes)
        self.chains = Chains(config.params.block_tokens)
        self.room = RoomQueue(config.params.queue_limit, config.params.ageing_tokens_per_s, clock)
        self.gate = SessionGate(config.requests.session_waiters, clock)
        self._admission = admission
        self._runner = Runner(engines)
        self._clock = clock
        self._janitor = janitor
        self._observer = observer or Observer()
        self.loads: dict[str, types_pb2.WorkerLoad] = {}
        self._last_seen: dict[str, float] = {}

    def apply(self, event: ev.Event) -> None:
        """An event from a follower: changes Σ, and lets a waiting turn try again when it may have made room."""
        if isinstance(event, ev.WorkerJoined):
            self.chains.use_seed(event.info.hash_seed)
        self.sigma.apply(event)
        if isinstance(event, ev.WorkerJoined | ev.LoadReported | ev.WorkerHealth):
            self.room.notify()

    async def dispatch(self, request: Request) -> AsyncGenerator[Output, None]:
        """Decides and runs a turn: yields one Decision with the first chunk, chunks, then one Result.

        Closing the iterator cancels the turn everywhere.

        Raises:
            KvcError: the turn could not be done; the error says why and, where it helps, when to try again.
        """
        arrived_s = self._clock.now_s()
        async with self.gate.turn(request.session_id, request.deadline_s):
            gate_s = self._clock.now_s() - arrived_s
            turn = self._arrive(request)
            avoid: set[WorkerRef] = set()
            attempt = 0
            for tries_left in range(self.config.engines.retries, -1, -1):
                decision = await self._decide(request, turn, attempt, frozenset(avoid), arrived_s)
                try:
                    async with aclosing(self._run(request, decision, arrived_s, gate_s)) as outputs:
                        async for output in outputs:
                            yield output
                except TurnFailedError as failed:
                    if failed.started or failed.error.final or not tries_left:
                        raise typed(failed.error) from failed.error
                    self._observer.retried(request, decision, failed.error)
                    avoid |= self._blame(decision, failed.error)
                    attempt = decision.attempt.attempt_number + 1
                else:
                    return

    def _arrive(self, request: Request) -> Turn:
        sigma = self.sigma
        now = self._clock.now_s()
        self._last_seen.pop(request.session_id, None)
        self._last_seen[request.session_id] = now
        self._forget_idle(now)
        chain = self.chains.chain(request.session_id, request.tokens, sigma.forest.chain(request.session_id))
        sigma.apply(ev.TurnArrived(request.session_id, chain, request.input_tokens))
        return sigma.turn(request.session_id, chain, request.input_tokens, request.max_new_tokens)

    def _forget_idle(self, now_s: float) -> None:
        """Closes sessions that were idle for too long, and the oldest beyond the cap; at most two a turn, so no turn pays for many."""
        limits = self.config.requests
        for _ in range(2):
            oldest = next(iter(self._last_seen), None)
            if oldest is None or self.gate.busy(oldest):
                return
            if now_s - self._last_seen[oldest] <= limits.session_idle_s and len(self._last_seen) <= limits.max_sessions:
                return
            self.close_session(oldest)

    def close_session(self, session_id: str) -> None:
        """Forgets a session: its pin, counters and chain."""
        self._last_seen.pop(session_id, None)
        self.chains.forget(session_id)
        self.sigma.apply(ev.SessionClosed(session_id))

    async def _decide(self, request: Request, turn: Turn, attempt: int, avoid: frozenset[WorkerRef], arrived_s: float) -> Decision:
        """Drives the dispatch generator to its end."""
        start_s = self._clock.now_s()
        if self.config.policy == "kvc":
            steps = dispatch(turn, self.sigma, request.request_id, first_attempt=attempt, avoid=avoid)
        else:
            steps = baseline(self.config.policy, turn, self.sigma, request.request_id, first_attempt=attempt, avoid=avoid)
        outcome = await self._drive(steps, request, arrived_s)
        self._observer.decided(request, outcome, self._clock.now_s() - start_s)
        if isinstance(outcome, GaveUp):
            raise gave_up(outcome, turn, len(self.room))
        self.room.notify()
        return outcome

    async def _drive(self, steps: Dispatch, request: Request, arrived_s: float) -> Decision | GaveUp:
        try:
            effect = next(steps)
            while True:
                effect = steps.send(await self._perform(effect, request, arrived_s))
        except StopIteration as stop:
            outcome: Decision | GaveUp = stop.value
            return outcome

    async def _perform(self, effect: Effect, request: Request, arrived_s: float) -> Answer:
        remaining_s = request.deadline_s - self._clock.now_s()
        if isinstance(effect, Ask):
            return await self._admission.admit(effect, max(0.0, min(self.config.agents.admit_timeout_s, remaining_s)))
        if isinstance(effect, WaitForRoom):
            if remaining_s <= 0:
                return Resumed("deadline")
            return await self.room.wait(request.request_id, effect, arrived_s, request.deadline_s)
        assert isinstance(effect, Pause)
        pause_s = effect.at_least_s + random.uniform(0.0, effect.jitter_s)  # noqa: S311 - spreads retries, guards nothing
        if pause_s >= remaining_s:
            return Resumed("deadline")
        await asyncio.sleep(pause_s)
        return Resumed("room", pause_s)

    async def _run(self, request: Request, decision: Decision, arrived_s: float, gate_s: float) -> AsyncGenerator[Output, None]:
        """Runs one attempt; its end reaches Σ exactly once, however it comes.

        Raises:
            TurnFailedError: an engine failed.
            DeadlineExceeded: the request's time is over.
        """
        end = ev.End.CANCELLED
        last = EngineChunk()
        result: Result | None = None
        failure: BaseException | None = None
        sent_s = self._clock.now_s()
        first_s = 0.0
        try:
            async with aclosing(self._chunks(request, decision)) as chunks:
                async for chunk in chunks:
                    if not first_s:
                        first_s = self._clock.now_s()
                        yield decision
                    last = chunk
                    yield chunk
            now_s = self._clock.now_s()
            mesh_s = max(0.0, sent_s - arrived_s - gate_s - decision.queued_s)
            result = Result(last, decision, first_s - arrived_s, now_s - arrived_s, mesh_s)
            end = ev.End.COMPLETED
        except EngineError as error:
            end, failure = ev.End.FAILED, error
            raise TurnFailedError(error, started=bool(first_s)) from error
        except KvcError as error:
            end, failure = ev.End.FAILED, error
            raise
        finally:
            self._end(request, decision, end, last)
            self._observer.ended(request, decision, end, result, failure)
        yield result

    async def _chunks(self, request: Request, decision: Decision) -> AsyncGenerator[EngineChunk, None]:
        decode = self.sigma.worker(decision.decode)
        prefill = self.sigma.worker(decision.prefill) if decision.prefill is not None else None
        if decode is None or (decision.prefill is not None and prefill is None):
            raise EngineError(0, "worker-left", "the worker left before the turn reached it", gone=True)
        job = Job(request.session_id, request.tokens, request.text, request.max_new_tokens, request.temperature, request.traceparent)
        info = prefill.info if prefill is not None else None
        stream = self._runner.run(job, decision, decode.info, info, lambda: self.sigma.apply(ev.PrefillDone(decision.attempt)))
        async with aclosing(stream):
            while True:
                try:
                    async with asyncio.timeout(max(0.0, request.deadline_s - self._clock.now_s())):
                        chunk = await anext(stream)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise DeadlineExceeded("the request's deadline passed while the engine worked on it") from None
                yield chunk

    def _end(self, request: Request, decision: Decision, end: ev.End, last: EngineChunk) -> None:
        self.sigma.apply(ev.TurnEnded(decision.attempt, end, last.prompt_tokens or request.input_tokens, last.completion_tokens))
        if end is not ev.End.COMPLETED and decision.admission is not None:
            # The engine consumes the ticket when the request arrives; if it never did, this frees the reservation before its TTL.
            self._janitor.release(decision.attempt, decision.decode, decision.admission.ticket)
        if request.close_session and end is ev.End.COMPLETED:
            self.close_session(request.session_id)
        self.room.notify()

    def _blame(self, decision: Decision, error: EngineError) -> set[WorkerRef]:
        """Whom a retry should not use again, and what Σ learns about their health."""
        if error.reason in _NOBODYS_FAULT:
            return set()
        guilty = decision.prefill if isinstance(error, PrefillFailedError) and decision.prefill is not None else decision.decode
        if error.gone:
            self.sigma.apply(ev.WorkerUnreachable(guilty, gone=True))
        return {guilty}


_NOBODYS_FAULT = frozenset({"ticket-expired", "ticket-used", "ticket-unknown"})


class TurnFailedError(Exception):
    """An engine failed during an attempt; `started`: after the first token, so that nothing can be repeated."""

    def __init__(self, error: EngineError, *, started: bool) -> None:
        """Keeps the engine's error."""
        super().__init__(str(error))
        self.error = error
        self.started = started


def typed(error: EngineError) -> KvcError:
    """The caller's error for an engine's."""
    if error.status in (400, 422):
        return InvalidField(error.message, field=error.field)
    if error.status == 413:  # noqa: PLR2004 - HTTP
        return TooLarge(error.message, field=error.field)
    if error.status in (429, 503):
        return Exhausted(error.message, reason="ENGINE_BUSY", retry_after_s=error.retry_after_s or 1.0)
    if error.status == 404:  # noqa: PLR2004 - HTTP
        return Precondition(error.message, reason="ENGINE_LACKS_API")
    reason = "PREFILL_FAILED" if isinstance(error, PrefillFailedError) else "ENGINE_FAILED"
    return Unavailable(str(error), reason=reason, retry_after_s=0.1)


def gave_up(outcome: GaveUp, turn: Turn, waiting: int) -> KvcError:
    """The caller's error for a dispatch without a decision."""
    if outcome.why is Give.EXCEEDS_CAPACITY:
        wanted = f"{turn.input_tokens} prompt and {turn.output_reserve_tokens} output tokens"
        return TooLarge(f"{wanted} fit on no worker, however empty", field="prompt", reason="EXCEEDS_CAPACITY")
    if outcome.why is Give.QUEUE_FULL:
        return Exhausted(
            f"no worker has room and {waiting} turns wait already", reason="QUEUE_FULL", retry_after_s=max(1.0, outcome.retry_after_s)
        )
    if outcome.why is Give.NO_WORKER:
        return Unavailable("no decode worker is available", reason="NO_WORKER", retry_after_s=1.0)
    return DeadlineExceeded("the request's deadline passed while it waited for room")
