"""Asking agents over real sockets: every answer and every way of not answering (R13, R16)."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvc import wire
from kvc.core.dispatch import Admitted, Ask, Refused, Unreachable
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, PrefillOffer, Reason, Rejection, WorkerRef
from kvc.errors import Exhausted, InvalidField, Unavailable
from kvc.runtime.clock import SystemClock
from services.router.adapters.agents import Agents, GrpcAdmission
from services.router.config import AgentsConfig
from tests.support.builders import run, turn
from tests.support.fake_agent import FakeAgent, agent
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvc.v1 import admission_pb2

FACTS = Facts(1000, held_tokens=7)
YES = Admission(Mode.DIRECT, Executor.LOCAL, 24, 48, "kvc-1", 5.0)
NO = Rejection(Reason.SEED_BUDGET, 0.25)
ASK = Ask(WorkerRef("d0", 1), Attempt("r", 3), turn("s", run("a", 4), output_reserve_tokens=8), PrefillOffer(0.5, 7000.0, 20_000.0, 24))

Answer = "Callable[[admission_pb2.AdmitRequest], Awaitable[admission_pb2.AdmitResponse]]"


@asynccontextmanager
async def asking(one: FakeAgent, hedge_after_s: float = 0.0) -> AsyncIterator[GrpcAdmission]:
    async with Agents(AgentsConfig()) as agents:
        agents.follow(one.info, one.target)
        yield GrpcAdmission(agents, hedge_after_s, SystemClock())


def answers(outcome: Admission | Rejection, ref: WorkerRef = ASK.worker, facts: Facts | None = FACTS) -> Any:
    async def answer(request: admission_pb2.AdmitRequest) -> admission_pb2.AdmitResponse:
        return wire.outcome_to_pb(outcome, ASK.attempt, ref, facts)

    return answer


def fails(error: Exception) -> Any:
    async def answer(request: admission_pb2.AdmitRequest) -> admission_pb2.AdmitResponse:
        raise error

    return answer


class Slow:
    """Answers each call when it is told to; keeps count of the calls that were cut off."""

    def __init__(self) -> None:
        self.go: list[asyncio.Event] = []
        self.cancelled = 0

    async def __call__(self, request: admission_pb2.AdmitRequest) -> admission_pb2.AdmitResponse:
        number = len(self.go)
        self.go.append(asyncio.Event())
        try:
            await self.go[number].wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return wire.outcome_to_pb(YES, ASK.attempt, ASK.worker, FACTS)


async def test_yes() -> None:
    async with agent() as one, asking(one) as admission:
        one.admit = answers(YES)
        reply = await admission.admit(ASK, 5.0)
        assert isinstance(reply, Admitted)
        assert reply.admission == YES
        assert reply.facts.held_tokens == 7
        assert reply.elapsed_s > 0
        (request,) = one.asked
        assert 0 < request.deadline_ms <= 5000
        attempt, ref, asked, offer = wire.admit_request_to_core(request, 24)
        assert (attempt, ref, offer) == (ASK.attempt, ASK.worker, ASK.offer)
        assert (asked.chain, asked.session_id) == (ASK.turn.chain, "s")


@pytest.mark.parametrize("facts", [FACTS, None])
async def test_no(facts: Facts | None) -> None:
    """Without facts, as with a stale epoch, nothing is learnt about the worker's load."""
    async with agent() as one, asking(one) as admission:
        one.admit = answers(NO, facts=facts)
        reply = await admission.admit(ASK, 5.0)
        assert isinstance(reply, Refused)
        assert reply.rejection == NO
        assert (reply.facts is None) == (facts is None)


@pytest.mark.parametrize("ref", [WorkerRef("d0", 2), WorkerRef("d1", 1)])
async def test_a_yes_of_somebody_else_is_no_answer(ref: WorkerRef) -> None:
    """F60, F74: a ticket is good only where it was asked for."""
    async with agent() as one, asking(one) as admission:
        one.admit = answers(YES, ref)
        reply = await admission.admit(ASK, 5.0)
        assert isinstance(reply, Unreachable)
        assert (reply.error, reply.gone) == ("STALE_EPOCH", False)


@pytest.mark.parametrize(
    ("error", "code", "gone"),
    [
        (Unavailable("the engine is away"), "UNAVAILABLE", True),
        (Exhausted("too many calls"), "RESOURCE_EXHAUSTED", False),
        (InvalidField("no", field="turn"), "INVALID_ARGUMENT", False),
        (RuntimeError("oops"), "INTERNAL", False),
    ],
)
async def test_errors(error: Exception, code: str, *, gone: bool) -> None:
    async with agent() as one, asking(one) as admission:
        one.admit = fails(error)
        reply = await admission.admit(ASK, 5.0)
        assert isinstance(reply, Unreachable)
        assert (reply.error, reply.gone) == (code, gone)


