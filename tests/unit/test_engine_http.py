"""The router's HTTP client to engines, against a server that sends exactly what a test wants."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvc.core.blocks import pack_tokens
from services.router.adapters import engine_http
from services.router.adapters.engine_http import MAX_EVENT_BYTES, HttpEngines
from services.router.config import EnginesConfig
from services.router.ports import EngineCall, EngineChunk, EngineError
from tests.support.mesh_server import until
from tests.support.raw_http import END, RawServer, chunk, event, head, raw_server, whole

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.raw_http import Script

FIRST = event(text="höl", output_ids=[5, 6], meta_info={"id": "x", "finish_reason": None, "prompt_tokens": 3, "completion_tokens": 2})
LAST = event(
    text="",
    output_ids=[],
    meta_info={
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "kvc_ttft_s": 0.25,
        "kvc_latency_s": 1.5,
        "kvc_worker": "d0",
    },
)
DONE = b"data: [DONE]\n\n"
WHOLE_STREAM = FIRST + LAST + DONE
GOOD: Script = [head() + chunk(WHOLE_STREAM) + END]
CHUNKS = [
    EngineChunk("höl", (5, 6), "", 3, 2),
    EngineChunk("", (), "length", 3, 2, 1, 0.25, 1.5),
]


def call(url: str, **fields: Any) -> EngineCall:
    values: dict[str, Any] = {
        "rid": "kvc-1",
        "session_id": "s",
        "tokens": pack_tokens([1, 2, 2**31 - 1]),
        "text": None,
        "max_new_tokens": 2,
        "temperature": 0.5,
    } | fields
    return EngineCall(url=url, **values)


@asynccontextmanager
async def engines(*scripts: Script) -> AsyncIterator[tuple[HttpEngines, RawServer]]:
    async with raw_server(*scripts) as server, HttpEngines(EnginesConfig()) as client:
        yield client, server


async def collect(client: HttpEngines, one: EngineCall) -> list[EngineChunk]:
    async with aclosing(client.generate(one)) as chunks:
        return [piece async for piece in chunks]


async def failure(client: HttpEngines, one: EngineCall, *, prefill: bool = False) -> EngineError:
    async with asyncio.timeout(10):
        with pytest.raises(EngineError) as failed:
            await (client.prefill(one) if prefill else collect(client, one))
    return failed.value


async def test_a_stream() -> None:
    async with engines(GOOD) as (client, server):
        assert await collect(client, call(server.url + "/", traceparent="00-1-2-01")) == CHUNKS
        ((headers, body),) = server.requests
        assert headers[":line"] == "POST /generate HTTP/1.1"
        assert headers["traceparent"] == "00-1-2-01"
        assert body == {
            "rid": "kvc-1",
            "session_id": "s",
            "input_ids": [1, 2, 2**31 - 1],
            "sampling_params": {"max_new_tokens": 2, "temperature": 0.5},
            "stream": True,
        }


async def test_text_and_bootstrap() -> None:
    """Text stays text, so that the engine's tokenizer is the one that counts; a pair meets in its room."""
    async with engines(GOOD) as (client, server):
        await collect(client, call(server.url, text="hi", bootstrap=("10.0.0.1", 9000, 2**63 - 1)))
        _, body = server.requests[0]
        assert body["text"] == "hi"
        assert "input_ids" not in body
        assert (body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"]) == ("10.0.0.1", 9000, 2**63 - 1)


class Pieces:
    """A response whose body comes in given pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.content = self
        self._pieces = list(pieces)

    async def iter_any(self) -> AsyncIterator[bytes]:
        while self._pieces:
            yield self._pieces.pop(0)

    async def readany(self) -> bytes:
        return b""


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_a_stream_split_at_every_byte(newline: bytes) -> None:
    stream = (b": a comment\nevent: x\n\n" + WHOLE_STREAM).replace(b"\n", newline)
    expected = [line[6:] for line in WHOLE_STREAM.splitlines() if line][:-1]
    for cut in range(1, len(stream)):
        pieces: Any = Pieces(stream[:cut], stream[cut:])
        assert [payload async for payload in engine_http._events(pieces)] == expected, cut
    single: Any = Pieces(*(stream[index : index + 1] for index in range(len(stream))))
    assert [payload async for payload in engine_http._events(single)] == expected


async def test_a_stream_byte_by_byte_over_a_socket() -> None:
    script: Script = [head(), *(chunk(WHOLE_STREAM[index : index + 1]) for index in range(len(WHOLE_STREAM))), END]
    async with engines(script) as (client, server):
        assert await collect(client, call(server.url)) == CHUNKS


async def test_the_first_chunk_is_not_held_back() -> None:
    async with engines([head() + chunk(FIRST), "wait", chunk(LAST + DONE) + END]) as (client, server):
        chunks = client.generate(call(server.url))
        assert await asyncio.wait_for(anext(chunks), 5) == CHUNKS[0]
        server.go.set()
        assert [piece async for piece in chunks] == CHUNKS[1:]


async def test_a_connection_is_used_again_after_a_whole_stream() -> None:
    async with engines(GOOD) as (client, server):
        for _ in range(5):
            await collect(client, call(server.url))
        assert server.connections == 1


async def test_an_end_that_comes_a_little_later() -> None:
    async with engines([head() + chunk(WHOLE_STREAM), "wait", END]) as (client, server):
        for _ in range(3):
            server.go.clear()
            chunks = client.generate(call(server.url))
            assert [await anext(chunks), await anext(chunks)] == CHUNKS
            asyncio.get_running_loop().call_later(0.02, server.go.set)
            assert await anext(chunks, None) is None
        assert server.connections == 1


async def test_done_without_an_end_of_the_body() -> None:
    """The turn is complete; a connection whose end does not come is not used again, and not waited for long."""
    async with engines([head() + chunk(WHOLE_STREAM), "hang"]) as (client, server):
        async with asyncio.timeout(engine_http.DRAIN_S + 3):
            assert await collect(client, call(server.url)) == CHUNKS
        await until(lambda: server.closed_by_client == 1)


async def test_a_stream_that_ends_without_done_but_complete() -> None:
    async with engines([head() + chunk(FIRST + LAST) + END], [head() + chunk(FIRST + LAST), "reset"]) as (client, server):
        for _ in range(2):
            assert await collect(client, call(server.url)) == CHUNKS


@pytest.mark.parametrize(
    ("script", "reason", "gone"),
    [
        ([head() + chunk(FIRST) + END], "stream-truncated", False),
        ([head() + chunk(FIRST + DONE) + END], "stream-truncated", False),
        ([head() + END], "stream-truncated", False),
        ([head() + chunk(FIRST), "close"], "connection-lost", True),
        ([head() + chunk(FIRST), "reset"], "connection-lost", True),
        ([head() + b"5\r\nda", "close"], "connection-lost", True),
        ([head(), "reset"], "connection-lost", True),
        (["reset"], "connection-lost", True),
        (["close"], "connection-lost", True),
        ([b"HTTP/1.1 200", "close"], "connection-lost", True),
        ([b"this is no HTTP at all\r\n\r\n"], "connection-lost", True),
        ([head() + chunk(b"data: {nonsense\n\n")], "bad-reply", False),
        ([head() + chunk(b"data: [1,2]\n\n")], "bad-reply", False),
        ([head() + chunk(b"data: null\n\n")], "bad-reply", False),
        ([head() + chunk(b"data: \xff\xfe\n\n")], "bad-reply", False),
        ([head() + chunk(event(output_ids=[-1]))], "bad-reply", False),
        ([head() + chunk(event(output_ids=[2**32]))], "bad-reply", False),
        ([head() + chunk(event(output_ids="x"))], "bad-reply", False),
        ([head() + chunk(event(meta_info={"prompt_tokens": -1}))], "bad-reply", False),
        ([head() + chunk(b'data: {"meta_info": {"kvc_ttft_s": NaN}}\n\n')], "bad-reply", False),
        ([head() + chunk(b'data: {"meta_info": {"kvc_ttft_s": 1e400}}\n\n')], "bad-reply", False),
        ([head() + chunk(b"data: " + b"[" * 100_000 + b"\n\n")], "bad-reply", False),
    ],
)
async def test_streams_that_break(script: Script, reason: str, *, gone: bool) -> None:
    async with engines(script) as (client, server):
        error = await failure(client, call(server.url))
        assert (error.reason, error.gone, error.status) == (reason, gone, 0)
        assert not error.final


async def test_an_endless_event() -> None:
    """Memory is bounded whatever an engine sends."""
    block = chunk(b"x" * (1 << 20))
    async with engines([head() + chunk(b"data: "), *([block] * (MAX_EVENT_BYTES // (1 << 20) + 2)), "hang"]) as (client, server):
        error = await failure(client, call(server.url))
        assert error.reason == "bad-reply"
        await until(lambda: server.closed_by_client == 1)


async def test_nobody_accepts() -> None:
    """A host that takes no connection, as one whose machine is gone: its backlog is full here."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):
            one.settimeout(0.0)
            one.connect_ex(full.getsockname())
        async with HttpEngines(EnginesConfig(connect_timeout_s=0.2)) as client:
            error = await failure(client, call(f"http://127.0.0.1:{full.getsockname()[1]}"))
            assert (error.reason, error.gone) == ("connect-timeout", True)


async def test_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        async with HttpEngines(EnginesConfig()) as client:
            for prefill in (False, True):
                error = await failure(client, call(f"http://127.0.0.1:{held.getsockname()[1]}"), prefill=prefill)
                assert (error.reason, error.gone) == ("connection-refused", True)


def refusal_body(**fields: Any) -> bytes:
    return json.dumps({"error": {"message": "too long", "type": "context-too-long", "param": "input_ids", "code": 400} | fields}).encode()


@pytest.mark.parametrize("status", [300, 302, 400, 401, 404, 409, 413, 422, 429, 500, 502, 503, 504])
async def test_refusals(status: int) -> None:
    async with engines([whole(refusal_body(), status, retry_after="2.5", location="/elsewhere")]) as (client, server):
        for prefill in (False, True):
            error = await failure(client, call(server.url), prefill=prefill)
            assert (error.status, error.reason, error.message) == (status, "context-too-long", "too long")
            assert (error.field, error.retry_after_s, error.gone) == ("input_ids", 2.5, False)
            assert error.final == (status in {400, 404, 413, 422})
        assert server.connections == 1, "an error that was read to its end frees its connection"


async def test_an_error_body_in_pieces() -> None:
    """F75: it arrives whole."""
    body = refusal_body(message="m" * 5000)
    pieces = [chunk(body[index : index + 100]) for index in range(0, len(body), 100)]
    async with engines([head(400, kind="application/json"), *pieces[:20], "wait", *pieces[20:], END]) as (client, server):
        task = asyncio.create_task(failure(client, call(server.url)))
        await until(lambda: len(server.requests) == 1)
        server.go.set()
        assert (await task).message == "m" * 5000


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "Whatever"),
        (b"<html>oops</html>", "Whatever"),
        (b"[1, 2]", "Whatever"),
        (b"null", "Whatever"),
        (b"\xff", "Whatever"),
        (b'{"error": "plain words"}', "plain words"),
        (b'{"error": {"message": 7}}', "7"),
        (b"x" * (1 << 17), "Whatever"),
        (b"[" * 60_000, "Whatever"),
    ],
)
@pytest.mark.parametrize("retry_after", ["", "soon", "nan", "inf", "-1", "9" * 400, "²"])
async def test_error_bodies_of_any_kind(body: bytes, message: str, retry_after: str) -> None:
    async with engines([whole(body, 503, retry_after=retry_after)]) as (client, server):
        error = await failure(client, call(server.url))
        assert (error.status, error.reason, error.message, error.retry_after_s) == (503, "http-503", message, 0.0)


