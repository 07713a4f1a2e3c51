"""Admit against the paper's text and the rulings, and invariant I1 under any interleaving of two routers (R7, R8)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvc.core.admit import admit
from kvc.core.cost import choose_executor
from kvc.core.params import Params, params_for
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, PrefillOffer, Reason, Rejection, Turn
from tests.support.builders import run, turn
from tests.support.model_engine import ModelEngine

if TYPE_CHECKING:
    from kvc.core.types import Outcome

pytestmark = pytest.mark.timeout(900)  # thousands of cases, on a shared machine

TOKENS = st.integers(0, 1200)
OFFERS = st.none() | st.builds(PrefillOffer, st.floats(0, 3), st.floats(1, 500), st.floats(1, 500), st.just(0))


@st.composite
def questions(draw: st.DrawFn) -> tuple[Facts, Turn]:
    """Facts and a turn that agree with each other: what is matched is part of the prompt, what is held of it is matched."""
    input_tokens = draw(TOKENS)
    matched = draw(st.integers(0, input_tokens))
    held_match = draw(st.integers(0, matched))
    facts = Facts(
        capacity_tokens=draw(st.sampled_from([1000, 1001, 2000])),
        held_tokens=held_match + draw(TOKENS),
        reserved_tokens=draw(st.integers(0, 200)),
        evictable_tokens=matched - held_match + draw(TOKENS),
        matched_tokens=matched,
        matched_held_tokens=held_match,
        host_matched_tokens=draw(st.integers(0, input_tokens - matched)),
        load_back_s=draw(st.floats(0, 1)),
        prefill_backlog_s=draw(st.floats(0, 3)),
        prefill_tokens_per_s=draw(st.floats(1, 500)),
        running=draw(st.integers(0, 4)),
        pending_transfers=draw(st.integers(0, 5)),
        session_resident=draw(st.booleans()),
        session_busy=draw(st.sampled_from([False, False, False, True])),
        draining=draw(st.sampled_from([False, False, False, True])),
        max_input_tokens=draw(st.sampled_from([900, 2**31 - 1])),
    )
    asked = turn(
        input_tokens=input_tokens,
        output_reserve_tokens=draw(st.integers(0, 100)),
        turn_index=draw(st.integers(0, 2)),
        known_session=draw(st.booleans()),
        new_tokens=draw(st.integers(0, input_tokens)),
    )
    return facts, asked


def before_any_rule(facts: Facts, asked: Turn, params: Params) -> Reason | None:
    """ADMIT-1 and ADMIT-2; the text's capacity rule knows no output reserve."""
    reserve = asked.output_reserve_tokens if params.capacity == "headroom" else 0
    if asked.input_tokens + reserve > params.rho * facts.capacity_tokens or asked.input_tokens > facts.max_input_tokens:
        return Reason.EXCEEDS_CAPACITY
    if facts.draining:
        return Reason.DRAINING
    return Reason.SESSION_BUSY if facts.session_busy else None


def papers_text(facts: Facts, asked: Turn, tau_append: int, rho: float) -> Mode | Reason:
    """Algorithm 2 as seed 000 section 3.2 writes it, line by line."""
    used_tokens = facts.held_tokens + facts.evictable_tokens + facts.reserved_tokens
    cap_ok = used_tokens + asked.input_tokens <= rho * facts.capacity_tokens
    if facts.session_resident:
        if asked.new_tokens <= tau_append and cap_ok:
            return Mode.DIRECT
        if asked.new_tokens > tau_append:
            return Reason.REAL_LARGE_APPEND
        return Reason.NO_D_CAPACITY
    if cap_ok:
        first = asked.turn_index == 0 and not asked.known_session
        return Mode.SEED if first else Mode.RESEED
    return Reason.SESSION_NOT_RESIDENT_NO_CAPACITY


def rulings(facts: Facts, asked: Turn, params: Params, offer: PrefillOffer | None) -> Mode | Reason:
    """R7, R9, R10, R15 in the order of docs/spec.md."""
    matched = facts.matched_tokens + facts.host_matched_tokens
    need = asked.input_tokens + asked.output_reserve_tokens - facts.matched_held_tokens
    if facts.held_tokens + facts.reserved_tokens + need > params.rho * facts.capacity_tokens:
        return Reason.NO_D_CAPACITY if matched else Reason.SESSION_NOT_RESIDENT_NO_CAPACITY
    if matched and asked.input_tokens - matched <= params.tau_append_tokens:
        return Mode.DIRECT
    remote = choose_executor(facts, asked.input_tokens, params, offer) is Executor.PREFILL
    if remote and facts.pending_transfers >= params.seed_budget:
        return Reason.SEED_BUDGET
    first = asked.turn_index == 0 and not asked.known_session
    return Mode.SEED if first else Mode.RESEED


