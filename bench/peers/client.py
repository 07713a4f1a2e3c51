"""An HTTP client for load: one request in flight a connection, replies timed and counted, nothing else."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final, cast

from bench.peers.framing import payload

_BLANK: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\n0\r\n\r\n"
_EVENT: Final = b"data: {"
_KEPT: Final = len(_EVENT) - 1  # shorter than an event's mark, so that none is counted twice
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)")
_CONTINUE: Final = 100


class Reply:
    """One reply. Times by `perf_counter`, seconds."""

    __slots__ = ("chunked", "chunks", "ended_s", "first_s", "parts", "reads", "sent_s", "size", "status")

    def __init__(self) -> None:
        """Nothing came yet."""
        self.status = 0
        self.chunked = True
        self.chunks = 0
        self.reads = 0
        self.size = 0
        self.sent_s = self.first_s = self.ended_s = 0.0
        self.parts: list[bytes] = []

    def recount(self) -> None:
        """Counts events again without the framing, which may have cut some of them.

        Raises:
            FramingError: the body is no chunked body.
        """
        self.chunks = payload(b"".join(self.parts)).count(_EVENT)


class Connection(asyncio.Protocol):
    """A connection that is kept alive."""

    def __init__(self) -> None:
        """Not connected."""
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._reply = Reply()
        self._head = b""
        self._length = -1
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remembers the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        """Fails the request in flight."""
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError("closed by the peer"))

    def close(self) -> None:
        """Drops the connection."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def ask(self, request: bytes) -> asyncio.Future[Reply]:
        """Sends a request; the reply comes when it is whole."""
        assert self._transport is not None, "connected"
        self._reply = reply = Reply()
        self._head, self._length, self._tail = b"", -1, b""
        self._waiter = asyncio.get_running_loop().create_future()
        reply.sent_s = time.perf_counter()
        self._transport.write(request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        """Counts, and finds the end."""
        reply = self._reply
        while not reply.status:
            self._head += data
            end = self._head.find(_BLANK)
            if end < 0:
                return
            head, data, self._head = self._head[: end + 2], self._head[end + 4 :], b""
            status = int(head[9:12])
            if status == _CONTINUE:
                if not data:
                    return
                continue
            reply.status = status
            length = _LENGTH.search(head)
            if length is not None:
                self._length, reply.chunked = int(length[1]), False
            if not data and self._length != 0:
                return
        self._body(reply, data)

    def _body(self, reply: Reply, data: bytes) -> None:
        if not reply.first_s:
            reply.first_s = time.perf_counter()
        reply.reads += 1
        reply.size += len(data)
        reply.parts.append(data)
        seen = self._tail + data
        reply.chunks += seen.count(_EVENT)
        self._tail = seen[-_KEPT:]
        if self._tail.endswith(_LAST_CHUNK) if reply.chunked else reply.size >= self._length:
            reply.ended_s = time.perf_counter()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(reply)


async def connect(port: int) -> Connection:
    """A new connection to 127.0.0.1."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection
