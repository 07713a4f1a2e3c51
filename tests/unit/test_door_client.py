"""The client's side of the front door: HTTP/1.1 in every shape that clients send, and what reaches the engine."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tests.support.door_engine import CHUNKED, USAGE, Asked, chunk, hangs, head
from tests.support.front import DEADLINE_S, HI, Front, chunked, get, post
from tests.support.waiting import until

BOTH_LOOPS = True
WORKERS = ("d0",)


# ---- one request after the other ----


async def test_a_connection_is_kept(door: Front) -> None:
    wire = await door.client()
    for index in range(5):
        await wire.send(post(HI) if index % 2 else get())
        answer = await wire.response(method="POST" if index % 2 else "GET")
        assert answer.status == 200
        assert answer.header("connection") is None
        assert answer.body == (USAGE if index % 2 else b'{"status":"ok"}')
    await door.check(2)


async def test_a_request_in_single_bytes(door: Front) -> None:
    wire = await door.client()
    for part in post(HI):
        wire.writer.write(bytes([part]))
        await asyncio.sleep(0)
    assert (await wire.response()).body == USAGE
    await wire.works()


@pytest.mark.parametrize("close", ["close", "Close", "keep-alive, close"])
async def test_connection_close(door: Front, close: str) -> None:
    for request in (post(HI, Connection=close), get(Connection=close), get("/nope", Connection=close)):
        wire = await door.client()
        await wire.send(request)
        answer = await wire.response()
        assert answer.header("connection") == "close"
        assert await wire.ended()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/", "/kvc/state", "/nope", "/v1/chat/completions"])
async def test_head_is_get_without_the_body(door: Front, path: str) -> None:
    wire = await door.client()
    await wire.send(get(path))
    full = await wire.response(method="GET")
    await wire.send(get(path, "HEAD"))
    bare = await wire.response(method="HEAD")
    assert bare.status == full.status
    assert bare.header("content-type") == full.header("content-type")
    assert bare.header("content-length") is not None
    await wire.works()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
async def test_other_methods_are_not_allowed(door: Front, method: str) -> None:
    wire = await door.client()
    await wire.send(get("/health", method, Content_Length="2") + b"{}")
    answer = await wire.response()
    assert (answer.status, answer.header("allow"), answer.kind) == (405, "GET, HEAD", "METHOD_NOT_ALLOWED")
    await wire.send(get("/v1/completions", "GET"))
    answer = await wire.response()
    assert (answer.status, answer.header("allow")) == (405, "POST")
    await wire.works()


@pytest.mark.parametrize("target", ["http://door/health", "HTTP://other:99/health?x=1", "https://user@door/health"])
async def test_a_whole_url_stands_for_its_path(door: Front, target: str) -> None:
    wire = await door.client()
    await wire.send(get(target))
    assert (await wire.response(method="GET")).status == 200
    await wire.works()


async def test_targets_reach_the_engine_as_paths(door: Front) -> None:
    for target, path in (("http://x/v1/completions?a=b", "/v1/completions?a=b"), ("/v1/completions?%00", "/v1/completions?%00")):
        assert (await door.ask({"prompt": "x"}, target)).status == 200
        assert door.engines["d0"].requests[-1].line == f"POST {path} HTTP/1.1"


async def test_options_for_the_server(door: Front) -> None:
    wire = await door.client()
    await wire.send(get("*", "OPTIONS"))
    assert (await wire.response()).status == 404
    await wire.works()


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 1000])
async def test_a_body_where_none_is_needed_is_skipped(door: Front, body: bytes) -> None:
    wire = await door.client()
    await wire.send(get("/health", Content_Length=str(len(body))) + body)
    assert (await wire.response(method="GET")).status == 200
    await wire.works()


async def test_an_upgrade_is_not_taken_up_and_nothing_is_lost(door: Front) -> None:
    """Java's client offers h2c on every request, with a body, too."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQBAAAAAAIAAAAA"}
    wire = await door.client()
    await wire.send(post(HI, **offer) + get("/health", **offer) + post(HI, **offer)[:-5])
    assert (await wire.response()).body == USAGE
    assert (await wire.response(method="GET")).status == 200
    await wire.send(post(HI, **offer)[-5:])
    assert (await wire.response()).body == USAGE
    await wire.works()
    for asked in door.engines["d0"].requests:
        assert asked.json["messages"] == HI["messages"]
        assert not asked.header("http2-settings")
        assert not asked.header("upgrade")
    await wire.send(post(HI, Connection="Upgrade, close", Upgrade="websocket"))
    assert (await wire.response()).header("connection") == "close"
    assert await wire.ended()


