"""The router's ports without a network: agents and engines that keep their books, fail on command and can be held at any step."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from kvc.core import events as ev
from kvc.core.blocks import pack_tokens
from kvc.core.dispatch import Admitted, Refused, Unreachable
from kvc.core.params import Params
from kvc.core.types import Admission, Executor, Facts, Mode, Reason, Rejection, Role, WorkerRef
from kvc.runtime.clock import SystemClock
from services.router.config import EnginesConfig, RequestsConfig, RouterConfig
from services.router.janitor import Janitor
from services.router.ports import EngineCall, EngineChunk, EngineError, Observer, Request, Result, Started
from services.router.router import Router
from tests.support.builders import worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from kvc.core.dispatch import Ask
    from kvc.core.types import Attempt, Decision, GaveUp
    from services.router.ports import Named, Output

E = TypeVar("E", bound=BaseException)

CAPACITY = 92_104
FACTS = Facts(CAPACITY)


class Steps:
    """Places where a fake can be held."""

    def __init__(self) -> None:
        self._held: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}

    def hold(self, *places: str) -> None:
        """From now on everybody who comes to these places stays there."""
        for place in places:
            self._held[place] = asyncio.Event()
            self._reached[place] = asyncio.Event()

    def go(self, place: str) -> None:
        """Lets those who are held go on, and holds nobody there any more."""
        self._held.pop(place).set()

    async def reached(self, place: str) -> None:
        """Waits until somebody is held."""
        async with asyncio.timeout(10):
            await self._reached[place].wait()

    async def at(self, place: str) -> None:
        """A step that takes at least one turn of the loop."""
        await asyncio.sleep(0)
        if place in self._held:
            self._reached[place].set()
            await self._held[place].wait()


@dataclass
class FakeAdmission:
    """Agents of all workers. A yes opens a ticket; the same attempt gets the same answer."""

    steps: Steps = field(default_factory=Steps)
    answer: Callable[[Ask], Admitted | Refused | Unreachable | None] = lambda _ask: None
    executor: Executor = Executor.LOCAL
    open: dict[str, Attempt] = field(default_factory=dict)
    asked: list[Ask] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    answers: dict[Attempt, Admitted | Refused | Unreachable] = field(default_factory=dict)
    live: int = 0

    async def admit(self, ask: Ask, timeout_s: float) -> Admitted | Refused | Unreachable:
        self.asked.append(ask)
        self.live += 1
        try:
            await self.steps.at("admit")
            return self.answers.setdefault(ask.attempt, self.answer(ask) or self.yes(ask))
        finally:
            self.live -= 1

    def yes(self, ask: Ask, mode: Mode = Mode.SEED) -> Admitted:
        ticket = f"kvc-{ask.worker.worker_id}-{ask.attempt.request_id}.{ask.attempt.attempt_number}"
        self.open[ticket] = ask.attempt
        executor = self.executor if ask.offer is not None else Executor.LOCAL
        tokens = ask.turn.input_tokens
        return Admitted(Admission(mode, executor, tokens, tokens + ask.turn.output_reserve_tokens, ticket, 5.0), FACTS)

    async def release(self, attempt: Attempt, ref: WorkerRef, ticket: str) -> None:
        await asyncio.sleep(0)
        self.released.append(ticket)
        self.open.pop(ticket, None)


def no(reason: Reason, *, retry_after_s: float = 0.0, terminal: bool = False) -> Refused:
    """A refusal."""
    return Refused(Rejection(reason, retry_after_s, terminal), FACTS)


def ok(*texts: str) -> list[EngineChunk | BaseException | str]:
    """A stream of one token a text, complete."""
    chunks: list[EngineChunk | BaseException | str] = [EngineChunk(text, (index,)) for index, text in enumerate(texts or ("a", "b", "c"))]
    return [*chunks, EngineChunk(finish_reason="length", prompt_tokens=48, completion_tokens=len(chunks), cached_tokens=24)]


@dataclass
class FakeEngines:
    """All engines. `streams` and `prefills` script one URL; a str in a script is a place to be held at."""

    admission: FakeAdmission
    steps: Steps = field(default_factory=Steps)
    streams: dict[str, list[EngineChunk | BaseException | str]] = field(default_factory=dict)
    prefills: dict[str, list[BaseException | str]] = field(default_factory=dict)
    calls: list[EngineCall] = field(default_factory=list)
    prefill_calls: list[EngineCall] = field(default_factory=list)
    live: int = 0
    live_prefills: int = 0
    closed: int = 0

    async def generate(self, call: EngineCall) -> AsyncGenerator[EngineChunk, None]:
        self.calls.append(call)
        self.live += 1
        complete = False
        try:
            await self.steps.at("connect")
            if call.rid.startswith("kvc-") and self.admission.open.pop(call.rid, None) is None:
                raise EngineError(409, "ticket-expired", "the ticket is unknown or expired", field="rid")
            for item in self.streams.get(call.url, ok()):
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, str):
                    await self.steps.at(item)
                    continue
                await self.steps.at("chunk")
                yield item
            complete = True
        finally:
            self.live -= 1
            self.closed += not complete

    async def prefill(self, call: EngineCall) -> None:
        self.prefill_calls.append(call)
        self.live_prefills += 1
        try:
            await self.steps.at("prefill")
            for item in self.prefills.get(call.url, []):
                if isinstance(item, BaseException):
                    raise item
                await self.steps.at(item)
        finally:
            self.live_prefills -= 1


@dataclass
class Seen(Observer):
    """Everything an observer is told."""

    decisions: list[Decision | GaveUp] = field(default_factory=list)
    retries: list[EngineError] = field(default_factory=list)
    ends: list[tuple[str, ev.End, Result | None, BaseException | None]] = field(default_factory=list)

    def decided(self, decision: Decision | GaveUp, decide_s: float) -> None:
        self.decisions.append(decision)

    def retried(self, request: Named, decision: Decision, error: EngineError) -> None:
        self.retries.append(error)

    def ended(self, request: Named, decision: Decision | None, end: ev.End, result: Result | None, error: BaseException | None) -> None:
        self.ends.append((request.request_id, end, result, error))


@dataclass
class World:
    """A router over fakes."""

    router: Router
    admission: FakeAdmission
    engines: FakeEngines
    janitor: Janitor
    seen: Seen
    numbers: int = 0

    def join(self, worker_id: str, epoch: int = 1, **fields: Any) -> WorkerRef:
        """A healthy worker with nothing resident."""
        info = worker(worker_id, epoch, **fields)
        self.router.apply(ev.WorkerJoined(info))
        self.router.apply(ev.WorkerHealth(info.ref, healthy=True))
        self.router.apply(ev.ResidencyReset(info.ref, ()))
        return info.ref

    def prefill(self, worker_id: str = "p0", **fields: Any) -> WorkerRef:
        """A prefill worker."""
        return self.join(worker_id, role=Role.PREFILL, bootstrap_host="127.0.0.1", bootstrap_port=9000, **fields)

    def request(self, session_id: str = "s", *, tokens: int = 48, timeout_s: float = 30.0, **fields: Any) -> Request:
        """A request with an id of its own."""
        self.numbers += 1
        values: dict[str, Any] = {
            "request_id": f"r{self.numbers}",
            "session_id": session_id,
            "tokens": pack_tokens(list(range(tokens))),
            "text": None,
            "input_tokens": tokens,
            "max_new_tokens": 8,
            "temperature": 0.0,
            "deadline_s": SystemClock().now_s() + timeout_s,
        } | fields
        return Request(**values)

    async def run(self, request: Request | None = None, before: list[Output] | None = None) -> list[Output]:
        """A dispatch to its end; `before` keeps what came before an error."""
        outputs = [] if before is None else before
        async for output in self.router.dispatch(request or self.request()):
            outputs.append(output)
        return outputs

    async def result(self, request: Request | None = None) -> Result:
        """The end of a dispatch that succeeds."""
        last = (await self.run(request))[-1]
        assert isinstance(last, Result)
        return last

    def left(self) -> dict[str, int]:
        """What is in flight, by where."""
        sigma = self.router.sigma
        counts = {
            "streams": self.engines.live,
            "prefills": self.engines.live_prefills,
            "asks": self.admission.live,
            "tickets": len(self.admission.open),
            "open turns": len(sigma.open),
            "sessions held": len(self.router.gate),
            "waiting": len(self.router.room),
            "requests": len(self.router.claims),
            "places": len(self.router.room._claims),
            "releases": self.janitor.pending,
            "inflight": sum(abs(state.inflight) for state in sigma.workers.values()),
            "sessions with turns": sum(session.open_turns != 0 for session in sigma.sessions.values()),
        }
        return {place: count for place, count in counts.items() if count}

    async def check(self) -> None:
        """Nothing is in flight once the janitor has done its work, and every count says so.

        Raises:
            AssertionError: something is left.
        """
        async with asyncio.timeout(5):
            await self.janitor.drained()
        assert self.left() == {}
        self.router.sigma.check_integrity()


def config(**fields: Any) -> RouterConfig:
    """Settings; `params`, `engines` and `requests` take dictionaries of changes."""
    values: dict[str, Any] = {
        "params": replace(Params(), **fields.pop("params", {})),
        "engines": EnginesConfig(**fields.pop("engines", {})),
        "requests": RequestsConfig(**fields.pop("requests", {})),
    }
    return RouterConfig(**values, **fields)


@asynccontextmanager
async def world(observer: Observer | None = None, **fields: Any) -> AsyncIterator[World]:
    """A router without workers; its janitor runs for as long as the context lasts. Other arguments as for `config`."""
    steps = Steps()
    admission = FakeAdmission(steps)
    engines = FakeEngines(admission, steps)
    clock = SystemClock()
    janitor = Janitor(admission, clock)
    seen = Seen()
    router = Router(config(**fields), admission, engines, clock, janitor, observer or seen)
    task = asyncio.create_task(janitor.run())
    try:
        yield World(router, admission, engines, janitor, seen)
    finally:
        router.room.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def refusal(kind: type[E], doing: Awaitable[object]) -> E:
    """The error of a call that must fail with it."""
    with pytest.raises(kind) as failed:
        await doing
    return failed.value


def kinds(outputs: list[Output]) -> str:
    """S for Started, c for a chunk, R for the result."""
    return "".join("S" if isinstance(output, Started) else "R" if isinstance(output, Result) else "c" for output in outputs)
