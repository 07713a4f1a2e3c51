"""The serving end of the engine link: one engine on a unix socket, for any number of clients.

Calls of one client are answered in order. A client that breaks the protocol costs its own connection and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvc.engine import link
from kvc.engine.convert import error_to_link
from kvc.engine.link_io import FrameMalformed, FrameTooLarge, FrameTruncated, LinkClosed, LinkError, encode, read_frame
from kvc.errors import AlreadyExists, Internal, InvalidField, KvcError, Precondition

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PATH_BYTES = 107
WRITE_BACKLOG_BYTES = 256 * 1024 * 1024

_logger = logging.getLogger(__name__)
_requests = msgspec.msgpack.Decoder(link.Request)


class LinkHandler(Protocol):
    """What a server needs of an engine."""

    async def handle(self, body: link.RequestBody) -> link.ReplyBody:
        """Answers one request other than Subscribe; a KvcError becomes `Failed`."""
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
            peer.send(encode(link.Reply(0, error_to_link(InvalidField(str(error))))))
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
            peer.send(encode(link.Reply(call, error_to_link(InvalidField(str(error), field=_field_of(str(error)))))))
            return
        try:
            reply = await self._reply(peer, request.body)
        except KvcError as error:
            reply = error_to_link(error)
        except Exception:
            _logger.exception("link call %s failed", type(request.body).__name__)
            reply = error_to_link(Internal(f"{type(request.body).__name__} failed inside the engine"))
        peer.send(encode(link.Reply(request.call, reply)))
        if isinstance(reply, link.Subscribed):
            for part in self._handler.snapshot():
                peer.send(encode(link.Event(part)))
            peer.subscribed = True

    async def _reply(self, peer: _Peer, body: link.RequestBody) -> link.ReplyBody:
        if isinstance(body, link.Hello):
            if body.version != link.LINK_VERSION:
                raise Precondition(f"link version {body.version}, this engine speaks {link.LINK_VERSION}", field="version")
            peer.greeted = True
        elif not peer.greeted:
            raise Precondition("the first message of a connection is Hello")
        if isinstance(body, link.Subscribe):
            if peer.subscribed:
                raise AlreadyExists("this connection has subscribed")
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
