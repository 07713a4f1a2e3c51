"""The load of the benchmark beside peer routers: the client that reads replies, prompts, percentiles, scenarios cut short."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bench.peers import replies
from bench.peers.client import Connection
from bench.peers.framing import framed
from bench.peers.load import Target, Times, percentile, times
from bench.peers.prompts import chat_turns, text_turns
from bench.peers.scenarios import SCENARIOS, Load
from tests.support.keeping_transport import Wire
from tests.support.listening import listening

if TYPE_CHECKING:
    import asyncio


def asked() -> tuple[Connection, asyncio.Future[Any], Wire]:
    connection, wire = Connection(), Wire()
    connection.connection_made(wire)
    return connection, connection.ask(b"request"), wire


async def test_a_chunked_reply_is_counted_and_ends_with_its_last_chunk() -> None:
    connection, waiter, wire = asked()
    assert wire.writes == [b"request"]
    body = framed(b'data: {"a":1}\n\n') + framed(b'data: {"b":2}\n\ndata: [DONE]\n\n') + b"0\r\n\r\n"
    connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.data_received(replies.STREAM_HEAD[:10])
    connection.data_received(replies.STREAM_HEAD[10:])
    for start in range(0, len(body), 7):  # events are cut, and counted once
        assert not waiter.done()
        connection.data_received(body[start : start + 7])
    reply = waiter.result()
    assert (reply.status, reply.chunked, reply.chunks, reply.size) == (200, True, 2, len(body))
    assert reply.reads == -(-len(body) // 7)
    assert reply.sent_s <= reply.first_s <= reply.ended_s


async def test_an_event_that_framing_cuts_is_counted_by_recounting() -> None:
    connection, waiter, _ = asked()
    connection.data_received(replies.STREAM_HEAD + framed(b"dat") + framed(b"a: {}\n\n") + b"0\r\n\r\n")
    reply = waiter.result()
    assert reply.chunks == 0
    reply.recount()
    assert reply.chunks == 1


async def test_a_reply_with_a_length_ends_after_it() -> None:
    connection, waiter, _ = asked()
    connection.data_received(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nab")
    assert not waiter.done()
    connection.data_received(b"cd")
    assert (waiter.result().status, waiter.result().size) == (503, 4)
    waiter = connection.ask(b"again")
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    assert waiter.result().size == 0
    waiter = connection.ask(b"again")
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        waiter.result()


async def test_replies_that_are_not_right_are_errors() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (
            b"HTTP/1.1 503 Busy\r\ncontent-length: 1\r\n\r\nx",
            replies.STREAM_HEAD + framed(b"data: {}\n\n") + b"0\r\n\r\n",
            replies.STREAM_HEAD + framed(b"data: {}\n\n" * 2) + b"0\r\n\r\n",
        ):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"]}")
            writer.write(answer)
        await reader.readuntil(b"]}")
        writer.close()

    async with listening(serve) as port:
        target = Target(port, Load(max_tokens=2))
        connection = await target.connection()
        for _ in range(4):
            connection = await target.send(connection, b"s1", b"{}")
    seen = target.seen(1.0)
    assert seen.errors == {"status 503": 1, "1 chunks": 1, "ConnectionError": 1}
    assert (seen.requests, seen.chunks, seen.reads) == (1, 2, 1)


@pytest.mark.parametrize("make", [chat_turns, text_turns])
def test_a_turn_repeats_the_one_before_it(make: Any) -> None:
    prompts = make(random.Random(1), 3, 100)
    assert prompts == make(random.Random(1), 3, 100)
    assert [later.startswith(earlier) for earlier, later in itertools.pairwise(prompts)] == [True, True]
    assert len(prompts[2]) >= 300
    msgspec.json.decode(b"[" + prompts[2] + b"]" if make is chat_turns else b'"' + prompts[2] + b'"')


def test_percentiles() -> None:
    assert percentile([float(value) for value in range(1, 11)], 0.1) == 2.0
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) == 0.0
    assert times([1.0, 3.0, 2.0]) == Times(1e6, 2e6, 3e6)


def test_a_scenario_is_cut_to_seconds() -> None:
    short = SCENARIOS["short"].within(0.5).load
    assert (short.seconds, short.connections, short.max_tokens) == (0.5, 32, 1)
    assert SCENARIOS["paced"].within(0.5).load.max_tokens == 50
    assert SCENARIOS["latency"].within(1.0).load.requests == 20
    assert SCENARIOS["turns"].within(0.05).load.requests == 10
    assert SCENARIOS["paced"].within(600.0) == SCENARIOS["paced"]
