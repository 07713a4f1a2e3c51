"""An engine that does nothing but drip: every request is answered with a stream of chunks at a steady pace, byte for byte known."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from tests.support.raw_http import END, chunk, event, head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEAD = head()
LAST = event(choices=[], usage={"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20})
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def piece(number: int) -> bytes:
    """The chunk with this number."""
    return chunk(event(choices=[{"index": 0, "delta": {"content": f"word {number:06d} "}, "finish_reason": None}]))


def whole(chunks: int) -> bytes:
    """A complete body of `chunks` chunks."""
    return b"".join(map(piece, range(chunks))) + chunk(LAST) + END


class Drip:
    """The engine. `open` streams, and how many of them their client left."""

    def __init__(self, chunks: int, pace_s: float) -> None:
        self.chunks = chunks
        self.pace_s = pace_s
        self.open = 0
        self.most = 0
        self.left = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Stream(asyncio.Protocol):
    """One connection: request after request."""

    def __init__(self, drip: Drip) -> None:
        self._drip = drip
        self._buffer = b""
        self._sent = -1
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        length = _LENGTH.search(self._buffer, 0, end) if end >= 0 else None
        if length is None or len(self._buffer) < end + 4 + int(length[1]):
            return
        self._buffer = b""
        self._sent = 0
        self._drip.open += 1
        self._drip.most = max(self._drip.most, self._drip.open)
        self._transport.write(HEAD)
        self._next()

    def _next(self) -> None:
        if self._sent == self._drip.chunks:
            self._transport.write(chunk(LAST) + END)
            self._ended()
            return
        self._transport.write(piece(self._sent))
        self._sent += 1
        self._timer = asyncio.get_running_loop().call_later(self._drip.pace_s, self._next)

    def _ended(self) -> None:
        self._sent = -1
        self._drip.open -= 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sent >= 0:
            self._drip.left += 1
            self._ended()


@asynccontextmanager
async def dripping(chunks: int, pace_s: float) -> AsyncIterator[Drip]:
    """The engine on a free port."""
    drip = Drip(chunks, pace_s)
    server = await asyncio.get_running_loop().create_server(lambda: _Stream(drip), "127.0.0.1", 0, backlog=4096)
    drip.port = server.sockets[0].getsockname()[1]
    try:
        yield drip
    finally:
        server.close()
