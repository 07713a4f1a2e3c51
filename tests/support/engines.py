"""Reference engines for tests: small ones that start fast, a client that checks what they answer, and their books."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec

from kvc.core.blocks import hash_chain, pack_hashes, pack_tokens
from kvc.engine import kvvalue, link
from kvc.engine.link_io import LinkClient
from kvc.engine.reference.config import EngineConfig
from kvc.engine.reference.main import running_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvc.core.params import Params
    from kvc.engine.reference.main import RunningEngine

DEADLINE_S = 20.0
BASELINE = ("inflight", "held_tokens", "reserved_tokens", "tickets", "waiting", "active", "rooms")
SLOW: dict[str, Any] = {"time_scale": 0.2, "chunk_tokens": 64}
"""Settings of an engine whose states a test can see from outside."""
CRAWLING: dict[str, Any] = {"time_scale": 0.02, "chunk_tokens": 200}
"""Slow enough for a transfer of some milliseconds to be seen from outside."""


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    body: Any

    @property
    def kind(self) -> str:
        """The error's type."""
        return str(self.body["error"]["type"])

    @property
    def param(self) -> str:
        """The error's field."""
        return str(self.body["error"]["param"])


class EngineUnderTest:
    """One running engine, its HTTP client and, with a link path, its link."""

    def __init__(self, running: RunningEngine, http: aiohttp.ClientSession, link_client: LinkClient | None) -> None:
        self.running = running
        self.engine = running.engine
        self.url = running.url
        self.http = http
        self._link = link_client

    @property
    def client(self) -> LinkClient:
        assert self._link is not None, "started without link_path"
        return self._link

    async def post(self, path: str, body: Any) -> Answer:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data) as response:
            return Answer(response.status, msgspec.json.decode(await response.read()))

    async def get(self, path: str) -> Answer:
        async with self.http.get(self.url + path) as response:
            return Answer(response.status, msgspec.json.decode(await response.read()))

    async def generate(self, ids: list[int], count: int, **fields: Any) -> Answer:
        return await self.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": count}, **fields})

    async def checked(self, ids: list[int], count: int, **fields: Any) -> list[int]:
        """Generates, and fails unless the reply is the one that a correct KV cache gives."""
        answer = await self.generate(ids, count, **fields)
        assert answer.status == 200, answer
        assert answer.body["output_ids"] == self.expected(ids, count)
        return list(answer.body["output_ids"])

    def expected(self, ids: list[int], count: int) -> list[int]:
        return kvvalue.expected_output(pack_tokens(ids), count, kvvalue.IDS_VOCAB, self.engine.salt)

    async def admit(self, session_id: str, ids: list[int], reserve: int, request_id: str = "", **fields: Any) -> Any:
        """Admits a prompt of these tokens over the link."""
        chain = hash_chain(pack_tokens(ids), self.engine.config.block_tokens, self.engine.hash_seed)
        body = link.Admit(request_id or f"request-{time.monotonic_ns()}", 0, session_id, 0, len(ids), reserve, pack_hashes(chain))
        return await self.client.call(msgspec.structs.replace(body, **fields))

    async def pool(self) -> dict[str, int]:
        """The books, checked."""
        self.engine.pool.check()
        books: dict[str, int] = (await self.get("/kv_pool")).body
        assert books["free_tokens"] + books["evictable_tokens"] + books["protected_tokens"] == books["capacity_tokens"]
        return books

    async def idle(self) -> dict[str, int]:
        """Waits until nothing is held, reserved or in flight: the baseline that every turn returns to."""
        end = time.monotonic() + DEADLINE_S
        while True:
            books = await self.pool()
            left = {name: books[name] for name in BASELINE if books[name]}
            if not left:
                return books
            assert time.monotonic() < end, f"still held: {left}"
            await asyncio.sleep(0.002)

    async def session(self, session_id: str) -> link.SessionRecord | None:
        reply = await self.client.call(link.ListSessions(session_id))
        return reply.sessions[0] if reply.sessions else None


def numbers(count: int, start: int = 0) -> list[int]:
    """Token ids that count up."""
    return list(range(start, start + count))


def config(**fields: Any) -> EngineConfig:
    """A small and fast engine."""
    defaults: dict[str, Any] = {"preset": "tiny", "time_scale": 50.0, "kv_tokens": 4800}
    return EngineConfig(**(defaults | fields))


@asynccontextmanager
async def serving(settings: EngineConfig, params: Params | None = None) -> AsyncIterator[EngineUnderTest]:
    """An engine with its clients."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_engine(settings, params))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = None
        if settings.link_path is not None:
            client = await LinkClient.connect(settings.link_path)
            stack.push_async_callback(client.close)
        yield EngineUnderTest(running, http, client)


@asynccontextmanager
async def engine_process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """`kvc engine` as a process, and what its log says of where it is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvc.engine.reference.main", "--preset", "tiny", *flags, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            line: dict[str, Any] = {}
            while line.get("event") != "engine_ready":
                line = msgspec.json.decode(await process.stderr.readline())
        yield process, line
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, prefill: EngineUnderTest, decode: EngineUnderTest) -> None:
        self.prefill = prefill
        self.decode = decode
        self._room = 0

    def fields(self, room: int | None = None) -> dict[str, Any]:
        """Bootstrap fields of a new room, or of a given one."""
        self._room += 1
        port = self.prefill.running.bootstrap_port
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": self._room if room is None else room}

    async def generate(self, ids: list[int], count: int, **fields: Any) -> tuple[Answer, Answer]:
        """Both halves of a request at once."""
        body = self.fields() | fields
        return await asyncio.gather(self.prefill.generate(ids, count, **body), self.decode.generate(ids, count, **body))

    async def checked(self, ids: list[int], count: int, **fields: Any) -> list[int]:
        first, second = await self.generate(ids, count, **fields)
        assert (first.status, second.status) == (200, 200), (first, second)
        assert second.body["output_ids"] == self.decode.expected(ids, count)
        return list(second.body["output_ids"])

    async def idle(self) -> None:
        """Waits until both engines are back at nothing held."""
        await self.prefill.idle()
        await self.decode.idle()


@asynccontextmanager
async def paired(link_path: Path | None = None, prefill: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[Pair]:
    """A prefill and a decode engine with the same settings but those in `prefill`."""
    first = config(role="prefill", worker_id="p", **(fields | (prefill or {})))
    second = config(role="decode", worker_id="d", link_path=link_path, **fields)
    async with serving(first) as one, serving(second) as other:
        yield Pair(one, other)


async def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition, or fails."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        await asyncio.sleep(0.002)
