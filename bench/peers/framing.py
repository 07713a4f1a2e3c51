"""Chunked bodies: where one ends, and what it carries."""

from __future__ import annotations

import re
from typing import Final

_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_CRLF: Final = b"\r\n"
MAX_SIZE_LINE_BYTES: Final = 4096


class FramingError(ValueError):
    """The bytes are not a chunked body."""


def body_end(data: bytes) -> int | None:
    """Where the chunked body ends that begins at the first byte, trailers included; None while it is not whole.

    Raises:
        FramingError: it is malformed.
    """
    return _walk(data)[1]


def payload(data: bytes) -> bytes:
    """What a whole chunked body carries.

    Raises:
        FramingError: it is malformed, not whole, or followed by something.
    """
    pieces, end = _walk(data)
    if end != len(data):
        raise FramingError("the body is not whole" if end is None else f"{len(data) - end} bytes follow the body")
    return b"".join(pieces)


def framed(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _walk(data: bytes) -> tuple[list[bytes], int | None]:
    pieces: list[bytes] = []
    position = 0
    while True:
        line = _SIZE.match(data, position)
        if line is None:
            if _CRLF in data[position : position + MAX_SIZE_LINE_BYTES] or len(data) - position > MAX_SIZE_LINE_BYTES:
                raise FramingError(f"no chunk size at byte {position}")
            return pieces, None
        start = line.end()
        size = int(line[1], 16)
        if size == 0:
            return pieces, _trailers_end(data, start)
        end = start + size
        if len(data) < end + 2:
            return pieces, None
        if data[end : end + 2] != _CRLF:
            raise FramingError(f"the chunk at byte {position} is not as long as it says")
        pieces.append(data[start:end])
        position = end + 2


def _trailers_end(data: bytes, position: int) -> int | None:
    """After the empty line that ends trailers, of which there may be none."""
    if data.startswith(_CRLF, position):
        return position + 2
    end = data.find(b"\r\n\r\n", position)
    return end + 4 if end >= 0 else None
