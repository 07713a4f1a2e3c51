"""Callers that go away: nothing of theirs is left, whatever the router was doing for them (F5, F58, F68, F69)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Refused
from kvc.core.types import Executor, Facts, Reason
from services.router.ports import EngineChunk, EngineError
from tests.support.fake_ports import FACTS, World, no, ok, world
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.core.dispatch import Ask
    from kvc.core.types import WorkerRef

FULL = Facts(92_104, held_tokens=92_104)


def alone(made: World) -> None:
    made.join("d0")


def pair(made: World) -> None:
    made.join("d0")
    made.prefill()
    made.admission.executor = Executor.PREFILL


def refused_then_fallback(made: World) -> None:
    made.join("d0")
    made.join("d1")
    made.admission.answer = lambda _ask: no(Reason.NO_D_CAPACITY)


def busy_then_admitted(made: World) -> None:
    made.join("d0")
    made.admission.answer = lambda ask: no(Reason.SESSION_BUSY) if ask.attempt.attempt_number < 2 else None


def engine_dies_then_another(made: World) -> None:
    made.join("d0")
    made.engines.streams["http://d0"] = [EngineError(0, "connection-refused", "", gone=True)]
    made.join("d1")
    made.router.sigma.workers["d1"].assigned = 1


def ticket_expires(made: World) -> None:
    made.join("d0")

    def answer(ask: Ask) -> Admitted:
        yes = made.admission.yes(ask)
        if ask.attempt.attempt_number == 0:
            made.admission.open.clear()
        return yes

    made.admission.answer = answer


def waits_for_room(made: World) -> None:
    d0 = made.join("d0")
    made.router.apply(ev.LoadReported(d0, FULL))
    made.admission.answer = lambda ask: Refused(no(Reason.NO_D_CAPACITY).rejection, FULL) if ask.attempt.attempt_number < 1 else None
    asyncio.get_running_loop().call_soon(keep_notifying, made, d0, 30)


def keep_notifying(made: World, ref: WorkerRef, times: int) -> None:
    made.router.apply(ev.LoadReported(ref, FACTS if times < 20 else FULL))
    if times:
        asyncio.get_running_loop().call_soon(keep_notifying, made, ref, times - 1)


KVC = [alone, pair, refused_then_fallback, busy_then_admitted, engine_dies_then_another, ticket_expires, waits_for_room]
BASELINE = [alone, pair, engine_dies_then_another]


@pytest.mark.parametrize(("policy", "prepare"), [("kvc", one) for one in KVC] + [("round_robin", one) for one in BASELINE])
async def test_cancel_at_every_await(prepare: Callable[[World], None], policy: str) -> None:
    """F58: cancelled after each number of turns of the event loop until the dispatch is done; the next turn of the session runs."""
    steps, done = 0, False
    while not done:
        async with world(policy=policy, params={"backoff_base_s": 0.0}) as made:
            prepare(made)
            task = asyncio.create_task(made.run(made.request("s")))
            for _ in range(steps):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await made.check()
            assert len(made.seen.ends) == (1 if steps else 0), "one end a request that began"
            assert (await asyncio.wait_for(made.result(made.request("s")), 10)).last.finish_reason == "length"
            await made.check()
        steps += 1
    assert steps > (10 if policy == "kvc" else 5)


@pytest.mark.parametrize("place", ["admit", "connect", "chunk", "middle", "prefill", "transfer"])
async def test_a_hundred_cancels_at_each_step(place: str) -> None:
    """F5, F58: a hundred sessions held at the same step go away at once."""
    async with world() as made:
        pair(made)
        made.engines.streams["http://d0"] = [EngineChunk("a"), "middle", *ok()]
        made.engines.prefills["http://p0"] = ["transfer"]
        made.engines.steps.hold(place)
        tasks = [asyncio.create_task(made.run(made.request(f"s{number}"))) for number in range(100)]
        counts = {"admit": lambda: made.admission.live, "prefill": lambda: made.engines.live_prefills}
        await until(lambda: counts.get(place, lambda: made.engines.live)() == 100)
        await made.engines.steps.reached(place)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        made.engines.steps.go(place)
        await made.check()
        assert [end for _, end, _, _ in made.seen.ends] == [ev.End.CANCELLED] * 100
        session = made.router.sigma.session("s0")
        assert session is not None
        assert (session.turns, session.context_tokens) == (0, 0)


async def test_a_ticket_in_an_answer_that_nobody_waits_for_is_given_back() -> None:
    async with world() as made:
        made.join("d0")
        made.engines.steps.hold("admit")
        task = asyncio.create_task(made.run())
        await made.engines.steps.reached("admit")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert made.left() == {"asks": 1, "releases": 1}
        made.engines.steps.go("admit")
        await made.check()
        assert made.admission.released == ["kvc-d0-r1.0"]


async def test_an_unused_ticket_is_given_back() -> None:
    """R8: the engine was never reached."""
    async with world() as made:
        made.join("d0")
        made.engines.streams["http://d0"] = []
        made.engines.steps.hold("connect")
        task = asyncio.create_task(made.run())
        await made.engines.steps.reached("connect")
        assert len(made.admission.open) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.check()
        assert made.admission.released == ["kvc-d0-r1.0"]


async def test_disconnect_then_the_next_turn() -> None:
    """F68: t0 completes, t1 is left after its first chunk, t2 comes at once: the session is as after t0."""
    async with world() as made:
        d0 = made.join("d0")
        await made.run(made.request("s", tokens=48))
        made.engines.streams["http://d0"] = [EngineChunk("a"), "later", *ok()]
        made.engines.steps.hold("later")
        async with aclosing(made.router.dispatch(made.request("s", tokens=96))) as outputs:
            await anext(outputs)
            await anext(outputs)
        session = made.router.sigma.session("s")
        assert session is not None
        assert (session.turns, session.context_tokens, session.pin) == (1, 51, d0)
        made.engines.steps.go("later")
        await made.run(made.request("s", tokens=96))
        turn = made.admission.asked[-1].turn
        assert (turn.turn_index, turn.new_tokens, turn.known_session) == (1, 96 - 51, True)
        await made.check()


@pytest.mark.parametrize("place", ["admit", "connect"])
async def test_cancel_while_queued_then_the_next_turn(place: str) -> None:
    """F69: t1 is cancelled while t2 waits behind it: t2 runs at once."""
    async with world() as made:
        made.join("d0")
        made.engines.steps.hold(place)
        first = asyncio.create_task(made.run(made.request("s")))
        await made.engines.steps.reached(place)
        second = asyncio.create_task(made.result(made.request("s")))
        await until(lambda: len(made.router.claims) == 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        made.engines.steps.go(place)
        assert (await asyncio.wait_for(second, 5)).last.finish_reason == "length"
        await made.check()


async def test_a_turn_that_is_cancelled_behind_another() -> None:
    """F69: its marker goes with it."""
    async with world() as made:
        made.join("d0")
        made.engines.steps.hold("connect")
        first = asyncio.create_task(made.run(made.request("s")))
        await made.engines.steps.reached("connect")
        second = asyncio.create_task(made.run(made.request("s")))
        await until(lambda: len(made.router.claims) == 2)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        made.engines.steps.go("connect")
        await first
        await made.run(made.request("s"))
        await made.check()


async def test_a_caller_that_leaves_the_queue_passes_its_chance_on() -> None:
    async with world() as made:
        waits_for_room(made)
        made.admission.answer = lambda _ask: Refused(no(Reason.NO_D_CAPACITY).rejection, FULL)
        tasks = [asyncio.create_task(made.result(made.request(f"s{number}"))) for number in range(10)]
        await until(lambda: len(made.router.room) == 10)
        made.admission.answer = lambda _ask: None
        made.engines.steps.hold("admit")
        made.router.room.notify()
        await made.engines.steps.reached("admit")
        asking = made.admission.asked[-1].turn.session_id
        tasks[int(asking.removeprefix("s"))].cancel()
        made.engines.steps.go("admit")
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 1
        await made.check()


@pytest.mark.parametrize("taken", range(7))
async def test_closing_after_any_output(taken: int) -> None:
    """A turn whose result was handed out is complete; closed before, it is cancelled. Either way its end is told once."""
    async with world() as made:
        made.join("d0")
        async with aclosing(made.router.dispatch(made.request())) as outputs:
            for _ in range(taken):
                await anext(outputs)
        await made.check()
        ends = [end for _, end, _, _ in made.seen.ends]
        assert ends == ([] if taken == 0 else [ev.End.COMPLETED] if taken == 6 else [ev.End.CANCELLED])
