"""The router: owns Σ, drives the dispatch generator, runs turns and accounts for their end exactly once.

    Dispatch request
      -> a claim on its request id, and on one of max_turns places
      -> SessionGate            one turn of a session at a time (R21)
      -> TurnArrived, turn      chain extended by the append
      -> _decide                kvc.core.dispatch; Ask -> AdmissionPort, WaitForRoom -> RoomQueue, Pause -> sleep
      -> Runner                 prefill and decode workers; before the first token a failed worker is replaced
      -> TurnEnded              completed, failed or cancelled; notifies the RoomQueue

Everything runs on one event loop and Σ changes only between awaits (architecture rule 2). Cancelling or closing a dispatch at any
point gives back what it holds: its claim, the session, its place in the queue, connections to engines, tickets.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core import events as ev
from kvc.core.baselines import baseline
from kvc.core.dispatch import Ask, Pause, Resumed, Unreachable, WaitForRoom, dispatch
from kvc.core.state import Sigma
from kvc.core.types import Decision, GaveUp, WorkerRef
from services.router.claims import Claims
from services.router.failures import TurnFailedError, gave_up, guilty, lost, no_worker, out_of_time, typed
from services.router.owed import Owed
from services.router.ports import EngineChunk, EngineError, Observer, Request, Result, Started
from services.router.prompts import Chains
from services.router.runner import Job, PrefillFailedError, Runner
from services.router.waiting import RoomQueue, SessionGate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from collections.abc import Set as AbstractSet

    from kvc.core.blocks import Chain
    from kvc.core.dispatch import Answer, Dispatch, Effect
    from kvc.core.types import Turn
    from kvc.runtime.clock import Clock
    from kvc.v1 import types_pb2
    from services.router.config import RouterConfig
    from services.router.janitor import Janitor
    from services.router.owed import Debt
    from services.router.ports import AdmissionPort, EnginePort, Output


@dataclass(slots=True)
class _Run:
    """What one request has seen so far. `waited_s`: for the session's previous turn, and for a first worker."""

    request: Request
    arrived_s: float
    next_attempt: int
    waited_s: float = 0.0
    avoid: set[WorkerRef] = field(default_factory=set)
    decision: Decision | None = None
    over: bool = False


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
        self.claims = Claims(config.requests.max_turns)
        self.gate = SessionGate(config.requests.session_waiters, clock)
        self.owed = Owed(config.engines.lost_s)
        self.loads: dict[str, types_pb2.WorkerLoad] = {}
        self._admission = admission
        self._runner = Runner(engines)
        self.clock = clock
        self.janitor = janitor
        self._observer = observer or Observer()
        self._last_seen: dict[str, float] = {}

    def apply(self, event: ev.Event) -> None:
        """An event from outside a dispatch: changes Σ, and lets a waiting turn try again when it may have made room."""
        if isinstance(event, ev.WorkerJoined):
            self.chains.use_seed(event.info.hash_seed)
            self.owed.back(event.info.ref)
        elif isinstance(event, ev.WorkerLeft):
            self.loads.pop(event.worker_id, None)
            self.owed.over(event.worker_id)
        elif isinstance(event, ev.WorkerHealth):
            (self.owed.back if event.healthy else self.owed.away)(event.ref)
        self.sigma.apply(event)
        if isinstance(event, ev.LoadReported | ev.ResidencyReset | ev.WorkerDraining):
            self.room.notify()

    async def dispatch(self, request: Request) -> AsyncGenerator[Output, None]:
        """Decides and runs a turn: yields one Started with the first chunk, chunks, then one Result.

        Closing the iterator cancels the turn everywhere.

        Raises:
            KvcError: the turn could not be done; the error says why and, where it helps, when to try again.
        """
        run = _Run(request, self.clock.now_s(), self.claims.next_attempt(request.request_id))
        try:
            with self.claims.hold(request.request_id):
                async with aclosing(self._claimed(run)) as outputs:
                    async for output in outputs:
                        yield output
        except BaseException as error:
            if not run.over:
                end = ev.End.FAILED if isinstance(error, Exception) else ev.End.CANCELLED
                self._observer.ended(request, run.decision, end, None, error)
            raise

    async def _claimed(self, run: _Run) -> AsyncGenerator[Output, None]:
        request = run.request
        try:
            async with self.gate.turn(request.session_id, request.deadline_s):
                run.waited_s = self.clock.now_s() - run.arrived_s
                await self._first_worker(run)
                async with aclosing(self._tries(run, self._arrive(request))) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            self.claims.count(request.request_id, run.next_attempt)
            self.room.leave(request.request_id)
            if run.decision is None:
                self.room.notify()  # a chance that woke it is the next one's

    async def _first_worker(self, run: _Run) -> None:
        """Waits until a worker was ever known: only then is there a hash seed, and with it a chain to decide on.

        Raises:
            KvcError: none came in time.
        """
        left_s = self.config.params.queue_wait_s
        while not self.chains.seeded:
            effect = WaitForRoom(run.request.input_tokens, at_least_s=0.0, jitter_s=0.0, at_most_s=left_s)
            resumed = await self.room.wait(run.request.request_id, effect, run.request.deadline_s)
            if resumed.why == "deadline":
                raise out_of_time("no worker was known")
            if resumed.why != "room":
                raise no_worker()
            run.waited_s += resumed.waited_s
            left_s = max(0.0, left_s - resumed.waited_s)

    def _arrive(self, request: Request) -> Turn:
        chain = self.chains.chain(request.session_id, request.tokens, self.sigma.forest.chain(request.session_id))
        return self.arrive(request.session_id, chain, request.input_tokens, request.max_new_tokens)

    def arrive(self, session_id: str, chain: Chain, input_tokens: int, output_reserve_tokens: int, *, estimated: bool = False) -> Turn:
        """A session's next prompt: Σ learns its chain, and the turn to decide on is made. `estimated`: the chain is of bytes."""
        self.touch(session_id)
        self.forget_idle(at_most=2)
        self.sigma.apply(ev.TurnArrived(session_id, chain, input_tokens, estimated))
        return self.sigma.turn(session_id, chain, input_tokens, output_reserve_tokens)

    def touch(self, session_id: str) -> None:
        """The session is in use."""
        self._last_seen.pop(session_id, None)
        self._last_seen[session_id] = self.clock.now_s()

    def forget_idle(self, at_most: int) -> None:
        """Closes up to `at_most` sessions: those that were idle for too long, and the oldest beyond the cap."""
        limits, now_s = self.config.requests, self.clock.now_s()
        for _ in range(at_most):
            oldest = next(iter(self._last_seen), None)
            if oldest is None:
                return
            if now_s - self._last_seen[oldest] <= limits.session_idle_s and len(self._last_seen) <= limits.max_sessions:
                return
            if self.gate.busy(oldest):
                self.touch(oldest)
            else:
                self.close_session(oldest)

    def close_session(self, session_id: str) -> None:
        """Forgets a session: its pin, counters and chain."""
        self._last_seen.pop(session_id, None)
        self.chains.forget(session_id)
        self.sigma.apply(ev.SessionClosed(session_id))

    def close_unserved(self, session_id: str) -> None:
        """Forgets a session that failed before any turn of it was completed: nobody has to come back to it."""
        session = self.sigma.session(session_id)
        if session is not None and not session.turns and not session.open_turns:
            self.close_session(session_id)

    async def _tries(self, run: _Run, turn: Turn) -> AsyncGenerator[Output, None]:
        """Attempts until one brings a first token, as often as the settings allow.

        Raises:
            KvcError: no attempt did, or the turn failed after its first token.
        """
        for tries_left in range(self.config.engines.retries, -1, -1):
            decision = await self._decide(run, turn)
            try:
                async with aclosing(self._attempt(run, decision)) as outputs:
                    async for output in outputs:
                        yield output
            except TurnFailedError as failed:
                self._blame(run, decision, failed.error)
                if failed.started or failed.error.final or not tries_left:
                    raise typed(failed.error) from failed.error
                self._observer.retried(run.request, decision, failed.error)
                run.decision = None
            else:
                return

    async def _decide(self, run: _Run, turn: Turn) -> Decision:
        """Drives the dispatch generator to its end."""
        start_s = self.clock.now_s()
        outcome = await self._drive(self.steps(turn, run.request.request_id, run.next_attempt, run.avoid), run)
        if isinstance(outcome, Decision):
            run.decision = outcome
            run.next_attempt = outcome.attempt.attempt_number + 1
        self._observer.decided(outcome, self.clock.now_s() - start_s)
        if isinstance(outcome, GaveUp):
            raise gave_up(outcome, turn, len(self.room))
        self.room.notify()
        return outcome

    def steps(self, turn: Turn, request_id: str, first_attempt: int, avoid: AbstractSet[WorkerRef]) -> Dispatch:
        """The dispatch generator of the policy in force; whoever drives it performs what it yields."""
        policy = self.config.policy
        if policy == "kvc":
            return dispatch(turn, self.sigma, request_id, first_attempt=first_attempt, avoid=frozenset(avoid))
        return baseline(policy, turn, self.sigma, request_id, first_attempt=first_attempt, avoid=frozenset(avoid))

    async def _drive(self, steps: Dispatch, run: _Run) -> Decision | GaveUp:
        try:
            effect = next(steps)
            while True:
                effect = steps.send(await self._perform(effect, run))
        except StopIteration as stop:
            outcome: Decision | GaveUp = stop.value
            return outcome
        finally:
            steps.close()

    async def _perform(self, effect: Effect, run: _Run) -> Answer:
        deadline_s = run.request.deadline_s
        if isinstance(effect, Ask):
            run.next_attempt = effect.attempt.attempt_number + 1
            return await self._ask(effect, deadline_s - self.clock.now_s())
        if isinstance(effect, WaitForRoom):
            return await self.room.wait(run.request.request_id, effect, deadline_s)
        assert isinstance(effect, Pause)
        pause_s = effect.at_least_s + random.uniform(0.0, effect.jitter_s)  # noqa: S311 - spreads retries, guards nothing
        if pause_s >= deadline_s - self.clock.now_s():
            return Resumed("deadline")
        await asyncio.sleep(pause_s)
        return Resumed("room", pause_s)

    async def _ask(self, ask: Ask, remaining_s: float) -> Answer:
        """One Admit. A caller that goes away leaves the answer to the janitor: there may be a ticket in it.

        Raises:
            DeadlineExceeded: the request's own time was too short for an answer, which is no worker's fault (R13).
        """
        if remaining_s <= 0:
            raise out_of_time("it was routed")
        timeout_s = min(self.config.agents.admit_timeout_s, remaining_s)
        answer = asyncio.ensure_future(self._admission.admit(ask, timeout_s))
        try:
            reply = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.janitor.settle(ask, answer)
            raise
        if isinstance(reply, Unreachable) and not reply.gone and timeout_s >= remaining_s:
            raise out_of_time("a worker was asked")
        return reply

    async def _attempt(self, run: _Run, decision: Decision) -> AsyncGenerator[Output, None]:
        """Runs one attempt; its end reaches Σ exactly once, however it comes.

        Raises:
            TurnFailedError: an engine failed.
            DeadlineExceeded: the request's time is over.
        """
        end, last = ev.End.CANCELLED, EngineChunk()
        sent_s = self.clock.now_s()
        first_s: float | None = None
        try:
            async with aclosing(self._chunks(run.request, decision)) as chunks:
                async for chunk in chunks:
                    if first_s is None:
                        first_s = self.clock.now_s()
                        yield Started(decision, sent_s - run.arrived_s)
                    last = chunk
                    yield chunk
            end = ev.End.CANCELLED if last.finish_reason == "abort" else ev.End.COMPLETED
        except EngineError as error:
            end = ev.End.FAILED
            raise TurnFailedError(error, started=first_s is not None) from error
        except Exception:
            end = ev.End.FAILED
            raise
        finally:
            self._end(run.request, decision, end, last)
        yield self._result(run, decision, last, end, sent_s, first_s or sent_s)

    def _result(self, run: _Run, decision: Decision, last: EngineChunk, end: ev.End, sent_s: float, first_s: float) -> Result:
        now_s = self.clock.now_s()
        mesh_s = max(0.0, sent_s - run.arrived_s - run.waited_s - decision.queued_s)
        result = Result(
            last=last,
            decision=decision,
            decide_s=sent_s - run.arrived_s,
            ttft_s=first_s - run.arrived_s,
            latency_s=now_s - run.arrived_s,
            mesh_s=mesh_s,
        )
        run.over = True
        self._observer.ended(run.request, decision, end, result, None)
        return result

    async def _chunks(self, request: Request, decision: Decision) -> AsyncGenerator[EngineChunk, None]:
        decode = self.sigma.worker(decision.decode)
        prefill = self.sigma.worker(decision.prefill) if decision.prefill is not None else None
        if decode is None:
            raise EngineError(0, "worker-left", "the decode worker left before the turn reached it", gone=True)
        if decision.prefill is not None and prefill is None:
            raise PrefillFailedError(0, "worker-left", "the prefill worker left before the turn reached it", gone=True)
        job = Job(request.session_id, request.tokens, request.text, request.max_new_tokens, request.temperature, request.traceparent)
        info = prefill.info if prefill is not None else None
        owing = (decision.decode,) if decision.prefill is None else (decision.decode, decision.prefill)
        async with aclosing(self._runner.run(job, decision, decode.info, info, lambda: self._prefilled(decision))) as stream:
            with self.owed.by(*owing) as debt:
                chunk = await self._next(stream, request, decision, debt)
            while chunk is not None:
                yield chunk
                chunk = await self._next(stream, request, decision)

    async def _next(
        self, stream: AsyncGenerator[EngineChunk, None], request: Request, decision: Decision, debt: Debt | None = None
    ) -> EngineChunk | None:
        """The next chunk; None at the end.

        Raises:
            EngineError: an engine failed, or a worker that owes the first chunk is lost.
            DeadlineExceeded: the request's time is over.
        """
        limit = asyncio.timeout(max(0.0, request.deadline_s - self.clock.now_s()))
        try:
            async with limit:
                if debt is not None:
                    debt.limit = limit
                return await anext(stream, None)
        except TimeoutError:
            if debt is not None and debt.lost is not None:
                raise lost(decision, debt.lost) from None
            if not limit.expired():
                raise
            raise out_of_time("the engine worked on it") from None

    def _prefilled(self, decision: Decision) -> None:
        """The prefill worker is done: the KV has moved, which may be what others waited for (R15)."""
        self.sigma.apply(ev.PrefillDone(decision.attempt))
        self.room.notify()

    def _end(self, request: Request, decision: Decision, end: ev.End, last: EngineChunk) -> None:
        self.sigma.apply(ev.TurnEnded(decision.attempt, end, last.prompt_tokens or request.input_tokens, last.completion_tokens))
        self.touch(request.session_id)
        if end is not ev.End.COMPLETED and decision.admission is not None:
            # The engine consumes the ticket when the request arrives; if it never did, this frees the reservation before its TTL.
            self.janitor.release(decision.attempt, decision.decode, decision.admission)
        if request.close_session and end is ev.End.COMPLETED:
            self.close_session(request.session_id)
        self.room.notify()

    def _blame(self, run: _Run, decision: Decision, error: EngineError) -> None:
        """Whom a next try should not use, and what Σ learns about a worker's health."""
        ref = guilty(decision, error)
        if ref is None:
            return
        run.avoid.add(ref)
        if error.gone:
            self.sigma.apply(ev.WorkerUnreachable(ref, gone=True))
