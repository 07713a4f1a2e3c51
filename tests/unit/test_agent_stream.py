"""AdmitStream without a network: each element has its own fate, and nothing outlives the stream."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import grpc
import pytest

from kvc.core.types import WorkerRef
from kvc.engine import link
from kvc.errors import Exhausted, InvalidField, KvcError
from kvc.v1 import admission_pb2, types_pb2
from services.admission_agent.stream import MAX_BATCH, MAX_UNREAD, AdmitStream
from services.admission_agent.translation import Answer
from tests.support.fake_engine import facts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

Request = admission_pb2.AdmitRequest
Result = admission_pb2.AdmitStreamResult
MAX_INFLIGHT = 100
YES = Answer(WorkerRef("d0", 1), link.Admitted("direct", "local", "t", 5.0, 0, 1, facts()))
ODD = Answer(WorkerRef("d0", 1), link.Admitted("direct", "local", "t", 5.0, -1, 1, facts()))


class Slow:
    """An element that waits until `set`."""

    def __init__(self, client: Client, answered: Callable[[Answer | KvcError], None]) -> None:
        self._client = client
        self._answered = answered
        self._over = False
        client.running += 1

    def set(self) -> None:
        self.cancel()
        self._answered(YES)

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            self._client.running -= 1


class Client:
    """The other side: batches it sends, results it has read."""

    def __init__(self) -> None:
        self.gates: dict[str, Slow] = {}
        self.running = 0
        self.released: list[str] = []
        self.batches: asyncio.Queue[admission_pb2.AdmitStreamRequest | None] = asyncio.Queue()
        self.taken = 0
        self.results: list[Result] = []
        self.responses = 0
        self.stream = AdmitStream(self.admit, self.release, MAX_INFLIGHT)

    def admit(self, request: Request, answered: Callable[[Answer | KvcError], None]) -> Slow | None:
        """Names choose the fate: "slow…" waits for its gate, "bad…", "full…", "odd…" and "fault…" fail."""
        name = request.attempt.request_id
        if name.startswith("slow"):
            self.gates[name] = Slow(self, answered)
            return self.gates[name]
        if name.startswith("bad"):
            raise InvalidField("must be 1 to 256 bytes", field="turn.session_id")
        if name.startswith("fault"):
            raise ZeroDivisionError
        answered(Exhausted("too many", reason="AGENT_OVERLOADED") if name.startswith("full") else ODD if name.startswith("odd") else YES)
        return None

    def release(self, request: admission_pb2.ReleaseRequest, answered: Callable[[bool | KvcError], None]) -> None:
        if not request.ticket:
            raise InvalidField("is required", field="ticket")
        self.released.append(request.ticket)
        answered(True)  # noqa: FBT003 - the answer

    def send(self, *names: str, releases: tuple[str, ...] = ()) -> None:
        self.batches.put_nowait(
            admission_pb2.AdmitStreamRequest(
                admits=[Request(attempt=types_pb2.Attempt(request_id=name)) for name in names],
                releases=[
                    admission_pb2.ReleaseRequest(attempt=types_pb2.Attempt(request_id=f"of-{ticket}"), ticket=ticket) for ticket in releases
                ],
            )
        )

    def half_close(self) -> None:
        self.batches.put_nowait(None)

    async def _iterate(self) -> AsyncIterator[admission_pb2.AdmitStreamRequest]:
        while (batch := await self.batches.get()) is not None:
            self.taken += 1
            yield batch

    async def read(self) -> None:
        """Reads to the end."""
        async with contextlib.aclosing(self.stream.serve(self._iterate())) as responses:
            async for response in responses:
                assert 0 < len(response.results) <= MAX_BATCH
                self.responses += 1
                self.results += response.results

    def names(self) -> list[str]:
        return [result.attempt.request_id for result in self.results]


async def test_answers_come_as_they_are_known_and_the_stream_ends_after_the_last() -> None:
    client = Client()
    client.send("slow-1", "a", "b")
    client.send("c")
    reading = asyncio.ensure_future(client.read())
    await until(lambda: len(client.results) == 3, 5.0, "the quick ones")
    assert sorted(client.names()) == ["a", "b", "c"]
    client.half_close()
    await until(lambda: client.running == 1, 5.0, "the slow one runs")
    assert not reading.done()
    client.gates["slow-1"].set()
    await reading
    assert client.names()[-1] == "slow-1"
    assert all(result.WhichOneof("result") == "response" for result in client.results)


async def test_f76_a_bad_element_is_answered_alone() -> None:
    """F76: one malformed element gets its own typed error that names the field; its neighbours get answers."""
    client = Client()
    client.send("a", "bad-1", "full-1", "fault-1", "odd-1", "b")
    client.half_close()
    await client.read()
    results = {result.attempt.request_id: result for result in client.results}
    assert len(results) == 6
    assert len(client.results) == 6
    assert results["a"].HasField("response")
    assert results["b"].HasField("response")
    bad, full, fault = (results[name].error for name in ("bad-1", "full-1", "fault-1"))
    assert (bad.code, bad.reason, bad.field) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_FIELD", "admits[1].turn.session_id")
    assert (full.code, full.reason, full.field) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "AGENT_OVERLOADED", "")
    for one in (fault, results["odd-1"].error):
        assert one.code == grpc.StatusCode.INTERNAL.value[0]
        assert "ZeroDivision" not in one.message
        assert "incident" in one.message


async def test_a_slow_element_blocks_nobody() -> None:
    client = Client()
    client.send(*[f"slow-{index}" for index in range(50)])
    for index in range(50):
        client.send(f"quick-{index}")
    reading = asyncio.ensure_future(client.read())
    await until(lambda: len(client.results) == 50, 5.0, "the quick ones")
    assert all(name.startswith("quick") for name in client.names())
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert client.running == 0


async def test_answers_that_are_ready_together_travel_together() -> None:
    client = Client()
    client.send(*[f"r{index}" for index in range(1000)])
    client.half_close()
    await client.read()
    assert len(client.results) == 1000
    assert client.responses <= 4


async def test_releases_are_done_and_only_failures_answered() -> None:
    client = Client()
    client.send("a", releases=("t1", "", "t2"))
    client.half_close()
    await client.read()
    assert client.released == ["t1", "t2"]
    results = {result.attempt.request_id: result for result in client.results}
    assert set(results) == {"a", "of-"}
    assert results["of-"].error.field == "releases[1].ticket"


@pytest.mark.parametrize("field", ["admits", "releases"])
async def test_a_batch_beyond_the_limit_ends_the_stream_with_a_typed_error(field: str) -> None:
    client = Client()
    client.send(*["a"] * MAX_BATCH, releases=("t",) * MAX_BATCH)
    client.send("slow-1")
    many = MAX_BATCH + 1
    if field == "admits":
        client.send(*["a"] * many)
    else:
        client.send(releases=("t",) * many)
    with pytest.raises(InvalidField) as caught:
        await client.read()
    assert caught.value.field == field
    assert "1024" in caught.value.message
    assert len(client.released) == MAX_BATCH
    assert client.running == 0, "what was in flight is given up"


async def test_close_answers_what_was_read_and_reads_no_more() -> None:
    client = Client()
    client.send("slow-1")
    reading = asyncio.ensure_future(client.read())
    await until(lambda: client.running == 1, 5.0, "it runs")
    client.stream.close()
    client.send("never-read")
    await asyncio.sleep(0)
    client.gates["slow-1"].set()
    await reading
    assert client.names() == ["slow-1"]
    assert client.taken == 1


async def test_a_stream_that_opens_while_the_agent_stops_ends_at_once() -> None:
    client = Client()
    client.stream.close()
    await client.read()
    assert client.results == []


async def test_a_client_that_does_not_read_is_not_read_from() -> None:
    client = Client()
    for _ in range(8):
        client.send(*[f"r{index}" for index in range(MAX_BATCH)])
    client.half_close()
    responses = client.stream.serve(client._iterate())
    first = await anext(responses)
    count = len(first.results)
    await until(lambda: not client.stream._open, 5.0, "elements done")
    assert client.taken == MAX_UNREAD // MAX_BATCH + 1
    async for response in responses:
        count += len(response.results)
    assert count == 8 * MAX_BATCH


async def test_releases_alone_make_room_again() -> None:
    client = Client()
    for _ in range(8):
        client.send(releases=("t",) * MAX_BATCH)
    client.half_close()
    await asyncio.wait_for(client.read(), 10.0)
    assert len(client.released) == 8 * MAX_BATCH


async def test_a_broken_request_stream_is_the_streams_error() -> None:
    async def broken() -> AsyncIterator[admission_pb2.AdmitStreamRequest]:
        yield admission_pb2.AdmitStreamRequest(admits=[Request(attempt=types_pb2.Attempt(request_id="slow-1"))])
        raise KvcError("broken")

    client = Client()
    with pytest.raises(KvcError, match="broken"):
        async for _ in client.stream.serve(broken()):
            pass
    assert client.running == 0


async def test_f58_streams_cancelled_anywhere_leave_nothing_running() -> None:
    """F58: 100 streams cancelled at a random await: no element and no reader is left."""
    rng = random.Random(58)
    before = asyncio.all_tasks()
    for _ in range(100):
        client = Client()
        client.send("slow-1", "a", "bad", "slow-2")
        client.send("b", releases=("t",))
        reading = asyncio.ensure_future(client.read())
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert client.running == 0
        assert asyncio.all_tasks() == before
