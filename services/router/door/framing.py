"""Where a response ends, without touching its bytes.

A reply is passed on as it came, framing included; the only thing the door must know is where it ends, so that the engine's connection
can carry the next request. One object follows one response.

    LENGTH    content-length: a countdown
    CHUNKED   chunk sizes are read, chunk data is skipped; trailers end with an empty line
    CLOSE     until the engine closes
    EMPTY     HEAD, 1xx, 204, 304
"""

from __future__ import annotations

import re
from functools import lru_cache

MAX_SIZE_LINE_BYTES = 256
MAX_TRAILER_BYTES = 8192
MAX_CHUNK_DIGITS = 15
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?\r\n")
_SIZE_START = re.compile(rb"[0-9A-Fa-f]{1,15}(?:[ \t]*|[ \t]*;[^\r\n]*)\r?")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])( [^\r\n\0]*)?\r\n")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*?)[ \t]*\r\n")
_CRLF = b"\r\n"
_PLAIN_SIZE_BYTES = 10
_NO_SIZE = -1
_EMPTY, _LENGTH, _CHUNKED, _CLOSE = range(4)
_VERSION = b"HTTP/1.1"
_SWITCHING = 101
_OK = 200
_BODILESS = frozenset({204, 304})
_CACHED = b"x-kvc-cached-tokens"
_READ = frozenset({b"connection", b"content-length", b"transfer-encoding", _CACHED})
# Not passed on: what concerns only our connection to the engine, and what the door says itself.
_OWN = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"traceparent",
        b"upgrade",
        b"x-kvc-cached-tokens",
        b"x-kvc-mode",
        b"x-kvc-worker",
    }
)
# The client needs these, whatever Connection names.
_NEEDED = frozenset({b"content-length", b"content-type", b"transfer-encoding"})


class FramingError(ValueError):
    """The peer's framing is not HTTP/1.1; the connection cannot be used any further."""


class Head:
    """A response head.

    Attributes:
        status: status code.
        length: content-length, -1 without one.
        chunked: transfer-encoding is chunked.
        keep_alive: the engine keeps the connection open.
        until_close: only the end of the connection ends the body.
        cached_tokens: prompt tokens that nobody prefills, when the engine says so in its head; else -1.
    """

    __slots__ = ("_passed", "cached_tokens", "chunked", "keep_alive", "length", "status", "until_close")

    def __init__(self, raw: bytes) -> None:
        """Parses a complete head.

        Raises:
            FramingError: it is malformed, or its length is ambiguous.
        """
        status = _STATUS.match(raw)
        if status is None:
            raise FramingError("no HTTP/1 status line")
        self.status = int(status[2])
        self.length = self.cached_tokens = -1
        self.chunked = False
        self.keep_alive = status[1] == b"1"
        dropped = set(_OWN)
        fields: list[tuple[bytes, int, int]] = []
        position, end = status.end(), len(raw) - 2
        while position < end:
            field = _FIELD.match(raw, position, end)
            if field is None:
                raise FramingError("malformed header line")
            name = field[1].lower()
            if name in _READ:
                self._take(name, field[2], dropped)
            fields.append((name, position, field.end()))
            position = field.end()
        if self.status == _SWITCHING:
            raise FramingError("switches to a protocol that nobody asked for")
        if self.chunked and (self.length >= 0 or status[1] == b"0"):
            raise FramingError("transfer-encoding beside content-length, or in HTTP/1.0")
        self.until_close = not self.chunked and self.length < 0 and self.status >= _OK and self.status not in _BODILESS
        kept = [_VERSION, raw[len(_VERSION) : status.end()] if status[3] else b" %b \r\n" % status[2]]  # the space must be there
        kept += [raw[start:to] for name, start, to in fields if name not in dropped]
        self._passed = b"".join(kept)

    def _take(self, name: bytes, value: bytes, dropped: set[bytes]) -> None:
        """Notes a field that says something about the connection; `dropped` gathers what Connection names."""
        if name == b"content-length":
            if self.length >= 0 or not value.isdigit() or len(value) > MAX_CHUNK_DIGITS:
                raise FramingError("bad content-length")
            self.length = int(value)
        elif name == b"transfer-encoding":
            if self.chunked or value.lower() != b"chunked":
                raise FramingError("transfer-encoding other than chunked")
            self.chunked = True
        elif name == _CACHED:
            self.cached_tokens = int(value) if value.isdigit() and len(value) < MAX_CHUNK_DIGITS else -1
        else:
            tokens = [token.strip(b" \t") for token in value.lower().split(b",")]
            self.keep_alive = b"close" not in tokens and (self.keep_alive or b"keep-alive" in tokens)
            dropped.update(token for token in tokens if token not in _NEEDED)

    def passed_on(self, extra: bytes) -> bytes:
        """The head for the client: in our version, without what concerns only the engine's connection, with `extra` lines at its end."""
        return self._passed + extra + _CRLF

    def passed_on_plain(self, extra: bytes) -> bytes:
        """As `passed_on`, for a client that does not know chunks."""
        lines = self._passed.split(_CRLF)
        kept = [line for line in lines if not line.lower().startswith((b"transfer-encoding:", b"trailer:"))]
        return _CRLF.join(kept) + extra + _CRLF


