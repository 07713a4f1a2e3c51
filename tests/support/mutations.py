"""Requests and replies that are nearly right: what generators make of good ones."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from tests.support.smuggling import REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Operation = tuple[str, int, int]
"""Its name, and two numbers that say where and what."""

CORPUS: Final = list(REFUSED.values())
_LENGTH = re.compile(rb"(?i)(content-length:[ \t]*)(\d+)")
_BODY = b"\r\n\r\n"


def _json(path: str, body: bytes, *lines: str) -> bytes:
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: door", *lines, f"Content-Length: {len(body)}", "", ""])
    return head.encode() + body


def _chunked(path: str, *parts: bytes, trailers: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: door\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


_CHAT = b'{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"}],"max_tokens":4,"stream":true}'
_TOOLS = (
    b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]},{"role":"assistant","content":null,"tool_calls":[{"id":"1",'
    b'"type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"1","content":"r"}],"tools":[{"x":1}]}'
)
_CLAUDE = b'{"model":"m","system":"s","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"metadata":{"user_id":"u"}}'

GOOD: Final[list[bytes]] = [
    _json("/v1/chat/completions", _CHAT),
    _json("/v1/chat/completions", _TOOLS, "X-Session-Id: fuzz", "Connection: keep-alive"),
    _json("/v1/completions", b'{"prompt":"once upon","max_tokens":4,"prompt_cache_key":"g"}', "Authorization: Bearer x"),
    _json("/v1/messages", _CLAUDE, "anthropic-version: 2023-06-01"),
    _json("/generate", b'{"text":"hi","sampling_params":{"max_new_tokens":4},"session_id":"s","rid":"r"}'),
    _json("/generate?x=y", b'{"input_ids":[1,2,3,400000],"sampling_params":{"max_new_tokens":4,"temperature":0.5}}'),
    _json("/v1/completions", b'{"prompt":[1,2,3]}', "Expect: 100-continue"),
    _json("/v1/chat/completions", _CHAT, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQA"),
    _json("/nope", b"{}"),
    _chunked("/v1/chat/completions", _CHAT),
    _chunked("/v1/chat/completions", _CHAT[:9], _CHAT[9:40], _CHAT[40:], trailers=b"X-T: 1\r\n"),
    b"GET /health HTTP/1.1\r\nHost: door\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nHost: door:80\r\nAccept: */*\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: door\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n",
    b"GET http://door/v1/models HTTP/1.1\r\nHost: door\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: door\r\nContent-Length: 0\r\n\r\n",
    b"DELETE /v1/chat/completions HTTP/1.1\r\nHost: door\r\n\r\n",
    b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
]

_TOKENS: Final[list[bytes]] = [
    b"\r\n", b"\n", b"\r", b"\x00", b"\r\n\r\n", b" ", b"\t", b":", b",", b";", b'"', b"{", b"}", b"[", b"]", b"\\", b"\\u0000", b"\\ud800",
    b"\xff", b"\xc3\x28", b"\xf0\x9f\x98\x80", b"0", b"-1", b"0x10", b"1e400", b"NaN", b"null", b"true", b"9" * 40, b"chunked", b"identity",
    b"close", b"keep-alive", b"HTTP/1.0", b"HTTP/2.0", b"GET ", b"CONNECT ", b"/", b"//", b"%00", b"#", b"?", b"http://x/", b"0\r\n\r\n",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"A" * 5000, b"[" * 2000, b'{"a":' * 1500,
    b'"rid":"x",', b'"bootstrap_room":1,',
]  # fmt: skip
_HEADERS: Final[list[bytes]] = [
    b"Content-Length: 0", b"Content-Length: 3", b"Content-Length: 00", b"Content-Length: 1e3", b"content-length:5",
    b"Content-Length: 5, 5",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity", b"transfer-encoding:\tchunked",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding: chunked\x0b", b"TE: trailers", b"Trailer: Content-Length", b"Host: other",
    b"Host:",
    b"Host: a b", b"Connection: close", b"Connection: keep-alive, content-length", b"Connection: host, x-session-id", b"Connection: ,,,",
    b"Keep-Alive: timeout=1", b"Upgrade: websocket", b"Connection: upgrade", b"Expect: 100-continue", b"Expect: 200-ok", b"X-Session-Id: a",
    b"X-Session-Id: \xff\xfe", b"X-Session-Id:", b"Traceparent: 00-%b-%b-01" % (b"a" * 32, b"b" * 16), b"Traceparent: \xff", b" folded: 1",
    b"\tfolded", b"X: " + b"a" * 9000, b"X\x00Y: 1", b"X: \x00", b"X: a\rb", b": empty", b"no colon",
    b"Accept: application/openmetrics-text;version=x",
    b"Content-Encoding: gzip", b"Content-Type: text/plain", b"Authorization: Basic x", b"Proxy-Connection: keep-alive", b"Range: bytes=0-1",
]  # fmt: skip
_ENDS: Final[list[bytes]] = [b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n ", b"\r\n\t", b"", b"\x00\r\n", b"\r\n\r\n"]
_SIZES: Final[list[bytes]] = [
    b"%X",
    b"0%x",
    b"%x;a=b",
    b'%x ;a="\\""',
    b"0x%x",
    b"+%x",
    b"-%x",
    b" %x",
    b"%x ",
    b"%x\r",
    b"%xg",
    b"%x\x00",
    b"%x;\n",
    b"0%x" * 9,
]
_VALUES: Final[list[bytes]] = [
    b"null", b"true", b"-1", b"0", b"1.5", b"1e400", b"-0", b"9" * 30, b"9" * 5000, b"NaN", b"Infinity", b"01", b'""', b'"\\ud800"',
    b'"\xff"',
    b'"\\u0000"', b"{}", b"[]", b"[[]]", b"[null]", b'[{"role":1}]', b'[{"role":"user","content":1}]', b"[" * 1200 + b"]" * 1200, b"", b"{",
    b'{"a":1,"a":2}', b'"' + b"x" * 20_000 + b'"', b"[1,2,-3]", b"[1.5]", b"[true]", b"4294967296",
    b'{"max_new_tokens":1,"max_new_tokens":2}',
]  # fmt: skip
_VALUE = re.compile(rb'(?<=":)(?:"[^"]*"|[-0-9.]+|true|false|null|\[[^\]]*\]|\{[^}]*\})')
_KEY = re.compile(rb'"[a-z_]+":')


def _pick(found: Sequence[re.Match[bytes]], number: int) -> re.Match[bytes] | None:
    return found[number % len(found)] if found else None


def _lines(raw: bytes) -> tuple[list[bytes], bytes]:
    head, edge, body = raw.partition(_BODY)
    return head.split(b"\r\n"), edge + body


def _line(raw: bytes, where: int, what: int) -> bytes:
    lines, rest = _lines(raw)
    lines.insert(1 + where % len(lines), _HEADERS[what % len(_HEADERS)])
    return b"\r\n".join(lines) + rest


def _line_twice(raw: bytes, where: int, _what: int) -> bytes:
    lines, rest = _lines(raw)
    lines.insert(1, lines[where % len(lines)])
    return b"\r\n".join(lines) + rest


def _line_gone(raw: bytes, where: int, _what: int) -> bytes:
    lines, rest = _lines(raw)
    del lines[where % len(lines)]
    return b"\r\n".join(lines) + rest


def _end(raw: bytes, where: int, what: int) -> bytes:
    found = _pick(list(re.finditer(b"\r\n", raw)), where)
    return raw if found is None else raw[: found.start()] + _ENDS[what % len(_ENDS)] + raw[found.end() :]


def _length(raw: bytes, _where: int, what: int) -> bytes:
    return _LENGTH.sub(lambda found: found[1] + b"%d" % max(0, int(found[2]) + what % 41 - 20), raw)


def _mend(raw: bytes, _where: int, _what: int) -> bytes:
    """Makes the length right again, so that what is wrong inside of the body is looked at."""
    size = len(raw.partition(_BODY)[2])
    return _LENGTH.sub(lambda found: found[1] + b"%d" % size, raw, count=1)


def _size(raw: bytes, where: int, what: int) -> bytes:
    found = _pick(list(re.finditer(rb"(?<=\r\n)([0-9a-f]+)(?=\r\n)", raw)), where)
    if found is None:
        return raw
    return raw[: found.start()] + _SIZES[what % len(_SIZES)].replace(b"%x", found[1]).replace(b"%X", found[1].upper()) + raw[found.end() :]


def _value(raw: bytes, where: int, what: int) -> bytes:
    found = _pick(list(_VALUE.finditer(raw)), where)
    return raw if found is None else _mend(raw[: found.start()] + _VALUES[what % len(_VALUES)] + raw[found.end() :], 0, 0)


def _key(raw: bytes, where: int, what: int) -> bytes:
    keys = list(_KEY.finditer(raw))
    one, other = _pick(keys, where), _pick(keys, what)
    return raw if one is None or other is None else _mend(raw[: one.start()] + other[0] + raw[one.end() :], 0, 0)


def _insert(raw: bytes, where: int, what: int) -> bytes:
    at = where % (len(raw) + 1)
    return raw[:at] + _TOKENS[what % len(_TOKENS)] + raw[at:]


def _flip(raw: bytes, where: int, what: int) -> bytes:
    at = where % max(1, len(raw))
    return raw[:at] + bytes([what % 256]) + raw[at + 1 :]


def _delete(raw: bytes, where: int, what: int) -> bytes:
    at = where % max(1, len(raw))
    return raw[:at] + raw[at + 1 + what % 30 :]


def _repeat(raw: bytes, where: int, what: int) -> bytes:
    at = where % max(1, len(raw))
    return raw[: at + 1 + what % 60] + raw[at:]


OPERATIONS: Final[dict[str, Callable[[bytes, int, int], bytes]]] = {
    "line": _line,
    "line twice": _line_twice,
    "line gone": _line_gone,
    "end": _end,
    "length": _length,
    "mend": _mend,
    "size": _size,
    "value": _value,
    "key": _key,
    "insert": _insert,
    "flip": _flip,
    "delete": _delete,
    "repeat": _repeat,
    "truncate": lambda raw, where, _what: raw[: where % (len(raw) + 1)],
    "more": lambda raw, _where, what: raw + _TOKENS[what % len(_TOKENS)],
    "corpus": lambda _raw, where, _what: CORPUS[where % len(CORPUS)],
}


def mutated(raw: bytes, operations: Sequence[Operation]) -> bytes:
    """The bytes after the operations, in order."""
    for name, where, what in operations:
        raw = OPERATIONS[name](raw, where, what)
    return raw


def pieces(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The bytes in pieces; the first cut says whether they travel byte by byte."""
    if cuts and cuts[0] % 8 == 0 and len(raw) < 2000:
        return [raw[index : index + 1] for index in range(len(raw))]
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return [raw[start:end] for start, end in pairwise(edges)]