async def test_an_error_body_that_never_ends() -> None:
    async with engines([head(500, kind="application/json") + chunk(b'{"error":'), "hang"]) as (client, server):
        error = await failure(client, call(server.url))
        assert (error.status, error.reason) == (500, "http-500")
        await until(lambda: server.closed_by_client == 1)


@pytest.mark.parametrize(
    ("payload", "status", "reason", "message"),
    [
        (event(error={"message": "no room", "type": "queue-full", "code": 503, "param": None}), 503, "queue-full", "no room"),
        (event(error="plain words"), 500, "engine-error", "plain words"),
        (event(error={"code": "x"}), 500, "engine-error", ""),
        (event(error={"code": 200}), 500, "engine-error", ""),
        (event(meta_info={"finish_reason": {"type": "abort", "message": "bad", "status_code": 400}}), 400, "engine-abort", "bad"),
        (event(meta_info={"finish_reason": {"type": "abort", "message": "died", "status_code": 500}}), 500, "engine-abort", "died"),
    ],
)
async def test_errors_inside_a_stream(payload: bytes, status: int, reason: str, message: str) -> None:
    async with engines([head() + chunk(FIRST + payload + DONE) + END]) as (client, server):
        async with aclosing(client.generate(call(server.url))) as chunks:
            assert await anext(chunks) == CHUNKS[0]
            with pytest.raises(EngineError) as failed:
                await anext(chunks)
        error = failed.value
        assert (error.status, error.reason, error.message) == (status, reason, message)


