"""Asking agents on one stream each, over real sockets: batches, deadlines, breaks, and tickets that come too late."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from kvc import wire
from kvc.core.dispatch import Admitted, Ask, Refused, Unreachable
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, Reason, Rejection, WorkerRef
from kvc.errors import InvalidField
from kvc.v1 import admission_pb2
from services.router.adapters.admit_stream import HOLD_S, StreamAdmission
from services.router.adapters.agents import Agents
from services.router.config import AgentsConfig
from tests.support.builders import run, turn, worker
from tests.support.fake_agent import FakeAgent, agent
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from kvc.core.dispatch import Answer

FACTS = Facts(1000, held_tokens=7)
NO = Rejection(Reason.NO_D_CAPACITY, 0.25)
TIMEOUT_S = 5.0


def yes(ticket: str = "kvc-1") -> Admission:
    return Admission(Mode.DIRECT, Executor.LOCAL, 24, 48, ticket, 5.0)


def question(number: int = 0, worker_id: str = "d0") -> Ask:
    return Ask(WorkerRef(worker_id, 1), Attempt(f"r{number}", 0), turn("s", run("a", 4), output_reserve_tokens=8), None)


class Talk:
    """An agent's side of its streams: what came, and a queue of what it says."""

    def __init__(self, one: FakeAgent) -> None:
        self.batches: list[admission_pb2.AdmitStreamRequest] = []
        self.streams = 0
        self._say: asyncio.Queue[admission_pb2.AdmitStreamResponse | None] = asyncio.Queue()
        self._ref = one.ref
        one.many = self._many

    def admits(self) -> list[admission_pb2.AdmitRequest]:
        return [admit for batch in self.batches for admit in batch.admits]

    def releases(self) -> list[admission_pb2.ReleaseRequest]:
        return [release for batch in self.batches for release in batch.releases]

    def answer(self, *pairs: tuple[Attempt, Admission | Rejection], facts: Facts | None = FACTS, ref: WorkerRef | None = None) -> None:
        results = [
            admission_pb2.AdmitStreamResult(
                attempt=wire.attempt_to_pb(attempt), response=wire.outcome_to_pb(outcome, attempt, ref or self._ref, facts)
            )
            for attempt, outcome in pairs
        ]
        self._say.put_nowait(admission_pb2.AdmitStreamResponse(results=results))

    def fail(self, attempt: Attempt, error: InvalidField) -> None:
        result = admission_pb2.AdmitStreamResult(attempt=wire.attempt_to_pb(attempt), error=wire.stream_error_to_pb(error))
        self._say.put_nowait(admission_pb2.AdmitStreamResponse(results=[result]))

    def hang_up(self) -> None:
        self._say.put_nowait(None)

    async def _many(self, requests: Any, context: Any) -> AsyncGenerator[Any]:
        self.streams += 1
        reader = asyncio.create_task(self._read(requests))
        try:
            while (response := await self._say.get()) is not None:
                yield response
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Any) -> None:
        async for batch in requests:
            self.batches.append(batch)


TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class Fallback:
    """Unary Admit: keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Ask, Callable[[Answer], None]]] = []
        self.traceparents: list[str] = []

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:
        self.asked.append((ask, answered))
        self.traceparents.append(traceparent)


class Rig:
    """A StreamAdmission over agents, and the answers that came."""

    def __init__(self, admission: StreamAdmission, fallback: Fallback) -> None:
        self.admission = admission
        self.fallback = fallback
        self.answers: dict[str, list[Answer]] = {}

    def ask(self, ask: Ask, traceparent: str = "") -> None:
        answers = self.answers.setdefault(ask.attempt.request_id, [])
        self.admission.ask(ask, answers.append, traceparent)

    async def answered(self, request_id: str) -> Answer:
        await until(lambda: bool(self.answers[request_id]))
        (answer,) = self.answers[request_id]
        return answer


@asynccontextmanager
async def asking(*them: FakeAgent, timeout_s: float = TIMEOUT_S, hold_s: float = HOLD_S) -> AsyncIterator[Rig]:
    targets = tuple(one.target for one in them)
    async with AsyncExitStack() as stack:
        agents = await stack.enter_async_context(Agents(AgentsConfig()))
        for one in them:
            agents.follow(one.info, one.target)
        fallback = Fallback()
        admission = StreamAdmission(agents, fallback, timeout_s, hold_s)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        task = group.create_task(admission.run(targets))
        stack.callback(task.cancel)
        await until(lambda: all(admission.is_up(target) for target in targets))
        yield Rig(admission, fallback)


async def test_what_is_asked_in_one_turn_of_the_loop_travels_in_one_message() -> None:
    async with agent() as one:
        talk = Talk(one)
        async with asking(one) as rig:
            for number in range(20):
                rig.ask(question(number))
            await until(lambda: len(talk.admits()) == 20)
            assert len(talk.batches) == 1
            assert all(0 < admit.deadline_ms <= TIMEOUT_S * 1000 for admit in talk.admits())
            talk.answer(*((question(number).attempt, yes(f"kvc-{number}")) for number in reversed(range(20))))
            for number in range(20):
                answer = await rig.answered(f"r{number}")
                assert isinstance(answer, Admitted)
                assert answer.admission.ticket == f"kvc-{number}"
                assert answer.facts.held_tokens == 7
                assert 0 < answer.elapsed_s < TIMEOUT_S
            assert rig.fallback.asked == []


async def test_what_is_asked_while_a_batch_is_unanswered_waits_for_its_answer_and_travels_together() -> None:
    """A message costs both ends more than what is in it: the agent would not answer sooner if it were asked again."""
    async with agent() as one:
        talk = Talk(one)
        async with asking(one, hold_s=30.0) as rig:
            rig.ask(question(0))
            await until(lambda: len(talk.batches) == 1)
            for number in range(1, 6):
                rig.ask(question(number))
                await asyncio.sleep(0)
            talk.answer((question(0).attempt, yes()))
            await rig.answered("r0")
            await until(lambda: len(talk.batches) == 2)
            assert [len(batch.admits) for batch in talk.batches] == [1, 5]
            talk.answer(*((question(number).attempt, yes()) for number in range(1, 6)))
            for number in range(1, 6):
                assert isinstance(await rig.answered(f"r{number}"), Admitted)
            rig.ask(question(6))
            await until(lambda: len(talk.batches) == 3)


async def test_an_engine_that_takes_its_time_holds_questions_back_for_no_longer_than_the_hold() -> None:
    async with agent() as one:
        talk = Talk(one)
        async with asking(one, hold_s=0.01) as rig:
            for number in range(3):
                rig.ask(question(number))
                await until(lambda: len(talk.admits()) == number + 1)  # noqa: B023 - awaited within the loop
            assert len(talk.batches) == 3
            assert rig.answers == {"r0": [], "r1": [], "r2": []}


async def test_what_is_asked_on_account_of_an_answer_leaves_with_what_has_waited() -> None:
    async with agent() as one:
        talk = Talk(one)
        async with asking(one, hold_s=30.0) as rig:
            rig.admission.ask(question(0), lambda _: rig.ask(question(1)))
            await until(lambda: len(talk.batches) == 1)
            rig.ask(question(2))
            talk.answer((question(0).attempt, yes()))
            await until(lambda: len(talk.batches) == 2)
            assert {admit.attempt.request_id for admit in talk.batches[1].admits} == {"r1", "r2"}


async def test_long_prompts_are_split_into_messages_that_an_agent_takes() -> None:
    """F78: what many sessions with long prompts ask in one turn of the loop is more than one message may hold."""
    blocks = 100_000
    long = turn("s", run("a", blocks), output_reserve_tokens=8)
    async with agent() as one:
        talk = Talk(one)
        async with asking(one) as rig:
            for number in range(30):
                rig.ask(Ask(WorkerRef("d0", 1), Attempt(f"r{number}", 0), long, None))
            await until(lambda: len(talk.admits()) == 30)
            assert len(talk.batches) > 1
            assert all(len(admit.turn.block_hashes) == 8 * blocks for admit in talk.admits())
            assert rig.fallback.asked == []
            assert rig.admission.is_up(one.target)


async def test_an_agent_that_was_not_there_yet_gets_every_question_once_it_is() -> None:
    """A stream that failed to open leaves nothing behind that would take the questions of the next one."""
    one = FakeAgent()
    await one.start()
    target = one.target
    await one.stop()
    async with AsyncExitStack() as stack:
        agents = await stack.enter_async_context(Agents(AgentsConfig()))
        agents.follow(one.info, target)
        rig = Rig(StreamAdmission(agents, Fallback(), TIMEOUT_S), Fallback())
        group = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(group.create_task(rig.admission.run((target,))).cancel)
        with pytest.raises(grpc.aio.AioRpcError):
            await agents.stub(target).GetWorker(admission_pb2.GetWorkerRequest(), timeout=TIMEOUT_S)
        talk = Talk(one)
        stack.push_async_callback(one.stop)
        await one.start()
        await until(lambda: rig.admission.is_up(target))
        rig.ask(question())
        await until(lambda: len(talk.admits()) == 1)
        talk.answer((question().attempt, yes()))
        assert isinstance(await rig.answered("r0"), Admitted)


@pytest.mark.parametrize("facts", [FACTS, None])
async def test_no(facts: Facts | None) -> None:
    """As by unary Admit: without facts nothing is learnt about the worker's load."""
    async with agent() as one:
        talk = Talk(one)
        async with asking(one) as rig:
            rig.ask(question())
            talk.answer((question().attempt, NO), facts=facts)
            answer = await rig.answered("r0")
            assert isinstance(answer, Refused)
            assert answer.rejection == NO
            assert (answer.facts is None) == (facts is None)


