"""The agent itself: what is asked of it is checked against the engine's current life and passed on."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from kvc.core.types import Reason, Rejection
from kvc.engine.convert import admit_to_link
from kvc.engine.link import ListSessions, Load, Release
from kvc.errors import Exhausted, Precondition
from kvc.runtime.telemetry import traceparent
from services.admission_agent.life import ADMIT
from services.admission_agent.replies import load_of, outcome_of, released_of, sessions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvc.core.types import Attempt, Facts, Outcome, PrefillOffer, Turn, WorkerInfo, WorkerRef
    from kvc.v1 import admission_pb2, types_pb2
    from services.admission_agent.connection import EngineConnection
    from services.admission_agent.life import Life


@dataclass(frozen=True, slots=True)
class Ask:
    """One Admit. `timeout_s` is the longest wait for the engine, seconds; `traceparent` the caller's trace context or empty."""

    attempt: Attempt
    worker: WorkerRef
    turn: Turn
    offer: PrefillOffer | None
    timeout_s: float
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Who answered what; `facts` is None when the engine was not asked."""

    worker: WorkerRef
    outcome: Outcome
    facts: Facts | None = None


class Admitter(Protocol):
    """Something that answers Admit."""

    async def admit(self, ask: Ask) -> Answer:
        """Decides on one turn.

        Raises:
            KvcError: no decision could be had.
        """
        ...


class AdmissionAgent:
    """Answers for the engine behind one connection."""

    def __init__(self, connection: EngineConnection, max_inflight: int) -> None:
        """Starts idle and open.

        Args:
            connection: the engine.
            max_inflight: calls that may wait for the engine at once.
        """
        self._connection = connection
        self._max_inflight = max_inflight
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def inflight(self) -> int:
        """Calls that wait for the engine now."""
        return self._inflight

    @property
    def draining(self) -> bool:
        """True once the agent takes no turns any more."""
        return self._draining

    def why_not(self) -> str | None:
        """Why no turn can be admitted, or None."""
        return "DRAINING: the agent is stopping" if self._draining else self._connection.why_not()

    def life(self) -> Life:
        """The engine's current life.

        Raises:
            Unavailable: the engine is away or was refused.
        """
        return self._connection.require()

    async def admit(self, ask: Ask) -> Answer:
        """Algorithm 2 for one turn, in the engine. A turn for another life or identity is refused as stale (F60, R18).

        Raises:
            Unavailable: the engine is away.
            Precondition: the engine does not admit.
            Exhausted: too many calls wait already.
            DeadlineExceeded: no answer in time; if the engine admits later, the ticket expires unused.
            KvcError: the engine could not answer.
        """
        life = self.life()
        if not _same_life(ask.worker, life.ref):
            return Answer(life.ref, Rejection(Reason.STALE_EPOCH))
        if self._draining:
            return Answer(life.ref, Rejection(Reason.DRAINING))
        if not life.offers(ADMIT):
            raise Precondition(f"worker {life.ref.worker_id} does not admit turns", reason="ENGINE_CAPABILITY_MISSING")
        message = admit_to_link(ask.attempt, ask.turn, ask.offer, traceparent() or ask.traceparent)
        with self._slot():
            outcome, facts = outcome_of(await life.link.call(message, ask.timeout_s))
        return Answer(life.ref, outcome, facts)

    async def release(self, worker: WorkerRef, ticket: str, timeout_s: float) -> bool:
        """Gives a ticket back; True when it was open. The ticket of another life is void already.

        Raises:
            KvcError: as for `admit`.
        """
        life = self.life()
        if not _same_life(worker, life.ref):
            return False
        with self._slot():
            return released_of(await life.link.call(Release(ticket), timeout_s))

    async def session(self, session_id: str, timeout_s: float) -> tuple[WorkerRef, admission_pb2.SessionResidency | None]:
        """One session, compared exactly (F66); None when the engine does not know it.

        Raises:
            KvcError: as for `admit`.
        """
        life = self.life()
        with self._slot():
            sessions, _ = sessions_of(await life.link.call(ListSessions(session_id=session_id, limit=1), timeout_s))
        return life.ref, next((one for one in sessions if one.session_id == session_id), None)

    async def sessions(self, limit: int, timeout_s: float) -> tuple[WorkerRef, list[admission_pb2.SessionResidency], int]:
        """The most recently used `limit` sessions and how many there are.

        Raises:
            KvcError: as for `admit`.
        """
        life = self.life()
        with self._slot():
            sessions, total = sessions_of(await life.link.call(ListSessions(limit=limit), timeout_s))
        return life.ref, sessions[:limit], total

    async def worker(self, timeout_s: float) -> tuple[WorkerInfo, types_pb2.WorkerLoad]:
        """What the worker is, and how busy at this moment.

        Raises:
            KvcError: as for `admit`.
        """
        life = self.life()
        with self._slot():
            load = load_of(await life.link.call(Load(), timeout_s))
        return replace(life.info, draining=life.info.draining or self._draining), load

    def drain(self) -> None:
        """From now on turns are refused as DRAINING. Mutates."""
        self._draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits for calls in flight; False when some are left after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """One call in flight, given back whatever happens to it (F5, F58).

        Raises:
            Exhausted: there are too many.
        """
        if self._inflight >= self._max_inflight:
            raise Exhausted(f"{self._inflight} calls wait for the engine", reason="AGENT_OVERLOADED", retry_after_s=0.05)
        self._inflight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inflight -= 1
            if self._inflight == 0:
                self._idle.set()


def _same_life(asked: WorkerRef, current: WorkerRef) -> bool:
    """True when the caller means this worker; epoch 0 means whichever life it is in."""
    return asked.worker_id == current.worker_id and asked.epoch in {0, current.epoch}