def said(outcome: Outcome) -> Mode | Reason:
    return outcome.mode if isinstance(outcome, Admission) else outcome.reason


@settings(max_examples=1000)
@given(question=questions(), offer=OFFERS)
def test_admit_paper_profile_is_the_text(question: tuple[Facts, Turn], offer: PrefillOffer | None) -> None:
    """ADMIT-9: under `paper`, Admit answers what Algorithm 2 answers, with the paper's reason."""
    facts, asked = question
    params = params_for("paper", tau_append_tokens=300)
    expected = before_any_rule(facts, asked, params) or papers_text(facts, asked, 300, params.rho)
    assert said(admit(facts, asked, params, offer)) == expected


@settings(max_examples=1000)
@given(question=questions(), offer=OFFERS)
def test_admit_default_profile_is_the_rulings(question: tuple[Facts, Turn], offer: PrefillOffer | None) -> None:
    """ADMIT-1 to ADMIT-8: under `default`, Admit answers what the rulings say."""
    facts, asked = question
    params = params_for("default", tau_append_tokens=300, seed_budget=3)
    expected = before_any_rule(facts, asked, params) or rulings(facts, asked, params, offer)
    outcome = admit(facts, asked, params, offer)
    assert said(outcome) == expected
    if isinstance(outcome, Rejection):
        assert outcome.terminal == (outcome.reason is Reason.EXCEEDS_CAPACITY)
        return
    assert outcome.need_tokens == asked.input_tokens + asked.output_reserve_tokens - facts.matched_held_tokens
    assert outcome.append_tokens == asked.input_tokens - facts.matched_tokens - facts.host_matched_tokens
    if outcome.mode is Mode.DIRECT or offer is None:
        assert outcome.executor is Executor.LOCAL


@settings(max_examples=300)
@given(question=questions(), more=st.integers(1, 500))
def test_admit_is_monotone_in_room(question: tuple[Facts, Turn], more: int) -> None:
    """R7: evictable KV counts as free, and giving memory back never turns a yes into a no for lack of room."""
    facts, asked = question
    params = Params(tau_append_tokens=300)
    before = said(admit(facts, asked, params, None))
    warmer = replace(facts, evictable_tokens=facts.evictable_tokens + more)
    assert said(admit(warmer, asked, params, None)) == before
    freer = replace(facts, held_tokens=max(facts.matched_held_tokens, facts.held_tokens - more))
    if isinstance(before, Mode):
        assert said(admit(freer, asked, params, None)) == before


