"""Bytes of a client's connection as requests: HTTP/1.1 taken literally, within limits, whichever way the bytes are cut.

What two readers could take for different things is refused, never repaired: two lengths, bare LF, folded lines, transfer encodings
other than `chunked`, a second host. llhttp refuses most of it; the rest is here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

import httptools

from services.router.door.request import HttpRequest

if TYPE_CHECKING:
    from services.router.door.door import Limits

BIG_BODY_BYTES: Final = 65_536
FRAMING_BYTES: Final = 8
"""What the framing of a chunked body may cost for each of its bytes."""
MANY_PARTS: Final = 512
_WATCHED: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect", b"connection", b"upgrade"})
_FIELD_BYTES: Final = 4
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
_ABSOLUTE = re.compile(rb"(?i:https?)://[^/?#]+(/[^?#]*)?(\?[^#]*)?")
_SLASH = b"/"
# What Connection may name without naming a header that would have to be dropped.
_PLAIN: Final = frozenset({b"", b"close", b"keep-alive", b"upgrade", b"te", b"trailers"})


class HttpRefusedError(Exception):
    """A request that is refused while it is read."""

    def __init__(self, status: int, message: str) -> None:
        """Status and one line."""
        super().__init__(message)
        self.status = status
        self.message = message


class Sink(Protocol):
    """Who gets the requests of a connection."""

    def request_begins(self) -> None:
        """The first byte of a request has come."""
        ...

    def request_expects(self) -> None:
        """The client sends the body when it is told to go on."""
        ...

    def request_is_big(self, path: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """A head whose body is long, or is waited for with.

        Raises:
            HttpRefusedError: there is no point in reading the body.
        """
        ...

    def request_complete(self, request: HttpRequest) -> None:
        """A request is complete."""
        ...


class RequestParser:
    """One connection's parser. Also httptools' protocol: the `on_` methods are called by llhttp."""

    def __init__(self, limits: Limits, sink: Sink) -> None:
        """Before the first byte."""
        self._limits = limits
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self._began = False
        self._long = False
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._taken: list[tuple[bytes, bytes]] = []
        self._fed_bytes = 0
        self._parts: list[bytes] = []
        self._buffer: bytearray | None = None
        self.body_bytes = 0
        self._head_open = False
        self._in_body = False
        self._length = 0
        self._host = False
        self._chunked = False
        self._expects = False
        self._upgrade = False
        self._named: list[bytes] = []

    @property
    def partial(self) -> bool:
        """True while a request has begun and not come to its end."""
        return self._head_open or self._in_body

    def forget(self) -> None:
        """Lets go of what has come of a request that nobody will see."""
        self._reset()

    def feed(self, data: bytes) -> None:
        """Takes bytes.

        Raises:
            HttpRefusedError: they are no request, or too large a one; the connection cannot be read any further.
        """
        self._long = self._head_open or len(data) > self._limits.head_bytes
        try:
            while True:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._not_upgraded() + data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise HttpRefusedError(400, f"malformed request: {error}") from None
        if self._head_open or self._in_body:
            if len(self._headers) > self._limits.headers and self._head_open:
                raise HttpRefusedError(431, "too many headers")
            self._count(len(data))

    def _count(self, size: int) -> None:
        """Limits what no callback tells of: a header that does not end, chunk extensions, trailers."""
        if self._began:  # its first bytes came with the end of another request; how many of them are its own is not known
            self._began = False
            return
        self._fed_bytes += size
        if self._head_open:
            if self._fed_bytes > self._limits.head_bytes:
                raise HttpRefusedError(431, f"the head is longer than {self._limits.head_bytes} bytes")
        elif self._chunked and self._fed_bytes > 2 * self._limits.head_bytes + FRAMING_BYTES * self.body_bytes:
            raise HttpRefusedError(413, "the framing of the body is out of proportion")

    def _not_upgraded(self) -> bytes:
        """Nobody is upgraded here: the head once more, without the offer, so that the body is read as a body."""
        lines = [b"%b %b HTTP/1.1\r\n" % (self._parser.get_method(), self._url)]
        for name, value in self._taken:
            if name == b"connection":
                value = b", ".join(token for token in map(bytes.strip, value.split(b",")) if token.lower() != b"upgrade")  # noqa: PLW2901
            if name != b"upgrade":
                lines.append(b"%b: %b\r\n" % (name, value))
        self._reset()
        self._parser = httptools.HttpRequestParser(self)
        return b"".join(lines) + b"\r\n"

    # --- llhttp -------------------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_open = self._began = True
        self._sink.request_begins()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._url += url
        if len(self._url) > self._limits.head_bytes:
            raise HttpRefusedError(431, "the target is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, looked at when all are there; or a trailer, which is dropped."""
        self._headers.append((name, value))

    def _take_headers(self) -> None:
        """Checks the headers; names become lower case. What comes after them, as trailers, goes nowhere."""
        headers = [(name.lower(), value) for name, value in self._headers]
        if len(headers) > self._limits.headers:
            raise HttpRefusedError(431, "too many headers")
        if self._long and sum(len(name) + len(value) + _FIELD_BYTES for name, value in headers) > self._limits.head_bytes:
            raise HttpRefusedError(431, "the head is too long")
        self._headers, self._taken = [], headers
        for name, value in headers:
            if name in _WATCHED:
                self._watch(name, value)

    def _watch(self, name: bytes, value: bytes) -> None:
        """A header that concerns the connection or the framing."""
        if name == b"host":
            if self._host or _HOST.fullmatch(value) is None:
                raise HttpRefusedError(400, "more than one host, or none that can be")
            self._host = True
        elif name == b"content-length":
            self._length = int(value)
            if self._length > self._limits.body_bytes:
                raise HttpRefusedError(413, f"the body is longer than {self._limits.body_bytes} bytes")
        elif name == b"transfer-encoding":
            if self._chunked or value.strip().lower() != b"chunked":
                raise HttpRefusedError(400, "a transfer-encoding other than chunked")
            self._chunked = True
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise HttpRefusedError(417, "an unknown expectation")
            self._expects = True
        elif name == b"upgrade":
            self._upgrade = True
        else:
            self._named += [token for token in map(bytes.strip, value.lower().split(b",")) if token not in _PLAIN]

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_body = True
        self._head_open = False
        self._take_headers()
        if self._upgrade and self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            return  # it comes again, without the offer
        version = self._parser.get_http_version()
        if version == "1.1":
            if not self._host:
                raise HttpRefusedError(400, "no host")
        elif version != "1.0":
            raise HttpRefusedError(400, "only HTTP/1.1 is spoken here")
        elif self._chunked:
            raise HttpRefusedError(400, "transfer-encoding in HTTP/1.0")
        if not self._url.startswith(_SLASH) or b"#" in self._url:
            self._target()
        if self._named:
            self._taken = [header for header in self._taken if header[0] not in self._named]
        if self._expects or self._chunked or self._length > BIG_BODY_BYTES:
            self._sink.request_is_big(self._url.partition(b"?")[0], self._taken)
            if self._expects and version == "1.1" and (self._length or self._chunked):
                self._sink.request_expects()

    def _target(self) -> None:
        """Targets that are no plain path: a whole URL stands for its path (RFC 9112, 3.2.2), the others for nothing we have."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise HttpRefusedError(405, "this is no proxy")
        whole = _ABSOLUTE.fullmatch(self._url)
        if whole is not None:
            self._url = (whole[1] or _SLASH) + (whole[2] or b"")
        elif self._url != b"*" or method != b"OPTIONS":
            raise HttpRefusedError(400, "the target is no path")

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self.body_bytes += len(body)
        if self.body_bytes > self._limits.body_bytes:
            raise HttpRefusedError(413, f"the body is longer than {self._limits.body_bytes} bytes")
        if self._buffer is not None:
            self._buffer += body
            return
        self._parts.append(body)
        if len(self._parts) > MANY_PARTS:  # an object for each of many small chunks would be many times their size
            self._buffer = bytearray(b"".join(self._parts))
            self._parts = []

    def on_message_complete(self) -> None:
        """A request is complete."""
        if self._upgrade and self._parser.should_upgrade():
            return
        url, parts = self._url, self._parts
        body = bytes(self._buffer) if self._buffer is not None else parts[0] if len(parts) == 1 else b"".join(parts)
        parser = self._parser
        path, keep_alive, http10 = url.partition(b"?")[0], parser.should_keep_alive(), parser.get_http_version() == "1.0"
        request = HttpRequest(parser.get_method(), path, url, self._taken, body, keep_alive, http10)
        self._reset()
        self._sink.request_complete(request)
