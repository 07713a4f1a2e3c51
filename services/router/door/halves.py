"""What runs on engines for one decision: the decode worker's half, whose reply is the client's, and the prefill worker's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from services.router.door.usage import aborted, tail_of
from services.router.engines import LINGER_S

if TYPE_CHECKING:
    from services.router.door.client import Client
    from services.router.door.exchange import Exchange
    from services.router.door.framing import Head
    from services.router.door.upstream import Connection, Pool

MAX_ERROR_BYTES = 1 << 20
CONFLICT: Final = 409
_RETRIED: Final = frozenset({CONFLICT, 429, 500, 502, 503, 504})
_ERROR: Final = 400


class _Half:
    """Sending, on an idle connection or a new one. Not used by itself."""

    def __init__(self, exchange: Exchange) -> None:
        """Nothing sent yet."""
        self._exchange: Exchange | None = exchange
        self._up: Connection | None = None
        self._pool: Pool | None = None
        self._message = b""

    def send(self, pool: Pool, message: bytes) -> None:
        """Sends the request."""
        self._pool, self._message = pool, message
        connection = pool.take()
        if connection is not None:
            self._up = connection
            connection.send(message, self)
        else:
            pool.connect(self._connected)

    def _connected(self, made: Connection | None, problem: str, gone: bool) -> None:  # noqa: FBT001 - upstream.Connected
        exchange = self._exchange
        if exchange is None:
            if made is not None:
                made.abort()
        elif made is None:
            exchange.guarded(lambda: self._failed("refused", problem, gone=gone))
        else:
            self._up = made
            made.send(self._message, self)

    def cancel(self) -> None:
        """Drops the half; the engine aborts what it does."""
        self._exchange = None
        if self._up is not None:
            self._up.abort()
            self._up = None

    def _failed(self, what: str, problem: str, *, gone: bool) -> None:
        raise NotImplementedError

    def reply_head(self, head: Head, rest: bytes) -> None:
        """See upstream.Reply."""
        raise NotImplementedError

    def reply_data(self, data: bytes) -> None:
        """See upstream.Reply."""
        raise NotImplementedError

    def reply_end(self) -> None:
        """See upstream.Reply."""
        raise NotImplementedError

    def reply_lost(self, problem: str, *, gone: bool) -> None:
        """The connection broke. On one that was idle before and has said nothing, the engine may just have closed it: once more."""
        connection, self._up = self._up, None
        if self._exchange is None:
            return
        if gone and connection is not None and connection.used and connection.silent and self._pool is not None:
            self._pool.connect(self._connected)
        else:
            self._failed("lost", problem, gone=gone)


class DecodeHalf(_Half):
    """The decode worker's half: its reply is spliced to the client. Until the first bytes of a body all of it can still be repeated."""

    def __init__(self, exchange: Exchange, client: Client) -> None:
        """Nothing sent yet."""
        super().__init__(exchange)
        self._client = client
        self._tail = b""
        self._head: Head | None = None
        self._error_body: bytearray | None = None
        self.started = False

    def pause(self) -> None:
        """The client reads slowly."""
        if self._up is not None:
            self._up.pause()

    def resume(self) -> None:
        """The client reads again."""
        if self._up is not None:
            self._up.resume()

    def reply_head(self, head: Head, rest: bytes) -> None:
        """The head goes out with the first bytes of its body, in one write: until then another worker may still be tried."""
        if head.status in _RETRIED:
            self._head, self._error_body = head, bytearray(rest)
        elif rest:
            self._begin(head, rest)
        else:
            self._head = head

    def _begin(self, head: Head, rest: bytes) -> bool:
        """The reply begins: from here on nothing can be tried again, and what that would need is let go. False: it is not wanted."""
        assert self._exchange is not None
        lines = self._exchange.begins(head.cached_tokens)
        if lines is None:
            return False
        self.started = True
        self._message, self._head, self._error_body = b"", None, None
        self._tail = tail_of(b"", rest)
        self._client.splice_head(head, lines, rest)
        return True

    def reply_data(self, data: bytes) -> None:
        """More bytes, as they came."""
        if self.started:
            self._tail = tail_of(self._tail, data)
            self._client.splice(data)
            return
        head, body = self._head, self._error_body
        assert head is not None
        if body is None:
            self._begin(head, data)
            return
        body += data
        if len(body) > MAX_ERROR_BYTES:
            self._begin(head, bytes(body))

    def reply_end(self) -> None:
        """The reply is complete."""
        self._up = None
        exchange = self._exchange
        assert exchange is not None
        if not self.started:
            head, body = self._head, self._error_body
            assert head is not None
            if body is not None and exchange.rejected(head.status, body):
                return
            # What no other worker is asked any more reaches the client as the engine sent it, errors too (F75).
            if not self._begin(head, bytes(body or b"")):
                return
        exchange.completed(self._tail)

    def _failed(self, what: str, problem: str, *, gone: bool) -> None:
        assert self._exchange is not None
        if self.started:
            self._exchange.broken(problem)
        else:
            self._exchange.decode_failed(f"connection-{what}", problem, gone=gone)


class PrefillHalf(_Half):
    """The prefill worker's half: its reply is dropped, its failure is not."""

    def __init__(self, exchange: Exchange) -> None:
        """Nothing sent yet."""
        super().__init__(exchange)
        self._status = 0
        self._tail = b""

    def finish(self) -> None:
        """The decode worker is done, so nothing depends on this half any more; it may end in peace."""
        self._exchange = None
        if self._up is not None:
            asyncio.get_running_loop().call_later(LINGER_S, self.cancel)

    def reply_head(self, head: Head, rest: bytes) -> None:
        """Only the status matters, and whether the engine gave up after all."""
        self._status, self._tail, self._message = head.status, tail_of(b"", rest), b""
        if head.status >= _ERROR and self._exchange is not None:
            self._exchange.prefill_failed("prefill-failed", f"HTTP {head.status}", gone=False)

    def reply_data(self, data: bytes) -> None:
        """Dropped, but for the end."""
        self._tail = tail_of(self._tail, data)

    def reply_end(self) -> None:
        """Done."""
        self._up = None
        exchange, self._exchange = self._exchange, None
        if exchange is None or self._status >= _ERROR:
            return
        if aborted(self._tail):
            exchange.prefill_failed("prefill-aborted", "the engine aborted its half of the turn", gone=False)
        else:
            exchange.prefill_done()

    def _failed(self, what: str, problem: str, *, gone: bool) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.prefill_failed(f"prefill-{what}", problem, gone=gone)