async def test_an_abort_by_the_operator_is_an_end() -> None:
    abort = event(meta_info={"finish_reason": {"type": "abort", "message": "aborted on request"}, "prompt_tokens": 3})
    async with engines([head() + chunk(FIRST + abort + DONE) + END]) as (client, server):
        assert [piece.finish_reason for piece in await collect(client, call(server.url))] == ["", "abort"]
        error = await failure(client, call(server.url), prefill=True)
        assert error.reason == "bad-reply"


@pytest.mark.parametrize("taken", [0, 1])
async def test_closing_a_stream_closes_its_connection(taken: int) -> None:
    """That is what makes the engine abort the turn (F4)."""
    async with engines([head() + chunk(FIRST), "hang"]) as (client, server):
        chunks = client.generate(call(server.url))
        for _ in range(taken):
            await anext(chunks)
        await chunks.aclose()
        await until(lambda: server.closed_by_client == taken)


@pytest.mark.parametrize("script", [["hang"], [head(), "hang"], [head() + chunk(FIRST), "hang"]])
async def test_cancelling_closes_the_connection(script: Script) -> None:
    async with engines(script) as (client, server):
        for prefill in (False, True):
            task = asyncio.create_task(client.prefill(call(server.url)) if prefill else collect(client, call(server.url)))
            await until(lambda prefill=prefill: len(server.requests) == 1 + prefill)  # type: ignore[misc]  # bound now
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            await until(lambda prefill=prefill: server.closed_by_client == 1 + prefill)  # type: ignore[misc]  # bound now


