"""Tickets given back in the background."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvc.core.dispatch import Admitted, Ask, Unreachable
from kvc.core.types import Admission, Attempt, Executor, Mode, WorkerRef
from kvc.runtime.clock import ManualClock
from kvc.runtime.logs import JsonFormatter
from services.router.janitor import Janitor
from tests.support.builders import turn
from tests.support.fake_ports import FACTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

D0 = WorkerRef("d0", 1)
ASK = Ask(D0, Attempt("r", 0), turn(), None)


def admission(number: int = 0, ttl_s: float = 5.0) -> Admission:
    return Admission(Mode.SEED, Executor.LOCAL, 10, 10, f"kvc-{number}", ttl_s)


class Agents:
    """Takes releases; fails or waits on command."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.fault: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def release(self, attempt: Attempt, ref: WorkerRef, ticket: str) -> None:
        await self.go.wait()
        if self.fault is not None:
            raise self.fault
        self.released.append(ticket)

    async def admit(self, ask: Ask, timeout_s: float) -> Unreachable:
        return Unreachable("UNAVAILABLE", gone=True)


@asynccontextmanager
async def working(janitor: Janitor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(janitor.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_releases_are_done_in_the_background() -> None:
    agents = Agents()
    janitor = Janitor(agents, ManualClock())
    async with working(janitor):
        for number in range(100):
            janitor.release(Attempt("r", number), D0, admission(number))
        assert janitor.pending == 100
        await janitor.drained()
        assert sorted(agents.released) == sorted(f"kvc-{number}" for number in range(100))
        assert (janitor.pending, janitor.dropped) == (0, 0)


async def test_the_queue_is_bounded() -> None:
    """Beyond the bound tickets are left to their TTL (R8), and that is counted."""
    janitor = Janitor(Agents(), ManualClock(), max_pending=2)
    for number in range(5):
        janitor.release(Attempt("r", number), D0, admission(number))
    assert (janitor.pending, janitor.dropped) == (2, 3)
    never: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
    for _ in range(2):
        janitor.settle(ASK, asyncio.get_running_loop().create_future())
    janitor.settle(ASK, never)  # type: ignore[arg-type]  # futures are invariant
    assert never.cancelled()
    assert (janitor.pending, janitor.dropped) == (4, 4)


async def test_what_is_over_anyway_is_not_given_back() -> None:
    """Behind an agent that does not answer, tickets of others grow old."""
    agents, clock = Agents(), ManualClock()
    janitor = Janitor(agents, clock)
    janitor.release(Attempt("r", 0), D0, admission(0, ttl_s=5.0))
    janitor.release(Attempt("r", 1), D0, admission(1, ttl_s=50.0))
    clock.advance(10.0)
    async with working(janitor):
        await janitor.drained()
    assert agents.released == ["kvc-1"]


async def test_one_failure_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    agents = Agents()
    janitor = Janitor(agents, ManualClock())
    agents.fault = RuntimeError("oops")
    async with working(janitor) as task:
        for number in range(20):
            janitor.release(Attempt("r", number), D0, admission(number))
        await janitor.drained()
        agents.fault = None
        janitor.release(Attempt("r", 99), D0, admission(99))
        await janitor.drained()
        assert not task.done()
    assert agents.released == ["kvc-99"]
    lines = [json.loads(JsonFormatter("router").format(record)) for record in caplog.records if record.levelno >= logging.ERROR]
    assert {line["event"] for line in lines} == {"release_failed"}


@pytest.mark.parametrize("late", [False, True])
async def test_the_ticket_of_an_answer_that_nobody_waits_for(*, late: bool) -> None:
    agents = Agents()
    janitor = Janitor(agents, ManualClock())
    async with working(janitor):
        answer: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        if not late:
            answer.set_result(Admitted(admission(7), FACTS))
        janitor.settle(ASK, answer)  # type: ignore[arg-type]  # futures are invariant
        assert janitor.pending == 1
        if late:
            answer.set_result(Admitted(admission(7), FACTS))
        await janitor.drained()
    assert agents.released == ["kvc-7"]


async def test_answers_without_a_ticket() -> None:
    agents = Agents()
    janitor = Janitor(agents, ManualClock())
    async with working(janitor):
        for outcome in (Unreachable("UNAVAILABLE", gone=True), RuntimeError("oops"), None):
            answer = asyncio.get_running_loop().create_future()
            janitor.settle(ASK, answer)
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            elif outcome is None:
                answer.cancel()
            else:
                answer.set_result(outcome)
        await janitor.drained()
        assert janitor.pending == 0
    assert agents.released == []


async def test_nothing_runs_on_after_the_end() -> None:
    agents = Agents()
    agents.go.clear()
    before = asyncio.all_tasks()
    janitor = Janitor(agents, ManualClock())
    slow = asyncio.ensure_future(asyncio.sleep(60, Unreachable("UNAVAILABLE", gone=True)))
    async with working(janitor):
        for number in range(20):
            janitor.release(Attempt("r", number), D0, admission(number))
        janitor.settle(ASK, slow)  # type: ignore[arg-type]  # futures are invariant
        await asyncio.sleep(0)
    assert slow.cancelled()
    assert asyncio.all_tasks() == before
