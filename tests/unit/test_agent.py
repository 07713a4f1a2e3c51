"""The agent: which turns reach the engine, under which deadline, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvc.core.types import Admission, Attempt, Executor, Mode, PrefillOffer, Reason, Rejection, WorkerRef
from kvc.engine import link
from kvc.engine.convert import admit_to_link, outcome_from_link
from kvc.errors import DeadlineExceeded, Exhausted, Internal, KvcError, Precondition, Unavailable
from kvc.runtime.asking import answer_of
from services.admission_agent.agent import AdmissionAgent
from services.admission_agent.config import AgentConfig, EngineConfig
from services.admission_agent.deadlines import child_timeout_s
from services.admission_agent.life import Life, accept
from services.admission_agent.translation import Ask
from tests.support.builders import run, turn
from tests.support.fake_engine import FakeEngine, FakeLink, facts, welcome
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from kvc.core.types import Facts, Outcome
    from services.admission_agent.connection import EngineConnection

HERE = WorkerRef("d0", 1)


class Connected:
    """A connection that is there, or is not."""

    def __init__(self, life: Life | None) -> None:
        self.life = life

    def require(self) -> Life:
        if self.life is None:
            raise Unavailable("the engine is away", reason="ENGINE_AWAY")
        return self.life

    def why_not(self) -> str | None:
        return None if self.life else "ENGINE_AWAY: the engine is away"


async def agent_of(engine: FakeEngine, max_inflight: int = 1000) -> AdmissionAgent:
    made: FakeLink = await engine.connect()
    life = Life(accept(made.welcome, config()), made)
    return AdmissionAgent(cast("EngineConnection", Connected(life)), max_inflight)


def config(**engine: Any) -> AgentConfig:
    return AgentConfig(engine=EngineConfig(socket=cast("Path", "engine.sock"), **engine))


def ask(worker: WorkerRef = HERE, timeout_s: float = 1.0, **fields: Any) -> Ask:
    values: dict[str, Any] = {"attempt": Attempt("r", 0), "turn": turn("s", run("p", 4)), "offer": None} | fields
    return Ask(worker, admit_to_link(**values), timeout_s)


async def admit(agent: AdmissionAgent, asked: Ask) -> tuple[WorkerRef, Outcome, Facts | None]:
    """Who answers, what, and what it is based on."""
    worker, reply = await answer_of(partial(agent.ask, asked))
    return (worker, Rejection(reply), None) if isinstance(reply, Reason) else (worker, *outcome_from_link(reply))


async def release(agent: AdmissionAgent, worker: WorkerRef, ticket: str) -> bool:
    return await answer_of(lambda answered: agent.release(worker, ticket, answered, 1.0))


async def test_the_turn_reaches_the_engine_whole() -> None:
    engine = FakeEngine()
    agent = await agent_of(engine)
    one = turn("s", run("p", 4), turn_index=3, output_reserve_tokens=9, known_session=True, new_tokens=5)
    offer = PrefillOffer(0.5, 7000.0, 20000.0, 24)
    worker, outcome, known = await admit(agent, ask(turn=one, offer=offer, attempt=Attempt("r7", 2), traceparent="00-aa-bb-01"))
    assert worker == HERE
    assert outcome == Admission(Mode.DIRECT, Executor.LOCAL, 7, 96, "r7-2", 5.0)
    assert known is not None
    assert known.matched_tokens == 24
    sent = engine.calls[-1]
    assert isinstance(sent, link.Admit)
    assert (sent.request_id, sent.attempt_number, sent.session_id, sent.turn_index) == ("r7", 2, "s", 3)
    assert (sent.input_tokens, sent.output_reserve_tokens, sent.known_session, sent.new_tokens) == (96, 9, True, 5)
    assert sent.block_hashes == run("p", 4).tobytes()
    assert sent.offer == link.Offer(0.5, 7000.0, 20000.0, 24)
    assert sent.traceparent == "00-aa-bb-01"


async def test_a_refusal_is_an_answer() -> None:
    engine = FakeEngine()

    async def refuse(_: link.Admit) -> link.ReplyBody:
        return link.Refused("no-d-capacity", 0.05, terminal=False, facts=facts(held_tokens=99_000))

    engine.on_admit = refuse
    _, outcome, known = await admit(await agent_of(engine), ask())
    assert outcome == Rejection(Reason.NO_D_CAPACITY, 0.05)
    assert known is not None
    assert known.held_tokens == 99_000


@pytest.mark.parametrize("epoch", [2, 7, 2**64 - 1])
async def test_f40_a_turn_for_another_life_is_refused_as_stale(epoch: int) -> None:
    """F40: whoever still believes in an earlier life is told, as an answer, who lives now; the engine is not asked."""
    engine = FakeEngine()
    worker, outcome, _ = await admit(await agent_of(engine), ask(WorkerRef("d0", epoch)))
    assert outcome == Rejection(Reason.STALE_EPOCH)
    assert worker == HERE
    assert not [call for call in engine.calls if isinstance(call, link.Admit)]


async def test_f60_an_address_reused_by_another_worker_refuses_by_identity() -> None:
    """F60: the agent behind an address answers for another worker id than the caller means, whatever epoch it names."""
    engine = FakeEngine()
    agent = await agent_of(engine)
    for epoch in (0, 1):
        worker, outcome, _ = await admit(agent, ask(WorkerRef("d9", epoch)))
        assert outcome == Rejection(Reason.STALE_EPOCH)
        assert worker == HERE
        assert await release(agent, WorkerRef("d9", epoch), "t") is False
    assert not engine.calls


async def test_epoch_zero_means_whichever_lives_now() -> None:
    agent = await agent_of(FakeEngine())
    assert isinstance((await admit(agent, ask(WorkerRef("d0", 0))))[1], Admission)


async def test_without_an_engine_there_is_no_decision() -> None:
    agent = AdmissionAgent(cast("EngineConnection", Connected(None)), 10)
    for call in (admit(agent, ask()), release(agent, HERE, "t"), agent.session("s", 1.0), agent.sessions(1, 1.0), agent.worker(1.0)):
        with pytest.raises(Unavailable) as caught:
            await call
        assert caught.value.reason == "ENGINE_AWAY"
    assert agent.why_not() == "ENGINE_AWAY: the engine is away"


async def test_a_prefill_worker_admits_nothing() -> None:
    agent = await agent_of(FakeEngine(role="prefill", capabilities=["prefill"]))
    with pytest.raises(Precondition) as caught:
        await admit(agent, ask())
    assert caught.value.reason == "ENGINE_CAPABILITY_MISSING"


async def test_a_draining_agent_refuses_turns_and_serves_the_rest() -> None:
    engine = FakeEngine()
    agent = await agent_of(engine)
    agent.drain()
    assert (await admit(agent, ask()))[1] == Rejection(Reason.DRAINING)
    assert (await admit(agent, ask(WorkerRef("d0", 9))))[1] == Rejection(Reason.STALE_EPOCH)
    assert await release(agent, HERE, "unknown") is False
    info, load = await agent.worker(1.0)
    assert info.draining
    assert load.facts.held_tokens == 20_000
    assert agent.why_not() == "DRAINING: the agent is stopping"


async def test_calls_in_flight_are_bounded_and_waited_for() -> None:
    engine = FakeEngine()
    gate = asyncio.Event()

    async def slow(body: link.Admit) -> link.ReplyBody:
        await gate.wait()
        return await engine._admit(body)

    engine.on_admit = slow
    agent = await agent_of(engine, max_inflight=3)
    waiting = [asyncio.ensure_future(admit(agent, ask(timeout_s=10.0))) for _ in range(3)]
    await until(lambda: agent.inflight == 3, 5.0, "3 in flight")
    with pytest.raises(Exhausted) as caught:
        await admit(agent, ask())
    assert (caught.value.reason, caught.value.retry_after_s) == ("AGENT_OVERLOADED", 0.05)
    agent.drain()
    assert await agent.wait_idle(0.01) is False
    gate.set()
    assert await agent.wait_idle(5.0) is True
    assert all(isinstance(outcome, Admission) for _, outcome, _ in await asyncio.gather(*waiting))


async def test_f5_timeouts_leave_nothing_in_flight() -> None:
    """F5: 400 calls with a deadline of 50 ms against an engine that takes 500 ms: inflight 0, pending 0."""
    engine = FakeEngine()

    async def slow(body: link.Admit) -> link.ReplyBody:
        await asyncio.sleep(0.5)
        return await engine._admit(body)

    engine.on_admit = slow
    agent = await agent_of(engine)
    answers = await asyncio.gather(*(admit(agent, ask(timeout_s=0.05)) for _ in range(400)), return_exceptions=True)
    assert all(isinstance(answer, DeadlineExceeded) for answer in answers)
    assert (agent.inflight, engine.pending) == (0, 0)


async def test_f58_cancelled_calls_leave_nothing_in_flight() -> None:
    """F58: calls are cancelled at every await, 100 times: inflight returns to 0."""
    engine = FakeEngine()
    rng = random.Random(58)

    async def jittery(body: link.Admit) -> link.ReplyBody:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        return await engine._admit(body)

    engine.on_admit = jittery
    agent = await agent_of(engine)
    for _ in range(100):
        task = asyncio.ensure_future(admit(agent, ask()))
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (agent.inflight, engine.pending) == (0, 0)


async def test_an_engine_that_goes_away_fails_what_it_was_asked() -> None:
    engine = FakeEngine()

    async def never(_: link.Admit) -> link.ReplyBody:
        await asyncio.Event().wait()
        raise AssertionError

    engine.on_admit = never
    agent = await agent_of(engine)
    task = asyncio.ensure_future(admit(agent, ask(timeout_s=30.0)))
    await until(lambda: agent.inflight == 1, 5.0, "1 in flight")
    engine.die()
    with pytest.raises(Unavailable):
        await task
    assert agent.inflight == 0


async def test_the_engines_failure_keeps_its_kind_and_field() -> None:
    engine = FakeEngine()

    async def fail(_: link.Admit) -> link.ReplyBody:
        return link.Failed("INVALID_ARGUMENT", "too many", "block_hashes")

    engine.on_admit = fail
    with pytest.raises(KvcError) as caught:
        await admit(await agent_of(engine), ask())
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "block_hashes")


@pytest.mark.parametrize(
    "reply",
    [
        link.Released(released=True),
        link.Refused("no-such-reason", 0.0, terminal=False, facts=facts()),
        link.Refused("draining", float("nan"), terminal=False, facts=facts()),
        link.Refused("draining", 0.0, terminal=False, facts=facts(held_tokens=-1)),
        link.Admitted("direct", "local", "", 5.0, 1, 1, facts()),
        link.Admitted("direct", "local", "t", 5.0, -1, 1, facts()),
        link.Admitted("sideways", "local", "t", 5.0, 1, 1, facts()),
    ],
)
async def test_f76_nonsense_from_the_engine_is_its_fault(reply: link.ReplyBody) -> None:
    """F76: an answer of the wrong kind or out of range is INTERNAL, never the caller's INVALID_ARGUMENT."""
    engine = FakeEngine()

    async def answer(_: link.Admit) -> link.ReplyBody:
        return reply

    engine.on_admit = answer
    agent = await agent_of(engine)
    with pytest.raises(Internal) as caught:
        await admit(agent, ask())
    assert caught.value.reason == "ENGINE_PROTOCOL"
    assert agent.inflight == 0


