"""What the door says with the statuses that it gives itself."""

from __future__ import annotations

from typing import Final

REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 404: b"Not Found", 405: b"Method Not Allowed", 408: b"Request Timeout",
    409: b"Conflict", 413: b"Content Too Large", 417: b"Expectation Failed", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 500: b"Internal Server Error", 502: b"Bad Gateway", 503: b"Service Unavailable",
    504: b"Gateway Timeout",
}  # fmt: skip
"""Of the status line."""
KINDS: Final = {
    401: "UNAUTHENTICATED", 405: "METHOD_NOT_ALLOWED", 408: "REQUEST_TIMEOUT", 413: "TOO_LARGE", 429: "TOO_MANY_REQUESTS",
    431: "HEAD_TOO_LARGE", 500: "INTERNAL", 503: "OVERLOADED",
}  # fmt: skip
"""Types of errors in requests that nobody could read to their end; others are BAD_REQUEST."""
