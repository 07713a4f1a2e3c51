"""What the front door sends to engines, and how their replies reach the client: byte for byte, at once, in one write."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from services.router.door import halves
from services.router.door.client import Client
from services.router.door.upstream import Connection
from tests.support.door_engine import CHUNKED, END, USAGE, Asked, answers, chunk, head, streams, whole
from tests.support.front import COMPLETED, DEADLINE_S, FAILED, HI, Front, post

BOTH_LOOPS = True


# ---- what is sent ----


async def test_a_request_and_its_reply(door: Front) -> None:
    """The body keeps its bytes; the mesh's own keys are appended; the engine's reply comes as it is, with the mesh's lines."""
    engine = await door.worker("d0", answers(200, USAGE, "Content-Type: application/json", "X-Engine: 1"))
    raw = b'{ "messages" : [{"role":"user","content":"hi"}], "temperature": 1.50,\n"rid":"mine","any":[1e400] }'
    answer = await door.ask(raw, x_session_id="s")
    asked = engine.requests[0]
    assert asked.line == "POST /v1/chat/completions HTTP/1.1"
    assert b'"temperature":1.50' in asked.body
    assert b'"any":[1e400]' in asked.body
    assert {key: asked.json[key] for key in ("rid", "session_id")} == {"rid": f"kvc-d0-{door.observer.ends[0][0]}.0", "session_id": "s"}
    assert "mine" not in asked.body.decode()
    assert (answer.status, answer.body, answer.header("x-engine")) == (200, USAGE, "1")
    assert (answer.header("x-kvc-mode"), answer.header("x-kvc-worker"), answer.header("x-kvc-cached-tokens")) == ("seed", "d0", "0")
    assert door.ends == [COMPLETED]
    await door.check(1)


async def test_prefill_and_decode_get_the_same_room(door: Front) -> None:
    p0, d0 = await door.pair()
    assert (await door.ask()).status == 200
    prefill, decode = p0.requests[0].json, d0.requests[0].json
    where = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "session_id")
    assert {key: prefill[key] for key in where} == {key: decode[key] for key in where}
    assert (prefill["bootstrap_host"], prefill["bootstrap_port"]) == ("127.0.0.1", 9000)
    assert prefill["rid"] != decode["rid"]
    assert {key: decode[key] for key in HI} == HI
    assert (await door.ask()).status == 200
    assert p0.requests[1].json["bootstrap_room"] != prefill["bootstrap_room"]
    await door.check(2)
    assert p0.connections == d0.connections == 1


@pytest.mark.parametrize("named", [{"x_session_id": "s"}, {}])
async def test_the_engine_knows_a_session_by_the_name_the_mesh_has_for_it(door: Front, named: dict[str, str]) -> None:
    """F74: two names for one session would be two sessions for the engine. The header counts; a name of the body's own is replaced."""
    engine = await door.worker()
    await door.ask(HI | {"session_id": "in the body"}, **named)
    sent = engine.requests[0].json["session_id"]
    assert sent == named.get("x_session_id", "in the body")
    assert door.router.sigma.session(sent) is not None
    assert len(door.router.sigma.sessions) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "system": "s", "max_tokens": 3}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 3}}),
        ("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}}),
    ],
)
async def test_every_path_is_passed_on_as_it_is(door: Front, path: str, body: dict[str, Any]) -> None:
    engine = await door.worker()
    assert (await door.ask(body, path)).body == USAGE
    assert engine.requests[0].line == f"POST {path} HTTP/1.1"
    assert {key: engine.requests[0].json[key] for key in body} == body
    assert door.admission.asked[0].turn.output_reserve_tokens == 3
    await door.check(1)


# ---- the reply, byte for byte ----


REPLIES: dict[str, list[bytes]] = {
    "a stream": [head(200, CHUNKED) + chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), END],
    "a stream whose head comes first": [head(200, CHUNKED), chunk(b"data: 1\n\n") + END],
    "chunks cut anywhere": [head(200, CHUNKED) + b"9;x=", b"y\r\nda", b"ta: 1\n\n\r", b"\n0\r\nX-T", b": 1\r\n\r", b"\n"],
    "a length": [head(200, "Content-Length: 10") + b"hello", b"world"],
    "no bytes at all": [head(200, "Content-Length: 0")],
    "no content": [head(204)],
    "a bad request": [whole(b'{"error":{"message":"temperature","code":400}}', 400, "Content-Type: application/json")],
    "an error on a stream": [head(422, CHUNKED), chunk(b'{"detail":'), chunk(b'"no"}') + END],
    "an error without a length of its own": [head(400, "Content-Length: 0")],
}


