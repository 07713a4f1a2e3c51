"""Connections to engines: reused when that is safe, given up when it is not; every reply ends exactly once."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from services.router.door import upstream
from services.router.door.upstream import Connection, Pool, Upstreams
from tests.support.door_engine import CHUNKED, END, Asked, Engine, chunk, engine, good, head, whole
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.router.door.framing import Head
    from tests.support.door_engine import Answer

BOTH_LOOPS = True
REQUEST = b"POST / HTTP/1.1\r\nhost: e\r\ncontent-length: 2\r\n\r\n{}"
DEADLINE_S = 5.0


@dataclass
class Seen:
    """Everything a reply's receiver is told."""

    words: list[str] = field(default_factory=list)
    head: Head | None = None
    body: bytes = b""
    problem: str = ""
    gone: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def reply_head(self, head: Head, rest: bytes) -> None:
        self.words.append(f"head {head.status}")
        self.head, self.body = head, rest

    def reply_data(self, data: bytes) -> None:
        if self.words[-1] != "data":
            self.words.append("data")
        self.body += data

    def reply_end(self) -> None:
        self.words.append("end")
        self.over.set()

    def reply_lost(self, problem: str, *, gone: bool) -> None:
        self.words.append("lost")
        self.problem, self.gone = problem, gone
        self.over.set()


@asynccontextmanager
async def pooled(*answers: Answer, most_idle: int = 4) -> AsyncIterator[tuple[Pool, Engine]]:
    """An engine and its pool."""
    upstreams = Upstreams(2.0, most_idle)
    async with engine(*answers) as made:
        try:
            yield upstreams.pool(made.url), made
        finally:
            upstreams.close()


async def connection(pool: Pool) -> Connection:
    """A connection, idle or new."""
    idle = pool.take()
    if idle is not None:
        return idle
    made: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
    pool.connect(lambda up, _problem, _gone: made.set_result(up))
    async with asyncio.timeout(DEADLINE_S):
        up = await made
    assert up is not None
    return up


async def ask(pool: Pool, *, is_head_request: bool = False) -> Seen:
    """One exchange to its end."""
    seen = Seen()
    (await connection(pool)).send(REQUEST, seen, is_head_request=is_head_request)
    async with asyncio.timeout(DEADLINE_S):
        await seen.over.wait()
    return seen


def sends(*parts: bytes, close: bool = False) -> Answer:
    """An answer in pieces, each in a packet of its own."""

    async def answer(asked: Asked) -> bool:
        for part in parts:
            await asked.send(part)
            await asyncio.sleep(0.005)
        return not close

    return answer


async def hangs(asked: Asked) -> None:
    await asked.gone.wait()


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


async def test_an_idle_connection_that_the_engine_closed_is_not_taken() -> None:
    async with pooled(good, good) as (pool, made):
        await ask(pool)
        made.requests[0].writer.close()
        await until(lambda: not pool._idle, DEADLINE_S, "the pool has noticed")
        assert (await ask(pool)).words[-1] == "end"
        assert made.connections == 2


async def test_an_idle_connection_on_which_the_engine_speaks_is_given_up() -> None:
    async with pooled(good, good) as (pool, made):
        await ask(pool)
        await made.requests[0].send(whole(b"stray"))
        await until(lambda: not pool._idle, DEADLINE_S, "the pool has noticed")
        assert (await ask(pool)).body != b"stray"


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


async def test_connections_that_were_idle_for_long_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may be closing them at this very moment."""
    async with pooled() as (pool, made):
        await ask(pool)
        monkeypatch.setattr(upstream, "KEEP_ALIVE_S", 0.0)
        assert pool.take() is None
        await until(lambda: made.open == 0, DEADLINE_S, "it is closed")


async def test_idle_connections_have_a_bound() -> None:
    async with pooled(most_idle=2) as (pool, made):
        ups = [await connection(pool) for _ in range(4)]
        all_seen = [Seen() for _ in ups]
        for up, seen in zip(ups, all_seen, strict=True):
            up.send(REQUEST, seen)
        for seen in all_seen:
            await until(seen.over.is_set, DEADLINE_S, "the end")
        await until(lambda: made.open == 2, DEADLINE_S, "the others are closed")
        assert len(pool._idle) == 2


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


async def test_nagle_is_off() -> None:
    async with pooled() as (pool, _):
        up = await connection(pool)
        assert up.transport is not None
        sock = up.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        up.abort()


async def failure(pool: Pool) -> tuple[str, bool]:
    """What a connection failed of, and whether that says that the engine is gone."""
    told: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()

    def use(made: Connection | None, problem: str, gone: bool) -> None:  # noqa: FBT001 - upstream.Connected
        assert made is None
        told.set_result((problem, gone))

    pool.connect(use)
    async with asyncio.timeout(DEADLINE_S):
        return await told


async def test_a_connection_that_cannot_be_made() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    upstreams = Upstreams(0.2, 1)
    for url in (f"http://127.0.0.1:{port}", "http://no..such..host", f"http://{'x' * 70}.invalid"):
        problem, gone = await failure(upstreams.pool(url))
        assert problem
        assert gone
    upstreams.close()


async def test_running_out_of_files_is_no_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def create_connection(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    upstreams = Upstreams(0.2, 1)
    loop = asyncio.get_running_loop()
    if not hasattr(loop, "__dict__"):  # uvloop's cannot be changed; the path is the same
        return
    monkeypatch.setattr(loop, "create_connection", create_connection)
    problem, gone = await failure(upstreams.pool("http://127.0.0.1:1"))
    assert "file descriptor" in problem
    assert not gone


@pytest.mark.parametrize(
    ("url", "host", "prefix"),
    [
        ("http://127.0.0.1:8000", b"127.0.0.1:8000", b""),
        ("http://engine", b"engine", b""),
        ("http://[::1]:80/", b"[::1]:80", b""),
        ("https://engine/behind/a/proxy/", b"engine", b"/behind/a/proxy"),
        ("http://user:secret@engine:1", b"engine:1", b""),
    ],
)
async def test_addresses(url: str, host: bytes, prefix: bytes) -> None:
    pool = Upstreams(0.2, 1).pool(url)
    assert (pool.host_header, pool.prefix) == (host, prefix)


async def test_engines_that_left_are_forgotten() -> None:
    async with engine() as one, engine() as two:
        upstreams = Upstreams(2.0, 4)
        for made in (one, two):
            assert (await ask(upstreams.pool(made.url))).words[-1] == "end"
        upstreams.keep_only({two.url})
        assert len(upstreams) == 1
        await until(lambda: one.open == 0, DEADLINE_S, "it is closed")
        assert two.open == 1
        upstreams.close()
