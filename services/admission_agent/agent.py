"""The agent itself: what is asked of it is checked against the engine's current life and passed on."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvc.core.types import Reason
from kvc.engine.link import ListSessions, Load, Release
from kvc.errors import Exhausted, KvcError, Precondition
from services.admission_agent.life import ADMIT
from services.admission_agent.replies import decision_of, load_of, released_of, sessions_of
from services.admission_agent.translation import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvc.core.types import WorkerInfo, WorkerRef
    from kvc.engine.link import ReplyBody
    from kvc.runtime.asking import Pending
    from kvc.v1 import admission_pb2, types_pb2
    from services.admission_agent.connection import EngineConnection
    from services.admission_agent.life import Life
    from services.admission_agent.translation import Ask


Result = TypeVar("Result")


class Admitter(Protocol):
    """Something that answers Admit."""

    def ask(self, ask: Ask, answered: Callable[[Answer | KvcError], None]) -> Pending | None:
        """Asks for a decision on one turn, without a task.

        Args:
            ask: the question.
            answered: called exactly once, possibly before this returns; with a KvcError when no decision could be had.

        Returns:
            The question, to cancel it; None when it is answered already.
        """
        ...


class _Call(Generic[Result]):
    """Something that the engine is asked: one of the calls in flight until it is over (F5, F58)."""

    __slots__ = ("_agent", "_answered", "_over", "pending", "ref")

    def __init__(self, agent: AdmissionAgent, ref: WorkerRef, answered: Callable[[Result | KvcError], None]) -> None:
        self._agent = agent
        self._answered = answered
        self._over = False
        self.ref = ref
        self.pending: Pending | None = None

    def replied(self, reply: ReplyBody | KvcError) -> None:
        """The engine said something, or nothing in time."""
        if self._over:
            return
        self._over = True
        self._agent.leave()
        if isinstance(reply, KvcError):
            self._answered(reply)
            return
        try:
            result = self._read(reply)
        except KvcError as error:
            self._answered(error)
            return
        self._answered(result)

    def _read(self, reply: ReplyBody) -> Result:
        raise NotImplementedError

    def cancel(self) -> None:
        """Nobody waits any more."""
        if self._over:
            return
        self._over = True
        self._agent.leave()
        if self.pending is not None:
            self.pending.cancel()


class _Admission(_Call[Answer]):
    __slots__ = ()

    def _read(self, reply: ReplyBody) -> Answer:
        return Answer(self.ref, decision_of(reply))


class _Release(_Call[bool]):
    __slots__ = ()

    def _read(self, reply: ReplyBody) -> bool:
        return released_of(reply)


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

    def ask(self, ask: Ask, answered: Callable[[Answer | KvcError], None]) -> Pending | None:
        """Algorithm 2 for one turn, in the engine. A turn for another life or identity is refused as stale (F60, R18).

        The error is Unavailable when the engine is away, Precondition when it does not admit, Exhausted when too many calls wait already,
        DeadlineExceeded when there is no answer in time (if the engine admits later, the ticket expires unused), or the engine's own.
        """
        try:
            life = self.life()
            if not _same_life(ask.worker, life.ref):
                answered(Answer(life.ref, Reason.STALE_EPOCH))
                return None
            if self._draining:
                answered(Answer(life.ref, Reason.DRAINING))
                return None
            if not life.offers(ADMIT):
                raise Precondition(f"worker {life.ref.worker_id} does not admit turns", reason="ENGINE_CAPABILITY_MISSING")
            self._enter()
        except KvcError as error:
            answered(error)
            return None
        call = _Admission(self, life.ref, answered)
        call.pending = life.link.ask(ask.message, call.replied, ask.timeout_s)
        return None if call.pending is None else call

    def release(self, worker: WorkerRef, ticket: str, answered: Callable[[bool | KvcError], None], timeout_s: float) -> Pending | None:
        """Gives a ticket back; True when it was open. The ticket of another life is void already. Otherwise as `ask`."""
        try:
            life = self.life()
            if not _same_life(worker, life.ref):
                answered(False)  # noqa: FBT003 - the answer
                return None
            self._enter()
        except KvcError as error:
            answered(error)
            return None
        call = _Release(self, life.ref, answered)
        call.pending = life.link.ask(Release(ticket), call.replied, timeout_s)
        return None if call.pending is None else call

    async def session(self, session_id: str, timeout_s: float) -> tuple[WorkerRef, admission_pb2.SessionResidency | None]:
        """One session, compared exactly (F66); None when the engine does not know it.

        Raises:
            KvcError: as for `ask`.
        """
        life = self.life()
        with self._slot():
            sessions, _ = sessions_of(await life.link.call(ListSessions(session_id=session_id, limit=1), timeout_s))
        return life.ref, next((one for one in sessions if one.session_id == session_id), None)

    async def sessions(self, limit: int, timeout_s: float) -> tuple[WorkerRef, list[admission_pb2.SessionResidency], int]:
        """The most recently used `limit` sessions and how many there are.

        Raises:
            KvcError: as for `ask`.
        """
        life = self.life()
        with self._slot():
            sessions, total = sessions_of(await life.link.call(ListSessions(limit=limit), timeout_s))
        return life.ref, sessions[:limit], total

    async def worker(self, timeout_s: float) -> tuple[WorkerInfo, types_pb2.WorkerLoad]:
        """What the worker is, and how busy at this moment.

        Raises:
            KvcError: as for `ask`.
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

    def _enter(self) -> None:
        """One call more is in flight. Mutates.

        Raises:
            Exhausted: there are too many.
        """
        if self._inflight >= self._max_inflight:
            raise Exhausted(f"{self._inflight} calls wait for the engine", reason="AGENT_OVERLOADED", retry_after_s=0.05)
        self._inflight += 1
        self._idle.clear()

    def leave(self) -> None:
        """One call less is in flight. Mutates."""
        self._inflight -= 1
        if self._inflight == 0:
            self._idle.set()

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """One call in flight, given back whatever happens to it (F5, F58).

        Raises:
            Exhausted: there are too many.
        """
        self._enter()
        try:
            yield
        finally:
            self.leave()


def _same_life(asked: WorkerRef, current: WorkerRef) -> bool:
    """True when the caller means this worker; epoch 0 means whichever life it is in."""
    return asked.worker_id == current.worker_id and asked.epoch in {0, current.epoch}
