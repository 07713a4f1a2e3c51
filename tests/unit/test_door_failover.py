"""Another worker is tried before the first byte, and only then; a prefill worker that fails takes the decode half with it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from kvc.core import events as ev
from services.router.engines import LINGER_S
from tests.support.door_engine import CHUNKED, END, USAGE, Asked, Gate, answers, breaks, chunk, closes, good, hangs, head, streams
from tests.support.front import COMPLETED, DEADLINE_S, FAILED, HI, Front, front, post
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.door_engine import Answer

BOTH_LOOPS = True


# ---- another worker, before the first byte only ----


REFUSING: dict[str, Answer] = {
    "breaks": breaks,
    "closes": closes,
    "is broken": streams(b"garbage\r\n\r\n"),
    "is overloaded": answers(503),
    "is busy": answers(429),
    "is at fault": answers(500),
    "has no ticket": answers(409, b'{"error":{"type":"ticket-expired"}}'),
}


@pytest.mark.parametrize("first", REFUSING.values(), ids=REFUSING)
async def test_a_failed_worker_is_replaced(door: Front, first: Answer) -> None:
    await door.worker("d0", first, good)
    (await door.worker("d1")).answers = door.engines["d0"].answers  # whoever is asked first fails
    answer = await door.ask()
    assert (answer.status, answer.body) == (200, USAGE)
    assert len(door.observer.retries) == 1
    assert door.ends == [COMPLETED]
    await door.check(1)


async def test_a_worker_that_cannot_be_reached_is_replaced(door: Front) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    door.join("d0", f"http://127.0.0.1:{port}")
    await door.worker("d1")
    for _ in range(4):
        assert (await door.ask()).header("x-kvc-worker") == "d1"
    assert door.router.sigma.workers["d0"].why_not
    await door.check(4)


async def test_when_all_workers_fail_the_client_is_told() -> None:
    async with front(params={"queue_wait_s": 0.1}) as door:
        await door.worker("d0", breaks)
        await door.worker("d1", closes)
        answer = await door.ask()
        assert answer.status == 503
        assert answer.header("retry-after") == "1"
        assert door.ends == [FAILED]
        await door.check(1)


async def test_all_workers_die_and_one_comes_back(door: Front) -> None:
    """F62: requests wait while nobody is there, and are served as soon as somebody is."""
    for name in ("d0", "d1"):
        await door.worker(name, breaks)
    asking = [asyncio.create_task(door.ask(x_session_id=str(index))) for index in range(20)]
    await until(lambda: len(door.router.room) == 20, DEADLINE_S, "all of them wait")
    for name in ("d0", "d1"):
        door.router.apply(ev.WorkerLeft(name))
    await door.worker("d2")
    door.router.room.notify()
    assert {(await asked).status for asked in asking} == {200}
    assert (await door.ask()).status == 200
    await door.check(21)


async def test_without_a_worker_ever_seen_the_client_is_told(door: Front) -> None:
    answer = await door.ask()
    assert (answer.status, answer.kind) == (503, "NO_WORKER")
    await door.check(0)


async def test_a_stale_connection_is_no_failure(door: Front) -> None:
    """The engine closed it at the very moment it was taken: the request goes out once more, and nobody is blamed."""
    await door.worker("d0", good, breaks, good)
    for _ in range(2):
        assert (await door.ask()).body == USAGE
    assert door.observer.retries == []
    assert door.engines["d0"].connections == 2
    assert not door.router.sigma.workers["d0"].why_not
    await door.check(2)


async def test_a_stale_connection_to_a_prefill_worker_is_no_failure(door: Front) -> None:
    async def decodes(asked: Asked) -> None:
        await until(lambda: sum(engine.live for engine in door.engines.values()) == 1, DEADLINE_S, "the prefill worker is done")
        await good(asked)

    p0, _ = await door.pair(good, decodes)
    p0.answers = [good, breaks, good]
    for _ in range(2):
        assert (await door.ask()).status == 200
    assert door.observer.retries == []
    assert not door.router.sigma.workers["p0"].why_not
    await until(lambda: len(p0.requests) == 3, DEADLINE_S, "it was sent once more")
    await door.check(2)


@pytest.mark.parametrize("cut", ["closes", "breaks", "garbage", "too long"])
async def test_an_error_in_the_middle_breaks_the_connection(door: Front, cut: str) -> None:
    """It never ends the chunked body: half a reply must not look like a whole one. And no other worker is asked."""

    async def fails(asked: Asked) -> bool:
        await asked.send(head(200, CHUNKED) + chunk(b"data: 1\n\n"))
        await asyncio.sleep(0.02)
        if cut == "garbage":
            await asked.send(b"zz\r\n")
        elif cut == "too long":
            await asked.send(b"1\r\nabc\r\n")
        elif cut == "breaks":
            asked.reset()
        return False

    await door.worker("d0", fails)
    await door.worker("d1", fails)
    wire = await door.client()
    await wire.send(post(HI) + post(HI))
    await wire.head()
    data = await wire.rest()
    assert data in (chunk(b"data: 1\n\n"), b"")
    assert len(door.engines["d0"].requests) + len(door.engines["d1"].requests) == 1
    assert door.ends == [FAILED]
    await door.check(1)


# ---- prefill workers that fail ----


def refuses_prefill(status: int) -> Answer:
    return answers(status, b'{"error":{"type":"overloaded"}}')


PREFILL_FAILS: dict[str, Answer] = {
    "500": refuses_prefill(500),
    "400": refuses_prefill(400),
    "breaks": breaks,
    "closes": closes,
    "aborts": answers(200, b'{"meta_info":{"finish_reason":{"type":"abort","message":"no"}}}'),
}


@pytest.mark.parametrize("decode", [hangs, streams(head(200, CHUNKED), gap_s=9.0)], ids=["silent", "with a head"])
@pytest.mark.parametrize("prefill", PREFILL_FAILS.values(), ids=PREFILL_FAILS)
async def test_a_prefill_worker_that_fails_takes_the_decode_worker_with_it(door: Front, prefill: Answer, decode: Answer) -> None:
    """F32: the decode worker is cancelled within a second instead of waiting for KV, and another one is tried."""
    p0, d0 = await door.pair(prefill, decode)
    d0.answers = [decode, good]
    p0.answers = [prefill, good]
    began_s = asyncio.get_running_loop().time()
    answer = await door.ask()
    assert asyncio.get_running_loop().time() - began_s < 1.0
    assert (answer.status, answer.body) == (200, USAGE)
    assert [reason.startswith("prefill-") for reason in door.observer.retries] == [True]
    assert door.ends == [COMPLETED]
    await door.check(1)


async def test_when_prefill_always_fails_the_reason_is_in_the_reply() -> None:
    """F32."""
    async with front(engines={"retries": 0}) as door:
        _, d0 = await door.pair(refuses_prefill(500), hangs)
        answer = await door.ask()
        assert answer.status == 503
        assert "prefill" in answer.json["error"]["message"]
        await until(lambda: d0.live == 0, 1.0, "the decode worker is cancelled")
        await door.check(1)


async def test_a_prefill_worker_that_fails_after_the_first_byte_is_not_noticed(door: Front) -> None:
    """Its KV has arrived; whether its reply does is nobody's business."""
    first, second = asyncio.Event(), asyncio.Event()

    async def late(asked: Asked) -> None:
        await first.wait()
        asked.reset()

    async def decodes(asked: Asked) -> None:
        await asked.send(head(200, CHUNKED) + chunk(b"1"))
        await second.wait()
        await asked.send(chunk(b"2") + END)

    p0, _ = await door.pair(late, decodes)
    wire = await door.client()
    await wire.send(post(HI))
    await wire.head()
    first.set()
    await until(lambda: p0.open == 0, DEADLINE_S, "it has failed")
    second.set()
    assert await wire.reader.readexactly(len(chunk(b"1") * 2 + END)) == chunk(b"1") + chunk(b"2") + END
    await door.check(1)


async def test_a_prefill_worker_that_ends_last_is_not_cut_off(door: Front) -> None:
    """Its connection is used again."""
    gate = Gate()
    p0, _ = await door.pair(gate)
    assert (await door.ask()).status == 200
    gate.go.set()
    await until(lambda: p0.live == 0, DEADLINE_S, "it has ended")
    assert (await door.ask()).status == 200
    assert p0.connections == 1
    await door.check(2)


async def test_a_prefill_worker_that_never_ends_is_cut_off_after_a_while(door: Front) -> None:
    p0, _ = await door.pair(hangs)
    assert (await door.ask()).status == 200
    await until(lambda: p0.live == 0, LINGER_S + 0.5, "it is cut off")
    await door.check(1)