@pytest.mark.parametrize("parts", REPLIES.values(), ids=REPLIES)
async def test_replies_pass_byte_for_byte(door: Front, parts: list[bytes]) -> None:
    """F75: also errors, and whatever their framing is."""
    await door.worker("d0", streams(*parts))
    wire = await door.client()
    sent = b"".join(parts)
    edge = sent.index(b"\r\n\r\n")
    for _ in range(2):
        await wire.send(post(HI))
        lines = (await wire.head())[3]
        assert lines.startswith(sent[: edge + 2])
        assert b"x-kvc-worker: d0\r\n" in lines
        assert await wire.reader.readexactly(len(sent) - edge - 4) == sent[edge + 4 :]
    await wire.works()
    await door.check(2)
    assert door.engines["d0"].connections == 1


async def test_a_reply_that_ends_with_its_connection(door: Front) -> None:
    """The client has no other way to see the end, either: its connection closes, too."""

    async def until_close(asked: Asked) -> bool:
        await asked.send(head(200) + b"hello ")
        await asyncio.sleep(0.02)
        await asked.send(b"world")
        return False

    await door.worker("d0", until_close)
    wire = await door.client()
    await wire.send(post(HI) + post(HI))
    answer = await wire.response()
    assert (answer.body, answer.header("connection")) == (b"hello world", "close")
    assert await wire.ended()
    assert door.ends == [COMPLETED]
    await door.check(1)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 409])
async def test_the_last_workers_error_reaches_the_client_intact(door: Front, status: int) -> None:
    """F75, after every retry was used up."""
    body = b'{"error":{"message":"%b"}}' % (b"x" * 100_000)
    await door.worker("d0", answers(status, body, "Retry-After: 7", "Content-Type: application/json"))
    answer = await door.ask()
    assert (answer.status, answer.body, answer.header("retry-after")) == (status, body, "7")
    assert answer.header("x-kvc-worker") == "d0"
    assert len(door.engines["d0"].requests) == 4
    assert door.ends == [FAILED]
    await door.check(1)


async def test_an_error_that_is_too_long_to_be_held_passes_all_the_same(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "MAX_ERROR_BYTES", 1000)
    body = b"".join(chunk(b"%03d" % index * 100) for index in range(100)) + END
    await door.worker("d0", streams(head(500, CHUNKED) + body[:500], body[500:9000], body[9000:]))
    answer = await door.ask()
    assert answer.status == 500
    assert answer.body == b"".join(b"%03d" % index * 100 for index in range(100))
    assert len(door.engines["d0"].requests) == 1
    await door.check(1)


# ---- one write, no delay ----


class Recording:
    """A transport that remembers what was written, write by write."""

    def __init__(self, transport: Any) -> None:
        self.inner = transport
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self.inner.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_one_write_a_part_and_no_delay(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and first chunk travel together, whether the engine sent them so or not; Nagle is off on both sides."""
    made: dict[str, list[Recording]] = {"Client": [], "Connection": []}
    for kind in (Client, Connection):

        def connection_made(self: Any, transport: Any, original: Any = kind.connection_made) -> None:
            recording = Recording(transport)
            made[type(self).__name__].append(recording)
            original(self, recording)

        monkeypatch.setattr(kind, "connection_made", connection_made)
    chunks = [chunk(b"data: %d\n\n" % index) for index in range(3)]
    await door.worker("d0", streams(head(200, CHUNKED) + chunks[0], *chunks[1:], END), streams(head(200, CHUNKED), *chunks, END))
    wire = await door.client()
    for _ in range(2):
        await wire.send(post(HI))
        await wire.response()
    (client,), (upstream,) = made["Client"], made["Connection"]
    for first in (0, 4):
        assert client.writes[first].startswith(b"HTTP/1.1 200 ")
        assert client.writes[first].endswith(b"\r\n\r\n" + chunks[0])
        assert client.writes[first + 1 : first + 4] == [chunks[1], chunks[2], END]
    assert len(client.writes) == 8
    assert len(upstream.writes) == 2
    for request in upstream.writes:
        assert request.startswith(b"POST ")
        assert request.endswith(b"}")
    for recording in (client, upstream):
        sock = recording.inner.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_chunks_travel_as_they_come(door: Front) -> None:
    """Nothing is held back for more."""
    gates = [asyncio.Event() for _ in range(5)]

    async def steps(asked: Asked) -> None:
        await asked.send(head(200, CHUNKED))
        for index, gate in enumerate(gates):
            await gate.wait()
            await asked.send(chunk(b"%d" % index))
        await asked.send(END)

    await door.worker("d0", steps)
    wire = await door.client()
    await wire.send(post(HI))
    for index, gate in enumerate(gates):
        gate.set()
        if not index:
            await wire.head()
        async with asyncio.timeout(DEADLINE_S):
            assert await wire.reader.readexactly(6) == b"1\r\n%d\r\n" % index
    await door.check(1)
