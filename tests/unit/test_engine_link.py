"""Frames, client and server of the engine link."""

from __future__ import annotations

import asyncio
import socket
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.engine import link
from kvc.engine.link_io import (
    CallFailed,
    FrameTooLarge,
    FrameTruncated,
    LinkClient,
    LinkClosed,
    LinkError,
    LinkTimeout,
    encode,
    read_frame,
)
from kvc.engine.link_serve import LinkServer
from kvc.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

WELCOME = link.Welcome(1, "w", 5, "decode", "m", 100, 16, 99, "http://x", "", 0, 1.0, 1.0, 7, [])


class Handler:
    """Answers Load slowly when told to, and fails Drain."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.parts = [link.Snapshot(3, [], last=False), link.Snapshot(3, [])]

    async def handle(self, body: link.RequestBody) -> link.ReplyBody:
        await self.gate.wait()
        match body:
            case link.Hello():
                return WELCOME
            case link.Release(ticket):
                return link.Released(ticket == "open")
            case link.Drain():
                raise InvalidField("no", field="draining")
            case _:
                raise RuntimeError("a fault")

    def snapshot(self) -> Iterable[link.Snapshot]:
        return self.parts


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[tuple[LinkServer, Handler]]:
    handler = Handler()
    server = LinkServer(handler)
    await server.start(path / "l.sock")
    try:
        yield server, handler
    finally:
        await server.stop()


async def raw(path: Path, data: bytes) -> bytes:
    """Sends bytes to a server, closes, and returns what it says before it hangs up."""
    reader, writer = await asyncio.open_unix_connection(str(path / "l.sock"))
    writer.write(data)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


async def test_calls_and_typed_failures(tmp_path: Path) -> None:
    async with serving(tmp_path):
        client = await LinkClient.connect(tmp_path / "l.sock")
        assert client.welcome == WELCOME
        assert await client.call(link.Release("open")) == link.Released(released=True)
        with pytest.raises(CallFailed) as caught:
            await client.call(link.Drain(draining=True))
        assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "draining")
        with pytest.raises(CallFailed) as caught:
            await client.call(link.Load())
        assert caught.value.code == "INTERNAL"
        assert "a fault" not in str(caught.value), "no details of a fault leave the engine"
        assert await client.call(link.Release("x")) == link.Released(released=False)
        await client.close()
        with pytest.raises(LinkClosed):
            await client.call(link.Release("x"))


async def test_timeout_leaves_the_connection_usable(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, handler):
        client = await LinkClient.connect(tmp_path / "l.sock")
        handler.gate.clear()
        with pytest.raises(LinkTimeout):
            await client.call(link.Release("open"), timeout_s=0.01)
        handler.gate.set()
        assert await client.call(link.Release("x")) == link.Released(released=False), "the late answer is not taken for this one"
        await client.close()


async def test_events_are_a_snapshot_and_then_deltas_for_each_of_several_clients(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, handler):
        clients = [await LinkClient.connect(tmp_path / "l.sock") for _ in range(3)]
        streams = [client.events() for client in clients]
        for stream in streams:
            assert [await anext(stream), await anext(stream)] == handler.parts
        assert server.subscribers == 3
        await clients[0].close()
        for sequence in (4, 5):
            server.publish(link.Delta(sequence, [link.PageRemoved([1]), link.AllCleared()]))
        for stream in streams[1:]:
            assert [(await anext(stream)), (await anext(stream))] == [
                link.Delta(4, [link.PageRemoved([1]), link.AllCleared()]),
                link.Delta(5, [link.PageRemoved([1]), link.AllCleared()]),
            ]
        with pytest.raises(LinkClosed):
            await anext(streams[0])
        with pytest.raises(CallFailed, match="subscribed"):
            await clients[1].call(link.Subscribe())
        for client in clients[1:]:
            await client.close()


async def test_a_dying_server_ends_calls_and_events(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, handler):
        client = await LinkClient.connect(tmp_path / "l.sock")
        stream = client.events()
        await anext(stream)
        await anext(stream)
        handler.gate.clear()
        call = asyncio.create_task(client.call(link.Release("open")))

        async def next_event() -> object:
            return await anext(stream)

        waiting = asyncio.create_task(next_event())
        await asyncio.sleep(0)
        await server.stop()
        for task in (call, waiting):
            with pytest.raises(LinkError):
                await task
        await client.close()
    with pytest.raises(LinkClosed):
        await LinkClient.connect(tmp_path / "l.sock")


async def test_version_and_greeting_are_checked(tmp_path: Path) -> None:
    async with serving(tmp_path):
        answer = await raw(tmp_path, encode(link.Request(1, link.Hello(version=99))) + encode(link.Request(2, link.Release("x"))))
        first = msgspec.msgpack.decode(answer[4 : 4 + int.from_bytes(answer[:4], "little")], type=link.Reply)
        assert first.call == 1
        assert isinstance(first.body, link.Failed)
        assert (first.body.code, first.body.field) == ("FAILED_PRECONDITION", "version")
        assert answer.count(b"FAILED_PRECONDITION") == 2


async def test_wrong_field_is_named_and_the_connection_lives(tmp_path: Path) -> None:
    """F76: a wrong type is the caller's typed error."""
    async with serving(tmp_path):
        bad = msgspec.msgpack.encode({"type": "request", "call": 9, "body": {"type": "release", "ticket": 5}})
        frames = (
            encode(link.Request(1, link.Hello())) + len(bad).to_bytes(4, "little") + bad + encode(link.Request(2, link.Release("open")))
        )
        answer = await raw(tmp_path, frames)
        assert b"INVALID_ARGUMENT" in answer
        assert b"ticket" in answer
        assert b"released" in answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        b"\x05\x00\x00\x00ab",
        (2**32 - 1).to_bytes(4, "little"),
        b"\x03\x00\x00\x00\xc1\xc1\xc1",
        b"\x00\x00\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        (3).to_bytes(4, "little") + b"\x93\x01\x02",
    ],
    ids=["short header", "truncated", "oversize", "garbage", "empty", "another protocol", "array"],
)
async def test_broken_frames_cost_one_connection(tmp_path: Path, data: bytes) -> None:
    """F76: whatever comes in, the server goes on serving others."""
    async with serving(tmp_path):
        client = await LinkClient.connect(tmp_path / "l.sock")
        assert b"INVALID_ARGUMENT" in await raw(tmp_path, data)
        assert await client.call(link.Release("open")) == link.Released(released=True)
        await client.close()


@given(body=st.binary(max_size=300))
def test_any_bytes_decode_or_fail_typed(body: bytes) -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(body)
        reader.feed_eof()
        while True:
            await read_frame(reader, max_bytes=64)

    with pytest.raises((LinkClosed, FrameTruncated, FrameTooLarge)):
        asyncio.run(scenario())


def test_oversize_messages_are_not_sent() -> None:
    with pytest.raises(FrameTooLarge):
        encode(link.Release("x" * (link.MAX_FRAME_BYTES + 1)))


async def test_socket_files(tmp_path: Path) -> None:
    """The owner alone may connect; a dead server's file is replaced, a live one's is not, and nothing else is touched."""
    path = tmp_path / "l.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(LinkError, match="served by another process"):
            await LinkServer(Handler()).start(path)
    assert not path.exists()
    path.write_text("data")
    with pytest.raises(LinkError, match="no socket"):
        await LinkServer(Handler()).start(path)
    assert path.read_text() == "data"
    with pytest.raises(LinkError, match="at most 107"):
        await LinkServer(Handler()).start(tmp_path / ("x" * 120))