async def test_f66_sessions_are_compared_exactly() -> None:
    """F66: "session-1" and "session-12" are different, also when the engine answers with the wrong one."""
    engine = FakeEngine()
    engine.sessions = {name: link.SessionRecord(name, 10, 5, 2, busy=False) for name in ("session-12", "session-1")}
    agent = await agent_of(engine)
    ref, one = await agent.session("session-1", 1.0)
    assert ref == HERE
    assert one is not None
    assert (one.session_id, one.committed_tokens, one.resident_tokens, one.generation) == ("session-1", 10, 5, 2)
    engine.sessions = {"session-1": link.SessionRecord("session-12", 10, 5, 2, busy=False)}
    assert (await agent.session("session-1", 1.0))[1] is None
    assert (await agent.session("session", 1.0))[1] is None


async def test_release_gives_a_ticket_back_once() -> None:
    engine = FakeEngine()
    agent = await agent_of(engine)
    outcome = (await admit(agent, ask()))[1]
    assert isinstance(outcome, Admission)
    assert await release(agent, HERE, outcome.ticket) is True
    assert await release(agent, HERE, outcome.ticket) is False
    assert await release(agent, WorkerRef("d0", 7), outcome.ticket) is False


@pytest.mark.parametrize(
    ("remaining_s", "expected_s"), [(None, 1.0), (float("inf"), 1.0), (9e18, 1.0), (0.5, 0.4), (1.1, 1.0), (0.1001, 0.0001)]
)
def test_the_childs_deadline(remaining_s: float | None, expected_s: float) -> None:
    assert child_timeout_s(1.0, remaining_s, 0.1) == pytest.approx(expected_s)


