"""Two thousand streams at once through one router process (F61's kind): nobody waits, nothing restarts, memory is bounded."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from bench.peers.always import Connector
from kvc.runtime.server import ServerConfig
from services.admission_agent.config import AgentConfig, EngineConfig
from services.admission_agent.main import running_agent
from services.local_mesh.processes import Child
from tests.support.drip import Drip, dripping, whole
from tests.support.waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STREAMS = 2_000
PACE_S = 1.0
CHUNKS = 12
RAMP = 100
AGENTS = 4
START_S = 60.0
HEALTH_S = 1.0
LATE_S = 2.0
MAX_STREAM_BYTES = 32 * 1024
"""Resident memory of the router for one stream in flight: what docs/http.md states."""


class Reader(asyncio.Protocol):
    """A client that reads one stream."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.received = bytearray()
        self.arrivals: list[float] = []
        self.done = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        lines = b"POST /v1/chat/completions HTTP/1.1\r\nhost: mesh\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(lines % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.arrivals.append(time.monotonic())
        if self.received.endswith(b"\r\n0\r\n\r\n"):
            self.done.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set()

    @property
    def body(self) -> bytes:
        return bytes(self.received).partition(b"\r\n\r\n")[2]


class Health:
    """Asks for /health again and again, each time on a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answers_s: list[float] = []

    async def run(self) -> None:
        while True:
            began_s = time.monotonic()
            async with aiohttp.request("GET", self._url) as response:
                assert response.status == 200
            self.answers_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.05)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@asynccontextmanager
async def routed(drip: Drip, log: Path) -> AsyncIterator[tuple[Child, dict[str, Any]]]:
    """A router process with default settings, over agents that admit everything."""
    async with AsyncExitStack() as stack:
        argv = ["router", "--port", "0", "--http-port", "0"]
        for index in range(AGENTS):
            config = AgentConfig(engine=EngineConfig(socket=Path("unused")), server=ServerConfig(port=0))
            agent = await stack.enter_async_context(running_agent(config, Connector(f"d{index}", "decode", drip.url)))
            argv += ["--agent", agent.target]
        router = Child("router", argv, log, "router_ready")
        await router.start()
        stack.push_async_callback(router.stop, 5.0)
        ready = await router.listening(START_S)

        async def check() -> None:
            async with aiohttp.request("GET", f"http://127.0.0.1:{ready['http_port']}/ready") as response:
                assert response.status == 200

        await eventually(check, START_S)
        yield router, ready


async def state(port: int) -> dict[str, Any]:
    async with aiohttp.request("GET", f"http://127.0.0.1:{port}/kvc/state") as response:
        known: dict[str, Any] = await response.json()
        return known


async def test_two_thousand_streams(tmp_path: Path) -> None:
    """F61: health answers within a second throughout, the process stays, each stream is byte for byte the engine's and on time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        drip = await stack.enter_async_context(dripping(CHUNKS, PACE_S))
        router, ready = await stack.enter_async_context(routed(drip, tmp_path / "router.log"))
        port, pid = int(ready["http_port"]), router.pid
        assert pid is not None
        before = resident_bytes(pid)
        probes = [Health(f"http://127.0.0.1:{one}/health") for one in (port, int(ready["ops_port"]))]
        asking = [loop.create_task(probe.run()) for probe in probes]
        readers: list[Reader] = []
        for start in range(0, STREAMS, RAMP):
            batch = [Reader(_body(number)) for number in range(start, start + RAMP)]
            await asyncio.gather(*(loop.create_connection(partial(_same, reader), "127.0.0.1", port) for reader in batch))
            readers += batch
            await until(lambda: all(reader.arrivals for reader in readers[-RAMP:]), START_S, "the first chunk of each stream")  # noqa: B023
        assert (await state(port))["in_flight"] == drip.open == STREAMS
        leaving, staying = readers[::10], [reader for index, reader in enumerate(readers) if index % 10]
        for reader in leaving:
            reader.transport.abort()
        await until(lambda: drip.left == len(leaving), LATE_S, "the engine hears of each client that left")
        during = resident_bytes(pid)
        await asyncio.wait_for(asyncio.gather(*(reader.done.wait() for reader in staying)), START_S)
        for task in asking:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        right = whole(CHUNKS)
        assert [reader for reader in staying if reader.body != right] == []
        waits = sorted(max(b - a for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)) for r in staying)
        slowest_s = max(max(probe.answers_s) for probe in probes)
        told = f"{(during - before) // STREAMS} bytes a stream, health in {slowest_s:.3f} s, longest gap between chunks {waits[-1]:.2f} s"
        assert drip.most == STREAMS
        assert all(len(probe.answers_s) > CHUNKS for probe in probes)
        assert slowest_s < HEALTH_S, told
        assert waits[len(waits) // 2] < PACE_S + 0.5, told
        assert during - before < STREAMS * MAX_STREAM_BYTES, told
        for reader in staying:
            reader.transport.close()
        known = await state(port)
        assert (known["in_flight"], router.pid) == (0, pid)
        assert sum(ends["completed"] for ends in known["turns"].values()) == len(staying)
        assert sum(ends["cancelled"] for ends in known["turns"].values()) == len(leaving)


def _same(reader: Reader) -> Reader:
    return reader


def _body(number: int) -> bytes:
    messages = [{"role": "user", "content": f"stream {number}: " + "a prompt of some length, as prompts are. " * 50}]
    return json.dumps({"model": "mock", "messages": messages, "stream": True, "max_tokens": 32}).encode()
