"""What the front door holds in memory for clients that read slowly, or not at all."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvc.core.types import Mode
from tests.support.door_engine import CHUNKED, END, Asked, chunk, head, streams, whole
from tests.support.front import DEADLINE_S, HI, Front, front, post
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.router.door.client import Client


BOTH_LOOPS = True


# ---- memory ----


def rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - a file of the kernel's
        return int(statm.read().split()[1]) * resource.getpagesize()


async def test_a_slow_client_holds_the_engine_back(door: Front) -> None:
    """100 MB for a client that reads nothing: the engine stops, the door holds a few buffers; then all of it arrives."""
    size, piece = 100_000_000, b"x" * 65_536
    sent = 0

    async def exact(asked: Asked) -> None:
        nonlocal sent
        await asked.send(head(200, f"Content-Length: {size}"))
        while sent < size:
            part = piece[: size - sent]
            sent += len(part)
            await asked.send(part)

    await door.worker("d0", exact)
    before = rss_bytes()
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        await loop.sock_connect(sock, ("127.0.0.1", door.port))
        await loop.sock_sendall(sock, post(HI))
        await until(lambda: sent > 0, DEADLINE_S, "it begins")
        await asyncio.sleep(0.3)
        stopped = sent
        await asyncio.sleep(0.3)
        assert sent == stopped < 30_000_000
        assert rss_bytes() - before < 30_000_000
        got = 0
        async with asyncio.timeout(60):
            while got < size:
                data = await loop.sock_recv(sock, 1 << 20)
                assert data
                got += len(data)
        assert rss_bytes() - before < 30_000_000
    await door.check(1)


@asynccontextmanager
async def silent(door: Front) -> AsyncIterator[tuple[socket.socket, Client]]:
    """A client that reads nothing by itself, and the door's end of its connection; what lies between them holds little."""
    with socket.socket() as sock:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", door.port))
        await until(lambda: len(door.door.clients) == 1, DEADLINE_S, "it is there")
        (client,) = door.door.clients
        assert client._transport is not None
        client._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield sock, client


async def receive(sock: socket.socket, size: int) -> int:
    """Reads until so many bytes have come, or the end."""
    got = 0
    async with asyncio.timeout(60):
        while got < size and (data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20)):
            got += len(data)
    return got


def unsent(client: Client) -> int:
    assert client._transport is not None
    return client._transport.get_write_buffer_size()


@pytest.mark.parametrize("size", [2_000_000, 200_000], ids=["long", "short"])
async def test_a_reply_behind_an_unread_one_waits(door: Front, size: int) -> None:
    """A client that pipelines and does not read: later replies are not fetched into memory, however short each of them is."""
    count = max(3, 4_000_000 // size)
    await door.worker("d0", streams(whole(b"x" * size)))
    async with silent(door) as (sock, client):
        await asyncio.get_running_loop().sock_sendall(sock, post(HI) * count)
        await until(lambda: unsent(client) > 65_536, DEADLINE_S, "it is full")
        await asyncio.sleep(0.3)
        assert unsent(client) < 1 << 20
        assert len(door.engines["d0"].requests) <= 2
        assert await receive(sock, count * size) >= count * size
    await door.check(count)


@pytest.mark.parametrize("size", [8_000_000, 70_000], ids=["under way", "complete"])
async def test_a_client_that_never_reads_is_cut_off_in_the_end(size: int) -> None:
    async with front(http={"idle_timeout_s": 0.3}, requests={"timeout_s": 1.0}) as door:
        await door.worker("d0", streams(whole(b"x" * size)))
        async with silent(door) as (sock, client):
            await asyncio.get_running_loop().sock_sendall(sock, post(HI))
            await until(lambda: unsent(client) > 30_000, DEADLINE_S, "it cannot be sent")
            await asyncio.sleep(0.05)
            assert bool(door.door.exchanges) is (size > 1_000_000)
            await until(lambda: not door.door.clients, DEADLINE_S, "it is cut off")
        await door.check(1)


async def test_stopping_waits_for_what_is_still_to_be_sent(door: Front) -> None:
    """A reply that is complete here has not arrived yet."""
    size = 70_000
    await door.worker("d0", streams(whole(b"x" * size)))
    async with silent(door) as (sock, client):
        await asyncio.get_running_loop().sock_sendall(sock, post(HI))
        await until(lambda: unsent(client) > 30_000, DEADLINE_S, "it cannot be sent")
        await until(lambda: not door.door.exchanges, DEADLINE_S, "it is complete here")
        stopping = asyncio.create_task(door.door.stop(DEADLINE_S))
        await asyncio.sleep(0.2)
        assert await receive(sock, 1 << 30) > size
        async with asyncio.timeout(1.0):
            await stopping


async def test_a_large_prompt_is_let_go_when_the_reply_begins(door: Front) -> None:
    gate = asyncio.Event()

    async def slow(asked: Asked) -> None:
        await asked.send(head(200, CHUNKED) + chunk(b"1"))
        await gate.wait()
        await asked.send(END)

    await door.worker("d0", slow)
    wire = await door.client()
    await wire.send(post(json.dumps({"prompt": "x" * 2_000_000, "max_tokens": 1}).encode(), "/v1/completions"))
    await wire.head()
    (exchange,) = door.door.exchanges
    assert exchange.request.body == b""
    assert exchange._payload is None
    gate.set()
    await door.check(1)


async def test_modes_reach_the_client(door: Front) -> None:
    await door.worker()
    for mode in (Mode.SEED, Mode.DIRECT):
        door.asking.mode = mode
        assert (await door.ask(x_session_id="s")).header("x-kvc-mode") == mode.value
    await door.check(2)
