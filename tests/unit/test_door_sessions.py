"""Which sessions the door leaves behind: those that completed a turn, and none that only ever failed."""

from __future__ import annotations

import asyncio

import pytest

from kvc.core.types import Reason
from tests.support.door_engine import Answer, Gate, answers, breaks, good, hangs, whole
from tests.support.fake_ports import no
from tests.support.front import CANCELLED, COMPLETED, DEADLINE_S, FAILED, HI, Front, front, post
from tests.support.waiting import until

BOTH_LOOPS = True


def known(door: Front) -> set[str]:
    """Sessions that anything of the router remembers."""
    door.router.sigma.check_integrity()
    return {*door.router.sigma.sessions, *door.router._last_seen, *door.router.sigma.forest.sessions()}


@pytest.mark.parametrize("answer", [answers(400), answers(500), breaks], ids=["a bad request", "an error", "a broken connection"])
async def test_a_session_that_only_ever_failed_is_forgotten(answer: Answer) -> None:
    async with front(engines={"retries": 0}) as door:
        await door.worker("d0", answer)
        await door.ask(x_session_id="s")
        assert door.ends == [FAILED]
        assert known(door) == set()
        await door.check(1)


async def test_a_session_that_was_served_stays(door: Front) -> None:
    await door.worker("d0", good, answers(400), good)
    assert [(await door.ask(x_session_id="s")).status for _ in range(3)] == [200, 400, 200]
    session = door.router.sigma.session("s")
    assert session is not None
    assert session.turns == 2
    assert known(door) == {"s"}
    await door.check(3)


async def test_a_session_for_which_there_is_no_room_is_forgotten() -> None:
    """Refused before any worker ran it: the queue is full."""
    async with front(params={"queue_limit": 1}) as door:
        await door.worker()
        door.admission.answer = lambda _ask: no(Reason.NO_D_CAPACITY)
        wire = await door.client()
        await wire.send(post(HI, x_session_id="waits"))
        await until(lambda: len(door.router.room) == 1, DEADLINE_S, "it waits")
        answer = await door.ask(x_session_id="late")
        assert (answer.status, answer.kind) == (429, "QUEUE_FULL")
        assert known(door) == {"waits"}
        await wire.close()
        await door.check(2)


async def test_a_client_that_goes_leaves_its_session(door: Front) -> None:
    """It may come back: what the worker has prefilled for it is still there."""
    await door.worker("d0", hangs)
    wire = await door.client()
    await wire.send(post(HI, x_session_id="s"))
    await until(lambda: door.engines["d0"].live == 1, DEADLINE_S, "the engine works")
    await wire.close()
    await until(lambda: door.ends == [CANCELLED], DEADLINE_S, "it has gone")
    assert known(door) == {"s"}
    await door.check(1)


async def test_the_next_turn_that_waits_begins_the_session_anew(door: Front) -> None:
    gate = Gate(whole(b"{}", 400))
    await door.worker("d0", gate, good)
    first = asyncio.create_task(door.ask(x_session_id="s"))
    await until(lambda: door.engines["d0"].live == 1, DEADLINE_S, "the engine works")
    second = asyncio.create_task(door.ask(x_session_id="s"))
    await until(lambda: len(door.door.exchanges) == 2, DEADLINE_S, "the second turn waits")
    gate.go.set()
    assert [(await first).status, (await second).status] == [400, 200]
    assert door.ends == [FAILED, COMPLETED]
    session = door.router.sigma.session("s")
    assert session is not None
    assert (session.turns, session.open_turns, known(door)) == (1, 0, {"s"})
    await door.check(2)
