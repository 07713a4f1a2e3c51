"""Whether a router's replies are the engine's, byte for byte: the same requests, sent to an engine and through the router."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.peers.framing import FramingError, body_end, framed, payload
from bench.peers.replies import CHAT, COMPLETIONS, GENERATE, MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEDS: Final = tuple(range(12))
PLAIN_TOKENS: Final = 40
AT_ONCE: Final = 8
TIMEOUT_S: Final = 20.0
SHOWN_BYTES: Final = 40
READ_BYTES: Final = 1 << 16
REQUEST_CHUNKS: Final = 3
_PATHS: Final = (CHAT, COMPLETIONS, GENERATE)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        path: where it goes.
        seed: which of the engine's varied replies.
        stream: asks for server-sent events.
        chunked: its body comes in chunks, otherwise with a length.
    """

    path: bytes
    seed: int
    stream: bool
    chunked: bool

    def __str__(self) -> str:
        """For the list of differences."""
        kind = "stream" if self.stream else "document"
        return f"POST {self.path.decode()}, {kind}, {'chunked' if self.chunked else 'content-length'} request, seed {self.seed}"

    def request(self, port: int) -> bytes:
        """Its bytes."""
        body: dict[str, object] = {"model": MODEL, "stream": self.stream, "seed": self.seed}
        words = f"prompt of {self.seed}, with \u00e9 and \U0001f600"
        if self.path == CHAT:
            body |= {"max_tokens": PLAIN_TOKENS, "messages": [{"role": "user", "content": words}]}
        elif self.path == COMPLETIONS:
            body |= {"max_tokens": PLAIN_TOKENS, "prompt": words}
        else:
            body = {"text": words, "stream": self.stream, "seed": self.seed, "sampling_params": {"max_new_tokens": PLAIN_TOKENS}}
        data = json.dumps(body, ensure_ascii=False).encode()
        head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n" % (self.path, port)
        if not self.chunked:
            return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)
        step = len(data) // REQUEST_CHUNKS + 1
        chunks = b"".join(framed(data[start : start + step]) for start in range(0, len(data), step))
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


ASKS: Final = tuple(itertools.starmap(Ask, itertools.product(_PATHS, SEEDS, (True, False), (True, False))))


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply.

    Attributes:
        status: status code.
        kind: content-type.
        chunked: it came in chunks.
        raw: all bytes after the head, framing and trailers included.
    """

    status: int
    kind: bytes
    chunked: bool
    raw: bytes

    @property
    def body(self) -> bytes:
        """What it carries."""
        return payload(self.raw) if self.chunked else self.raw


@dataclass(frozen=True, slots=True)
class Identity:
    """What came of a comparison: how many replies of which kind, and what was different."""

    replies: int
    body_bytes: int
    differences: tuple[str, ...]


async def compare(engine: int, router: int, asks: Sequence[Ask] = ASKS) -> Identity:
    """Sends every request to both ports and compares status, content-type, kind of framing, body, and the raw bytes after the head."""
    room = asyncio.Semaphore(AT_ONCE)

    async def both(ask: Ask) -> tuple[int, str]:
        async with room:
            try:
                expected = await asyncio.wait_for(exchange(engine, ask), TIMEOUT_S)
                got = await asyncio.wait_for(exchange(router, ask), TIMEOUT_S)
                return len(expected.body), difference(expected, got)
            except (OSError, EOFError, TimeoutError, FramingError) as error:
                return 0, f"{type(error).__name__} {error}"

    async with asyncio.TaskGroup() as group:
        tasks = [(ask, group.create_task(both(ask))) for ask in asks]
    results = [(ask, *task.result()) for ask, task in tasks]
    found = tuple(f"{ask}: {what}" for ask, _, what in results if what)
    return Identity(len(asks), sum(size for _, size, _ in results), found)


def difference(expected: Answer, got: Answer) -> str:
    """What is not the same; empty when all is.

    Raises:
        FramingError: a body is malformed.
    """
    for name, one, other in (
        ("status", expected.status, got.status),
        ("content-type", expected.kind, got.kind),
        ("chunked", expected.chunked, got.chunked),
    ):
        if one != other:
            return f"{name} {other!r} instead of {one!r}"
    for name, before, after in (("body", expected.body, got.body), ("framing", expected.raw, got.raw)):
        if before != after:
            place = next((place for place, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
            shown = slice(max(0, place - SHOWN_BYTES // 2), place + SHOWN_BYTES // 2)
            return f"{name} differs at byte {place} of {len(before)}: {after[shown]!r} instead of {before[shown]!r}"
    return ""


async def exchange(port: int, ask: Ask) -> Answer:
    """Sends a request on a connection of its own and reads the reply to its end.

    Raises:
        EOFError: the connection ended before the reply.
        FramingError: the reply's framing is malformed, or something follows the reply.
        OSError: the connection failed.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(ask.request(port))
        head = await reader.readuntil(b"\r\n\r\n")
        fields = _fields(head)
        length = int(fields[b"content-length"]) if b"content-length" in fields else None
        raw = b""
        while (end := length if length is not None else body_end(raw)) is None or len(raw) < end:
            more = await reader.read(READ_BYTES)
            if not more:
                raise EOFError(f"the connection ended after {len(raw)} bytes of the body")
            raw += more
        if len(raw) > end:
            raise FramingError(f"{len(raw) - end} bytes follow the reply")
        return Answer(int(head[9:12]), fields.get(b"content-type", b""), length is None, raw)
    finally:
        writer.close()


def _fields(head: bytes) -> dict[bytes, bytes]:
    """Header fields by lower-case name.

    Raises:
        FramingError: neither a length nor chunks end the body.
    """
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)
    fields = {name.lower(): value.strip() for name, _, value in lines}
    if b"content-length" not in fields and fields.get(b"transfer-encoding", b"").lower() != b"chunked":
        raise FramingError("the reply has neither a length nor chunks")
    return fields
