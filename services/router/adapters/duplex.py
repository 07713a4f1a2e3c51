"""One bidirectional gRPC call on a connection of its own, spoken by the event loop itself: HTTP/2 for exactly one stream.

    connecting   preface, settings and the call's headers are sent; the peer has said nothing yet
    open         the peer has sent its settings: messages may be sent
    over         `ended` has been called with why; nothing more happens

A message there and back through gRPC's core crosses two threads; here it is one write and one read, and costs about 0.6 of the CPU time
(docs/dependencies.md has the numbers). What makes it short: one call a connection, so there are no streams to keep apart; the headers
that are sent are literal, and of those that come all that matters is whether they end the call.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 5, 6, 7, 8
ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
ENABLE_PUSH: Final = 2
INITIAL_WINDOW_SIZE: Final = 4
CANCEL: Final = 8
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ALPN: Final = "h2"
CALL: Final = 1
"""The only stream there is."""
FRAME_BYTES: Final = 16_384
"""Longest payload of a frame: HTTP/2's default, which every peer takes and this end never raises."""
DEFAULT_WINDOW: Final = 65_535
MAX_WINDOW: Final = 2**31 - 1
WINDOW: Final = 4 << 20
"""Bytes that the peer may send before it is told that they were taken."""
IDLE_S = 5.0
PONG_S = 3.0

_head = struct.Struct(">HBBBI")
_setting = struct.Struct(">HI")
_number = struct.Struct(">I")
_prefix = struct.Struct(">BI")


class Broken(Exception):  # noqa: N818 - says what happened to the call
    """The call is over: the peer ended it, or does not keep to the protocol."""


