"""Where a response ends, however its bytes are cut; and which heads are passed on, and how."""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.router.door.framing import MAX_SIZE_LINE_BYTES, MAX_TRAILER_BYTES, Body, FramingError, Head
from services.router.door.usage import aborted, counts


def head(*lines: str, status: str = "200 OK", version: str = "1.1") -> Head:
    return Head("\r\n".join([f"HTTP/{version} {status}", *lines, "", ""]).encode())


CHUNKED = head("Transfer-Encoding: chunked")
NEXT = b"HTTP/1.1 200 OK\r\n"
BODIES = {
    "one chunk": b"5\r\nhello\r\n0\r\n\r\n",
    "chunks": b"1\r\na\r\n0b\r\nhello world\r\n00A\r\n0123456789\r\n000\r\n\r\n",
    "extensions": b'3;a=b;c="d e"\r\nabc\r\n2 ;x\r\nde\r\n0;last\r\n\r\n',
    "trailers": b"2\r\nab\r\n0\r\nX-One: 1\r\nX-Two:2 \r\n\r\n",
    "only the end": b"0\r\n\r\n",
    "data like framing": b"9\r\n0\r\n\r\n2\r\nx\r\n0\r\n\r\n",
}


def pieces(data: bytes, *cuts: int) -> list[bytes]:
    edges = [0, *cuts, len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def follow(of: Head, parts: list[bytes], *, is_head_request: bool = False) -> tuple[int, bool]:
    """Bytes taken, and whether the body is complete."""
    body = Body(of, is_head_request=is_head_request)
    taken = 0
    for part in parts:
        mine = body.feed(part)
        taken += mine
        if mine < len(part):
            assert body.done
            break
    return taken, body.done


@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES)
def test_a_chunked_body_ends_in_the_same_place_at_every_cut(data: bytes) -> None:
    whole = data + NEXT
    for one in range(len(whole) + 1):
        for two in range(one, len(whole) + 1):
            assert follow(CHUNKED, pieces(whole, one, two)) == (len(data), True), (one, two)


@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES)
def test_a_chunked_body_byte_by_byte(data: bytes) -> None:
    body = Body(CHUNKED, is_head_request=False)
    for index in range(len(data)):
        assert not body.done
        assert body.feed(data[index : index + 1]) == 1
    assert body.done
    assert body.feed(NEXT) == 0


@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES)
def test_a_chunked_body_is_incomplete_before_its_last_byte(data: bytes) -> None:
    for size in range(len(data)):
        assert follow(CHUNKED, [data[:size]]) == (size, False)


PAYLOADS = [b"hello", b"ahello world0123456789", b"abcde", b"ab", b"", b"0\r\n\r\n2\r\nx"]


@pytest.mark.parametrize(("data", "payload"), list(zip(BODIES.values(), PAYLOADS, strict=True)), ids=BODIES)
def test_the_payload_of_a_chunked_body_at_every_cut(data: bytes, payload: bytes) -> None:
    for one in range(len(data) + 1):
        for two in range(one, len(data) + 1):
            body = Body(CHUNKED, is_head_request=False)
            assert b"".join(map(body.payload, pieces(data, one, two))) == payload, (one, two)


def test_a_body_with_a_length_at_every_cut() -> None:
    of = head("Content-Length: 11")
    whole = b"hello world" + NEXT
    for one in range(len(whole) + 1):
        for two in range(one, len(whole) + 1):
            assert follow(of, pieces(whole, one, two)) == (11, True)
    assert follow(of, [b"hello worl"]) == (10, False)
    assert follow(head("Content-Length: 0"), [NEXT]) == (0, True)


def test_a_body_without_a_length_goes_on_until_the_connection_ends() -> None:
    of = head("Content-Type: text/plain")
    assert of.until_close
    assert follow(of, [b"0\r\n\r\n", b"more"]) == (9, False)


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified", "100 Continue", "199 Whatever"])
def test_statuses_without_a_body(status: str) -> None:
    of = head("Content-Length: 5", status=status)
    assert not of.until_close
    assert follow(of, [NEXT]) == (0, True)
    assert follow(head(status=status), [NEXT]) == (0, True)


def test_the_answer_to_head_has_no_body() -> None:
    assert follow(head("Content-Length: 5"), [NEXT], is_head_request=True) == (0, True)
    assert follow(CHUNKED, [NEXT], is_head_request=True) == (0, True)