# ---- chunked requests ----


async def test_a_chunked_request_reaches_the_engine_with_a_length(door: Front) -> None:
    raw = json.dumps(HI).encode()
    wire = await door.client()
    await wire.send(chunked(raw), chunked(*(raw[index : index + 1] for index in range(len(raw)))), chunked(raw[:9], raw[9:]))
    for _ in range(3):
        assert (await wire.response()).body == USAGE
    for asked in door.engines["d0"].requests:
        assert asked.header("content-length") == [str(len(asked.body))]
        assert asked.header("transfer-encoding") == []
        assert asked.json["messages"] == HI["messages"]
    await wire.works()


async def test_many_small_chunks_are_one_body(door: Front) -> None:
    raw = json.dumps(HI | {"messages": [{"role": "user", "content": "x" * 20_000}]}).encode()
    wire = await door.client()
    await wire.send(chunked(*(raw[index : index + 3] for index in range(0, len(raw), 3))))
    assert (await wire.response()).body == USAGE
    assert door.engines["d0"].requests[0].json["messages"][0]["content"] == "x" * 20_000
    await wire.works()


async def test_trailers_of_a_request_are_dropped(door: Front) -> None:
    wire = await door.client()
    await wire.send(chunked(json.dumps(HI).encode(), trailers=b"X-Session-Id: forged\r\nX-T: 1\r\n"))
    assert (await wire.response()).body == USAGE
    asked = door.engines["d0"].requests[0]
    assert asked.header("x-t") == asked.header("x-session-id") == []
    assert asked.json["session_id"] != "forged"
    await wire.works()


# ---- HTTP/1.0 ----


def old(body: Any, *lines: str) -> bytes:
    raw = json.dumps(body).encode()
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.0", f"Content-Length: {len(raw)}", *lines, "", ""]).encode() + raw


@pytest.mark.parametrize("lines", [[], ["Connection: keep-alive"]])
async def test_a_client_of_http10_gets_no_chunks(door: Front, lines: list[str]) -> None:
    parts = [chunk(b"data: 1\n\n"), chunk(b"data: 0\r\n\r\n"), b"0\r\nX-T: 1\r\n\r\n"]

    async def streams(asked: Asked) -> None:
        await asked.send(head(200, CHUNKED, "Trailer: X-T") + parts[0][:5])
        await asyncio.sleep(0.02)
        await asked.send(parts[0][5:] + parts[1][:3])
        await asyncio.sleep(0.02)
        await asked.send(parts[1][3:] + parts[2])

    door.engines["d0"].answers = [streams]
    wire = await door.client()
    await wire.send(old(HI, *lines))
    answer = await wire.response()
    assert answer.body == b"data: 1\n\ndata: 0\r\n\r\n"
    assert answer.header("transfer-encoding") is None
    assert answer.header("connection") == "close"
    assert await wire.ended()