@pytest.mark.parametrize("remaining_s", [0.1, 0.05, 0.0, -1.0])
def test_no_time_left_is_an_error_before_the_engine_is_asked(remaining_s: float) -> None:
    with pytest.raises(DeadlineExceeded):
        child_timeout_s(1.0, remaining_s, 0.1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"capabilities": []}, "ENGINE_CAPABILITY_MISSING"),
        ({"capabilities": ["admit"]}, "ENGINE_CAPABILITY_MISSING"),
        ({"role": "monolithic", "capabilities": ["residency"]}, "ENGINE_CAPABILITY_MISSING"),
        ({"block_tokens": 16}, "ENGINE_BLOCK_TOKENS_MISMATCH"),
        ({"role": "mixed"}, "ENGINE_WELCOME_INVALID"),
        ({"epoch": 0}, "ENGINE_WELCOME_INVALID"),
        ({"epoch": -1}, "ENGINE_WELCOME_INVALID"),
        ({"epoch": 2**64}, "ENGINE_WELCOME_INVALID"),
        ({"worker_id": ""}, "ENGINE_WELCOME_INVALID"),
        ({"page_tokens": 0}, "ENGINE_WELCOME_INVALID"),
        ({"prefill_tokens_per_s": float("nan")}, "ENGINE_WELCOME_INVALID"),
        ({"engine_url": "ftp://x"}, "ENGINE_WELCOME_INVALID"),
        ({"hash_seed": -5}, "ENGINE_WELCOME_INVALID"),
    ],
)
def test_f73_an_engine_that_lacks_what_is_needed_is_refused(fields: dict[str, Any], reason: str) -> None:
    """F73: a capability that is missing, a block size that differs, or a greeting that makes no sense ends in a typed refusal."""
    with pytest.raises(Precondition) as caught:
        accept(welcome(**fields), config())
    assert caught.value.reason == reason


def test_another_model_is_refused_when_one_is_asked_for() -> None:
    with pytest.raises(Precondition) as caught:
        accept(welcome(), config(model="qwen"))
    assert caught.value.reason == "ENGINE_MODEL_MISMATCH"
    assert accept(welcome(model="qwen"), config(model="qwen")).model == "qwen"


def test_a_prefill_engine_needs_no_capability() -> None:
    assert accept(welcome(role="prefill", capabilities=[]), config()).capabilities == ()


@pytest.mark.parametrize(
    ("url", "host", "expected"),
    [
        ("http://0.0.0.0:30000", "node7", "http://node7:30000"),
        ("https://127.0.0.1/base", "10.0.0.7", "https://10.0.0.7/base"),
        ("http://127.0.0.1:1", "fd00::7", "http://[fd00::7]:1"),
    ],
)
def test_the_advertised_host_replaces_the_engines(url: str, host: str, expected: str) -> None:
    info = accept(welcome(engine_url=url, bootstrap_host="0.0.0.0", bootstrap_port=8998), config(advertise_host=host))
    assert (info.engine_url, info.bootstrap_host, info.bootstrap_port) == (expected, host, 8998)
    assert accept(welcome(engine_url=url), config(advertise_host=host)).bootstrap_host == ""
