"""What the door says itself, as bytes: heads, errors, and refusals of requests that nobody could read to their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvc.errors import http_body, messages_body
from services.router.door.request import MESSAGES

if TYPE_CHECKING:
    from kvc.errors import KvcError

UNAUTHORIZED: Final = 401
REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 404: b"Not Found", 405: b"Method Not Allowed", 408: b"Request Timeout",
    409: b"Conflict", 413: b"Content Too Large", 417: b"Expectation Failed", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 500: b"Internal Server Error", 502: b"Bad Gateway", 503: b"Service Unavailable",
    504: b"Gateway Timeout",
}  # fmt: skip
"""Of the status line."""
_KINDS: Final = {
    401: "UNAUTHENTICATED", 405: "METHOD_NOT_ALLOWED", 408: "REQUEST_TIMEOUT", 413: "TOO_LARGE", 429: "TOO_MANY_REQUESTS",
    431: "HEAD_TOO_LARGE", 500: "INTERNAL", 503: "OVERLOADED",
}  # fmt: skip
_CHALLENGE: Final = b"www-authenticate: Bearer\r\n"


def head_of(status: int, length_bytes: int, content_type: bytes, lines: bytes) -> bytes:
    """The head of a reply with a body of `length_bytes`; `lines` are further headers."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
        status, REASONS.get(status, b"Status"), content_type, length_bytes, lines, _CHALLENGE if status == UNAUTHORIZED else b"",
    )  # fmt: skip


def error_of(error: KvcError, path: bytes) -> tuple[int, bytes, bytes]:
    """Status, body and further headers of a typed error, in the shape that the clients of `path` understand."""
    status, body = http_body(error)
    if path == MESSAGES:
        body = messages_body(error)
    return status, body, b"retry-after: %d\r\n" % max(1, round(error.retry_after_s)) if error.retry_after_s else b""


def refusal_of(status: int, message: str, kind: str = "") -> bytes:
    """The body of a refusal; its type is the status's own unless `kind` names one."""
    kind = kind or _KINDS.get(status, "BAD_REQUEST")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