BAD_CHUNKS = [
    b"\r\n",
    b"x\r\n",
    b"-1\r\n",
    b"+1\r\n",
    b"0x1\r\na\r\n",
    b" 1\r\na\r\n",
    b"1 \r\na\r\n",
    b"1\na\n",
    b"1\r\nab\r\n",
    b"1\r\na\n",
    b"1\r\na\r0",
    b"1;a\nb\r\n",
    b"1;a\rb\r\n",
    b"1_0\r\n",
    b"1000000000000000\r\n",
    b"0000000000000001\r\na\r\n",
    b"\xb2\r\n",
    b"1;" + b"a" * MAX_SIZE_LINE_BYTES + b"\r\n",
    b"0\r\nno colon\r\n",
    b"0\r\nX : 1\r\n",
    b"0\r\n X: 1\r\n",
    b"0\r\nX: 1\n\r\n",
    b"0\r\nX: \x00\r\n",
    b"0\r\n\n",
    b"0\r\nX: " + b"a" * MAX_TRAILER_BYTES + b"\r\n",
    b"0\r\n" + b"X-Trailer: 1\r\n" * (MAX_TRAILER_BYTES // 10) + b"\r\n",
]


@pytest.mark.parametrize("data", BAD_CHUNKS, ids=[repr(data[:20]) for data in BAD_CHUNKS])
def test_bad_chunks_are_refused_at_every_cut(data: bytes) -> None:
    """What comes after is never needed to see it: a peer cannot make us wait for more."""
    cuts = range(len(data) + 1) if len(data) < 64 else [0, 1, 2, 3, 4, 100, len(data) - 2, len(data) - 1]
    for cut in cuts:
        with pytest.raises(FramingError):
            follow(CHUNKED, pieces(data, cut))


def test_lines_as_long_as_may_be_are_taken_at_every_cut() -> None:
    size = b"0;" + b"a" * (MAX_SIZE_LINE_BYTES - 4) + b"\r\n\r\n"
    trailer = b"0\r\nX: " + b"a" * (MAX_TRAILER_BYTES - 3) + b"\r\n\r\n"
    for data in (size, trailer):
        for cut in [*range(300), *range(len(data) - 8, len(data) + 1)]:
            assert follow(CHUNKED, pieces(data, min(cut, len(data)))) == (len(data), True)
    assert follow(CHUNKED, [trailer[index : index + 1] for index in range(len(trailer))]) == (len(trailer), True)


BAD_HEADS = [
    b"",
    b"\r\n\r\n",
    b"HTTP/2 200 OK\r\n\r\n",
    b"HTTP/1.2 200 OK\r\n\r\n",
    b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 099 OK\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1  200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\nX: 1\r\n\r\n",
    b"HTTP/1.1 200 O\x00K\r\n\r\n",
    b"ICY 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n: empty\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX : 1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: 1\r\n folded\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: 1\nY: 2\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: 1\rY: 2\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: \x00\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
]


@pytest.mark.parametrize("raw", BAD_HEADS, ids=[repr(raw[8:50]) for raw in BAD_HEADS])
def test_bad_heads_are_refused(raw: bytes) -> None:
    with pytest.raises(FramingError):
        Head(raw)


@pytest.mark.parametrize(
    ("of", "keep_alive"),
    [
        (head(), True),
        (head("Connection: close"), False),
        (head("Connection: Keep-Alive, Close"), False),
        (head("Connection: closed"), True),
        (head(version="1.0"), False),
        (head("Connection: Keep-Alive", version="1.0"), True),
        (head("Connection: x-keep-alive", version="1.0"), False),
    ],
)
def test_whether_the_connection_may_be_used_again(of: Head, keep_alive: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert of.keep_alive is keep_alive


def test_hop_by_hop_headers_and_our_own_are_not_passed_on() -> None:
    lines = [
        "Server: engine",
        "Connection: keep-alive, X-Private, Content-Type, Content-Length",
        "Keep-Alive: timeout=5",
        "x-private: secret",
        "Content-Type: application/json",
        "Proxy-Authenticate: Basic",
        "Upgrade: h2c",
        "X-Kvc-Mode: forged",
        "Traceparent: forged",
        "Content-Length: 2",
        "Set-Cookie: a=b",
        "set-cookie: c=d",
    ]
    passed = head(*lines).passed_on(b"x-kvc-mode: direct\r\n")
    assert passed == (
        b"HTTP/1.1 200 OK\r\nServer: engine\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        b"Set-Cookie: a=b\r\nset-cookie: c=d\r\n"
        b"x-kvc-mode: direct\r\n\r\n"
    )


def test_a_reason_that_looks_like_a_header_stays() -> None:
    of = head("Connection: x", "x: 1", status="200 x: 1")
    assert of.passed_on(b"") == b"HTTP/1.1 200 x: 1\r\n\r\n"


def test_the_version_passed_on_is_ours() -> None:
    assert head("Content-Length: 0", version="1.0").passed_on(b"") == b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    for status in ("200", "200 "):
        assert head("X: 1", status=status).passed_on(b"") == b"HTTP/1.1 200 \r\nX: 1\r\n\r\n"


def test_a_head_for_a_client_without_chunks() -> None:
    of = head("Transfer-Encoding: chunked", "Trailer: X-Sum", "X-A: transfer-encoding: chunked")
    assert (
        of.passed_on_plain(b"connection: close\r\n") == b"HTTP/1.1 200 OK\r\nX-A: transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )


def test_counts_come_from_the_engines_keys_only() -> None:
    """What a model writes cannot be taken for them: quotes inside of strings are escaped."""
    tail = (
        rb'{"text":"\"prompt_tokens\": 9","usage":{"prompt_tokens": 12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}'
    )
    assert counts(tail) == {b"prompt_tokens": 12, b"completion_tokens": 3, b"cached_tokens": 8}
    assert counts(rb'"prompt_tokens": 99999999999999, "completion_tokens": -1, "cached_tokens": 1.5') == {b"cached_tokens": 1}


@pytest.mark.parametrize(
    ("tail", "gave_up"),
    [
        (b'{"finish_reason":"abort"}', True),
        (b'"finish_reason": { "type": "abort", "message": ""}', True),
        (b'"finish_reason":"stop"', False),
        (rb'"text":"\"finish_reason\":\"abort\""', False),
        (b'"finish_reason":null,"x":"abort"', False),
    ],
)
def test_an_engine_that_gave_up(tail: bytes, gave_up: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert aborted(tail) is gave_up
