"""One-hop admission at the door: a turn on hot KV takes its question along, and is decided and accounted once whatever comes of it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvc.core import events as ev
from kvc.core.types import Facts
from kvc.engine.hop import HOP_CAPABILITY, parse_hop_rid
from tests.support.door_engine import USAGE, Asked, Gate, answers, breaks, closes, good, hangs, streams, whole
from tests.support.front import CANCELLED, COMPLETED, DEADLINE_S, FAILED, Front, front, post
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvc.core.types import WorkerRef
    from tests.support.door_engine import Answer, Engine

BOTH_LOOPS = True

TURN = {
    "messages": [{"role": "user", "content": "a prompt of a few blocks, so that there is something to be resident " * 2}],
    "max_tokens": 8,
}
REFUSED = answers(409, json.dumps({"error": {"type": "hop-refused", "code": 409}, "kvc": {"reason": "session-busy"}}).encode())


async def heat(door: Front, ref: WorkerRef, session: str = "s") -> None:
    """The session's first turn, after which its KV is on the worker, which says so."""
    answer = await door.ask(TURN, x_session_id=session)
    assert (answer.status, answer.header("x-kvc-worker")) == (200, ref.worker_id)
    chain = door.router.sigma.forest.chain(session)
    assert chain
    door.router.apply(ev.ResidencyReset(ref, tuple(chain)))
    door.router.apply(ev.LoadReported(ref, Facts(100_000)))
    door.admission.asked.clear()


