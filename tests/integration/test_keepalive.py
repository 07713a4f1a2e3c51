"""Keepalive between the mesh's own clients and servers, with a real process at the other end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvc.runtime.server import channel

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = """
import asyncio
import grpc
from kvc.runtime.metrics import process_registry
from kvc.runtime.server import Server, ServerConfig
from kvc.runtime.telemetry import Telemetry

async def idle(_request, _context):
    yield b"hello"
    await asyncio.Event().wait()

def register(server):
    handlers = {"Idle": grpc.unary_stream_rpc_method_handler(idle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Keepalive", handlers),))

async def main():
    server = await Server.start(ServerConfig(), register, [], Telemetry(None), process_registry(), lambda: None)
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    yield process
    process.kill()
    process.communicate(timeout=30)


async def ready(one: grpc.aio.Channel) -> None:
    """Connects."""
    state = one.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        await one.wait_for_state_change(state)
        state = one.get_state()


async def test_an_idle_stream_lives_and_a_frozen_peer_is_noticed(server: subprocess.Popen[str]) -> None:
    """F29's sibling for our own streams: TCP stays open, yet the follower learns within 10 s that nobody is there.

    gRPC servers answer a 5 s keepalive with GOAWAY after three pings unless they are told otherwise, once for connections with a call and
    once for those without; without a ping timeout of its own a client notices a frozen peer after a minute.
    """
    assert server.stdout is not None
    port = int(await asyncio.to_thread(server.stdout.readline))
    # Channels of equal options share a connection; this one must have its own.
    idle = channel(f"127.0.0.1:{port}", max_message_bytes=1 << 20)
    async with channel(f"127.0.0.1:{port}") as open_channel, idle as idle_channel:
        await ready(idle_channel)
        method: Any = open_channel.unary_stream("/test.Keepalive/Idle")
        call = method(b"", timeout=120)
        assert await call.read() == b"hello"
        waiting = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait([waiting], timeout=22)
        assert not done, "the idle stream ended"
        assert idle_channel.get_state() is grpc.ChannelConnectivity.READY, "the channel without a call was told to go away"
        os.kill(server.pid, signal.SIGSTOP)
        frozen = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - frozen < 10.0
        os.kill(server.pid, signal.SIGCONT)
