"""Waiting turns: for room (R28), and for the session's previous turn (R21)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvc.core.dispatch import Resumed, WaitForRoom
from kvc.errors import DeadlineExceeded, SessionBusy
from kvc.runtime.clock import ManualClock, SystemClock
from services.router.waiting import RoomQueue, SessionGate
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from collections.abc import Awaitable

FAR = 1e9


def effect(prefill_tokens: int = 100, at_least_s: float = 0.0, jitter_s: float = 0.0, at_most_s: float = FAR) -> WaitForRoom:
    return WaitForRoom(prefill_tokens, at_least_s, jitter_s, at_most_s)


async def started(queue: RoomQueue, name: str, how: WaitForRoom, deadline_s: float = FAR) -> asyncio.Task[Resumed]:
    """A turn that waits."""
    before = len(queue)
    task = asyncio.create_task(queue.wait(name, how, deadline_s))
    await until(lambda: len(queue) == before + 1)
    return task


async def settle() -> None:
    """Lets everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def room(limit: int = 10, ageing: float = 1000.0, clock: ManualClock | SystemClock | None = None) -> RoomQueue:
    return RoomQueue(limit, ageing, clock or ManualClock())


class TestRoomQueue:
    async def test_notify_wakes_exactly_one_and_the_shortest_prefill_first(self) -> None:
        queue = room()
        tasks = {name: await started(queue, name, effect(tokens)) for name, tokens in (("long", 900), ("short", 100), ("middle", 500))}
        order = []
        for left in (2, 1, 0):
            queue.notify()
            await settle()
            order += [name for name, task in tasks.items() if task.done() and name not in order]
            assert len(queue) == left
        assert order == ["short", "middle", "long"]
        assert [tasks[name].result().why for name in order] == ["room"] * 3

    async def test_waiting_ages(self) -> None:
        clock = ManualClock()
        queue = room(ageing=1000.0, clock=clock)
        old = await started(queue, "old and long", effect(900))
        clock.advance(1.0)
        young = await started(queue, "young and short", effect(100))
        queue.notify()
        await settle()
        assert old.done()
        assert not young.done()
        queue.notify()
        assert (await young).why == "room"

    async def test_full(self) -> None:
        queue = room(limit=2)
        tasks = [await started(queue, name, effect()) for name in "ab"]
        assert await queue.wait("c", effect(), FAR) == Resumed("full", 0.0)
        queue.notify()
        queue.notify()
        await asyncio.gather(*tasks)

    async def test_no_waiting_at_all(self) -> None:
        assert (await room(limit=0).wait("a", effect(), FAR)).why == "full"

    async def test_a_turn_that_was_woken_keeps_its_claim_until_it_leaves(self) -> None:
        queue = room(limit=1)
        first = await started(queue, "first", effect())
        queue.notify()
        assert (await first).why == "room"
        assert (await queue.wait("newcomer", effect(), FAR)).why == "full"
        again = await started(queue, "first", effect())
        queue.notify()
        assert (await again).why == "room"
        queue.leave("first")
        newcomer = await started(queue, "newcomer", effect())
        queue.notify()
        assert (await newcomer).why == "room"

    async def test_a_turn_that_comes_back_has_its_old_place(self) -> None:
        clock = ManualClock()
        queue = room(ageing=1000.0, clock=clock)
        first = await started(queue, "first", effect(500))
        queue.notify()
        await first
        clock.advance(10.0)
        later = await started(queue, "later", effect(100))
        again = await started(queue, "first", effect(500))
        queue.notify()
        assert (await again).why == "room"
        assert not later.done()
        queue.notify()
        await later

    async def test_waited_and_deadline_are_told_apart(self) -> None:
        queue = room(clock=SystemClock())
        now = SystemClock().now_s()
        assert (await queue.wait("a", effect(at_most_s=0.02), now + 60)).why == "waited"
        resumed = await queue.wait("b", effect(at_most_s=60), now + 0.05)
        assert resumed.why == "deadline"
        assert 0 < resumed.waited_s < 5
        assert (await queue.wait("c", effect(), now - 1)).why == "deadline"
        assert len(queue) == 0

    async def test_at_least_is_obeyed(self) -> None:
        """R15: the pause hint of the workers."""
        clock = ManualClock()
        queue = room(clock=clock)
        task = await started(queue, "a", effect(at_least_s=0.05))
        queue.notify()
        await settle()
        assert not task.done()
        clock.advance(0.05)
        queue.notify()
        assert (await task).why == "room"
        queue.close()

    async def test_an_early_notice_is_not_lost(self) -> None:
        """When nobody is ready yet, the queue looks again by itself as soon as somebody is."""
        queue = room(clock=SystemClock())
        task = await started(queue, "a", effect(at_least_s=0.05, jitter_s=0.01))
        queue.notify()
        resumed = await asyncio.wait_for(task, 5)
        assert resumed.why == "room"
        assert 0.05 <= resumed.waited_s < 3

    async def test_a_ready_turn_does_not_wait_for_an_earlier_one_that_pauses(self) -> None:
        clock = ManualClock()
        queue = room(clock=clock)
        pausing = await started(queue, "pausing", effect(100, at_least_s=5.0))
        ready = await started(queue, "ready", effect(900))
        queue.notify()
        await settle()
        assert (ready.done(), pausing.done()) == (True, False)
        clock.advance(5.0)
        queue.notify()
        assert (await pausing).why == "room"

    async def test_cancel_removes_the_waiter(self) -> None:
        queue = room(limit=1)
        task = await started(queue, "a", effect())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        queue.leave("a")
        assert len(queue) == 0
        queue.notify()
        other = await started(queue, "b", effect())
        queue.notify()
        assert (await other).why == "room"

    async def test_a_chance_given_to_a_turn_that_is_cancelled_passes_on(self) -> None:
        """F58: the wake-up of a turn that goes away in the same moment must not be lost."""
        queue = room()
        first, second = await started(queue, "first", effect(1)), await started(queue, "second", effect(2))
        queue.notify()
        first.cancel()
        assert (await asyncio.wait_for(second, 5)).why == "room"
        assert first.cancelled()

    async def test_longest_wait(self) -> None:
        clock = ManualClock()
        queue = room(clock=clock)
        task = await started(queue, "a", effect())
        clock.advance(3.0)
        queue.notify()
        assert (await task).waited_s == 3.0
        assert queue.longest_wait_s == 3.0