@asynccontextmanager
async def hot(*then: Answer, http: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[tuple[Front, Engine, WorkerRef]]:
    """A door whose session `s` is hot on d0, which answers its next requests with `then`."""
    async with front(http=http, **fields) as door:
        engine = await door.worker("d0", good, *then, capabilities=(HOP_CAPABILITY,))
        ref = door.router.sigma.workers["d0"].ref
        await heat(door, ref)
        yield door, engine, ref


def rid(asked: Asked) -> str:
    """The rid a request came with."""
    name: str = asked.json["rid"]
    return name


def hops(door: Front) -> dict[str, int]:
    """What became of hops."""
    return {outcome: count.value for (outcome,), count in door.observer._metrics._hops.items() if count.value}


async def test_a_hot_turn_is_not_asked_about() -> None:
    async with hot(good) as (door, engine, ref):
        answer = await door.ask(TURN, x_session_id="s")
        assert (answer.status, answer.body, answer.header("x-kvc-mode")) == (200, USAGE, "direct")
        assert door.admission.asked == []
        found = parse_hop_rid(rid(engine.requests[1]))
        assert found is not None
        assert (found[0], found[1].attempt_number) == (ref.epoch, 0)
        assert hops(door) == {"landed": 1}
        session = door.router.sigma.sessions["s"]
        assert (session.turns, session.pin) == (2, ref)
        await door.check(2)


@pytest.mark.parametrize(
    "why",
    ["stale residency", "no capability", "no numbers", "not resident", "pinned elsewhere", "no room", "unknown session", "off"],
)
async def test_a_turn_that_is_not_hot_is_asked_about_first(why: str) -> None:
    async with hot(good, http={"one_hop": why != "off"}) as (door, engine, ref):
        sigma = door.router.sigma
        if why == "stale residency":
            door.router.apply(ev.ResidencyStale(ref))
        elif why == "no capability":
            door.join("d0", engine.url)
        elif why == "no numbers":
            sigma.workers["d0"].facts = None
        elif why == "not resident":
            door.router.apply(ev.ResidencyReset(ref, ()))
        elif why == "pinned elsewhere":
            sigma.sessions["s"].pin = None
        elif why == "no room":
            door.router.apply(ev.LoadReported(ref, Facts(100_000, held_tokens=99_990)))
        answer = await door.ask(TURN, x_session_id="t" if why == "unknown session" else "s")
        assert answer.status == 200
        assert len(door.admission.asked) == 1
        assert parse_hop_rid(rid(engine.requests[-1])) is None
        assert hops(door) == {}
        await door.check(2)


@pytest.mark.parametrize(
    ("refusal", "outcome"),
    [
        (REFUSED, "refused"),
        (answers(409, b'{"error":{"type":"ticket-used"}}'), "refused"),
        (answers(503), "failed"),
        (answers(500), "failed"),
    ],
)
async def test_a_refused_hop_is_asked_about_and_done_in_two_steps(refusal: Answer, outcome: str) -> None:
    async with hot(refusal, good) as (door, engine, _ref):
        answer = await door.ask(TURN, x_session_id="s")
        assert (answer.status, answer.body) == (200, USAGE)
        assert len(door.admission.asked) == 1
        assert [parse_hop_rid(rid(asked)) is not None for asked in engine.requests] == [False, True, False]
        assert hops(door) == {outcome: 1}
        assert door.observer.retries == []
        await door.check(2)


async def test_a_fault_in_asking_after_a_refused_hop_answers_the_client_and_leaves_nothing() -> None:
    async with hot(REFUSED) as (door, _engine, _ref):

        def breaks_down(*_: object) -> None:
            raise RuntimeError("a fault of ours")

        door.door.admission = SimpleNamespace(ask=breaks_down)
        answer = await door.ask(TURN, x_session_id="s")
        assert (answer.status, answer.kind) == (500, "INTERNAL")
        assert door.ends == [COMPLETED, FAILED]
        await door.check(2)


async def test_a_hop_is_tried_once_a_request() -> None:
    """A worker that refuses the hop and then takes no ticket is replaced like any other; the request does not hop again."""
    async with hot(REFUSED, answers(500), good) as (door, engine, _ref):
        answer = await door.ask(TURN, x_session_id="s")
        assert answer.status == 200
        assert sum(parse_hop_rid(rid(asked)) is not None for asked in engine.requests) == 1
        assert len(door.observer.retries) == 1
        await door.check(2)


async def test_a_request_that_is_wrong_is_answered_by_the_engine() -> None:
    body = b'{"error":{"message":"no such model"}}'
    async with hot(answers(400, body), good) as (door, _engine, _ref):
        answer = await door.ask(TURN, x_session_id="s")
        assert (answer.status, answer.body) == (400, body)
        assert door.ends == [COMPLETED, FAILED]
        await door.check(2)


@pytest.mark.parametrize("failure", [breaks, closes, streams(b"garbage\r\n\r\n")], ids=["breaks", "closes", "is broken"])
async def test_a_hop_whose_connection_fails_goes_to_the_next_worker(failure: Answer) -> None:
    async with hot(failure) as (door, _engine, ref):
        await door.worker("d1", good)
        answer = await door.ask(TURN, x_session_id="s")
        assert (answer.status, answer.header("x-kvc-worker")) == (200, "d1")
        assert [ask.worker.worker_id for ask in door.admission.asked] == ["d1"]
        assert hops(door) == {"failed": 1}
        assert door.router.sigma.workers[ref.worker_id].failures
        await door.check(2)


async def test_a_client_that_leaves_a_hop_stops_it_within_200_ms() -> None:
    async with hot(hangs) as (door, engine, _ref):
        wire = await door.client()
        await wire.send(post(TURN, x_session_id="s"))
        await until(lambda: len(engine.requests) == 2, DEADLINE_S, "the engine has it")
        await wire.close()
        async with asyncio.timeout(0.2):
            await engine.requests[1].gone.wait()
        assert door.router.sigma.workers["d0"].asked == 0
        assert door.ends == [COMPLETED, CANCELLED]
        await door.check(2)


async def test_a_worker_that_left_before_it_answered_has_not_said_yes() -> None:
    gate = Gate()
    async with hot(gate) as (door, engine, _ref):
        await door.worker("d1", good)
        asking = asyncio.create_task(door.ask(TURN, x_session_id="s"))
        await until(lambda: len(engine.requests) == 2, DEADLINE_S, "the engine has it")
        door.router.apply(ev.WorkerLeft("d0"))
        gate.go.set()
        assert (await asking).header("x-kvc-worker") == "d1"
        await door.check(2)


async def test_a_hop_is_one_in_flight_for_placement() -> None:
    gate = Gate(whole(USAGE))
    async with hot(gate) as (door, engine, ref):
        asking = asyncio.create_task(door.ask(TURN, x_session_id="s"))
        await until(lambda: len(engine.requests) == 2, DEADLINE_S, "the engine has it")
        worker = door.router.sigma.workers[ref.worker_id]
        assert worker.asked + worker.inflight == 1
        gate.go.set()
        assert (await asking).status == 200
        await door.check(2)


@pytest.mark.parametrize("heated", [True, False], ids=["hop", "ticket"])
async def test_a_turn_without_its_first_byte_leaves_a_worker_that_nobody_hears(*, heated: bool) -> None:
    """F29: the engine hangs with its connections open; its agent says so, and after `engines.lost_s` the turn runs elsewhere."""
    async with hot(hangs, engines={"lost_s": 0.1}) as (door, engine, ref):
        if not heated:
            door.router.apply(ev.ResidencyStale(ref))
        asking = asyncio.create_task(door.ask(TURN, x_session_id="s"))
        await until(lambda: len(engine.requests) == 2, DEADLINE_S, "the engine has it")
        await door.worker("d1", good)
        door.router.apply(ev.WorkerHealth(ref, healthy=False))
        assert (await asking).header("x-kvc-worker") == "d1"
        assert hops(door) == ({"failed": 1} if heated else {})
        await door.check(2)


async def test_a_reply_that_has_begun_outlives_the_silence_of_its_agent() -> None:
    gate = Gate(b"1\r\nb\r\n0\r\n\r\n")

    async def begins(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await gate(asked)

    async with hot(begins, engines={"lost_s": 0.05}) as (door, _engine, ref):
        wire = await door.client()
        await wire.send(post(TURN, x_session_id="s"))
        await until(lambda: bool(door.router.sigma.open), DEADLINE_S, "it has begun")
        door.router.apply(ev.WorkerHealth(ref, healthy=False))
        await until(lambda: door.router.owed.is_lost(ref), DEADLINE_S, "the worker is lost")
        await asyncio.sleep(0.3)  # a sweep of the door passes: what is tested is that it does nothing
        gate.go.set()
        assert (await wire.response()).body == b"ab"
        await door.check(2)