async def test_an_element_that_fails_fails_alone() -> None:
    async with agent() as one:
        talk = Talk(one)
        async with asking(one) as rig:
            rig.ask(question(0))
            rig.ask(question(1))
            talk.fail(question(0).attempt, InvalidField("is required", field="turn"))
            talk.answer((question(1).attempt, yes()))
            failed = await rig.answered("r0")
            assert isinstance(failed, Unreachable)
            assert (failed.error, failed.gone) == ("INVALID_ARGUMENT", False)
            assert isinstance(await rig.answered("r1"), Admitted)


async def test_f60_an_admission_of_another_life_is_none() -> None:
    async with agent() as one:
        talk = Talk(one)
        async with asking(one) as rig:
            rig.ask(question())
            talk.answer((question().attempt, yes()), ref=WorkerRef("d0", 2))
            answer = await rig.answered("r0")
            assert isinstance(answer, Unreachable)
            assert answer.error == "STALE_EPOCH"


async def test_a_ticket_that_comes_after_the_deadline_is_given_back() -> None:
    """F58: the turn has gone elsewhere by then; nobody else would free what the ticket holds before its TTL."""
    async with agent() as one:
        talk = Talk(one)
        async with asking(one, timeout_s=0.1) as rig:
            rig.ask(question())
            late = await rig.answered("r0")
            assert isinstance(late, Unreachable)
            assert (late.error, late.gone) == ("DEADLINE_EXCEEDED", False)
            talk.answer((question().attempt, yes("kvc-late")))
            await until(lambda: bool(talk.releases()))
            (release,) = talk.releases()
            assert (release.ticket, release.attempt.request_id, release.worker.worker_id) == ("kvc-late", "r0", "d0")
            assert rig.answers["r0"] == [late]


async def test_a_stream_that_breaks_loses_no_question_and_is_opened_again() -> None:
    async with agent() as one:
        talk = Talk(one)
        async with asking(one) as rig:
            rig.ask(question(0), TRACE)
            await until(lambda: len(talk.admits()) == 1)
            assert talk.admits()[0].traceparent == TRACE
            talk.hang_up()
            await until(lambda: bool(rig.fallback.asked))
            assert rig.fallback.traceparents == [TRACE]
            ((again, answered),) = rig.fallback.asked
            assert again.attempt == question(0).attempt
            answered(Refused(NO))
            assert rig.answers["r0"] == [Refused(NO)]
            await until(lambda: talk.streams == 2 and rig.admission.is_up(one.target))
            rig.ask(question(1))
            talk.answer((question(1).attempt, yes()))
            assert isinstance(await rig.answered("r1"), Admitted)
            assert len(rig.fallback.asked) == 1


async def test_an_agent_that_hangs_delays_no_other() -> None:
    async with agent() as one, agent(worker("d1", capabilities=("admit", "residency"))) as other:
        Talk(one)
        talk = Talk(other)
        async with asking(one, other) as rig:
            for number in range(10):
                rig.ask(question(number))
            rig.ask(question(99, "d1"))
            talk.answer((question(99).attempt, yes()))
            assert isinstance(await rig.answered("r99"), Admitted)
            assert all(rig.answers[f"r{number}"] == [] for number in range(10))


async def test_a_worker_whose_agent_is_not_followed_is_asked_by_unary_admit() -> None:
    async with agent() as one:
        Talk(one)
        async with asking(one) as rig:
            rig.ask(question(worker_id="d7"), TRACE)
            assert rig.fallback.traceparents == [TRACE]
            assert [ask.worker.worker_id for ask, _ in rig.fallback.asked] == ["d7"]