async def test_a_client_of_http10_may_keep_its_connection_for_what_has_a_length(door: Front) -> None:
    wire = await door.client()
    for _ in range(2):
        await wire.send(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = await wire.response(method="GET")
        assert (answer.status, answer.header("connection")) == (200, "keep-alive")
    await wire.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert (await wire.response(method="GET")).header("connection") == "close"
    assert await wire.ended()


# ---- clients that go ----


async def test_a_client_that_closes_its_half_is_gone(door: Front) -> None:
    """What an engine does for it is aborted within 200 ms: nothing tells a half from the whole."""
    door.engines["d0"].answers = [hangs]
    wire = await door.client()
    await wire.send(post(HI))
    await until(lambda: door.engines["d0"].live == 1, DEADLINE_S, "the engine works")
    wire.writer.write_eof()
    await until(lambda: door.engines["d0"].live == 0, 0.2, "the engine has noticed")
    await door.check(1)


async def test_a_client_that_closes_its_half_still_gets_what_is_answered_here(door: Front) -> None:
    wire = await door.client()
    wire.writer.write(get() + get("/ready") + get("/nope") + get())
    wire.writer.write_eof()
    for status in (200, 200, 404, 200):
        assert (await wire.response(method="GET")).status == status
    assert await wire.ended()


async def test_no_turn_begins_for_a_client_that_closed_its_half(door: Front) -> None:
    wire = await door.client()
    wire.writer.write(get() + get() + get() + post(HI))
    wire.writer.write_eof()
    for _ in range(3):
        assert (await wire.response(method="GET")).status == 200
    assert await wire.ended()
    await door.check()
    assert len(door.engines["d0"].requests) <= 1


async def test_a_client_that_goes_in_the_middle_of_a_request(door: Front) -> None:
    for part in (b"", b"POST /", post(HI)[:-1], chunked(b"{}")[:-4]):
        for close in ("half", "whole"):
            wire = await door.client()
            await wire.send(part)
            if close == "half":
                wire.writer.write_eof()
                assert await wire.ended()
            await wire.close()
    await until(lambda: not door.door.clients, DEADLINE_S, "they are gone")
    await door.check(0)


# ---- headers ----


async def test_what_reaches_the_engine(door: Front) -> None:
    """Hop-by-hop headers stay here, whoever names them; what concerns the request goes on as it is."""
    dropped = {
        "Connection": "keep-alive, X-Private, Cookie",
        "Keep-Alive": "timeout=9",
        "Proxy-Connection": "keep-alive",
        "Proxy-Authorization": "Basic x",
        "TE": "trailers",
        "Trailer": "X-T",
        "Accept-Encoding": "gzip, br",
        "X-Session-Id": "s",
        "X-Private": "secret",
        "Cookie": "secret",
        "Traceparent": "not one",
    }
    kept = {"Accept": "*/*", "Authorization": "Bearer for the engine", "X-Any": "a\xff", "User-Agent": "test"}
    assert (await door.ask(HI, **dropped, **kept)).status == 200
    asked = door.engines["d0"].requests[0]
    names = [name.lower() for name, _ in asked.headers]
    assert sorted(names) == sorted([*(name.lower() for name in kept), "host", "content-type", "content-length", "traceparent"])
    for name, value in kept.items():
        assert asked.header(name.lower()) == [value]
    assert asked.header("host") == [f"127.0.0.1:{door.engines['d0'].port}"]
    assert asked.json == HI | {"session_id": "s", "rid": asked.json["rid"]}


PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.mark.parametrize(
    "given", [PARENT, PARENT.replace("00-", "ff-"), f"00-{'0' * 32}-{'1' * 16}-00", PARENT.upper(), PARENT + "-x", "x" * 9000, ""]
)
async def test_the_trace_goes_on_or_a_new_one_begins(door: Front, given: str) -> None:
    answer = await door.ask(HI, Traceparent=given)
    sent = answer.header("traceparent") or ""
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", sent)
    assert (sent == given) is (given == PARENT)
    assert door.engines["d0"].requests[0].header("traceparent") == [sent]
    bad = await door.ask(b"[]", Traceparent=PARENT)
    assert bad.header("traceparent") == PARENT
