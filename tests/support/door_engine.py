"""An engine for tests of the front door: it sends exactly what a test wants, when it wants it, and keeps its books."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.support.listening import listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


@dataclass
class Asked:
    """A request as the engine got it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> dict[str, Any]:
        """The body decoded; a key twice is an error."""

        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            assert len({key for key, _ in pairs}) == len(pairs), pairs
            return dict(pairs)

        decoded: dict[str, Any] = json.loads(self.body, object_pairs_hook=once)
        return decoded

    def header(self, name: str) -> list[str]:
        """The values of a header."""
        return [value for key, value in self.headers if key.lower() == name]

    async def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Breaks the connection."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Answer: TypeAlias = "Callable[[Asked], Awaitable[bool | None]]"
"""Answers a request. False: the connection is closed after it."""


def head(status: int = 200, *lines: str, reason: str = "Whatever") -> bytes:
    """A response head."""
    return "\r\n".join([f"HTTP/1.1 {status} {reason}", *lines, "", ""]).encode("latin-1")


def whole(body: bytes, status: int = 200, *lines: str) -> bytes:
    """A response with a length."""
    return head(status, f"Content-Length: {len(body)}", *lines) + body


def chunk(data: bytes) -> bytes:
    """A chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


END = b"0\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked"
USAGE = b'{"text":"ok","usage":{"prompt_tokens":48,"completion_tokens":3,"cached_tokens":24}}'


async def good(asked: Asked) -> None:
    """A small complete reply."""
    await asked.send(whole(USAGE, 200, "Content-Type: application/json"))


async def hangs(asked: Asked) -> None:
    await asked.gone.wait()


async def breaks(asked: Asked) -> None:
    asked.reset()


def answers(status: int, body: bytes = b"{}", *lines: str) -> Answer:
    async def answer(asked: Asked) -> None:
        await asked.send(whole(body, status, *lines))

    return answer


def streams(*parts: bytes, gap_s: float = 0.01) -> Answer:
    """A stream whose parts come one after the other."""

    async def answer(asked: Asked) -> None:
        for part in parts:
            await asked.send(part)
            await asyncio.sleep(gap_s)

    return answer


async def closes(asked: Asked) -> bool:
    await asked.send(b"")
    return False


class Gate:
    """An engine that answers when it is told to."""

    def __init__(self, reply: bytes = b"") -> None:
        self.go = asyncio.Event()
        self.reply = reply or whole(USAGE)

    async def __call__(self, asked: Asked) -> None:
        await self.go.wait()
        await asked.send(self.reply)


@dataclass
class Engine:
    """Answers each request with the next answer, and repeats the last one."""

    answers: list[Answer] = field(default_factory=list)
    requests: list[Asked] = field(default_factory=list)
    arrived: Callable[[Asked], object] = lambda _asked: None
    connections: int = 0
    open: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def live(self) -> int:
        """Requests whose connection is open and whose reply is not complete."""
        return sum(not asked.gone.is_set() for asked in self.requests)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        self.open += 1
        asked: Asked | None = None
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = [(line.partition(":")[0], line.partition(":")[2].strip()) for line in lines[1:] if line]
                size = int(next(value for key, value in headers if key.lower() == "content-length"))
                asked = Asked(lines[0], headers, await reader.readexactly(size), reader, writer)
                self.requests.append(asked)
                self.arrived(asked)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                more = await self._while_connected(answer(asked), reader)
                asked.gone.set()
                if more is False:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            self.open -= 1
            if asked is not None:
                asked.gone.set()
            writer.close()

    async def _while_connected(self, answer: Awaitable[bool | None], reader: asyncio.StreamReader) -> bool | None:
        """Runs an answer; a client that goes away ends it, as in a real engine."""
        working = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_end_of(reader))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionResetError
            return working.result()
        finally:
            for task in (working, gone):
                task.cancel()
            await asyncio.gather(working, gone, return_exceptions=True)


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Waits for the end of the stream without taking bytes from it."""
    while not (reader.at_eof() or reader.exception()):  # noqa: ASYNC110 - a stream tells of its end only those who read
        await asyncio.sleep(0.002)


@asynccontextmanager
async def engine(*answers: Answer) -> AsyncIterator[Engine]:
    """An engine on a free port."""
    made = Engine(list(answers) or [good])
    async with listening(made.serve) as made.port:
        yield made