async def test_prefill() -> None:
    async with engines(
        [whole(json.dumps({"text": "x", "output_ids": [1], "meta_info": {"finish_reason": {"type": "length"}}}).encode())]
    ) as (
        client,
        server,
    ):
        for _ in range(3):
            await client.prefill(call(server.url, bootstrap=("h", 1, 2)))
        assert server.connections == 1
        assert server.requests[0][1]["stream"] is False


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([whole(b'{"meta_info": {"finish_reason": {"type": "abort"}}}')], "prefill-aborted"),
        ([whole(b'{"error": {"type": "decode-gone", "code": 502}}')], "decode-gone"),
        ([whole(b"nonsense")], "bad-reply"),
        ([head() + chunk(b"{"), "reset"], "connection-lost"),
        (["close"], "connection-lost"),
    ],
)
async def test_prefill_failures(script: Script, reason: str) -> None:
    """F32: a half that failed is no success, whatever its status says."""
    async with engines(script) as (client, server):
        assert (await failure(client, call(server.url), prefill=True)).reason == reason


async def test_an_endless_prefill_reply() -> None:
    block = chunk(b" " * (1 << 20))
    async with engines([head(), *([block] * (MAX_EVENT_BYTES // (1 << 20) + 2)), "hang"]) as (client, server):
        assert (await failure(client, call(server.url), prefill=True)).message.startswith("a body of more than")
        await until(lambda: server.closed_by_client == 1)


async def test_many_turns_at_once_do_not_wait_for_each_other() -> None:
    """A turn holds two connections; a bound on connections would let turns that hold one wait for ever."""
    count = 150
    script: Script = [head() + chunk(FIRST), "wait", chunk(LAST + DONE) + END]
    async with raw_server(script) as server, HttpEngines(EnginesConfig(connect_timeout_s=30.0)) as client:
        tasks = [asyncio.create_task(collect(client, call(server.url))) for _ in range(count)]
        await until(lambda: len(server.requests) == count)
        server.go.set()
        assert await asyncio.gather(*tasks) == [CHUNKS] * count
