"""AdmitStream over real sockets: elements have fates of their own, and a stream that ends leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from kvc.errors import InvalidField
from kvc.v1 import types_pb2
from tests.support.agent_rig import WAIT_S, Rig, Stream, admit_request, error_of, rig_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvc.engine import link


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rig_of() as one:
        yield await one.ready()


async def test_stream_answers_in_any_order_with_a_deadline_each(rig: Rig) -> None:
    gate = asyncio.Event()

    async def chosen(body: link.Admit) -> link.ReplyBody:
        if body.request_id.startswith("slow"):
            await gate.wait()
        return await rig.engine._admit(body)

    rig.engine.on_admit = chosen
    stream = Stream(rig.stub)
    await stream.send(admit_request("slow-1"), admit_request("slow-2", deadline_ms=50), admit_request("a"), admit_request("b"))
    await stream.read_until("a", "b", "slow-2")
    assert stream.results["a"].response.admission.ticket == "a-1"
    assert stream.results["slow-2"].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert "slow-1" not in stream.results
    await stream.send(admit_request("c", worker=types_pb2.WorkerRef(worker_id="d0", epoch=9)))
    await stream.read_until("c")
    assert stream.results["c"].response.rejection.reason == types_pb2.REASON_STALE_EPOCH
    gate.set()
    await stream.read_until("slow-1")
    await stream.call.done_writing()
    assert await stream.code() is grpc.StatusCode.OK


async def test_stream_half_close_waits_for_answers(rig: Rig) -> None:
    gate = asyncio.Event()

    async def slow(body: link.Admit) -> link.ReplyBody:
        await gate.wait()
        return await rig.engine._admit(body)

    rig.engine.on_admit = slow
    stream = Stream(rig.stub)
    await stream.send(admit_request("a"))
    await stream.call.done_writing()
    await until(lambda: rig.engine.pending == 1, WAIT_S, "it waits")
    gate.set()
    await stream.read_until("a")
    assert await stream.code() is grpc.StatusCode.OK


async def test_stream_releases_tickets(rig: Rig) -> None:
    stream = Stream(rig.stub)
    await stream.send(admit_request("a"), admit_request("b"))
    await stream.read_until("a", "b")
    await stream.send(tickets=("a-1", "unknown"))
    await until(lambda: rig.engine.open_tickets == {"b-1"}, WAIT_S, "one ticket left")
    await stream.call.done_writing()
    assert await stream.code() is grpc.StatusCode.OK
    assert set(stream.results) == {"a", "b"}


@pytest.mark.parametrize("field", ["admits", "releases"])
async def test_stream_batches_are_bounded(rig: Rig, field: str) -> None:
    stream = Stream(rig.stub)
    if field == "admits":
        await stream.send(*[admit_request()] * 1025)
    else:
        await stream.send(tickets=("t",) * 1025)
    error = await error_of(stream.call.read())
    assert isinstance(error, InvalidField)
    assert error.field == field


async def test_f58_a_cancelled_stream_leaves_nothing_behind(rig: Rig) -> None:
    """F58: streams cancelled with elements in flight: inflight and pending return to 0."""

    async def never(_: link.Admit) -> link.ReplyBody:
        await asyncio.Event().wait()
        raise AssertionError

    rig.engine.on_admit = never
    for _ in range(10):
        stream = Stream(rig.stub)
        await stream.send(*[admit_request(f"r{index}") for index in range(20)])
        await until(lambda: rig.agent.agent.inflight == 20, WAIT_S, "20 in flight")
        stream.call.cancel()
        await until(lambda: rig.agent.agent.inflight == rig.engine.pending == 0, WAIT_S, "nothing in flight")


async def test_stream_elements_fail_one_by_one_while_the_engine_is_away(rig: Rig) -> None:
    stream = Stream(rig.stub)
    await stream.send(admit_request("a"))
    await stream.read_until("a")
    rig.engine.die()
    await until(lambda: rig.agent.connection.life is None, WAIT_S, "no life")
    await stream.send(admit_request("b"))
    await stream.read_until("b")
    assert stream.results["b"].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert stream.results["b"].error.reason == "ENGINE_AWAY"
    rig.engine.restart()
    await until(lambda: rig.agent.connection.life is not None, WAIT_S, "the next life")
    await stream.send(admit_request("c", worker=types_pb2.WorkerRef(worker_id="d0", epoch=2)))
    await stream.read_until("c")
    assert stream.results["c"].HasField("response")
    stream.call.cancel()


async def test_five_hundred_at_once_on_one_stream(rig: Rig) -> None:
    stream = Stream(rig.stub)
    names = [f"r{index}" for index in range(500)]
    for start in range(0, 500, 50):
        await stream.send(*[admit_request(name) for name in names[start : start + 50]])
    await stream.call.done_writing()
    await stream.read_until(*names)
    assert all(result.response.admission.ticket == f"{name}-1" for name, result in stream.results.items())
    assert await stream.code() is grpc.StatusCode.OK