class Duplex(asyncio.Protocol):
    """A call. Not reusable."""

    def __init__(
        self,
        headers: Sequence[tuple[str, str]],
        received: Callable[[bytes], None],
        drained: Callable[[], None],
        ended: Callable[[str], None],
        max_message_bytes: int,
    ) -> None:
        """Use `connect`.

        Args:
            headers: of the call, pseudo headers first; lower-case ASCII.
            received: takes each message.
            drained: called when the call is writable again.
            ended: called once, with why, when the call is over.
            max_message_bytes: longest message that is taken, bytes.
        """
        self._headers = headers
        self._received = received
        self._drained = drained
        self._ended = ended
        self._max_message_bytes = max_message_bytes
        self._takers: dict[int, Callable[[int, int, bytes], None]] = {
            DATA: self._take_data,
            HEADERS: self._take_headers,
            RST_STREAM: self._take_reset,
            SETTINGS: self._take_settings,
            PUSH_PROMISE: self._take_push,
            PING: self._take_ping,
            GOAWAY: self._take_goaway,
            WINDOW_UPDATE: self._take_room,
        }
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._paused = False
        self._connection_window = DEFAULT_WINDOW
        self._call_window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._taken = 0
        self._heard = False
        self._pinged = False
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self.open: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(
        cls,
        target: str,
        path: str,
        metadata: Sequence[tuple[str, str]],
        received: Callable[[bytes], None],
        drained: Callable[[], None],
        ended: Callable[[str], None],
        *,
        tls: ssl.SSLContext | None,
        max_message_bytes: int,
        timeout_s: float,
    ) -> Duplex:
        """Connects, begins the call and waits until the peer speaks.

        Args:
            target: host:port.
            path: /package.Service/Method.
            metadata: more headers; lower-case ASCII.
            received: takes each message.
            drained: called when the call is writable again.
            ended: called once, with why, when the call is over; also when it never opened, once there was a connection.
            tls: context that offers `ALPN`; None: no TLS.
            max_message_bytes: longest message that is taken, bytes.
            timeout_s: longest wait, seconds.

        Raises:
            OSError: nobody listens there, or TLS failed.
            TimeoutError: the peer is silent.
            Broken: the peer does not speak HTTP/2.
        """
        host, _, port = target.rpartition(":")
        scheme = "http" if tls is None else "https"
        headers = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", target), ("te", "trailers")]
        headers += [("content-type", "application/grpc"), *metadata]
        async with asyncio.timeout(timeout_s):
            _, call = await asyncio.get_running_loop().create_connection(
                lambda: cls(headers, received, drained, ended, max_message_bytes), host.strip("[]"), int(port), ssl=tls
            )
            try:
                await call.open
            except BaseException:
                call.close()
                raise
        return call

    @property
    def writable(self) -> bool:
        """True when nothing waits for room at the peer's end."""
        return not (self._outgoing or self._paused)

    def send(self, message: bytes) -> None:
        """Sends one message; what the peer has no room for waits. Mutates."""
        if not self._over:
            self._outgoing += _prefix.pack(0, len(message))
            self._outgoing += message
            self._pump()

    def close(self) -> None:
        """Cancels the call. Idempotent. Mutates."""
        if not self._over:
            self._write(_frame(RST_STREAM, 0, CALL, _number.pack(CANCEL)))
            self._end("closed")

    # --- the event loop's side ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Says everything that needs no answer."""
        self._transport = cast("asyncio.Transport", transport)
        secure = transport.get_extra_info("ssl_object")
        if secure is not None and secure.selected_alpn_protocol() != ALPN:
            self._end("the peer does not speak HTTP/2")
            return
        settings = _setting.pack(ENABLE_PUSH, 0) + _setting.pack(INITIAL_WINDOW_SIZE, WINDOW)
        self._write(
            PREFACE
            + _frame(SETTINGS, 0, 0, settings)
            + _frame(WINDOW_UPDATE, 0, 0, _number.pack(WINDOW - DEFAULT_WINDOW))
            + _frame(HEADERS, END_HEADERS, CALL, _literal(self._headers))
        )
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._watch)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        self._end("the peer closed the connection" if error is None else f"connection lost: {error}")

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._paused = True

    def resume_writing(self) -> None:
        """It has room again."""
        self._paused = False
        self._pump()
        if self.writable and not self._over:
            self._drained()

    def data_received(self, data: bytes) -> None:
        """Takes whole frames, and keeps what is left of the last."""
        self._heard = True
        if self._unread:
            data = self._unread + data
        try:
            self._unread = self._take_frames(data)
        except Broken as error:
            self._end(str(error))

    # --- inside -------------------------------------------------------------------------------------------------------------------

    def _take_frames(self, data: bytes) -> bytes:
        """Takes whole frames. Returns what is left; raises Broken."""
        at, size, takers = 0, len(data), self._takers
        while size - at >= _head.size and not self._over:
            high, low, kind, flags, stream = _head.unpack_from(data, at)
            length = high << 8 | low
            if length > FRAME_BYTES:
                raise Broken(f"a frame of {length} bytes")
            begin = at + _head.size
            if begin + length > size:
                break
            at = begin + length
            taker = takers.get(kind)
            if taker is not None:  # what this end does not know, it may ignore
                taker(flags, stream & MAX_WINDOW, data[begin:at])
        return data[at:]

    def _take_headers(self, flags: int, _stream: int, _payload: bytes) -> None:
        if flags & END_STREAM:
            raise Broken("the peer ended the call")

    def _take_reset(self, _flags: int, _stream: int, _payload: bytes) -> None:
        raise Broken("the peer reset the call")

    def _take_push(self, _flags: int, _stream: int, _payload: bytes) -> None:
        raise Broken("a push, which was not allowed")

    def _take_ping(self, flags: int, _stream: int, payload: bytes) -> None:
        if not flags & ACK:
            self._write(_frame(PING, ACK, 0, payload))

    def _take_goaway(self, _flags: int, _stream: int, payload: bytes) -> None:
        if _first(payload) & MAX_WINDOW < CALL:
            raise Broken("the peer takes no calls")

    def _take_data(self, flags: int, _stream: int, payload: bytes) -> None:
        self._taken += len(payload)
        if flags & PADDED:
            if not payload or payload[0] >= len(payload):
                raise Broken("more padding than data")
            payload = payload[1 : len(payload) - payload[0]]
        self._incoming += payload
        self._take_messages()
        if flags & END_STREAM:
            raise Broken("the peer ended the call")
        if self._taken >= WINDOW // 4:
            taken, self._taken = _number.pack(self._taken), 0
            self._write(_frame(WINDOW_UPDATE, 0, 0, taken) + _frame(WINDOW_UPDATE, 0, CALL, taken))

    def _take_messages(self) -> None:
        incoming, at = self._incoming, 0
        while len(incoming) - at >= _prefix.size and not self._over:
            compressed, length = _prefix.unpack_from(incoming, at)
            if compressed:
                raise Broken("a compressed message")
            if length > self._max_message_bytes:
                raise Broken(f"a message of {length} bytes")
            begin = at + _prefix.size
            if begin + length > len(incoming):
                break
            at = begin + length
            self._received(bytes(incoming[begin:at]))
        del incoming[:at]

    def _take_settings(self, flags: int, _stream: int, payload: bytes) -> None:
        if flags & ACK:
            return
        if len(payload) % _setting.size:
            raise Broken("settings cut short")
        for name, value in _setting.iter_unpack(payload):
            if name == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Broken("a window beyond all bounds")
                self._call_window += value - self._initial_window
                self._initial_window = value
        self._write(_frame(SETTINGS, ACK, 0))
        if not self.open.done():
            self.open.set_result(None)
        self._pump_on()

    def _take_room(self, _flags: int, stream: int, payload: bytes) -> None:
        by = _first(payload) & MAX_WINDOW
        if stream == 0:
            self._connection_window += by
        elif stream == CALL:
            self._call_window += by
        if max(self._connection_window, self._call_window) > MAX_WINDOW:
            raise Broken("a window beyond all bounds")
        self._pump_on()

    def _pump_on(self) -> None:
        """There may be room again."""
        waited = not self.writable
        self._pump()
        if waited and self.writable and not self._over:
            self._drained()

    def _pump(self) -> None:
        """Sends what the peer has room for."""
        outgoing = self._outgoing
        while outgoing and not self._paused and not self._over:
            room = min(self._connection_window, self._call_window, FRAME_BYTES, len(outgoing))
            if room <= 0:
                return
            self._connection_window -= room
            self._call_window -= room
            self._write(_frame(DATA, 0, CALL, bytes(outgoing[:room])))
            del outgoing[:room]

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._over:
            self._transport.write(data)

    def _watch(self) -> None:
        """Pings a peer that says nothing; one that goes on saying nothing is gone."""
        if self._pinged and not self._heard:
            self._end("the peer is silent")
            return
        self._pinged, self._heard = not self._heard, False
        if self._pinged:
            self._write(_frame(PING, 0, 0, bytes(8)))
        self._timer = asyncio.get_running_loop().call_later(PONG_S if self._pinged else IDLE_S, self._watch)

    def _end(self, why: str) -> None:
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()
        self._outgoing.clear()
        if not self.open.done():
            self.open.set_exception(Broken(why))
        self._ended(why)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _head.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def _first(payload: bytes) -> int:
    """The number that a frame begins with."""
    if len(payload) < _number.size:
        raise Broken("a frame cut short")
    number: int = _number.unpack_from(payload)[0]
    return number


def _literal(headers: Sequence[tuple[str, str]]) -> bytes:
    """Headers as literals that are not indexed, without Huffman codes."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    """Text led by its length: seven bits, and if they are all set, the rest in groups of seven, lowest first."""
    raw = text.encode("ascii")
    size = len(raw)
    if size < 127:  # noqa: PLR2004 - seven bits
        return bytes([size]) + raw
    out, size = bytearray([127]), size - 127
    while size > 127:  # noqa: PLR2004 - seven bits
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + raw
