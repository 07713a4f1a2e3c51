"""The pool of connections to engines: which idle ones are taken, how many are kept, and what a connection fails of."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from services.router.door import upstream
from services.router.door.upstream import Connection, Pool, Upstreams
from tests.support.door_engine import engine, good, whole
from tests.support.pooled import DEADLINE_S, REQUEST, Seen, ask, connection, pooled
from tests.support.waiting import until

BOTH_LOOPS = True


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