class TwoRouters(RuleBasedStateMachine):
    """Two routers ask one D of 1,000 tokens; turns arrive, end, are released, expire, or come without a ticket, in any order."""

    CAPACITY = 1000

    def __init__(self) -> None:
        super().__init__()
        params = params_for("default", block_tokens=10, tau_append_tokens=60, ticket_ttl_s=5.0)
        self.engine = ModelEngine(params, self.CAPACITY)
        self.now_s = 0.0
        self.asked = 0
        self.turns: dict[Attempt, Turn] = {}
        self.length: dict[int, int] = {}
        self.queued: list[Attempt] = []

    def make_turn(self, session: int, more: int, tail: int, reserve: int) -> Turn:
        """Sessions 0-3 share a system prompt of 12 blocks; every session grows."""
        self.length[session] = min(60, self.length.get(session, 0) + more)
        chain = run(f"own{session}-", self.length[session], run("system", 12) if session <= 3 else ())
        return turn(f"s{session}", chain, len(chain) * 10 + tail, output_reserve_tokens=reserve, turn_index=1)

    @rule(
        router=st.sampled_from("AB"), session=st.integers(0, 6), more=st.integers(0, 25), tail=st.integers(0, 9), reserve=st.integers(0, 80)
    )
    def ask(self, router: str, session: int, more: int, tail: int, reserve: int) -> None:
        """Admit; a yes keeps the promise of `need` tokens."""
        self.asked += 1
        attempt = Attempt(f"{router}{self.asked}", 0)
        self.turns[attempt] = self.make_turn(session, more, tail, reserve)
        before = self.engine.committed_tokens
        outcome = self.engine.admit(attempt, self.turns[attempt], self.now_s)
        grown = self.engine.committed_tokens - before
        assert grown == (outcome.need_tokens if isinstance(outcome, Admission) else 0)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """R16: a repeated attempt gets the same answer and reserves nothing more."""
        attempt = data.draw(st.sampled_from(sorted(self.turns)))
        before = self.engine.committed_tokens
        if attempt in self.engine.outcomes:
            first = self.engine.outcomes[attempt]
            assert self.engine.admit(attempt, self.turns[attempt], self.now_s) is first
            assert self.engine.committed_tokens == before

    @precondition(lambda self: self.engine.tickets)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """The turn reaches the engine: its ticket becomes memory of its own, not a token more."""
        before = self.engine.committed_tokens
        assert self.engine.arrive(data.draw(st.sampled_from(sorted(self.engine.tickets))))
        assert self.engine.committed_tokens == before

    @precondition(lambda self: self.engine.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.engine.tickets)))
        self.engine.release(attempt)
        self.engine.release(attempt)
        assert not self.engine.arrive(attempt)

    @rule(seconds=st.floats(0, 6))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.engine.expire(self.now_s)
        assert all(hold.expires_s > self.now_s for hold in self.engine.tickets.values())

    @rule(session=st.integers(0, 6), more=st.integers(0, 25), reserve=st.integers(0, 80))
    def fall_back(self, session: int, more: int, reserve: int) -> None:
        """R23: without a ticket the engine queues the turn until it fits."""
        self.asked += 1
        attempt = Attempt(f"F{self.asked}", 0)
        self.turns[attempt] = self.make_turn(session, more, 0, reserve)
        if not self.engine.start_without_ticket(attempt, self.turns[attempt]):
            self.queued.append(attempt)

    @precondition(lambda self: self.queued)
    @rule()
    def queue_moves(self) -> None:
        attempt = self.queued[0]
        if self.engine.start_without_ticket(attempt, self.turns[attempt]):
            self.queued.pop(0)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:  # noqa: FBT001 - drawn by hypothesis
        self.engine.finish(data.draw(st.sampled_from(sorted(self.engine.running))), keep=keep)

    @invariant()
    def never_above_the_high_water_mark(self) -> None:
        """I1."""
        assert self.engine.committed_tokens <= self.engine.limit_tokens
        assert self.engine.physical_tokens <= self.engine.limit_tokens

    @invariant()
    def the_cache_is_closed_under_prefixes(self) -> None:
        assert all(parent == 0 or parent in self.engine.cache for parent in self.engine.cache.values())

    def teardown(self) -> None:
        """When everything has ended nothing is held, and what still waits can run one after the other."""
        self.engine.expire(self.now_s + 100)
        for attempt in list(self.engine.running):
            self.engine.finish(attempt)
        for attempt in self.queued:
            if self.turns[attempt].input_tokens + self.turns[attempt].output_reserve_tokens <= self.engine.limit_tokens:
                assert self.engine.start_without_ticket(attempt, self.turns[attempt])
                self.engine.finish(attempt)
        assert self.engine.committed_tokens == 0


TestTwoRouters = TwoRouters.TestCase
TestTwoRouters.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


@settings(max_examples=200)
@given(order=st.permutations(range(10)), growth=st.integers(1, 200))
def test_f18_seeds_that_grow_never_pass_the_mark_nor_deadlock(order: list[int], growth: int) -> None:
    """F18: K=1000, rho=.95, ten 95-token seeds each growing: never above 950, and all ten are served."""
    engine = ModelEngine(params_for("default", block_tokens=1), 1000)
    waiting, rounds = list(order), 0
    while waiting:
        rounds += 1
        for number in list(waiting):
            attempt = Attempt(f"r{number}", rounds)
            asked = turn(f"s{number}", run(f"p{number}-", 95), 95, output_reserve_tokens=growth)
            if isinstance(engine.admit(attempt, asked), Admission) and engine.arrive(attempt):
                waiting.remove(number)
            assert engine.committed_tokens <= 950
            assert engine.physical_tokens <= 950
        engine.finish(next(iter(engine.running)))
    assert rounds <= 10
