"""The mock engine: workers that cost next to nothing, so that what is measured beside them is the router.

One process is all workers, one port each. HTTP is read by hand: a request costs about 15 µs of CPU time and a chunk about 4 µs. Clients
send their next request when they have the last reply.

    POST /generate, /v1/chat/completions, /v1/completions    as many chunks as the request asks tokens for, or one document
    GET  /health, /v1/models, ...                            what routers ask about a worker
    POST /tune?first_token_ms=0&gap_ms=10&varied=0           changes the pace; answers with what was served and spent
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import time
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import parse_qsl

import uvloop

from bench.peers import replies
from bench.peers.framing import FramingError, body_end, payload

if TYPE_CHECKING:
    from collections.abc import Sequence

PARAMETERS_BYTES: Final = 2048
"""How much of a body's start and of its end is searched for parameters; a long prompt is not."""
PIECE_GAP_S: Final = 0.0005
BACKLOG: Final = 4096
_BLANK: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)")
_TOKENS: Final = re.compile(rb'"max_(?:new_|completion_)?tokens"\s*:\s*(\d+)')
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_SEED: Final = re.compile(rb'"seed"\s*:\s*(\d+)')


class Pace:
    """When tokens leave: one ticker for all streams, as one step of an engine gives every running request its token."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """At once, without gaps."""
        self.loop = loop
        self.first_token_s = 0.0
        self.gap_s = 0.0
        self.varied = False
        self.requests = 0
        self.chunks = 0
        self._left: dict[Worker, int] = {}
        self._ticking = False
        self._due_s = 0.0

    def tune(self, query: str) -> None:
        """Changes what the query names.

        Raises:
            ValueError: it names something else, or a value is no number of milliseconds.
        """
        changes = {name: float(value) for name, value in parse_qsl(query, strict_parsing=bool(query))}
        for name, value in changes.items():
            if name not in {"first_token_ms", "gap_ms", "varied"} or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value}: first_token_ms, gap_ms or varied, 0 or more")
        self.first_token_s = changes.get("first_token_ms", self.first_token_s * 1e3) / 1e3
        self.gap_s = changes.get("gap_ms", self.gap_s * 1e3) / 1e3
        self.varied = bool(changes.get("varied", self.varied))

    def add(self, worker: Worker, chunks: int) -> None:
        """A stream gets `chunks` more, one a step."""
        if not self._ticking:
            self._ticking = True
            self._due_s = self.loop.time()
            self.loop.call_soon(self._step)
        self._left[worker] = chunks

    def drop(self, worker: Worker) -> None:
        """A stream's client is gone."""
        self._left.pop(worker, None)

    def _step(self) -> None:
        left = self._left
        ended = []
        self.chunks += len(left)
        for worker, chunks in left.items():
            if chunks > 1:
                worker.transport.write(worker.chunk)
                left[worker] = chunks - 1
            else:
                worker.transport.write(worker.chunk + replies.STREAM_END)
                ended.append(worker)
        for worker in ended:
            del left[worker]
        if not left:
            self._ticking = False
        elif self.gap_s == 0:
            self.loop.call_soon(self._step)
        else:  # a late step is made up for, up to one gap
            self._due_s = max(self._due_s + self.gap_s, self.loop.time() - self.gap_s)
            self.loop.call_at(self._due_s, self._step)