@lru_cache(4096)
def _plain_size(line: bytes) -> int:
    """A chunk size without extensions; -1 for any other line. Cached: the replies of a mesh have a few sizes."""
    found = _SIZE.fullmatch(line + _CRLF)
    return int(found[1], 16) if found is not None and len(found[1]) == len(line) else _NO_SIZE


class Body:
    """Follows one response body. `feed` tells how many bytes of what arrived belong to it."""

    __slots__ = ("_in_trailer", "_left", "_line", "_mode", "_out", "_trailer_bytes", "done")

    def __init__(self, head: Head, *, is_head_request: bool) -> None:
        """Starts at the first byte after the head."""
        self._line = b""
        self._in_trailer = False
        self._trailer_bytes = 0
        self._left = 0
        self._out: list[bytes] | None = None
        if is_head_request or head.status < _OK or head.status in _BODILESS:
            self._mode = _EMPTY
        elif head.chunked:
            self._mode = _CHUNKED
        elif head.length >= 0:
            self._mode, self._left = _LENGTH, head.length
        else:
            self._mode = _CLOSE
        self.done = self._mode == _EMPTY or (self._mode == _LENGTH and self._left == 0)

    def feed(self, data: bytes) -> int:
        """Takes bytes.

        Returns:
            How many of them belong to this body; fewer than all only when `done`.

        Raises:
            FramingError: a chunk is malformed.
        """
        if self.done:
            return 0
        if self._mode == _LENGTH:
            taken = min(self._left, len(data))
            self._left -= taken
            self.done = self._left == 0
            return taken
        return self._chunks(data) if self._mode == _CHUNKED else len(data)

    def payload(self, data: bytes) -> bytes:
        """As `feed`; returns the body's bytes without their framing, for clients that do not know chunks."""
        self._out = []
        self.feed(data)
        return b"".join(self._out)

    def _chunks(self, data: bytes) -> int:
        """`_left` counts what is left of a chunk, its CRLF included; 0: a size line or a trailer comes next."""
        position = 0 if self._left or self._line or self._in_trailer or self._out is not None else self._whole_chunks(data)
        end = len(data)
        if self.done:
            return position
        while position < end:
            if self._left > 2:  # noqa: PLR2004 - data and CRLF
                step = min(self._left - 2, end - position)
                if self._out is not None:
                    self._out.append(data[position : position + step])
                self._left -= step
                position += step
                continue
            if self._left:
                if data[position] != _CRLF[2 - self._left]:
                    raise FramingError("chunk data is longer than its size")
                self._left -= 1
                position += 1
                continue
            if self._in_trailer:
                position = self._trailer(data, position)
                if self.done:
                    return position
                continue
            position = self._size(data, position)
        return end

    def _whole_chunks(self, data: bytes) -> int:
        """Skips chunks that are there from size to CRLF, as most are, and takes the end without trailers. Returns where to go on."""
        position = 0
        while True:
            line_end = data.find(_CRLF, position, position + _PLAIN_SIZE_BYTES)
            size = _plain_size(data[position:line_end]) if line_end > position else _NO_SIZE
            if size == _NO_SIZE:
                return position
            after = line_end + 2 + size
            if data[after : after + 2] != _CRLF:
                return position
            position = after + 2
            if size == 0:
                self.done = True
                return position

    def _size(self, data: bytes, position: int) -> int:
        line, start = data, position
        if self._line:
            line, start = self._line + data[position : position + MAX_SIZE_LINE_BYTES], 0
        found = _SIZE.match(line, start)
        if found is None:
            line = line[start : start + MAX_SIZE_LINE_BYTES]
            if len(line) == MAX_SIZE_LINE_BYTES or _SIZE_START.fullmatch(line) is None:
                raise FramingError("bad chunk size")
            self._line = line
            return len(data)
        if found.end() - start > MAX_SIZE_LINE_BYTES:
            raise FramingError("the chunk's extensions are too long")
        position += found.end() - start - len(self._line)
        self._line = b""
        size = int(found[1], 16)
        if size:
            self._left = size + 2
        else:
            self._in_trailer = True
        return position

    def _trailer(self, data: bytes, position: int) -> int:
        line = self._line + data[position : position + MAX_TRAILER_BYTES + 2]
        end = line.find(_CRLF)
        if self._trailer_bytes + (end if end >= 0 else len(line) - 1) > MAX_TRAILER_BYTES:
            raise FramingError("trailers are too long")
        if end < 0:
            if b"\n" in line:
                raise FramingError("bare LF in a trailer")
            self._line = line
            return len(data)
        position += end + 2 - len(self._line)
        self._line = b""
        self._trailer_bytes += end
        if end == 0:
            self.done = True
        elif _FIELD.fullmatch(line, 0, end + 2) is None:
            raise FramingError("malformed trailer")
        return position