@pytest.mark.parametrize(
    "outcome", [Admission(Mode.SEED, Executor.LOCAL, 1, 1, "", 5.0), Admission(Mode.SEED, Executor.LOCAL, 1, 1, "kvc-1", float("nan"))]
)
async def test_answers_that_make_no_sense(outcome: Admission) -> None:
    async with agent() as one, asking(one) as admission:
        one.admit = answers(outcome)
        reply = await admission.admit(ASK, 5.0)
        assert isinstance(reply, Unreachable)
        assert (reply.error, reply.gone) == ("INVALID_ARGUMENT", False)


async def test_a_worker_that_nobody_answers_for() -> None:
    async with agent() as one, asking(one) as admission:
        stranger = Ask(WorkerRef("d7", 1), ASK.attempt, ASK.turn, None)
        assert await admission.admit(stranger, 5.0) == Unreachable("NOT_FOUND", gone=True)
        await admission.release(ASK.attempt, stranger.worker, "kvc-1")
        assert one.releases == []


async def test_an_agent_that_is_gone() -> None:
    async with agent() as one, asking(one) as admission:
        await one.stop()
        reply = await admission.admit(ASK, 5.0)
        assert isinstance(reply, Unreachable)
        assert (reply.error, reply.gone) == ("UNAVAILABLE", True)
        await admission.release(ASK.attempt, ASK.worker, "kvc-1")


@pytest.mark.parametrize("hedge_after_s", [0.0, 0.05])
async def test_no_answer_in_time(hedge_after_s: float) -> None:
    async with agent() as one, asking(one, hedge_after_s) as admission:
        one.admit = slow = Slow()
        start_s = time.monotonic()
        reply = await admission.admit(ASK, 0.3)
        assert isinstance(reply, Unreachable)
        assert (reply.error, reply.gone) == ("DEADLINE_EXCEEDED", False)
        assert 0.2 < time.monotonic() - start_s < 3
        assert len(one.asked) == (2 if hedge_after_s else 1)
        await until(lambda: slow.cancelled == len(one.asked))


@pytest.mark.parametrize("answering", [0, 1])
async def test_a_hedge_asks_for_the_same_answer_once_more(answering: int) -> None:
    """R16: at most one, idempotent by attempt; whichever comes first counts, the other is let go."""
    async with agent() as one, asking(one, 0.05) as admission:
        one.admit = slow = Slow()
        task = asyncio.create_task(admission.admit(ASK, 10.0))
        await until(lambda: len(slow.go) == 2)
        assert one.asked[0] == one.asked[1]
        slow.go[answering].set()
        assert isinstance(await asyncio.wait_for(task, 5), Admitted)
        await until(lambda: slow.cancelled == 1)
        assert len(one.asked) == 2


async def test_a_fast_answer_needs_no_hedge() -> None:
    async with agent() as one, asking(one, 5.0) as admission:
        one.admit = answers(YES)
        for _ in range(20):
            assert isinstance(await admission.admit(ASK, 10.0), Admitted)
        assert len(one.asked) == 20


async def test_a_hedge_after_a_failure_is_not_sent() -> None:
    async with agent() as one, asking(one, 5.0) as admission:
        one.admit = fails(Unavailable("away"))
        assert isinstance(await admission.admit(ASK, 10.0), Unreachable)
        assert len(one.asked) == 1


async def test_a_hedged_call_that_fails_waits_for_the_other() -> None:
    async with agent() as one, asking(one, 0.05) as admission:
        slow = Slow()

        async def answer(request: admission_pb2.AdmitRequest) -> admission_pb2.AdmitResponse:
            if len(one.asked) == 2:
                raise Unavailable("away")
            return await slow(request)

        one.admit = answer
        task = asyncio.create_task(admission.admit(ASK, 10.0))
        await until(lambda: len(one.asked) == 2)
        slow.go[0].set()
        assert isinstance(await asyncio.wait_for(task, 5), Admitted)


@pytest.mark.parametrize("hedge_after_s", [0.0, 0.02])
async def test_cancel(hedge_after_s: float) -> None:
    """F58: the agent is let go of, and no task is left."""
    async with agent() as one, asking(one, hedge_after_s) as admission:
        one.admit = slow = Slow()
        calls = 2 if hedge_after_s else 1
        task = asyncio.create_task(admission.admit(ASK, 30.0))
        await until(lambda: len(slow.go) == calls)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await until(lambda: slow.cancelled == calls)
        await until(lambda: not [task for task in asyncio.all_tasks() if "adapters/agents.py" in repr(task)])


async def test_release() -> None:
    async with agent() as one, asking(one) as admission:
        await admission.release(ASK.attempt, ASK.worker, "kvc-9")
        (request,) = one.releases
        assert (request.ticket, request.worker.worker_id, request.attempt.attempt_number) == ("kvc-9", "d0", 3)