class Turns:
    """Turns of sessions behind a gate; each holds its session until it is told to end."""

    def __init__(self, waiters: int = 8) -> None:
        self.gate = SessionGate(waiters, SystemClock())
        self.entered: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def start(self, name: str, session_id: str = "s", timeout_s: float = 60.0) -> asyncio.Task[None]:
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._turn(name, session_id, SystemClock().now_s() + timeout_s))

    async def _turn(self, name: str, session_id: str, deadline_s: float) -> None:
        async with self.gate.turn(session_id, deadline_s):
            self.entered.append(name)
            await self.ends[name].wait()

    def waiting(self, session_id: str = "s") -> int:
        return len(self.gate._busy.get(session_id, ()))


async def ended(*tasks: Awaitable[None]) -> list[BaseException | None]:
    return await asyncio.gather(*tasks, return_exceptions=True)


class TestSessionGate:
    async def test_turns_of_a_session_go_one_by_one_in_order(self) -> None:
        turns = Turns()
        tasks = [turns.start(name) for name in "abcd"]
        await until(lambda: turns.waiting() == 3)
        for index, name in enumerate("abcd"):
            assert turns.entered == list("abcd"[: index + 1])
            turns.ends[name].set()
            await until(lambda index=index: len(turns.entered) == min(4, index + 2))  # type: ignore[misc]  # bound now
        await ended(*tasks)
        assert len(turns.gate) == 0

    async def test_sessions_do_not_wait_for_each_other(self) -> None:
        """F66: ids are compared exactly."""
        turns = Turns()
        tasks = [turns.start("a", "session-1"), turns.start("b", "session-12")]
        await until(lambda: turns.entered == ["a", "b"])
        assert turns.gate.busy("session-1")
        assert not turns.gate.busy("session")
        for name in "ab":
            turns.ends[name].set()
        await ended(*tasks)

    @pytest.mark.parametrize("waiters", [0, 2])
    async def test_waiters_are_bounded(self, waiters: int) -> None:
        turns = Turns(waiters)
        tasks = [turns.start(str(index)) for index in range(waiters + 1)]
        await until(lambda: turns.waiting() == waiters and turns.entered == ["0"])
        with pytest.raises(SessionBusy) as refused:
            await turns.start("too many")
        assert refused.value.field == "session_id"
        assert refused.value.retry_after_s > 0
        for end in turns.ends.values():
            end.set()
        await ended(*tasks)
        assert len(turns.gate) == 0

    async def test_a_waiter_that_is_cancelled_lets_the_next_one_in(self) -> None:
        """F69."""
        turns = Turns()
        first, second, third = (turns.start(name) for name in "abc")
        await until(lambda: turns.waiting() == 2)
        second.cancel()
        await ended(second)
        turns.ends["a"].set()
        await until(lambda: turns.entered == ["a", "c"])
        turns.ends["c"].set()
        await ended(first, third)
        assert len(turns.gate) == 0

    async def test_a_waiter_that_is_cancelled_in_the_moment_it_is_handed_the_session(self) -> None:
        turns = Turns()
        first, second, third = (turns.start(name) for name in "abc")
        await until(lambda: turns.waiting() == 2)
        turns.ends["a"].set()
        while turns.waiting() == 2:  # noqa: ASYNC110 - step by step, until the session is handed to the second turn, which has not run yet
            await asyncio.sleep(0)
        second.cancel()
        await until(lambda: turns.entered == ["a", "c"])
        turns.ends["c"].set()
        assert (await ended(first, third)) == [None, None]
        assert second.cancelled()
        assert len(turns.gate) == 0

    async def test_the_only_waiter_is_cancelled_in_the_moment_the_turn_ends(self) -> None:
        turns = Turns()
        first, second = turns.start("a"), turns.start("b")
        await until(lambda: turns.waiting() == 1)
        first.cancel()
        second.cancel()  # its place is cancelled at once; its task runs when the first turn has left and taken the queue with it
        results = await ended(first, second)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        assert len(turns.gate) == 0

    async def test_deadline(self) -> None:
        turns = Turns()
        first = turns.start("a")
        await until(lambda: turns.entered == ["a"])
        with pytest.raises(DeadlineExceeded) as late:
            await turns.start("late", timeout_s=0.02)
        assert late.value.field == "session_id"
        with pytest.raises(DeadlineExceeded):
            await turns.start("too late", timeout_s=-1.0)
        assert turns.waiting() == 0
        turns.ends["a"].set()
        await first
        assert len(turns.gate) == 0

    async def test_every_order_of_ends_and_cancels_leaves_the_gate_free(self) -> None:
        """F58: whatever ends first, one turn at a time, and nothing is left."""
        for pattern in range(2**6):
            turns = Turns()
            tasks = [turns.start(str(index)) for index in range(3)]
            await until(lambda turns=turns: turns.waiting() == 2)  # type: ignore[misc]  # bound now
            for step in range(3):
                choice = pattern >> 2 * step & 3
                if choice == 3:
                    await settle()
                else:
                    tasks[choice].cancel()
            for end in turns.ends.values():
                end.set()
            await asyncio.wait_for(ended(*tasks), 10)
            assert len(turns.gate) == 0, bin(pattern)
