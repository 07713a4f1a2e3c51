"""A client's connection: strict HTTP/1.1 in, spliced bytes out.

One request at a time is worked on; what a client sends beyond it waits in order, and reading stops when too much waits. Every limit has
its status: 408 for a request that does not come to its end in time, 413 and 431 for one that is too large, 400 for one that is no HTTP.
A request that is refused ends the connection, after the replies to those before it.

A client that closes its side is gone: what an engine does for it is aborted, whether it closed all of the connection or only its sending
half, because the two look alike and an engine's time is dear. What the door answers itself still reaches a client that closed its half.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from services.router.door.answers import UNAUTHORIZED, error_of, head_of, refusal_of
from services.router.door.framing import Body
from services.router.door.parser import HttpRefusedError, RequestParser
from services.router.door.spans import traceparent_of
from services.router.door.watch import has_ended

if TYPE_CHECKING:
    from kvc.errors import KvcError
    from services.router.door.door import Door
    from services.router.door.exchange import Exchange
    from services.router.door.framing import Head
    from services.router.door.request import HttpRequest
    from services.router.door.spans import Trace

MAX_WAITING: Final = 64
"""Requests that wait for their turn; with more, reading stops, and with it the news of the client's end (watch.py sees to that)."""
MOST_WAITING: Final = 256
"""Requests that may wait because they were read at once."""
MAX_WAITING_BYTES: Final = 1 << 20
MOST_TURNED_AWAY = 1024
"""Connections beyond the limit that may wait for their last answer to be read; with more, they are reset."""
LINGER_S = 2.0
"""How long what a client still sends after its last answer is read and dropped: closing at once would take the answer away from it."""
NEVER_S: Final = float("inf")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection. Implements parser.Sink."""

    trace: Trace | None = None
    """Of the current request, when it is recorded."""

    def __init__(self, door: Door) -> None:
        """Not connected yet."""
        self._door = door
        self._parser = RequestParser(door.limits, self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._exchange: Exchange | None = None
        self._current: HttpRequest | None = None
        self._due_s = NEVER_S
        self._gone_by_s = NEVER_S
        self._refusal: tuple[int, str] | None = None
        self._deaf = False
        self._closing = False
        self._half_closed = False
        self._last = False
        self._continue_due = False
        self._reads = True
        self._writes = True
        self._http10_body: Body | None = None
        self._held_bytes = 0
        self._behind_bytes = 0
        self.traceparent = b""
        self.status = 0

    # --- transport ----------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        door = self._door
        if door.is_crowded:
            self._turn_away()
            return
        door.clients.add(self)
        self._arm(door.limits.idle_s)

    def _turn_away(self) -> None:
        """A connection too many. It is told so, and closed when it has had time to read that, unless too many of these are left, too."""
        door, transport = self._door, self._transport
        door.counts.turned_away.value += 1
        if len(door.turned_away) >= MOST_TURNED_AWAY and transport is not None:
            self._deaf = self._closing = True
            transport.abort()
            return
        door.clients.add(self)
        door.turned_away.add(self)
        self._deaf = True
        self._answer_refusal(503, "too many connections", "TOO_MANY_CONNECTIONS", b"retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The client is gone: its turn stops everywhere."""
        self._deaf = self._closing = True
        self._waiting.clear()
        self._door.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._disarm()
        self._door.clients.discard(self)
        self._door.turned_away.discard(self)
        self._door.watch.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()

    def eof_received(self) -> bool:
        """The client closed its side. True keeps ours open for what the door answers itself."""
        self._deaf = True
        exchange = self._exchange
        if exchange is not None:
            self.cut_off()
            exchange.cancel()
            return False
        transport = self._transport
        self._half_closed = bool(self._waiting) and transport is not None and transport.can_write_eof()
        self._closing = not self._half_closed
        return self._half_closed

    def pause_writing(self) -> None:
        """The client reads slowly: the engine's side stops, too."""
        self._writes = False
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._writes = True
        if self._exchange is not None:
            self._exchange.resume()
        elif self._waiting:
            self._begin_waiting()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests; dropped after one that was refused."""
        if self._deaf:
            return
        try:
            self._parser.feed(data)
        except HttpRefusedError as error:
            self._refuse(error.status, error.message)
        except Exception as error:  # noqa: BLE001 - a fault of ours answers this client and is logged; the others go on
            self._refuse(500, self._door.fault(error).message)
        if self._waiting or self._parser.body_bytes or self._held_bytes:
            if self._waiting:
                self._behind_bytes += len(data)
            self._hold_back()
            self._account()
            if self._door.is_full and self._parser.body_bytes:
                self._refuse(503, "the bodies of all requests together are too long")

    def _account(self) -> None:
        """Tells the door how many bytes of bodies this connection holds."""
        held = self._parser.body_bytes + sum(len(request.body) for request in self._waiting)
        if self._current is not None:
            held += len(self._current.body)
        self._door.held_bytes += held - self._held_bytes
        self._held_bytes = held

    def _hold_back(self) -> None:
        """Reads no further while too much waits, and on when it does not."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        waiting = len(self._waiting)
        if not waiting:
            self._behind_bytes = 0
        held = sum(len(request.body) for request in self._waiting) + (self._parser.body_bytes if self._current is not None else 0)
        reads = self._deaf or (waiting < MAX_WAITING and max(held, self._behind_bytes) < MAX_WAITING_BYTES)
        if reads is not self._reads:
            self._reads = reads
            (transport.resume_reading if reads else transport.pause_reading)()
            (self._door.watch.discard if reads else self._door.watch.add)(self)

    def look(self) -> None:
        """Nobody reads from the client just now: has it gone meanwhile?"""
        if self._exchange is not None and self._transport is not None and has_ended(self._transport):
            self.eof_received()

    # --- requests -----------------------------------------------------------------------------------------------------------------

    def request_begins(self) -> None:
        """The first byte of a request has come."""
        if self._current is None and not self._closing:
            self._arm(self._door.limits.request_s)

    def request_expects(self) -> None:
        """The client waits for a word before it sends the body; it gets it after the replies to earlier requests."""
        if self._current is None and not self._waiting and not self._closing and self._transport is not None:
            self._transport.write(_CONTINUE)
        else:
            self._continue_due = True

    def request_is_big(self, path: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """A body that would be refused for lack of a token is not read."""
        if not self._door.allows(path, headers):
            raise HttpRefusedError(UNAUTHORIZED, "a bearer token is needed")

    def request_complete(self, request: HttpRequest) -> None:
        """A request is complete: it is worked on now, or when those before it are done."""
        self._continue_due = False
        if self._closing:
            return
        if self._current is None and not self._waiting and self._writes:
            self._begin(request)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(request)
        else:
            raise HttpRefusedError(429, "too many requests at once")

    def _begin(self, request: HttpRequest) -> None:
        self._disarm()
        self._current = request
        self._last = request.http10 or not request.keep_alive
        self.status = 0
        tracing = self._door.tracing
        if tracing is None:
            self.traceparent = traceparent_of(request)
        else:
            self.traceparent, self.trace = tracing.begin(request)
        self._door.handle(self, request)

    def _begin_waiting(self) -> None:
        if self._waiting and self._current is None and self._writes and not self._closing:
            request = self._waiting.popleft()
            self._hold_back()
            self._begin(request)

    def run(self, exchange: Exchange) -> None:
        """The current request is routed by `exchange`."""
        if self._half_closed:
            self._close()
            return
        self._exchange = exchange
        exchange.start()

    # --- replies ------------------------------------------------------------------------------------------------------------------

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """A complete reply of the door itself."""
        self._exchange = None
        request = self._current
        keep_alive = request is not None and request.keep_alive and not self._closing and not self._door.stopping
        connection = b"connection: close\r\n"
        if keep_alive:
            connection = b"connection: keep-alive\r\n" if request is not None and request.http10 else b""
        self.status = status
        if self._transport is not None and not self._transport.is_closing():
            head = head_of(status, len(body), content_type, connection + extra)
            self._transport.write(head if request is not None and request.method == b"HEAD" else head + body)
            self._door.responses[status].value += 1
        if self.trace is not None and request is not None:
            self.trace.answered(status)
            self.trace.over()
        self._next(keep_alive=keep_alive)

    def respond_error(self, error: KvcError) -> None:
        """A typed error, in the shape that the clients of the path understand."""
        if self.trace is not None:
            self.trace.refused(error)
        status, body, lines = error_of(error, self._current.path if self._current is not None else b"")
        self.respond(status, body, extra=b"traceparent: %b\r\n%b" % (self.traceparent, lines))

    def splice_head(self, head: Head, extra: bytes, rest: bytes) -> None:
        """The engine's head, with our lines, and the first bytes of its body in one write."""
        self.status = status = head.status
        transport, request = self._transport, self._current
        if transport is None or request is None:
            return
        self._door.responses[status].value += 1
        if self.trace is not None:
            self.trace.answered(status)
        if head.until_close or self._door.stopping:
            self._last = True
        if self._last:
            extra += b"connection: close\r\n"
        if request.http10 and head.chunked:  # HTTP/1.0 knows no chunks: the body is passed on without them, and ends with the connection
            self._http10_body = Body(head, is_head_request=False)
            transport.write(head.passed_on_plain(extra) + self._http10_body.payload(rest))
        else:
            transport.write(head.passed_on(extra) + rest)

    def splice(self, data: bytes) -> None:
        """More of the engine's body."""
        if self._transport is not None:
            self._transport.write(data if self._http10_body is None else self._http10_body.payload(data))

    def finished(self) -> None:
        """The engine's reply is complete."""
        self._exchange = None
        self._next(keep_alive=not self._last)

    def cut_off(self) -> None:
        """The reply cannot be completed: the client must see that, so the connection breaks."""
        self._exchange = None
        self._deaf = self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def _next(self, *, keep_alive: bool) -> None:
        """A reply is complete: what comes now?"""
        self._current = None
        if self._held_bytes:
            self._account()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not keep_alive or self._closing or self._door.stopping:
            self._close()
            return
        self._arm(self._door.limits.request_s if self._parser.partial else self._door.limits.idle_s)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_waiting)
        elif self._refusal is not None:
            self._answer_refusal(*self._refusal)
        elif self._half_closed:
            self._close()
        elif self._continue_due:
            self._continue_due = False
            transport.write(_CONTINUE)
        if not self._reads:
            self._hold_back()

    # --- ends ---------------------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """A request that cannot be understood: an answer when those before it have theirs, then the end."""
        self._deaf = True
        self._parser.forget()
        if self._held_bytes:
            self._account()
        if self._closing:
            return  # the last answer has been given already
        if self._current is None and not self._waiting:
            self._answer_refusal(status, message)
        else:
            self._refusal = (status, message)

    def _answer_refusal(self, status: int, message: str, kind: str = "", extra: bytes = b"") -> None:
        self._closing = True
        self.respond(status, refusal_of(status, message, kind), extra=extra)

    def _close(self, *, lingers: bool = True) -> None:
        """Closes when what was written has been sent. What may still come in is read and dropped for a while."""
        unread = self._deaf or self._parser.partial or bool(self._waiting)
        self._deaf = self._closing = True
        self._waiting.clear()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._hold_back()
        self._gone_by_s = self._door.clock.now_s() + self._door.limits.idle_s
        self._arm(LINGER_S)
        if not lingers or self._half_closed:
            transport.close()
        elif transport.can_write_eof():
            transport.write_eof()
        elif not unread:  # over TLS the end cannot be told but by closing
            transport.close()

    def _closes(self, now_s: float) -> None:
        """Closing takes its time when there is something to send; not for ever when nobody reads it."""
        transport = self._transport
        if transport is None:
            return
        if now_s >= self._gone_by_s:
            transport.abort()
            return
        self._arm(LINGER_S)
        if not transport.get_write_buffer_size():
            transport.close()

    def close_when_idle(self) -> None:
        """Shutdown: closes now when nothing is under way, else after the current reply."""
        if self._current is None and not self._closing:
            self._close(lingers=False)

    def _arm(self, seconds: float) -> None:
        self._due_s = self._door.clock.now_s() + seconds

    def _disarm(self) -> None:
        self._due_s = NEVER_S

    def check(self, now_s: float) -> None:
        """Called a few times a second: idle connections close; requests that do not come to their end get a 408."""
        if now_s < self._due_s:
            return
        self._disarm()
        if self._closing:
            self._closes(now_s)
        elif self._parser.partial and not self._waiting and not self._deaf:
            self._refuse(408, "the request did not come to its end in time")
        else:
            self._close(lingers=False)
