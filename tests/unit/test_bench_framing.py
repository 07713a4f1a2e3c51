"""Chunked bodies in the benchmark beside peer routers."""

from __future__ import annotations

import pytest

from bench.peers.framing import FramingError, body_end, framed, payload


def test_a_chunked_body_ends_after_its_trailers() -> None:
    body = b"5\r\nhello\r\n00A ;x=1\r\n0123456789\r\n0\r\nx-sum: 1\r\n\r\n"
    assert body_end(body + b"HTTP/1.1") == len(body)
    assert payload(body) == b"hello0123456789"
    assert body_end(b"0\r\n\r\n") == 5
    assert framed(b"0123456789abcdef") == b"10\r\n0123456789abcdef\r\n"


def test_no_part_of_a_chunked_body_is_whole() -> None:
    body = b"7\r\n0\r\n\r\nab\r\n0\r\nx: 1\r\n\r\n"
    assert [body_end(body[:size]) for size in range(len(body))] == [None] * len(body)
    assert body_end(body) == len(body)


@pytest.mark.parametrize(
    "body", [b"\r\n", b"x\r\n", b"-1\r\n", b"0x1\r\na\r\n", b"1\r\nab\r\n0\r\n\r\n", b"+1\r\na\r\n", b";\r\n", b"1" * 5000]
)
def test_what_is_no_chunked_body_is_refused(body: bytes) -> None:
    with pytest.raises(FramingError):
        body_end(body)


def test_a_payload_needs_a_whole_body_and_nothing_after_it() -> None:
    with pytest.raises(FramingError, match="not whole"):
        payload(b"1\r\na\r\n")
    with pytest.raises(FramingError, match="2 bytes follow"):
        payload(b"0\r\n\r\nab")
