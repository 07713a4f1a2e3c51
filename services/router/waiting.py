"""Turns that wait: for room on any worker (R28), and for the previous turn of their own session (R21).

RoomQueue     bounded; a place is fixed at the first wait (kvc.core.queue); `notify` lets the first ready turn try again
SessionGate   one turn of a session in flight; the next ones wait in order of arrival, a bounded number of them
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvc.core.dispatch import Resumed
from kvc.core.queue import WaitQueue
from kvc.errors import DeadlineExceeded, SessionBusy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container

    from kvc.core.dispatch import WaitForRoom
    from kvc.runtime.clock import Clock

Why = Literal["room", "waited", "full", "deadline"]


class _Waiter(NamedTuple):
    woken: asyncio.Future[None]
    ready_s: float
    prefill_tokens: int


class RoomQueue:
    """Turns that every worker refused. Lives on one event loop.

    A turn that was woken keeps its claim on a place until `leave`: when it is refused again it comes back to where it was, and no
    newcomer can have taken its place meanwhile.
    """

    def __init__(self, limit: int, ageing_tokens_per_s: float, clock: Clock) -> None:
        """Starts empty; limits as in kvc.core.params."""
        self.limit = limit
        self.longest_wait_s = 0.0
        self._queue = WaitQueue(max(1, limit), ageing_tokens_per_s)
        self._clock = clock
        self.waiting: dict[str, _Waiter] = {}
        self._claims: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Turns waiting."""
        return len(self.waiting)

    async def wait(self, name: str, effect: WaitForRoom, deadline_s: float) -> Resumed:
        """Waits for a chance to ask for admission again.

        Args:
            name: names the turn; one wait a name at a time.
            effect: how to wait.
            deadline_s: end of the request, by the clock.
        """
        start_s = self._clock.now_s()
        if name not in self._claims and len(self._claims) >= self.limit:
            return Resumed("full")
        first_s = self._claims.setdefault(name, start_s)
        self._queue.push(name, effect.prefill_tokens, first_s)
        ready_s = start_s + effect.at_least_s + random.uniform(0.0, effect.jitter_s)  # noqa: S311 - spreads retries, guards nothing
        waiter = _Waiter(asyncio.get_running_loop().create_future(), ready_s, effect.prefill_tokens)
        self.waiting[name] = waiter
        left_s = deadline_s - start_s
        why: Why = "deadline" if left_s <= effect.at_most_s else "waited"
        try:
            async with asyncio.timeout(max(0.0, min(left_s, effect.at_most_s))):
                await waiter.woken
            why = "room"
        except TimeoutError:
            pass
        finally:
            del self.waiting[name]
            self._queue.remove(name)
            if why != "room" and waiter.woken.done() and not waiter.woken.cancelled():
                self.notify()  # woken in the moment it gave up: the chance is the next one's
        now_s = self._clock.now_s()
        self.longest_wait_s = max(self.longest_wait_s, now_s - first_s)
        return Resumed(why, now_s - start_s)

    def leave(self, name: str) -> None:
        """The turn needs no place any more; one that never waited is fine."""
        self._claims.pop(name, None)

    def notify(self) -> None:
        """Room may be there: resumes the first turn whose pause is over; when none is ready yet, looks again as soon as one is."""
        now_s = self._clock.now_s()
        early: list[str] = []
        woken = False
        while not woken and (name := self._queue.pop()) is not None:
            waiter = self.waiting[name]
            if waiter.ready_s > now_s:
                early.append(name)
            elif not waiter.woken.done():
                waiter.woken.set_result(None)
                woken = True
        for name in early:
            self._queue.push(name, self.waiting[name].prefill_tokens, self._claims[name])
        if early and not woken:
            self._look_again(min(self.waiting[name].ready_s for name in early) - now_s)

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

    def __len__(self) -> int:
        """Sessions with a turn in flight."""
        return len(self._busy)

    def busy(self, session_id: str) -> bool:
        """True while a turn of the session is in flight."""
        return session_id in self._busy

    def sessions(self) -> Container[str]:
        """Sessions with a turn in flight."""
        return self._busy

    def try_enter(self, session_id: str) -> bool:
        """Takes the session for one turn if nobody has it; `leave` gives it back."""
        if session_id in self._busy:
            return False
        self._busy[session_id] = deque()
        return True

    @asynccontextmanager
    async def turn(self, session_id: str, deadline_s: float) -> AsyncIterator[None]:
        """Holds the session for one turn.

        Raises:
            SessionBusy: too many turns of the session wait already.
            DeadlineExceeded: the turn before did not end in time.
        """
        await self.enter(session_id, deadline_s)
        try:
            yield
        finally:
            self.leave(session_id)

    async def enter(self, session_id: str, deadline_s: float) -> None:
        """Waits for the session; `leave` gives it back. Errors as in `turn`."""
        if self.try_enter(session_id):
            return
        queue = self._busy[session_id]
        if len(queue) >= self._waiters:
            raise SessionBusy(f"a turn of the session is in flight and {len(queue)} wait for it", field="session_id", retry_after_s=0.1)
        handed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(handed)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.now_s())):
                await handed
        except TimeoutError:
            self._abandon(session_id, handed)
            raise DeadlineExceeded("the session's previous turn did not end in time", field="session_id") from None
        except asyncio.CancelledError:
            self._abandon(session_id, handed)
            raise

    def _abandon(self, session_id: str, handed: asyncio.Future[None]) -> None:
        """A waiter gives up; when the session was handed to it in the same moment, it is handed on."""
        if handed.done() and not handed.cancelled():
            self.leave(session_id)
            return
        queue = self._busy.get(session_id)  # gone when the turn in flight ended in this very moment
        if queue is not None and handed in queue:
            queue.remove(handed)

    def leave(self, session_id: str) -> None:
        """Hands the session to the next turn that waits for it."""
        queue = self._busy[session_id]
        while queue:
            handed = queue.popleft()
            if not handed.done():
                handed.set_result(None)
                return
        del self._busy[session_id]
