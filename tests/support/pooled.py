"""Connections to scripted engines out of the front door's pool, and a receiver that keeps what it is told."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.router.door.upstream import Connection, Pool, Upstreams
from tests.support.door_engine import Asked, Engine, engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.router.door.framing import Head
    from tests.support.door_engine import Answer

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
        """The head, and what came along with it."""
        self.words.append(f"head {head.status}")
        self.head, self.body = head, rest

    def reply_data(self, data: bytes) -> None:
        """Bytes of the body."""
        if self.words[-1] != "data":
            self.words.append("data")
        self.body += data

    def reply_end(self) -> None:
        """The end."""
        self.words.append("end")
        self.over.set()

    def reply_lost(self, problem: str, *, gone: bool) -> None:
        """The end before the end."""
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
