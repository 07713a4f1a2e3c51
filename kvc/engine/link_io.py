"""Engine link over a unix stream socket: frames, a client and a server (messages: kvc.engine.link).

A frame is a 4-byte little-endian length and that many bytes of msgpack. Both ends bound the length, so a broken peer costs a closed
connection and never memory. One server serves several clients at once; calls of one client are answered in order.

Errors:
    LinkError
    ├── LinkClosed         the peer closed between two frames
    ├── FrameTruncated     the peer closed inside a frame
    ├── FrameTooLarge      a length above the limit
    ├── FrameMalformed     bytes that are no message
    ├── LinkTimeout        no answer in time
    └── CallFailed         the engine answered `Failed`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvc.engine import link

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

HEADER_BYTES = 4
MAX_PATH_BYTES = 107
EVENT_BACKLOG = 100_000
WRITE_BACKLOG_BYTES = 256 * 1024 * 1024

_logger = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(link.Request)
_from_engine = msgspec.msgpack.Decoder(link.FromEngine)


class LinkError(Exception):
    """The link to an engine failed."""


class LinkClosed(LinkError):  # noqa: N818 - names what happened, as the standard library does
    """The peer closed the connection between two frames."""


class FrameTruncated(LinkError):  # noqa: N818 - names what happened, as the standard library does
    """The peer closed the connection inside a frame."""


class FrameTooLarge(LinkError):  # noqa: N818 - names what happened, as the standard library does
    """A frame announces more bytes than allowed."""


class FrameMalformed(LinkError):  # noqa: N818 - names what happened, as the standard library does
    """A frame holds no message of the protocol."""


class LinkTimeout(LinkError):  # noqa: N818 - names what happened, as the standard library does
    """The engine did not answer in time."""


class CallFailed(LinkError):  # noqa: N818 - names what happened, as the standard library does
    """The engine answered `Failed`.

    Attributes:
        code: a gRPC status name.
        field: the field at fault, or empty.
    """

    def __init__(self, code: str, message: str, field: str = "") -> None:
        """Keeps the typed parts of the answer."""
        super().__init__(message)
        self.code = code
        self.field = field


def encode(message: msgspec.Struct) -> bytes:
    """One frame.

    Raises:
        FrameTooLarge: the message exceeds MAX_FRAME_BYTES.
    """
    body = _encoder.encode(message)
    if len(body) > link.MAX_FRAME_BYTES:
        raise FrameTooLarge(f"frame of {len(body)} bytes, at most {link.MAX_FRAME_BYTES} allowed")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = link.MAX_FRAME_BYTES) -> bytes:
    """The body of the next frame.

    Raises:
        LinkClosed: end of stream between frames, or the connection was reset.
        FrameTruncated: end of stream inside a frame.
        FrameTooLarge: the announced length is above `max_bytes`.
    """
    try:
        header = await reader.readexactly(HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FrameTruncated(f"stream ended after {len(error.partial)} of {HEADER_BYTES} header bytes") from error
        raise LinkClosed("peer closed the connection") from error
    except OSError as error:
        raise LinkClosed(f"connection lost: {error}") from error
    size = int.from_bytes(header, "little")
    if size > max_bytes:
        raise FrameTooLarge(f"frame of {size} bytes, at most {max_bytes} allowed")
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise FrameTruncated(f"stream ended after {len(error.partial)} of {size} frame bytes") from error
    except OSError as error:
        raise LinkClosed(f"connection lost: {error}") from error


class LinkClient:
    """One connection to an engine. Reconnecting is the caller's: a client is not reusable after `LinkError`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `connect`."""
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._events: asyncio.Queue[link.Snapshot | link.Delta | None] = asyncio.Queue()
        self._ended: LinkError | None = None
        self._pump = asyncio.create_task(self._read(), name="link-client")
        self.welcome: link.Welcome

    @classmethod
    async def connect(cls, path: str | Path, timeout_s: float = 5.0) -> LinkClient:
        """Connects and exchanges Hello and Welcome.

        Raises:
            LinkClosed: nobody listens on `path`.
            LinkTimeout: no Welcome in time.
            CallFailed: the engine speaks another version.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(str(path))
        except TimeoutError as error:
            raise LinkTimeout(f"no connection to {path} within {timeout_s} s") from error
        except OSError as error:
            raise LinkClosed(f"cannot connect to {path}: {error}") from error
        client = cls(reader, writer)
        try:
            client.welcome = await client.call(link.Hello(), timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def call(self, body: link.RequestBody, timeout_s: float = 5.0) -> Any:
        """Sends one request and waits for its reply.

        Raises:
            CallFailed: the engine refused to answer.
            LinkTimeout: no reply within `timeout_s`; the connection stays usable.
            LinkError: the connection is gone.
        """
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        self._last_call += 1
        call = self._last_call
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._writer.write(encode(link.Request(call, body)))
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError as error:
            raise LinkTimeout(f"no answer to {type(body).__name__} within {timeout_s} s") from error
        finally:
            self._calls.pop(call, None)
        if isinstance(reply, link.Failed):
            raise CallFailed(reply.code, reply.message, reply.field)
        return reply

    async def events(self, timeout_s: float = 5.0) -> AsyncIterator[link.Snapshot | link.Delta]:
        """Subscribes and yields the snapshot and then deltas for ever.

        Raises:
            LinkError: the connection is gone; events may have been lost, so subscribe anew.
        """
        await self.call(link.Subscribe(), timeout_s)
        while True:
            event = await self._events.get()
            if event is None:
                error = self._ended or LinkClosed("closed")
                raise type(error)(str(error))
            yield event

    async def close(self) -> None:
        """Closes the connection. Idempotent; calls in flight fail with LinkClosed."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._end(LinkClosed("closed"))
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                frame = await read_frame(self._reader)
                try:
                    message = _from_engine.decode(frame)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise FrameMalformed(f"malformed frame: {error}") from error
                self._take(message)
        except LinkError as error:
            self._end(error)
            self._writer.close()

    def _take(self, message: link.Reply | link.Event) -> None:
        if isinstance(message, link.Event):
            if self._events.qsize() >= EVENT_BACKLOG:
                raise LinkClosed("too many unread events")
            self._events.put_nowait(message.body)
            return
        if message.call == 0 and isinstance(message.body, link.Failed):
            raise FrameMalformed(message.body.message)
        future = self._calls.get(message.call)
        if future is not None and not future.done():
            future.set_result(message.body)

    def _end(self, error: LinkError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        for future in self._calls.values():
            if not future.done():
                future.set_exception(type(error)(str(error)))
        self._events.put_nowait(None)


class LinkHandler(Protocol):
    """What a server needs of an engine."""

    async def handle(self, body: link.RequestBody) -> link.ReplyBody:
        """Answers one request other than Subscribe; raises CallFailed for a typed failure."""
        ...

    def snapshot(self) -> Iterable[link.Snapshot]:
        """What is resident now, in one or more parts; no delta is published while it is consumed."""
        ...


class _Peer:
    """One client of a server."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.greeted = False
        self.subscribed = False

    def send(self, frame: bytes) -> None:
        """Queues a frame; a client that does not read is cut off, for it can resynchronise."""
        transport = self.writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > WRITE_BACKLOG_BYTES:
            _logger.warning("link client does not read, closing")
            transport.abort()
            return
        self.writer.write(frame)


class LinkServer:
    """Serves one engine on a unix socket."""

    def __init__(self, handler: LinkHandler) -> None:
        """Keeps the engine; `start` listens."""
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._peers: set[_Peer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._path: Path | None = None

    @property
    def subscribers(self) -> int:
        """Clients that follow residency."""
        return sum(peer.subscribed for peer in self._peers)

    async def start(self, path: str | Path) -> None:
        """Listens on `path`, readable by the owner only; a dead server's socket file is replaced.

        Raises:
            LinkError: the path is too long, in use, or not a socket.
        """
        path = Path(path)
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise LinkError(f"socket path of {len(os.fsencode(path))} bytes, at most {MAX_PATH_BYTES} possible: {path}")
        _remove_dead_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener)
        except OSError as error:
            listener.close()
            raise LinkError(f"cannot listen on {path}: {error}") from error
        self._path = path

    def publish(self, delta: link.Delta) -> None:
        """Sends a delta to every subscriber."""
        subscribers = [peer for peer in self._peers if peer.subscribed]
        if subscribers:
            frame = encode(link.Event(delta))
            for peer in subscribers:
                peer.send(frame)

    async def stop(self) -> None:
        """Closes the socket and every connection, and removes the socket file."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="link-peer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(writer)
        self._peers.add(peer)
        try:
            while True:
                await self._answer(peer, await read_frame(reader))
                await writer.drain()
        except LinkClosed:
            pass
        except (FrameTruncated, FrameTooLarge, FrameMalformed) as error:
            _logger.warning("link client dropped: %s", error)
            peer.send(encode(link.Reply(0, link.Failed("INVALID_ARGUMENT", str(error)))))
        except OSError as error:
            _logger.info("link client lost: %s", error)
        finally:
            self._peers.discard(peer)
            writer.close()

    async def _answer(self, peer: _Peer, frame: bytes) -> None:
        try:
            request = _requests.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            call = _call_number(frame)
            if call is None:
                raise FrameMalformed(f"malformed frame: {error}") from error
            peer.send(encode(link.Reply(call, link.Failed("INVALID_ARGUMENT", str(error), _field_of(str(error))))))
            return
        try:
            reply = await self._reply(peer, request.body)
        except CallFailed as error:
            reply = link.Failed(error.code, str(error), error.field)
        except Exception:
            _logger.exception("link call %s failed", type(request.body).__name__)
            reply = link.Failed("INTERNAL", f"{type(request.body).__name__} failed inside the engine")
        peer.send(encode(link.Reply(request.call, reply)))
        if isinstance(reply, link.Subscribed):
            for part in self._handler.snapshot():
                peer.send(encode(link.Event(part)))
            peer.subscribed = True

    async def _reply(self, peer: _Peer, body: link.RequestBody) -> link.ReplyBody:
        if isinstance(body, link.Hello):
            if body.version != link.LINK_VERSION:
                raise CallFailed("FAILED_PRECONDITION", f"link version {body.version}, this engine speaks {link.LINK_VERSION}", "version")
            peer.greeted = True
        elif not peer.greeted:
            raise CallFailed("FAILED_PRECONDITION", "the first message of a connection is Hello")
        if isinstance(body, link.Subscribe):
            if peer.subscribed:
                raise CallFailed("ALREADY_EXISTS", "this connection has subscribed")
            return link.Subscribed()
        return await self._handler.handle(body)


class _CallOnly(msgspec.Struct):
    """Enough of a request to answer it with an error."""

    call: int


def _call_number(frame: bytes) -> int | None:
    try:
        return msgspec.msgpack.decode(frame, type=_CallOnly).call
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _field_of(message: str) -> str:
    """The field path that msgspec puts at the end of its message: "... - at `$.body.input_tokens`"."""
    _, found, path = message.rpartition("`$")
    return path.rstrip("`").lstrip(".").removeprefix("body.") if found else ""


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise LinkError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            raise LinkError(f"{path} is served by another process")
