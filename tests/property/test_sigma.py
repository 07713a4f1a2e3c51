"""Σ against its oracle, bit-exact replay, and two routers over three workers whose every step may interleave."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvc.core import events as ev
from kvc.core.dispatch import Ask, Resumed, Unreachable
from kvc.core.params import Params, params_for
from kvc.core.state import Sigma
from tests.support.logs import logs
from tests.support.mesh import PARAMS, Mesh, Router
from tests.support.slow_sigma import SlowSigma, fold

pytestmark = pytest.mark.timeout(900)  # thousands of cases, on a shared machine

RUNS, STEPS = 1000, 30


def everything(sigma: Sigma) -> dict[str, Any]:
    """All of Σ as plain values."""
    return {
        "workers": sigma.workers,
        "sessions": sigma.sessions,
        "open": sigma.open,
        "asking": sigma.asking,
        "cursors": (sigma.prefill_cursor, sigma.decode_cursor),
        "chains": {session: sigma.forest.chain(session) for session in sorted(sigma.forest.sessions())},
        "bytes": sigma.forest.held_bytes,
    }


def assert_same(sigma: Sigma, slow: SlowSigma) -> None:
    """Σ and the oracle agree on every field of seed 000 section 2.3 and on what R19 and R26 need."""
    assert set(sigma.workers) == set(slow.lives)
    for worker in sigma.workers.values():
        ref = worker.ref
        assert ref == slow.lives[ref.worker_id].ref
        assert worker.inflight == slow.inflight(ref)
        assert worker.asked == slow.asked(ref)
        assert worker.healthy == (ref not in slow.unhealthy)
        assert worker.draining == (ref.worker_id in slow.draining)
        if worker.info.role.keeps_sessions:
            assert worker.assigned == slow.assigned[ref]
            assert worker.placed_tokens == sum(tokens for where, tokens in slow.placed.values() if where == ref)
        if worker.fresh:
            assert worker.resident == slow.resident[ref]
    for name in {*sigma.sessions, *slow.pin, *slow.placed, *slow.chains}:
        session = sigma.sessions.get(name)
        assert (session.pin if session is not None else None) == slow.pin.get(name)
        chain = sigma.forest.chain(name)
        assert (list(chain) if chain is not None else None) == slow.chains.get(name)
        for worker_id in slow.lives:
            assert sigma.rejects(name, worker_id) == slow.rejects[name, worker_id]


@settings(max_examples=500)
@given(
    log=logs(max_size=60), params=st.sampled_from([params_for("default"), params_for("paper"), params_for("paper", reset_on_admit=False)])
)
def test_sigma_equals_its_oracle(log: list[ev.Event], params: Params) -> None:
    """STATE-1 to STATE-9: after any events, stale, repeated and unknown ones among them, Σ is what counting from scratch gives."""
    sigma = Sigma(params)
    for event in log:
        sigma.apply(event)
    sigma.check_integrity()
    assert_same(sigma, fold(params, log))


@settings(max_examples=400)
@given(log=logs(max_size=60))
def test_a_log_replays_bit_exact(log: list[ev.Event]) -> None:
    """STATE-1: the same events, through a file, give the same Σ to the last bit."""
    once, again = Sigma(params_for("default")), Sigma(params_for("default"))
    for event in log:
        once.apply(event)
    for event in pickle.loads(pickle.dumps(log)):  # noqa: S301 - written one line above
        again.apply(event)
    assert everything(once) == everything(again)


@settings(max_examples=400)
@given(log=logs(max_size=60))
def test_everything_ends(log: list[ev.Event]) -> None:
    """I4, F58: when every open turn has ended and every session is closed, nothing is in flight, placed or remembered."""
    sigma = Sigma(params_for("default"))
    for event in log:
        sigma.apply(event)
    for attempt in list(sigma.open):
        sigma.apply(ev.TurnEnded(attempt, ev.End.CANCELLED))
    for attempt in list(sigma.asking):
        sigma.apply(ev.Answered(attempt))
    assert all((worker.inflight, worker.asked, worker.prefill_tokens) == (0, 0, 0) for worker in sigma.workers.values())
    for session in list(sigma.sessions):
        sigma.apply(ev.SessionClosed(session))
    assert all(worker.placed_tokens == 0 and worker.placed_sessions == 0 for worker in sigma.workers.values())
    assert not sigma.open
    assert not sigma.sessions
    assert len(sigma.forest) == 0


class TwoRouters(RuleBasedStateMachine):
    """Every rule is one step of one party: a question, an answer, an arrival, an end, a death."""

    steps_of_runs: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.mesh = Mesh()
        self.steps = 0

    def pick(self, data: st.DataObject, what: str) -> tuple[Router, str]:
        """A session of a router that has some."""
        choices = [(name, session) for name, router in self.mesh.routers.items() for session in sorted(getattr(router, what))]
        name, session = data.draw(st.sampled_from(choices))
        return self.mesh.routers[name], session

    def any_talks(self) -> bool:
        return any(router.talks for router in self.mesh.routers.values())

    def any_running(self) -> bool:
        return any(router.running for router in self.mesh.routers.values())

    @rule(router=st.sampled_from("AB"), session=st.integers(0, 2), more=st.integers(0, 12), reserve=st.integers(0, 60))
    def begin(self, router: str, session: int, more: int, reserve: int) -> None:
        self.steps += 1
        name = f"{router}{session}"
        party = self.mesh.routers[router]
        if name not in party.talks and name not in party.running:
            party.begin(name, more, reserve)

    @precondition(any_talks)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.steps += 1
        router, session = self.pick(data, "talks")
        effect = router.talks[session].effect
        if isinstance(effect, Ask):
            router.reply(session, self.mesh.ask(effect))
        else:
            router.reply(session, Resumed(data.draw(st.sampled_from(["room", "room", "waited", "full", "deadline"])), 1.0))

    @precondition(any_talks)
    @rule(data=st.data(), heard=st.booleans(), gone=st.booleans())
    def lose_answer(self, data: st.DataObject, heard: bool, gone: bool) -> None:  # noqa: FBT001 - drawn by hypothesis
        """The worker may have said yes, the router never learns it: the ticket ends by its TTL."""
        self.steps += 1
        router, session = self.pick(data, "talks")
        effect = router.talks[session].effect
        if isinstance(effect, Ask):
            if heard:
                self.mesh.ask(effect)
            router.reply(session, Unreachable("deadline exceeded", gone=gone))

    @precondition(any_talks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.steps += 1
        router, session = self.pick(data, "talks")
        router.cancel(session)

    @precondition(any_running)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.steps += 1
        router, session = self.pick(data, "running")
        running = router.running[session]
        if not running.on_engine and not self.mesh.start(running):
            router.end(session, ev.End.FAILED)

    @precondition(any_running)
    @rule(data=st.data(), end=st.sampled_from([ev.End.COMPLETED, ev.End.COMPLETED, ev.End.FAILED, ev.End.CANCELLED]))
    def finish(self, data: st.DataObject, end: ev.End) -> None:
        self.steps += 1
        router, session = self.pick(data, "running")
        running = router.running[session]
        router.sigma.apply(ev.PrefillDone(running.decision.attempt))
        self.mesh.stop(router, session, end if running.on_engine else ev.End.CANCELLED)

    @rule(router=st.sampled_from("AB"))
    def follow(self, router: str) -> None:
        self.steps += 1
        self.mesh.follow(self.mesh.routers[router])

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.steps += 1
        self.mesh.now_s += seconds
        for engine in self.mesh.engines.values():
            engine.expire(self.mesh.now_s)

    @rule(name=st.sampled_from(["D0", "D1", "D2"]), what=st.sampled_from(["restart", "blip", "heal", "heal", "sick", "drain", "undrain"]))
    def disturb(self, name: str, what: str) -> None:
        self.steps += 1
        ref = next(ref for ref in self.mesh.living() if ref.worker_id == name)
        if what == "restart":
            self.mesh.restart(name)
        elif what == "blip":
            info = self.mesh.routers["A"].sigma.workers[name].info
            self.mesh.tell(ev.WorkerLeft(name))
            self.mesh.tell(ev.WorkerJoined(info))
            self.mesh.resync(ref)
        elif what in ("heal", "sick"):
            self.mesh.tell(ev.WorkerHealth(ref, what == "heal"))
        else:
            self.mesh.tell(ev.WorkerDraining(name, what == "drain"))
            self.mesh.engines[ref].draining = what == "drain"

    @rule(router=st.sampled_from("AB"), session=st.integers(0, 2))
    def close(self, router: str, session: int) -> None:
        """The client says goodbye, whatever is in flight; a dispatch that has not decided is cancelled first."""
        self.steps += 1
        name, party = f"{router}{session}", self.mesh.routers[router]
        if name in party.talks:
            party.cancel(name)
        party.length.pop(name, None)
        party.sigma.apply(ev.SessionClosed(name))

    @invariant()
    def capacity(self) -> None:
        """I1."""
        for engine in self.mesh.engines.values():
            assert engine.committed_tokens <= engine.limit_tokens
            assert engine.physical_tokens <= engine.limit_tokens

    @invariant()
    def books(self) -> None:
        """I4."""
        for router in self.mesh.routers.values():
            router.sigma.check_integrity()
            assert {running.decision.attempt for running in router.running.values()} == set(router.sigma.open)

    def teardown(self) -> None:
        """Everything ends: nothing is in flight or held; the logs replay, and the oracle agrees."""
        TwoRouters.steps_of_runs.append(self.steps)
        for router in self.mesh.routers.values():
            for session in list(router.talks):
                router.cancel(session)
            for session in list(router.running):
                self.mesh.stop(router, session, ev.End.CANCELLED)
            for member in router.sigma.workers.values():
                assert (member.inflight, member.asked, member.prefill_tokens) == (0, 0, 0)
            again = Sigma(PARAMS)
            for event in router.sigma.log:
                again.apply(event)
            assert everything(again) == everything(router.sigma)
            assert_same(router.sigma, fold(PARAMS, router.sigma.log))
        for engine in self.mesh.engines.values():
            engine.expire(self.mesh.now_s + 100)
            assert engine.committed_tokens == 0


def test_two_routers_over_three_workers() -> None:
    """I1 to I4 and STATE-1 in at least 1,000 runs of at least 30 steps."""
    TwoRouters.steps_of_runs.clear()
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        TwoRouters, settings=settings(max_examples=RUNS + 180, stateful_step_count=STEPS + 15, deadline=None, suppress_health_check=quiet)
    )
    assert sum(steps >= STEPS for steps in TwoRouters.steps_of_runs) >= RUNS
