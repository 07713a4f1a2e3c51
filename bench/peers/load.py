"""The load generator, a process of its own: sends the load of a scenario to one system or to several, and prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from bench.peers.client import Connection, Reply, connect
from bench.peers.framing import FramingError
from bench.peers.prompts import chat_turns, text_turns
from bench.peers.scenarios import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL: Final = b"mock"
SESSIONS: Final = 8
"""Of a connection that works in a closed loop, one after the other, turn by turn."""
_OK: Final = 200


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to send: `ports` by target, on 127.0.0.1."""

    ports: dict[str, int]
    load: Load
    seed: int


class Times(msgspec.Struct, frozen=True):
    """Microseconds."""

    p10: float
    p50: float
    p99: float


class Seen(msgspec.Struct, frozen=True):
    """What came back from one target.

    Attributes:
        requests: whole and right replies.
        errors: all others, by kind.
        wall_s: how long the load lasted.
        chunks: server-sent events with content.
        reads: pieces in which replies arrived.
        first_us: from the request to the reply's first bytes.
        end_us: from the request to the reply's end.
    """

    requests: int
    errors: dict[str, int]
    wall_s: float
    chunks: int
    reads: int
    first_us: Times
    end_us: Times


class Report(msgspec.Struct, frozen=True):
    """What a load generator prints."""

    cpu_s: float
    targets: dict[str, Seen]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the sorted values are below; 0 of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def times(seconds: Sequence[float]) -> Times:
    """Percentiles of times in seconds."""
    ordered = sorted(1e6 * value for value in seconds)
    return Times(percentile(ordered, 0.1), percentile(ordered, 0.5), percentile(ordered, 0.99))


class Target:
    """One system, and what came back from it."""

    def __init__(self, port: int, load: Load) -> None:
        """Nothing sent yet."""
        self.load = load
        self._port = port
        self._replies: list[Reply] = []
        self._errors: dict[str, int] = {}
        limit, stream = load.max_tokens, b"true" if load.stream else b"false"
        if load.path == "/generate":
            self._before = b'{"stream": %b, "sampling_params": {"max_new_tokens": %d}, "text": "' % (stream, limit)
            self._after = b'"}'
        else:
            self._before = b'{"model": "%b", "stream": %b, "max_tokens": %d, "messages": [' % (MODEL, stream, limit)
            self._after = b"]}"

    async def connection(self) -> Connection:
        """A new connection."""
        return await connect(self._port)

    def prompts(self, rng: random.Random) -> list[bytes]:
        """The turns of a new session."""
        make = text_turns if self.load.path == "/generate" else chat_turns
        return make(rng, self.load.turns, self.load.turn_bytes)

    async def send(self, connection: Connection, session: bytes, prompt: bytes) -> Connection:
        """One request; whatever goes wrong is counted, for a broken target must not end the run of the others.

        Returns:
            The connection for the next request.
        """
        try:
            if connection.closed:
                connection = await self.connection()
            reply = await asyncio.wait_for(connection.ask(self._request(session, prompt)), self.load.timeout_s)
            self._take(reply)
        except (OSError, TimeoutError, FramingError) as error:
            self._fail(type(error).__name__)
            connection.close()
        return connection

    def _request(self, session: bytes, prompt: bytes) -> bytes:
        length = len(self._before) + len(prompt) + len(self._after)
        return (
            b"POST %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\nx-smg-routing-key: %b\r\nx-session-id: %b\r\n"
            b"content-length: %d\r\n\r\n%b%b%b"
            % (self.load.path.encode(), self._port, session, session, length, self._before, prompt, self._after)
        )

    def _take(self, reply: Reply) -> None:
        if self.load.stream and reply.chunked and reply.chunks < self.load.max_tokens:
            reply.recount()
        reply.parts.clear()
        if reply.status != _OK:
            self._fail(f"status {reply.status}")
        elif self.load.stream and reply.chunks - self.load.max_tokens not in {0, 1}:  # some systems end with an empty chunk
            self._fail(f"{reply.chunks} chunks")
        else:
            self._replies.append(reply)

    def _fail(self, kind: str) -> None:
        self._errors[kind] = self._errors.get(kind, 0) + 1

    def seen(self, wall_s: float) -> Seen:
        """All that came back."""
        replies = self._replies
        return Seen(
            requests=len(replies),
            errors=self._errors,
            wall_s=wall_s,
            chunks=sum(reply.chunks for reply in replies),
            reads=sum(reply.reads for reply in replies),
            first_us=times([reply.first_s - reply.sent_s for reply in replies]),
            end_us=times([reply.ended_s - reply.sent_s for reply in replies]),
        )


async def paired(targets: Sequence[Target], load: Load, rng: random.Random) -> None:
    """One request at a time, to each target in turn: the machine's noise meets all alike."""
    connections = {target: await target.connection() for target in targets}
    sent = 0
    while sent < load.requests:
        session = b"s%d" % rng.randrange(10**9)
        for prompt in targets[0].prompts(rng):
            for target in rng.sample(targets, len(targets)):
                connections[target] = await target.send(connections[target], session, prompt)
                if load.pause_ms:
                    await asyncio.sleep(load.pause_ms / 1e3)
            sent += 1


class Loop:
    """One connection's closed loop over its sessions, from their first turn to their last, and again."""

    def __init__(self, target: Target, connection: Connection, rng: random.Random) -> None:
        """Makes its prompts, which takes longer than to send them."""
        self._target = target
        self._connection = connection
        self._sessions = [(b"s%d" % rng.randrange(10**9), target.prompts(rng)) for _ in range(SESSIONS)]

    async def run(self, load: Load, ends_s: float) -> None:
        """Sends until `ends_s`, by `perf_counter`, or until all requests were sent."""
        sent = 0
        while time.perf_counter() < ends_s and (not load.requests or sent < load.requests):
            session, prompts = self._sessions[sent % SESSIONS]
            self._connection = await self._target.send(self._connection, session, prompts[sent // SESSIONS % load.turns])
            sent += 1


async def run(job: Job) -> Report:
    """Sends the load.

    Raises:
        OSError: a target does not listen.
    """
    load = job.load
    targets = {name: Target(port, load) for name, port in job.ports.items()}
    loops: list[Loop] = []
    if not load.paired:
        for number, target in enumerate(targets.values()):
            for connection in range(load.connections):
                rng = random.Random(job.seed * 1000 + number * 100 + connection)
                loops.append(Loop(target, await target.connection(), rng))
    start_s, cpu_s = time.perf_counter(), time.process_time()
    if load.paired:
        await paired(list(targets.values()), load, random.Random(job.seed))
    else:
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop.run(load, start_s + load.seconds))
    wall_s = time.perf_counter() - start_s
    return Report(time.process_time() - cpu_s, {name: target.seen(wall_s) for name, target in targets.items()})


def main() -> int:
    """`python -m bench.peers.load JOB`, a Job as JSON."""
    if len(sys.argv) != 2:
        print("usage: python -m bench.peers.load JOB", file=sys.stderr)
        return 2
    try:
        job = msgspec.json.decode(sys.argv[1], type=Job)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        print(f"not a job: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(uvloop.run(run(job))).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
