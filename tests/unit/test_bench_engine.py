"""The mock engine of the benchmark beside peer routers: its replies, its pace, what it refuses."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import msgspec
import pytest

from bench.peers import replies
from bench.peers.engine import Pace, Worker
from bench.peers.framing import framed, payload
from tests.support.keeping_transport import Wire
from tests.support.waiting import until


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
