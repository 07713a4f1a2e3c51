"""The HTTP of the benchmark beside peer routers: chunked bodies, the mock engine, the load's client, the comparison of replies."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from bench.peers import replies
from bench.peers.client import Connection
from bench.peers.engine import Pace, Worker
from bench.peers.framing import FramingError, body_end, framed, payload
from bench.peers.identity import ASKS, Answer, Ask, compare, difference
from bench.peers.load import Target, Times, percentile, times
from bench.peers.prompts import chat_turns, text_turns
from bench.peers.scenarios import SCENARIOS, Load
from tests.support.listening import listening
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping


# ---- chunked bodies ----


def test_a_chunked_body_ends_after_its_trailers() -> None:
    body = b"5\r\nhello\r\n00A ;x=1\r\n0123456789\r\n0\r\nx-sum: 1\r\n\r\n"
    assert body_end(body + b"HTTP/1.1") == len(body)
    assert payload(body) == b"hello0123456789"
    assert body_end(b"0\r\n\r\n") == 5
    assert framed(b"0123456789abcdef") == b"10\r\n0123456789abcdef\r\n"


def test_no_part_of_a_chunked_body_is_whole() -> None:
    body = b"7\r\n0\r\n\r\nab\r\n0\r\nx: 1\r\n\r\n"
    assert [body_end(body[:size]) for size in range(len(body))] == [None] * len(body)
    assert body_end(body) == len(body)


@pytest.mark.parametrize(
    "body", [b"\r\n", b"x\r\n", b"-1\r\n", b"0x1\r\na\r\n", b"1\r\nab\r\n0\r\n\r\n", b"+1\r\na\r\n", b";\r\n", b"1" * 5000]
)
def test_what_is_no_chunked_body_is_refused(body: bytes) -> None:
    with pytest.raises(FramingError):
        body_end(body)


def test_a_payload_needs_a_whole_body_and_nothing_after_it() -> None:
    with pytest.raises(FramingError, match="not whole"):
        payload(b"1\r\na\r\n")
    with pytest.raises(FramingError, match="2 bytes follow"):
        payload(b"0\r\n\r\nab")


# ---- the mock engine ----


class Wire(asyncio.Transport):
    """Remembers what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    @property
    def sent(self) -> bytes:
        return b"".join(self.writes)


def connected(pace: Pace) -> tuple[Worker, Wire]:
    worker, wire = Worker(pace), Wire()
    worker.connection_made(wire)
    return worker, wire


def post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
async def pace() -> Pace:
    return Pace(asyncio.get_running_loop())


