"""The front door under requests that are nearly right, and engines that nearly answer.

Every connection is kept for as long as the door keeps it, and proves with a following good request that both sides still mean the same:
the request gets its own answer, or the connection was closed. Nothing is answered with 500, nothing hangs, and nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvc.core import events as ev
from services.router.door.client import Client
from tests.support.door_engine import CHUNKED, END, Asked, chunk, head, whole
from tests.support.front import Front, front, post
from tests.support.mutations import CORPUS, GOOD, OPERATIONS, mutated, pieces
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.router.door.request import HttpRequest
    from tests.support.front import Wire
    from tests.support.mutations import Operation

REQUESTS = 4
"""Generated requests a connection."""
NIGHTLY = settings.default is not None and settings.default.max_examples >= 1000
EXAMPLES = 5_000 if NIGHTLY else 500
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
DEADLINE_S = 10.0
LIMITS = {"max_head_bytes": 8192, "max_body_bytes": 65_536, "max_headers": 40}
STATUS_LINE = re.compile(rb"HTTP/1\.1 \d\d\d ")

pytestmark = pytest.mark.timeout(1800)  # for the nightly profile
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


class Watched(Client):
    """A connection whose books the test can read."""

    made: list[Watched]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.got_bytes = 0
        self.methods: list[bytes] = []
        self.made.append(self)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.got_bytes += len(data)
        super().data_received(data)

    def _begin(self, request: HttpRequest) -> None:
        self.methods.append(request.method)
        super()._begin(request)

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing was begun."""
        return self._current is None and not self._waiting and not self._parser.partial

    @property
    def quiet(self) -> bool:
        """Nothing will be said before something more is heard."""
        return self._closing or (self._current is None and not self._waiting)


