"""Engine link over a unix stream socket: frames, errors and the client (messages: kvc.engine.link; server: kvc.engine.link_serve).

A frame is a 4-byte little-endian length and that many bytes of msgpack. Both ends bound the length, so a broken peer costs a closed
connection and never memory.

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
from typing import TYPE_CHECKING, Any

import msgspec

from kvc.engine import link
from kvc.runtime.asking import answer_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

HEADER_BYTES = 4
EVENT_BACKLOG = 100_000

_encoder = msgspec.msgpack.Encoder()
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


class Asked:
    """A request without its reply."""

    __slots__ = ("_calls", "answered", "number", "timer")

    def __init__(self, calls: dict[int, Asked], number: int, answered: Callable[[Any], None], timer: asyncio.TimerHandle) -> None:
        """Is in `calls` until there is an answer."""
        self._calls = calls
        self.number = number
        self.answered = answered
        self.timer = timer

    def cancel(self) -> None:
        """The reply is dropped when it comes. Idempotent."""
        if self._calls.pop(self.number, None) is not None:
            self.timer.cancel()


class LinkClient:
    """One connection to an engine. Reconnecting is the caller's: a client is not reusable after `LinkError`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `connect`."""
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, Asked] = {}
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

    def ask(self, body: link.RequestBody, answered: Callable[[Any], None], timeout_s: float = 5.0) -> Asked | None:
        """Sends one request.

        Args:
            body: the request.
            answered: called exactly once, possibly before this returns: with the reply's body, or with the LinkError that `call` raises.
            timeout_s: longest wait, seconds; the connection stays usable after it.

        Returns:
            The request; None when it is answered already.
        """
        if self._ended is not None:
            answered(type(self._ended)(str(self._ended)))
            return None
        frame = encode(link.Request(self._last_call + 1, body))
        self._last_call += 1
        number = self._last_call
        timer = asyncio.get_running_loop().call_later(timeout_s, self._late, number, type(body).__name__, timeout_s)
        asked = self._calls[number] = Asked(self._calls, number, answered, timer)
        self._writer.write(frame)
        return asked

    async def call(self, body: link.RequestBody, timeout_s: float = 5.0) -> Any:
        """Sends one request and waits for its reply.

        Raises:
            CallFailed: the engine refused to answer.
            LinkTimeout: no reply within `timeout_s`; the connection stays usable.
            LinkError: the connection is gone.
        """
        return await answer_of(lambda answered: self.ask(body, answered, timeout_s))

    def _late(self, number: int, name: str, timeout_s: float) -> None:
        self._calls.pop(number).answered(LinkTimeout(f"no answer to {name} within {timeout_s} s"))

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
        asked = self._calls.pop(message.call, None)
        if asked is None:
            return
        asked.timer.cancel()
        body = message.body
        self._answer(asked, CallFailed(body.code, body.message, body.field) if isinstance(body, link.Failed) else body)

    def _answer(self, asked: Asked, reply: link.ReplyBody | LinkError) -> None:
        """A fault of whoever asked is theirs: the connection and the other requests go on."""
        try:
            asked.answered(reply)
        except Exception as error:  # noqa: BLE001 - see above
            context = {"message": "a fault while a reply was taken", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _end(self, error: LinkError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        calls = list(self._calls.values())
        self._calls.clear()
        for asked in calls:
            asked.timer.cancel()
            self._answer(asked, type(error)(str(error)))
        self._events.put_nowait(None)
