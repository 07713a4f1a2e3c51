"""Turns that wait: for room on any worker (R28), and for the previous turn of their own session (R21).

RoomQueue     bounded; a place is fixed at arrival (kvc.core.queue); `notify` lets the first ready turn try again
SessionGate   one turn of a session in flight; the next ones wait in order of arrival, a bounded number of them
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from kvc.core.dispatch import Resumed
from kvc.core.queue import WaitQueue
from kvc.errors import DeadlineExceeded, SessionBusy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvc.core.dispatch import WaitForRoom
    from kvc.runtime.clock import Clock

Why = Literal["room", "waited", "full", "deadline"]


class RoomQueue:
    """Turns that every worker refused. Lives on one event loop."""

    def __init__(self, limit: int, ageing_tokens_per_s: float, clock: Clock) -> None:
        """Starts empty; limits as in kvc.core.params."""
        self._queue = WaitQueue(limit, ageing_tokens_per_s)
        self._clock = clock
        self._waiting: dict[str, tuple[asyncio.Future[Why], float, WaitForRoom, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.longest_wait_s = 0.0

    def __len__(self) -> int:
        """Turns waiting."""
        return len(self._waiting)

    async def wait(self, name: str, effect: WaitForRoom, arrival_s: float, deadline_s: float) -> Resumed:
        """Waits for a chance to be asked for again.

        Args:
            name: names the turn.
            effect: how to wait.
            arrival_s: when the turn first waited, by the clock: keeps its place.
            deadline_s: end of the request, by the clock.
        """
        start = self._clock.now_s()
        if not self._queue.push(name, effect.prefill_tokens, arrival_s):
            return Resumed("full")
        ready_s = start + effect.at_least_s + random.uniform(0.0, effect.jitter_s)  # noqa: S311 - spreads retries, guards nothing
        future: asyncio.Future[Why] = asyncio.get_running_loop().create_future()
        self._waiting[name] = (future, ready_s, effect, arrival_s)
        until = min(start + effect.at_most_s, deadline_s)
        try:
            async with asyncio.timeout(max(0.0, until - start)):
                why = await future
        except TimeoutError:
            why = "deadline" if self._clock.now_s() >= deadline_s else "waited"
        finally:
            self._waiting.pop(name, None)
            self._queue.remove(name)
        waited = self._clock.now_s() - start
        self.longest_wait_s = max(self.longest_wait_s, self._clock.now_s() - arrival_s)
        return Resumed(why, waited)

    def notify(self) -> None:
        """Room may be there: resumes the first turn whose pause is over; when none is ready yet, looks again as soon as one is."""
        now = self._clock.now_s()
        early: list[str] = []
        while (name := self._queue.pop()) is not None:
            future, ready_s, _, _ = self._waiting[name]
            if ready_s > now:
                early.append(name)
            elif not future.done():
                future.set_result("room")
                break
        for waiting in early:
            _, _, effect, arrival_s = self._waiting[waiting]
            self._queue.push(waiting, effect.prefill_tokens, arrival_s)
        if early and name is None:
            self._look_again(min(self._waiting[waiting][1] for waiting in early) - now)

    def _look_again(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.notify)

    def close(self) -> None:
        """Stops looking again."""
        if self._timer is not None:
            self._timer.cancel()


class SessionGate:
    """At most one turn of a session at a time (R21). Lives on one event loop."""

    def __init__(self, waiters: int, clock: Clock) -> None:
        """Takes at most `waiters` waiting turns a session."""
        self._waiters = waiters
        self._clock = clock
        self._busy: dict[str, deque[asyncio.Future[None]]] = {}

    def busy(self, session_id: str) -> bool:
        """True while a turn of the session is in flight."""
        return session_id in self._busy

    @asynccontextmanager
    async def turn(self, session_id: str, deadline_s: float) -> AsyncIterator[None]:
        """Holds the session for one turn.

        Raises:
            SessionBusy: too many turns of the session wait already.
            DeadlineExceeded: the turn before did not end in time.
        """
        await self._enter(session_id, deadline_s)
        try:
            yield
        finally:
            self._leave(session_id)

    async def _enter(self, session_id: str, deadline_s: float) -> None:
        queue = self._busy.get(session_id)
        if queue is None:
            self._busy[session_id] = deque()
            return
        if len(queue) >= self._waiters:
            raise SessionBusy(f"{len(queue)} turns of the session wait for the one in flight", field="session_id", retry_after_s=0.1)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(future)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.now_s())):
                await future
        except TimeoutError:
            self._abandon(session_id, future)
            raise DeadlineExceeded("the session's previous turn did not end in time", field="session_id") from None
        except asyncio.CancelledError:
            self._abandon(session_id, future)
            raise

    def _abandon(self, session_id: str, future: asyncio.Future[None]) -> None:
        """A waiter gives up; when the session was handed to it in the same moment, it is handed on."""
        if future.done() and not future.cancelled():
            self._leave(session_id)
        elif future in self._busy[session_id]:
            self._busy[session_id].remove(future)

    def _leave(self, session_id: str) -> None:
        queue = self._busy[session_id]
        while queue:
            future = queue.popleft()
            if not future.done():
                future.set_result(None)
                return
        del self._busy[session_id]