class Fuzz:
    """A door that lives for all examples of a test."""

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.runner = asyncio.Runner(loop_factory=loop_factory)
        self.stack = AsyncExitStack()
        self.reply: Callable[[bytes], bytes] | None = None
        self.requests = 0
        self.markers = 0
        self.refused = 0
        self.last_bytes = 0
        self.door: Front = self.runner.run(self._start())

    async def _start(self) -> Front:
        door = await self.stack.enter_async_context(front(http=LIMITS, params={"queue_wait_s": 0.0}))
        await door.worker("d0", self.answer)
        return door

    async def answer(self, asked: Asked) -> bool | None:
        """An engine that says what it was asked, framed in one way or another; in a test of replies, spoilt."""
        assert asked.header("content-length") == [str(len(asked.body))]
        assert not {name.lower() for name, _ in asked.headers} & {"transfer-encoding", "expect", "upgrade", "connection", "trailer"}
        body = json.dumps({"echo": self.prompt(asked.body), "usage": {"prompt_tokens": 1}}).encode()
        kind = len(asked.body) % 3
        reply = whole(body) if kind == 0 else head(200, CHUNKED) + chunk(body[:5]) + chunk(body[5:]) + END
        await asked.send(reply if self.reply is None or b"marker-" in asked.body else self.reply(reply))
        return kind != 2

    def prompt(self, body: bytes) -> object:
        """The prompt, of a body that is JSON, has every key once, and the mesh's own; what only the engine reads may be anything."""
        try:
            pairs = json.loads(body, object_pairs_hook=list)
        except (UnicodeDecodeError, RecursionError):
            return None
        fields = dict(pairs)
        assert len(fields) == len(pairs), body
        assert {"rid", "session_id"} <= set(fields)
        assert str(fields["rid"]).startswith("kvc-d0-")
        return fields.get("prompt")

    def close(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()

    async def ended(self, watched: Watched) -> None:
        """Nothing of a connection is left."""
        await until(lambda: watched not in self.door.door.clients, DEADLINE_S, "the connection is gone", poll_s=0.0005)
        await until(lambda: not self.door.left(), DEADLINE_S, f"nothing is left of {self.door.left()}", poll_s=0.0005)
        self.door.observer.ends.clear()
        self.heal()
        self.door.engines["d0"].requests.clear()

    def heal(self) -> None:
        """An engine that closed its connection before it answered counts as gone; this one is back."""
        self.door.router.apply(ev.WorkerHealth(self.door.router.sigma.workers["d0"].ref, healthy=True))

    async def open(self) -> tuple[Wire, Watched]:
        """A connection."""
        Watched.made.clear()
        wire = await self.door.client()
        await until(lambda: bool(Watched.made), DEADLINE_S, "it is there", poll_s=0.0005)
        return wire, Watched.made[0]

    async def quiet(self, watched: Watched, sent_bytes: int) -> None:
        """The door has read everything, and has no more to say."""
        await until(lambda: watched._deaf or watched.got_bytes >= sent_bytes, DEADLINE_S, "all of it is read", poll_s=0.0005)
        await until(lambda: watched.quiet, DEADLINE_S, "the door is quiet", poll_s=0.0005)

    async def talk(self, requests: list[tuple[bytes, list[int]]], *, at_once: bool) -> None:
        """Sends requests one after the other, or all at once, with a good one after each group."""
        wire, watched = await self.open()
        try:
            await self._talk(wire, watched, requests, at_once=at_once)
        finally:
            wire.writer.transport.abort()
            await wire.close()
        await self.ended(watched)

    async def _talk(self, wire: Wire, watched: Watched, requests: list[tuple[bytes, list[int]]], *, at_once: bool) -> None:
        sent, answered = 0, 0
        groups = [requests] if at_once else [[request] for request in requests]
        for group in groups:
            raw = b"".join(raw for raw, _ in group)
            try:
                for piece in [piece for raw, cuts in group for piece in pieces(raw, cuts)]:
                    wire.writer.write(piece)
                    await asyncio.sleep(0)
                await wire.writer.drain()
            except ConnectionError:
                break
            sent += len(raw)
            await self.quiet(watched, sent)
            if watched._closing or not watched.idle:
                break
            before = answered
            answered = await self._proved(wire, watched, before, sent)
            sent += self.last_bytes
        if watched._closing:
            self.refused += 1
            await self._all_answers(wire, watched, answered)

    async def _proved(self, wire: Wire, watched: Watched, before: int, sent: int) -> int:
        self.markers += 1
        marker = f"marker-{self.markers}"
        request = post({"prompt": marker, "max_tokens": 1}, "/v1/completions")
        self.last_bytes = len(request)
        await wire.send(request)
        await self.quiet(watched, sent + len(request))
        methods = watched.methods[before:]
        assert methods, "the good request was not understood"
        answer = None
        for method in methods:
            assert answer is None or marker.encode() not in answer.body
            answer = await wire.response(method=method.decode())
            assert answer.status < 500, answer
        assert answer is not None
        assert (answer.status, answer.json["echo"]) == (200, marker)
        return len(watched.methods)

    async def _all_answers(self, wire: Wire, watched: Watched, before: int) -> None:
        """What came before a refusal is answered, too; then comes the refusal, if there is one, and then the end."""
        for method in watched.methods[before:]:
            answer = await wire.response(method=method.decode())
            assert answer.status < 500, answer
        rest = (await wire.rest()).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        if rest:
            status = int(rest.split(b" ", 2)[1])
            assert 400 <= status < 500, rest
            assert b"connection: close\r\n" in rest
            assert len(STATUS_LINE.findall(rest)) == 1


@pytest.fixture(params=LOOPS)
def fuzz(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fuzz]:
    Watched.made = []
    # Hypothesis seeds the one that is shared by all: every example would use the same ids.
    monkeypatch.setattr("services.router.door.deciding.random", random.SystemRandom())
    monkeypatch.setattr("services.router.door.spans.random", random.SystemRandom())
    monkeypatch.setattr("services.router.door.door.Client", Watched)
    made = Fuzz(LOOPS[request.param])
    try:
        yield made
    finally:
        made.close()


NUMBER = st.integers(0, 1 << 16)
OPERATION = st.tuples(st.sampled_from(sorted(OPERATIONS)), NUMBER, NUMBER)
CUTS = st.lists(NUMBER, max_size=5)
REQUEST = st.tuples(st.sampled_from(GOOD), st.lists(OPERATION, max_size=3), CUTS)
CASE = st.lists(REQUEST, min_size=REQUESTS, max_size=REQUESTS)


def test_requests_that_are_nearly_right(fuzz: Fuzz) -> None:
    """F76."""

    @fuzzed
    @given(CASE, st.booleans())
    def run(case: list[tuple[bytes, list[Operation], list[int]]], at_once: bool) -> None:  # noqa: FBT001 - hypothesis calls it
        fuzz.requests += len(case)
        fuzz.runner.run(fuzz.talk([(mutated(raw, operations), cuts) for raw, operations, cuts in case], at_once=at_once))

    run()
    assert fuzz.requests >= EXAMPLES * REQUESTS
    assert fuzz.refused > fuzz.requests // 50, "hardly anything was refused: these are no tests"
    assert fuzz.markers > fuzz.requests // 10, "hardly any connection went on: these are no tests"


def test_the_corpus_after_and_before_good_requests(fuzz: Fuzz) -> None:
    """Every request of two meanings, alone, behind a good one, and with a good one behind it."""
    for raw in CORPUS:
        for case in ([raw], [GOOD[0], raw], [raw, GOOD[0]]):
            fuzz.runner.run(fuzz.talk([(part, []) for part in case], at_once=True))
    assert fuzz.refused == 3 * len(CORPUS)


async def settled(watched: Watched) -> None:
    """Gives the door time to be done, as long as there is something to do."""
    ends_s = asyncio.get_running_loop().time() + 0.05
    while not watched.quiet and asyncio.get_running_loop().time() < ends_s:  # noqa: ASYNC110 - looks into the door
        await asyncio.sleep(0.0005)


async def whole_or_cut(wire: Wire, watched: Watched) -> bool:
    """True when the reply is whole; one that is not must be seen to be cut."""
    try:
        await wire.response()
    except (asyncio.IncompleteReadError, ConnectionError):
        assert watched._closing
        return False
    return True


REPLY = st.lists(st.tuples(st.sampled_from(sorted(set(OPERATIONS) - {"corpus"})), NUMBER, NUMBER), max_size=3)


def test_replies_that_are_nearly_right(fuzz: Fuzz) -> None:
    """Whatever an engine sends, its client gets a whole reply, an error, or a broken connection; and the next client a good one."""
    whole_replies = 0

    async def ask(operations: list[Operation], stream: int) -> None:
        nonlocal whole_replies
        fuzz.reply = lambda reply: mutated(reply, operations)
        fuzz.heal()
        wire, watched = await fuzz.open()
        try:
            await wire.send(post({"prompt": "x" * stream, "max_tokens": 1}, "/v1/completions"))
            await until(lambda: bool(watched.methods), DEADLINE_S, "it is understood", poll_s=0.0005)
            await settled(watched)
            if watched.quiet:  # else the engine owes the rest of a reply
                whole_replies += await whole_or_cut(wire, watched)
                fuzz.reply = None
                fuzz.heal()
                if not watched._closing:
                    await fuzz._proved(wire, watched, 1, watched.got_bytes)
        finally:
            wire.writer.transport.abort()
            await wire.close()
        await fuzz.ended(watched)

    @fuzzed
    @given(REPLY, st.integers(0, 2))
    def run(operations: list[Operation], stream: int) -> None:
        fuzz.runner.run(ask(operations, stream))

    run()
    assert whole_replies > EXAMPLES // 10
