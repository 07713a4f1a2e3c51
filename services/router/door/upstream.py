"""Connections to engines: kept alive, reused, one exchange at a time. Callbacks, no tasks: a reply costs its bytes and little else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

from services.router.door.framing import Body, FramingError, Head
from services.router.engines import KEEP_ALIVE_S, OUT_OF_FILES, out_of_files

if TYPE_CHECKING:
    from collections.abc import Callable, Container

MAX_HEAD_BYTES = 65_536
MAX_HEADS_CACHED = 1024
_END_OF_HEAD = b"\r\n\r\n"
_OK = 200

Connected: TypeAlias = "Callable[[Connection | None, str, bool], None]"
"""Called with a connection; or with None, what was wrong, and whether that says the engine is gone."""


class Reply(Protocol):
    """Who gets a reply. All calls come from the event loop, in this order: head, data*, then end or lost."""

    def reply_head(self, head: Head, rest: bytes) -> None:
        """The head came, and `rest`: what of the body came with it."""
        ...

    def reply_data(self, data: bytes) -> None:
        """A part of the body, framing included."""
        ...

    def reply_end(self) -> None:
        """The reply is complete; the connection has been given back."""
        ...

    def reply_lost(self, problem: str, *, gone: bool) -> None:
        """No more will come. `gone`: the connection was refused or broke."""
        ...


class Heads:
    """Parsed heads by their bytes: engines send the same few heads again and again."""

    def __init__(self) -> None:
        """Starts empty."""
        self._known: dict[bytes, Head] = {}

    def parse(self, raw: bytes) -> Head:
        """The head.

        Raises:
            FramingError: it is malformed.
        """
        head = self._known.get(raw)
        if head is None:
            head = Head(raw)
            if len(self._known) >= MAX_HEADS_CACHED:
                self._known.clear()
            self._known[raw] = head
        return head


class Connection(asyncio.Protocol):
    """One connection to an engine. `reply` is set while an exchange runs on it."""

    def __init__(self, pool: Pool, heads: Heads) -> None:
        """Not connected yet."""
        self._pool = pool
        self._heads = heads
        self.transport: asyncio.Transport | None = None
        self.used = False
        self.idle_since_s = 0.0
        self._reply: Reply | None = None
        self._is_head = False
        self._buffer = b""
        self._head: Head | None = None
        self._body: Body | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is up."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    @property
    def silent(self) -> bool:
        """True while nothing of the exchange's reply has come."""
        return self._body is None and not self._buffer

    def send(self, request: bytes, reply: Reply, *, is_head_request: bool = False) -> None:
        """Starts an exchange."""
        self._reply, self._is_head = reply, is_head_request
        self._buffer, self._head, self._body = b"", None, None
        if self.transport is not None:
            self.transport.write(request)

    def abort(self) -> None:
        """Ends the exchange by closing the connection; the engine aborts the request. No callback follows."""
        self._reply = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """Back-pressure: reads no more."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Reads on."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Bytes of a reply."""
        reply = self._reply
        if reply is None:
            self.abort()  # an engine that speaks out of turn cannot be understood any further
            return
        try:
            if self._body is None:
                self._take_head(data, reply)
            else:
                self._take_body(data, reply)
        except FramingError as error:
            self._fail(str(error), gone=False)

    def _take_head(self, data: bytes, reply: Reply) -> None:
        buffer = self._buffer + data if self._buffer else data
        while True:
            end = buffer.find(_END_OF_HEAD)
            if end < 0:
                if len(buffer) > MAX_HEAD_BYTES:
                    raise FramingError("the reply's head is too long")
                self._buffer = buffer
                return
            end += 4
            head = self._heads.parse(buffer[:end])
            buffer = buffer[end:]
            if head.status >= _OK:
                break
            # Interim replies are between us and the engine.
        self._buffer = b""
        self._head = head
        body = self._body = Body(head, is_head_request=self._is_head)
        if buffer and body.feed(buffer) < len(buffer):
            raise FramingError("bytes after the end of the reply")
        reply.reply_head(head, buffer)
        if body.done:
            self._finish()

    def _take_body(self, data: bytes, reply: Reply) -> None:
        body = self._body
        assert body is not None
        if body.feed(data) < len(data):
            raise FramingError("bytes after the end of the reply")
        reply.reply_data(data)
        if body.done:
            self._finish()

    def _finish(self) -> None:
        reply, self._reply = self._reply, None
        if reply is None:
            return
        transport = self.transport
        assert self._head is not None and transport is not None  # noqa: PT018
        if transport.is_closing() or transport.get_write_buffer_size():
            transport.abort()  # an engine that answered before it has read the whole request: the next one must not follow the rest
        elif self._head.keep_alive:
            transport.resume_reading()
            self._pool.give_back(self)
        else:
            transport.close()
        reply.reply_end()

    def eof_received(self) -> bool:
        """The engine closed its side."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._pool.lost(self)
        if self._reply is not None and self._body is not None and self._head is not None and self._head.until_close and exc is None:
            reply, self._reply = self._reply, None
            reply.reply_end()
            return
        self._fail(str(exc) if exc else "the engine closed the connection", gone=True)

    def _fail(self, problem: str, *, gone: bool) -> None:
        reply, self._reply = self._reply, None
        if self.transport is not None:
            self.transport.abort()
        if reply is not None:
            reply.reply_lost(problem, gone=gone)


class Pool:
    """Idle connections to one engine, and the making of new ones."""

    def __init__(self, url: str, heads: Heads, connect_timeout_s: float, most_idle: int) -> None:
        """Connects to nothing yet.

        Args:
            url: base URL of the engine.
            heads: shared cache of heads.
            connect_timeout_s: longest wait for a connection.
            most_idle: idle connections kept.
        """
        parts = urlsplit(url)
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self.host_header = parts.netloc.rpartition("@")[2].encode()
        self.prefix = parts.path.rstrip("/").encode()
        self._heads = heads
        self._timeout_s = connect_timeout_s
        self._most_idle = most_idle
        self._idle: list[Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()

    def take(self) -> Connection | None:
        """An idle connection."""
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            if time.monotonic() - connection.idle_since_s < KEEP_ALIVE_S:
                return connection
            transport.close()
        return None

    def connect(self, use: Connected) -> None:
        """Makes a connection, then calls `use`."""
        task = asyncio.get_running_loop().create_task(self._connect(use))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, use: Connected) -> None:
        connection = Connection(self, self._heads)
        tls = True if self._tls else None
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: connection, self._host, self._port, ssl=tls)
        except (OSError, UnicodeError) as error:
            if isinstance(error, OSError) and out_of_files(error):
                use(None, OUT_OF_FILES, False)  # noqa: FBT003 - by Connected
            else:
                use(None, str(error) or type(error).__name__, True)  # noqa: FBT003 - by Connected
            return
        use(connection, "", False)  # noqa: FBT003 - by Connected

    def give_back(self, connection: Connection) -> None:
        """A connection whose exchange is over."""
        connection.used = True
        connection.idle_since_s = time.monotonic()
        if len(self._idle) < self._most_idle:
            self._idle.append(connection)
        elif connection.transport is not None:
            connection.transport.close()

    def lost(self, connection: Connection) -> None:
        """A connection that is gone."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Closes idle connections and gives up those being made."""
        for task in self._connecting:
            task.cancel()
        self.close_idle()

    def close_idle(self) -> None:
        """Closes idle connections."""
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle = []


class Upstreams:
    """Pools by engine URL."""

    def __init__(self, connect_timeout_s: float, most_idle: int) -> None:
        """Opens nothing yet."""
        self._timeout_s = connect_timeout_s
        self._most_idle = most_idle
        self._heads = Heads()
        self._pools: dict[str, Pool] = {}

    def pool(self, url: str) -> Pool:
        """The pool of an engine."""
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = Pool(url, self._heads, self._timeout_s, self._most_idle)
        return pool

    def __len__(self) -> int:
        """Engines that connections were made to."""
        return len(self._pools)

    def keep_only(self, urls: Container[str]) -> None:
        """Forgets the engines that are at none of these URLs any more; exchanges with them end as they may."""
        for url in [url for url in self._pools if url not in urls]:
            self._pools.pop(url).close_idle()

    def close(self) -> None:
        """Closes everything that is idle, and gives up connections that are being made."""
        for pool in self._pools.values():
            pool.close()
