"""Exchanges over a connection to an engine: every reply ends exactly once, and the connection is reused only when that is safe."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from services.router.door import upstream
from tests.support.door_engine import CHUNKED, END, Asked, chunk, good, hangs, head, whole
from tests.support.pooled import DEADLINE_S, REQUEST, Seen, ask, connection, pooled, sends
from tests.support.waiting import until

if TYPE_CHECKING:
    from services.router.door.framing import Head

BOTH_LOOPS = True


REPLIES = {
    "with a length": (whole(b"hello"), b"hello"),
    "empty": (whole(b""), b""),
    "chunked": (head(200, CHUNKED) + chunk(b"hello") + END, chunk(b"hello") + END),
    "chunked with trailers": (head(200, CHUNKED) + chunk(b"a") + b"0\r\nX-T: 1\r\n\r\n", chunk(b"a") + b"0\r\nX-T: 1\r\n\r\n"),
    "no content": (head(204), b""),
    "not modified, with a length": (head(304, "Content-Length: 99"), b""),
    "an error": (whole(b'{"error":1}', 400), b'{"error":1}'),
    "after an interim reply": (head(103) + whole(b"hello"), b"hello"),
    "after many of them": (head(102) * 5000 + whole(b"hello"), b"hello"),
}


@pytest.mark.parametrize(("reply", "body"), REPLIES.values(), ids=REPLIES)
async def test_a_reply_is_complete_and_the_connection_is_used_again(reply: bytes, body: bytes) -> None:
    async with pooled(sends(reply)) as (pool, made):
        for _ in range(3):
            seen = await ask(pool)
            assert seen.body == body
            assert seen.words[0].startswith("head ")
            assert seen.words[-1] == "end"
        assert made.connections == 1


@pytest.mark.parametrize("reply", [head(103) + whole(b"hello"), head(200, CHUNKED) + chunk(b"hello") + b"0\r\nX: 1\r\n\r\n"])
async def test_a_reply_byte_by_byte(reply: bytes) -> None:
    async with pooled(sends(*(reply[index : index + 1] for index in range(len(reply))))) as (pool, _):
        seen = await ask(pool)
        assert b"hello" in seen.body
        assert seen.words == ["head 200", "data", "end"]


async def test_the_answer_to_head_has_no_body() -> None:
    async with pooled(sends(head(200, "Content-Length: 99"))) as (pool, made):
        for _ in range(2):
            assert (await ask(pool, is_head_request=True)).words == ["head 200", "end"]
        assert made.connections == 1


async def test_a_reply_that_ends_with_the_connection() -> None:
    async with pooled(sends(head(200), b"hello", b" world", close=True)) as (pool, made):
        for _ in range(2):
            seen = await ask(pool)
            assert (seen.body, seen.words[-1]) == (b"hello world", "end")
        assert made.connections == 2


@pytest.mark.parametrize("lines", [["Connection: close"], ["connection: foo, CLOSE"]])
async def test_a_connection_that_the_engine_will_close_is_not_used_again(lines: list[str]) -> None:
    async with pooled(sends(whole(b"hello", 200, *lines))) as (pool, made):
        for _ in range(2):
            assert (await ask(pool)).words[-1] == "end"
        assert made.connections == 2


BROKEN = {
    "garbage": b"\x16\x03\x01 garbage\r\n\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "both lengths": head(200, "Content-Length: 1", CHUNKED) + b"0\r\n\r\n",
    "two lengths": head(200, "Content-Length: 1", "Content-Length: 2") + b"ab",
    "bad chunk": head(200, CHUNKED) + b"zz\r\n",
    "bytes after the end": whole(b"hello") + b"!",
    "another reply after the end": whole(b"hello") + whole(b"hello"),
    "an endless head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * (upstream.MAX_HEAD_BYTES + 1),
    "switching protocols": head(101),
}


@pytest.mark.parametrize("reply", BROKEN.values(), ids=BROKEN)
async def test_what_cannot_be_understood_is_lost_and_the_connection_with_it(reply: bytes) -> None:
    async with pooled(sends(reply), sends(whole(b"hello"))) as (pool, made):
        seen = await ask(pool)
        assert seen.words == ["lost"]
        assert not seen.gone, "an engine that talks is not gone"
        assert (await ask(pool)).body == b"hello"
        assert made.connections == 2


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ([b""], ["lost"]),
        ([b"HTTP/1.1 2"], ["lost"]),
        ([head(200, "Content-Length: 9") + b"hello"], ["head 200", "lost"]),
        ([head(200, CHUNKED) + chunk(b"hello")], ["head 200", "lost"]),
        ([head(200, CHUNKED) + chunk(b"hello"), b"0\r\n"], ["head 200", "data", "lost"]),
        ([head(200, CHUNKED), chunk(b"hello") + b"x"], ["head 200", "lost"]),
    ],
)
async def test_an_engine_that_closes_early(reply: list[bytes], words: list[str]) -> None:
    """A reply that is cut short never looks complete."""
    async with pooled(sends(*reply, close=True)) as (pool, _):
        assert (await ask(pool)).words == words


async def test_an_engine_that_breaks_the_connection() -> None:
    async def breaks(asked: Asked) -> None:
        await asked.send(head(200) + b"hello")  # without a length only a proper end is an end
        await asyncio.sleep(0.02)
        asked.reset()

    async with pooled(breaks) as (pool, _):
        seen = await ask(pool)
        assert (seen.words, seen.gone) == (["head 200", "lost"], True)


async def test_a_request_on_a_connection_that_dies_knows_that_nothing_came() -> None:
    """Whoever asked may try once more: the connection was idle, and has said nothing."""

    async def dies(asked: Asked) -> None:
        asked.reset()

    async with pooled(good, dies) as (pool, _):
        await ask(pool)
        up = await connection(pool)
        seen = Seen()
        up.send(REQUEST, seen)
        await until(seen.over.is_set, DEADLINE_S, "the end")
        assert (seen.words, seen.gone, up.used, up.silent) == (["lost"], True, True, True)


async def test_an_engine_that_answers_before_it_has_read_everything() -> None:
    """Its reply counts; what it did not read must not be taken for the next request."""

    async def early(asked: Asked) -> None:
        await asked.send(whole(b"enough", 413))
        await asked.gone.wait()

    async with pooled(early) as (pool, _):
        up, seen = await connection(pool), Seen()
        assert up.transport is not None
        up.send(REQUEST + b"x" * 50_000_000, seen)
        await until(seen.over.is_set, DEADLINE_S, "the reply")
        assert (seen.body, seen.words) == (b"enough", ["head 413", "end"])
        assert not pool._idle
        assert up.transport.is_closing()


async def test_abort_closes_at_once_and_nothing_is_said_any_more() -> None:
    async with pooled(hangs) as (pool, made):
        up, seen = await connection(pool), Seen()
        up.send(REQUEST, seen)
        await until(lambda: made.live == 1, DEADLINE_S, "it works")
        up.abort()
        await until(lambda: made.open == 0, 0.2, "the engine has noticed")
        assert seen.words == []


async def test_back_pressure_stops_the_engine() -> None:
    sent = 0

    async def floods(asked: Asked) -> None:
        nonlocal sent
        await asked.send(head(200, "Content-Length: 100000000"))
        while sent < 100_000_000:
            await asked.send(b"x" * 100_000)
            sent += 100_000

    async with pooled(floods) as (pool, _):
        up, seen = await connection(pool), Seen()
        up.send(REQUEST, seen)
        await until(lambda: bool(seen.words), DEADLINE_S, "the head")
        up.pause()
        await asyncio.sleep(0.1)
        before = sent
        await asyncio.sleep(0.2)
        assert sent <= before + 100_000
        assert sent < 50_000_000
        up.resume()
        await until(lambda: sent > before + 1_000_000, DEADLINE_S, "it goes on")
        up.abort()


async def test_a_pause_does_not_outlast_the_exchange() -> None:
    async with pooled() as (pool, _):
        up, seen = await connection(pool), Seen()

        def pause(head: Head, rest: bytes) -> None:
            Seen.reply_head(seen, head, rest)
            up.pause()

        seen.reply_head = pause  # type: ignore[method-assign]
        up.send(REQUEST, seen)
        await until(seen.over.is_set, DEADLINE_S, "the end")
        assert (await ask(pool)).words[-1] == "end"