class Worker(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport
    chunk: bytes

    def __init__(self, pace: Pace) -> None:
        """Waits for a head."""
        self._pace = pace
        self._unread = b""
        self._target = b""
        self._body: list[bytes] = []
        self._missing = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remembers the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        """Ends its stream."""
        self._pace.drop(self)

    def data_received(self, data: bytes) -> None:
        """Answers when the request is whole."""
        if self._missing > 0:  # the middle of a long body
            self._body.append(data)
            self._missing -= len(data)
        else:
            self._unread += data
            try:
                if not self._begun():
                    return
            except (FramingError, IndexError, ValueError) as error:
                self._refuse(error)
                return
        if self._missing <= 0:
            self._answer()

    def _begun(self) -> bool:
        """True when the head is there, and the body if it comes in chunks."""
        if not self._target:
            end = self._unread.find(_BLANK)
            if end < 0:
                return False
            self._target = self._unread[:end].split(b" ", 2)[1]
            head = self._unread[: end + 2].lower()
            rest, self._unread = self._unread[end + 4 :], b""
            if b"\r\nexpect:" in head:
                self.transport.write(replies.CONTINUE)
            length = _LENGTH.search(head)
            self._chunked = length is None and b"\r\ntransfer-encoding:" in head
            if not self._chunked:
                self._body.append(rest)
                self._missing = int(length[1]) - len(rest) if length is not None else 0
                return True
            self._unread = rest
        end_of_body = body_end(self._unread)
        if end_of_body is None:
            return False
        self._body.append(payload(self._unread[:end_of_body]))
        self._unread = self._unread[end_of_body:]
        return True

    def _refuse(self, error: Exception) -> None:
        body = json.dumps({"error": {"message": f"not a request: {error}"}}).encode()
        self.transport.write(replies.whole_bytes(body, b"400 Bad Request"))
        self.transport.close()

    def _answer(self) -> None:
        body, self._body = self._body, []
        target, self._target = self._target, b""
        path, _, query = target.partition(b"?")
        if path in replies.CHUNKS:
            self._generate(path, b"".join(body))
        elif path == b"/tune":
            try:
                self._pace.tune(query.decode())
            except ValueError as error:
                self._refuse(error)
                return
            served = {"requests": self._pace.requests, "chunks": self._pace.chunks, "cpu_s": time.process_time()}
            self.transport.write(replies.whole(served))
        else:
            self.transport.write(replies.STATIC.get(path, replies.NOT_FOUND))

    def _generate(self, path: bytes, body: bytes) -> None:
        pace = self._pace
        pace.requests += 1
        edges = body if len(body) <= 2 * PARAMETERS_BYTES else body[:PARAMETERS_BYTES] + body[-PARAMETERS_BYTES:]
        stream = _STREAM.search(edges) is not None
        if pace.varied:
            seed = _SEED.search(edges)
            self._pieces(replies.varied(int(seed[1]) if seed else 0, path, stream=stream), 0)
            return
        tokens = _TOKENS.search(edges)
        chunks = int(tokens[1]) if tokens else 1
        if pace.first_token_s:
            pace.loop.call_later(pace.first_token_s, self._start, path, stream, chunks)
        else:
            self._start(path, stream, chunks)

    def _start(self, path: bytes, stream: bool, chunks: int) -> None:  # noqa: FBT001 - the loop calls it with positional arguments
        if not stream:
            self.transport.write(replies.WHOLES[path])
            return
        self.chunk = chunk = replies.CHUNKS[path]
        self._pace.chunks += 1
        if chunks <= 1:
            self.transport.write(replies.STREAM_HEAD + chunk + replies.STREAM_END)
        else:
            self.transport.write(replies.STREAM_HEAD + chunk)
            self._pace.add(self, chunks - 1)

    def _pieces(self, pieces: Sequence[bytes], sent: int) -> None:
        """Writes the next piece, and the ones after it some time later."""
        self.transport.write(pieces[sent])
        if sent + 1 < len(pieces):
            self._pace.loop.call_later(PIECE_GAP_S, self._pieces, pieces, sent + 1)


async def serve(ports: Sequence[int]) -> None:
    """Serves a worker on each port, until it is cancelled."""
    loop = asyncio.get_running_loop()
    pace = Pace(loop)
    for port in ports:
        await loop.create_server(lambda: Worker(pace), "127.0.0.1", port, backlog=BACKLOG)
    await asyncio.Event().wait()


def main() -> None:
    """`python -m bench.peers.engine --ports PORT ...`."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.engine", description="Mock workers, one a port.")
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