async def test_a_stream_has_as_many_chunks_as_tokens_and_each_is_a_write(pace: Pace) -> None:
    worker, wire = connected(pace)
    worker.data_received(post("/v1/chat/completions", b'{"stream": true, "max_tokens": 3}'))
    await until(lambda: wire.sent.endswith(b"0\r\n\r\n"), 5, "the stream's end")
    chunk = replies.CHUNKS[replies.CHAT]
    assert wire.writes == [replies.STREAM_HEAD + chunk, chunk, chunk + replies.STREAM_END]
    body = wire.sent.partition(b"\r\n\r\n")[2]
    assert payload(body).count(b"data: {") == 3
    assert payload(body).endswith(b"data: [DONE]\n\n")
    assert (pace.requests, pace.chunks) == (1, 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_one_token_is_one_write(pace: Pace, path: str) -> None:
    worker, wire = connected(pace)
    worker.data_received(post(path, b'{"stream":true,"sampling_params":{"max_new_tokens":1}}'))
    worker.data_received(post(path, b"{}"))
    stream, document = wire.writes
    assert payload(stream.partition(b"\r\n\r\n")[2]).count(b"data: {") == 1
    head, _, body = document.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert b"usage" in body or b"meta_info" in body


@pytest.mark.parametrize("cut", [1, 20, 65, 90])
async def test_a_request_may_come_in_pieces(pace: Pace, cut: int) -> None:
    worker, wire = connected(pace)
    request = post("/generate", b'{"stream": true, "max_new_tokens": 1, "text": "hello there"}')
    worker.data_received(request[:cut])
    assert not wire.writes
    worker.data_received(request[cut:])
    assert len(wire.writes) == 1


async def test_a_request_may_be_chunked_and_expect_to_be_waited_for(pace: Pace) -> None:
    worker, wire = connected(pace)
    worker.data_received(b"POST /generate HTTP/1.1\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert wire.writes == [replies.CONTINUE]
    body = framed(b'{"stream": true, "max_new_') + framed(b'tokens": 1}') + b"0\r\n\r\n"
    worker.data_received(body[:30])
    worker.data_received(body[30:])
    assert wire.writes[1:] == [replies.STREAM_HEAD + replies.CHUNKS[replies.GENERATE] + replies.STREAM_END]
    worker.data_received(b"GET /health HTTP/1.1\r\n\r\n")
    assert wire.writes[-1] == replies.STATIC[b"/health"]


class Agenda:
    """An event loop's clock and what it was told to call, called by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, call: Any) -> None:
        self.calls.append((self.now_s, call))

    def call_at(self, when_s: float, call: Any) -> None:
        self.calls.append((when_s, call))

    def step(self) -> float:
        """Makes the one call there is, in time; returns when."""
        ((when_s, call),) = self.calls
        self.calls.clear()
        self.now_s = max(self.now_s, when_s)
        call()
        return when_s


def test_one_ticker_serves_all_streams_and_makes_up_for_a_late_step() -> None:
    agenda = Agenda()
    pace = Pace(cast("asyncio.AbstractEventLoop", agenda))
    pace.tune("gap_ms=20")
    request = post("/generate", b'{"stream": true, "max_new_tokens": 8}')
    (first, one), (second, other) = connected(pace), connected(pace)
    first.data_received(request)
    assert agenda.step() == 0.0
    first.connection_lost(None)
    second.data_received(request)  # the ticker still has its next step to come
    assert agenda.step() == 0.02
    assert (len(one.writes), len(other.writes)) == (2, 2)
    agenda.now_s = 0.05
    assert [agenda.step() for _ in range(3)] == pytest.approx([0.04, 0.06, 0.08])
    agenda.now_s = 1.0
    agenda.step()
    assert agenda.step() == pytest.approx(0.98)  # one gap is made up for, not fifty
    agenda.step()
    assert other.writes[-1].endswith(b"0\r\n\r\n")
    assert not agenda.calls


async def test_the_pace_is_tuned_and_tells_what_was_served(pace: Pace) -> None:
    worker, wire = connected(pace)
    worker.data_received(post("/tune?first_token_ms=50&gap_ms=10&varied=1", b""))
    assert (pace.first_token_s, pace.gap_s, pace.varied) == (0.05, 0.01, True)
    told = msgspec.json.decode(wire.sent.partition(b"\r\n\r\n")[2])
    assert told.keys() == {"requests", "chunks", "cpu_s"}
    worker.data_received(post("/tune", b""))
    assert (pace.first_token_s, pace.gap_s, pace.varied) == (0.05, 0.01, True)


@pytest.mark.parametrize("query", ["gap_ms=x", "gap_ms=-1", "gap_ms=inf", "speed=1", "gap_ms"])
async def test_a_wrong_pace_is_refused(pace: Pace, query: str) -> None:
    worker, wire = connected(pace)
    worker.data_received(post(f"/tune?{query}", b""))
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert wire.closed
    assert pace.gap_s == 0.0


@pytest.mark.parametrize("request_bytes", [b"nonsense\r\n\r\n", b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"])
async def test_what_is_no_request_is_refused(pace: Pace, request_bytes: bytes) -> None:
    worker, wire = connected(pace)
    worker.data_received(request_bytes)
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert wire.closed


async def test_unknown_paths_are_not_found(pace: Pace) -> None:
    worker, wire = connected(pace)
    worker.data_received(b"GET /nowhere HTTP/1.1\r\n\r\n")
    assert wire.sent == replies.NOT_FOUND


def test_varied_replies_are_http_and_differ() -> None:
    seen: set[bytes] = set()
    kinds: set[bytes] = set()
    for seed in range(40):
        for stream in (True, False):
            pieces = replies.varied(seed, replies.CHAT, stream=stream)
            assert pieces == replies.varied(seed, replies.CHAT, stream=stream)
            head, _, raw = b"".join(pieces).partition(b"\r\n\r\n")
            chunked = b"transfer-encoding: chunked" in head
            body = payload(raw) if chunked else raw
            length = re.search(rb"content-length: (\d+)", head)
            assert chunked or (length is not None and int(length[1]) == len(raw))
            assert body.endswith(b"data: [DONE]\n\n") if stream else msgspec.json.decode(body)
            seen.add(raw)
            kinds |= {b"trailer" for _ in re.findall(rb"0\r\nx-checksum", raw)} | {b"extension" for _ in re.findall(rb"; id=7\r\n", raw)}
            kinds |= {b"deceptive"} if b"\n0\r\n\r\n" in body else set()
    assert len(seen) == 80
    assert kinds == {b"trailer", b"extension", b"deceptive"}


# ---- the load ----


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


# ---- byte identity ----


def answer(raw: bytes, **fields: Any) -> Answer:
    values: dict[str, Any] = {"status": 200, "kind": b"text/event-stream", "chunked": True} | fields
    return Answer(raw=raw, **values)


WHOLE = framed(b"abc") + framed(b"def") + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (answer(WHOLE), ""),
        (answer(WHOLE, status=500), "status 500 instead of 200"),
        (answer(WHOLE, kind=b"x"), "content-type b'x' instead of b'text/event-stream'"),
        (answer(b"abcdef", chunked=False), "chunked False instead of True"),
        (answer(WHOLE.replace(b"e", b"E")), "body differs at byte 4 of 6: b'abcdEf' instead of b'abcdef'"),
        (answer(framed(b"abc") + b"0\r\n\r\n"), "body differs at byte 3 of 6: b'abc' instead of b'abcdef'"),
        (answer(framed(b"abcdef") + b"0\r\n\r\n"), "framing differs at byte 0 of 21: "),
        (answer(WHOLE[:-2] + b"x: y\r\n\r\n"), "framing differs at byte 19 of 21: "),
    ],
)
def test_any_difference_is_told(other: Answer, told: str) -> None:
    found = difference(answer(WHOLE), other)
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_every_kind_of_request_is_compared() -> None:
    kinds = {(ask.path, ask.stream, ask.chunked) for ask in ASKS}
    assert len(kinds) == 12
    assert len(ASKS) == len(set(ASKS)) == 144
    head, _, body = Ask(replies.CHAT, 3, stream=True, chunked=True).request(1).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert msgspec.json.decode(payload(body))["seed"] == 3


async def test_replies_are_compared_with_the_engines() -> None:
    """A faithful relay passes; one that joins two chunks, drops bytes or fails is found."""
    loop = asyncio.get_running_loop()
    pace = Pace(loop)
    pace.tune("varied=1")
    server = await loop.create_server(lambda: Worker(pace), "127.0.0.1", 0)
    engine = server.sockets[0].getsockname()[1]
    asks = ASKS[:48]
    spoil: Mapping[str, Any] = {
        "as it is": lambda data: data,
        "another letter": lambda data: data.replace(b"cmpl-mock", b"cmpl-Mock"),
        "rewritten framing": lambda data: re.sub(rb"; id=7\r\n", b"\r\n", data),
        "nothing": lambda _: b"",
    }
    found: dict[str, int] = {}
    for name, change in spoil.items():

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Any = change) -> None:
            to_engine, engine_writer = None, None
            try:
                to_engine, engine_writer = await asyncio.open_connection("127.0.0.1", engine)
                engine_writer.write(await reader.read(1 << 16))
                reply = await to_engine.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", reply)
                body = b""
                while len(body) < int(length[1]) if length else body_end(body) is None:
                    body += await to_engine.read(1 << 16)
                writer.write(change(reply + body))
            finally:
                for each in (engine_writer, writer):
                    if each is not None:
                        each.close()

        async with listening(relay) as port:
            identity = await compare(engine, port, asks)
        assert identity.replies == 48
        found[name] = len(identity.differences)
    server.close()
    await server.wait_closed()
    assert found["as it is"] == 0
    assert found["another letter"] > 20
    assert 0 < found["rewritten framing"] < 48
    assert found["nothing"] == 48
