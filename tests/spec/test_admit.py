"""docs/spec.md, Algorithm 2 and tickets: one example a line; K = 1000, so the high-water mark is 950."""

# ruff: noqa: RUF002 - quotations carry the symbols of the spec

from __future__ import annotations

from typing import Any

import pytest

from kvc.core.admit import admit
from kvc.core.params import Params, params_for
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, PrefillOffer, Reason, Rejection
from tests.support.builders import run, turn
from tests.support.model_engine import ModelEngine

PARAMS = params_for("default", tau_append_tokens=100)
PAPER = params_for("paper", tau_append_tokens=100)
FAST_P = PrefillOffer(backlog_s=0.0, prefill_tokens_per_s=1e6, transfer_tokens_per_s=1e6)


def facts(**fields: Any) -> Facts:
    return Facts(1000, **fields)


def refused(reason: Reason, params: Params = PARAMS) -> Rejection:
    return Rejection(reason, params.retry_after_s)


def test_admit_1() -> None:
    """ADMIT-1: "input + reserve > ρK, or input above the engine's own limit: `exceeds-capacity`, terminal"."""
    never = Rejection(Reason.EXCEEDS_CAPACITY, terminal=True)
    assert admit(facts(), turn(input_tokens=900, output_reserve_tokens=51), PARAMS) == never
    assert isinstance(admit(facts(), turn(input_tokens=900, output_reserve_tokens=50), PARAMS), Admission)
    assert admit(facts(max_input_tokens=500), turn(input_tokens=501), PARAMS) == never
    assert isinstance(admit(facts(max_input_tokens=500), turn(input_tokens=500), PARAMS), Admission)


def test_f10_an_over_long_prompt_opens_no_transfer() -> None:
    """F10, ADMIT-1: the limit of Admit is the limit of the engine; no executor is chosen, nothing is reserved."""
    engine = ModelEngine(PARAMS, 1000)
    outcome = engine.admit(Attempt("r", 0), turn(input_tokens=951), offer=FAST_P)
    assert outcome == Rejection(Reason.EXCEEDS_CAPACITY, terminal=True)
    assert engine.tickets == {}


def test_admit_2() -> None:
    """ADMIT-2: "A draining worker answers `draining`; one with another turn of s in flight answers `session-busy`"."""
    assert admit(facts(draining=True), turn(input_tokens=10), PARAMS) == Rejection(Reason.DRAINING)
    assert admit(facts(session_busy=True), turn(input_tokens=10), PARAMS) == refused(Reason.SESSION_BUSY)
    assert not Reason.DRAINING.counts_as_reject
    assert not Reason.SESSION_BUSY.counts_as_reject


def test_admit_3() -> None:
    """ADMIT-3: "matched counts the device and the host tier; append = input − matched"."""
    asked = turn(input_tokens=400, turn_index=3)
    outcome = admit(facts(matched_tokens=200, host_matched_tokens=150, evictable_tokens=200), asked, PARAMS)
    assert outcome == Admission(Mode.DIRECT, Executor.LOCAL, append_tokens=50, need_tokens=400)
    colder = admit(facts(matched_tokens=200, host_matched_tokens=99, evictable_tokens=200), asked, PARAMS)
    assert isinstance(colder, Admission)
    assert (colder.mode, colder.append_tokens) == (Mode.RESEED, 101)


def test_admit_4() -> None:
    """ADMIT-4: "need = input + reserve − what of matched is held already; cap_ok ⇔ held + reserved + need ≤ ρK"."""
    asked = turn(input_tokens=400, output_reserve_tokens=50, turn_index=1)
    for held, reserved, matched_held, evictable, fits in (
        (500, 0, 0, 500, True),
        (501, 0, 0, 0, False),
        (400, 100, 0, 0, True),
        (400, 101, 0, 0, False),
        (700, 0, 200, 0, True),
        (701, 0, 200, 0, False),
    ):
        known = facts(
            held_tokens=held, reserved_tokens=reserved, matched_tokens=300, matched_held_tokens=matched_held, evictable_tokens=evictable
        )
        outcome = admit(known, asked, PARAMS)
        assert isinstance(outcome, Admission) is fits
        if isinstance(outcome, Admission):
            assert outcome.need_tokens == 450 - matched_held


def test_r7_a_long_session_is_not_counted_twice() -> None:
    """R7: a session of 50K with an append of 1K on K = 92,104: the text refuses it, the headroom rule runs it Direct."""
    known = Facts(92_104, evictable_tokens=50_000, matched_tokens=50_000, session_resident=True)
    asked = turn(input_tokens=51_000, turn_index=5, new_tokens=1_000)
    outcome = admit(known, asked, params_for("default"))
    assert isinstance(outcome, Admission)
    assert outcome.mode is Mode.DIRECT
    assert admit(known, asked, params_for("paper")) == refused(Reason.NO_D_CAPACITY)


def test_r7_two_idle_sessions_cannot_both_come_back_at_once() -> None:
    """R7, TICKET-1: two idle sessions of 45K on K = 92,104: the ticket of the first locks its prefix, so the second does not fit."""
    engine = ModelEngine(params_for("default", block_tokens=1000), 92_104)
    chains = {name: run(name, 43) for name in "ab"}
    for name, chain in chains.items():
        attempt = Attempt(name, 0)
        assert isinstance(engine.admit(attempt, turn(name, chain, 43_000)), Admission)
        engine.arrive(attempt)
        engine.finish(attempt)
    assert engine.evictable_tokens == 86_000
    first = engine.admit(Attempt("a", 1), turn("a", chains["a"], 45_000, output_reserve_tokens=500, turn_index=1))
    assert isinstance(first, Admission)
    assert first.mode is Mode.DIRECT
    assert engine.admit(Attempt("b", 1), turn("b", chains["b"], 45_000, output_reserve_tokens=500, turn_index=1)) == refused(
        Reason.NO_D_CAPACITY
    )
    engine.release(Attempt("a", 1))
    assert isinstance(engine.admit(Attempt("b", 2), turn("b", chains["b"], 45_000, output_reserve_tokens=500, turn_index=1)), Admission)


def test_admit_5() -> None:
    """ADMIT-5: "`no-d-capacity` when something matched, else `session-not-resident-no-capacity`; with a pause hint"."""
    asked = turn(input_tokens=400)
    assert admit(facts(held_tokens=600, matched_tokens=24), asked, PARAMS) == refused(Reason.NO_D_CAPACITY)
    assert admit(facts(held_tokens=600), asked, PARAMS) == refused(Reason.SESSION_NOT_RESIDENT_NO_CAPACITY)


def test_admit_6() -> None:
    """ADMIT-6: "matched > 0 and append ≤ τ_append: Direct, on the worker itself"; R10: residency may be partial."""
    for matched, mode in ((0, Mode.SEED), (24, Mode.SEED), (199, Mode.SEED), (200, Mode.DIRECT), (300, Mode.DIRECT)):
        outcome = admit(facts(matched_tokens=matched, pending_transfers=99), turn(input_tokens=300), PARAMS)
        assert isinstance(outcome, Admission)
        assert (outcome.mode, outcome.executor) == (mode, Executor.LOCAL)


@pytest.mark.parametrize(
    ("turn_index", "known", "mode"), [(0, False, Mode.SEED), (1, False, Mode.RESEED), (0, True, Mode.RESEED), (4, True, Mode.RESEED)]
)
def test_admit_7(turn_index: int, known: bool, mode: Mode) -> None:  # noqa: FBT001 - a table
    """ADMIT-7: "Otherwise Seed for a session's first turn, Reseed for a later one; also for a large append on resident KV"."""
    for matched in (0, 100):
        asked = turn(input_tokens=400, turn_index=turn_index, known_session=known)
        for offer, executor in ((None, Executor.LOCAL), (FAST_P, Executor.PREFILL)):
            outcome = admit(facts(matched_tokens=matched), asked, PARAMS, offer)
            assert isinstance(outcome, Admission)
            assert (outcome.mode, outcome.executor) == (mode, executor)


def test_r9_off_refuses_the_large_append() -> None:
    """R9, switch `reseed_large_append`: off, a returning session's large append is refused where its KV is; a new session still seeds."""
    params = params_for("default", tau_append_tokens=100, reseed_large_append=False)
    known = facts(matched_tokens=100)
    assert admit(known, turn(input_tokens=400, turn_index=1), params) == refused(Reason.REAL_LARGE_APPEND)
    assert admit(known, turn(input_tokens=400, known_session=True), params) == refused(Reason.REAL_LARGE_APPEND)
    assert isinstance(admit(known, turn(input_tokens=400), params), Admission)
    assert isinstance(admit(known, turn(input_tokens=200, turn_index=1), params), Admission)


def test_admit_8() -> None:
    """ADMIT-8: "A transfer beyond the worker's seed budget: `seed-budget`, with a pause hint"."""
    asked = turn(input_tokens=400)
    for pending, budget, full in ((1, 2, False), (2, 2, True), (3, 2, True), (99, 0, False)):
        params = params_for("default", tau_append_tokens=100, seed_budget=budget)
        known = facts(pending_transfers=pending)
        assert (admit(known, asked, params, FAST_P) == refused(Reason.SEED_BUDGET)) is full
        assert isinstance(admit(known, asked, params), Admission), "no transfer, no budget"
    assert not Reason.SEED_BUDGET.counts_as_reject


def test_admit_9() -> None:
    """ADMIT-9: "residency is the session's record, cap_ok is used + input ≤ ρK with used = held + evictable + reserved"."""
    resident = facts(held_tokens=100, evictable_tokens=300, reserved_tokens=50, session_resident=True)
    strange = facts(held_tokens=100, evictable_tokens=300, reserved_tokens=50, matched_tokens=200)
    small = turn(input_tokens=500, new_tokens=100, turn_index=2)
    assert admit(resident, small, PAPER, FAST_P) == Admission(Mode.DIRECT, Executor.LOCAL, append_tokens=100, need_tokens=500)
    outcome = admit(strange, small, PAPER, FAST_P)
    assert isinstance(outcome, Admission)
    assert (outcome.mode, outcome.executor) == (Mode.RESEED, Executor.PREFILL)
    assert admit(resident, turn(input_tokens=501, new_tokens=100), PAPER) == refused(Reason.NO_D_CAPACITY)
    assert admit(resident, turn(input_tokens=501, new_tokens=101), PAPER) == refused(Reason.REAL_LARGE_APPEND)
    assert admit(strange, turn(input_tokens=501, new_tokens=1), PAPER) == refused(Reason.SESSION_NOT_RESIDENT_NO_CAPACITY)
    assert admit(facts(), turn(input_tokens=951), PAPER) == Rejection(Reason.EXCEEDS_CAPACITY, terminal=True)
    assert isinstance(admit(facts(), turn(input_tokens=950, output_reserve_tokens=100), PAPER), Admission)


def test_admit_9_with_r9() -> None:
    """ADMIT-9 with `reseed_large_append` alone switched on: the large append is reseeded in place when there is room."""
    params = params_for("paper", tau_append_tokens=100, reseed_large_append=True)
    asked = turn(input_tokens=500, new_tokens=300, turn_index=1)
    outcome = admit(facts(session_resident=True), asked, params, FAST_P)
    assert isinstance(outcome, Admission)
    assert (outcome.mode, outcome.append_tokens) == (Mode.RESEED, 300)
    assert admit(facts(session_resident=True, held_tokens=500), asked, params, FAST_P) == refused(Reason.NO_D_CAPACITY)


def test_ticket_1() -> None:
    """TICKET-1: "A yes locks the matched prefix and reserves the rest of `need` in the same scheduler step"."""
    engine = ModelEngine(params_for("default", block_tokens=10), 1000)
    chain = run("p", 30)
    engine.admit(Attempt("r", 0), turn("s", chain, 300))
    engine.arrive(Attempt("r", 0))
    engine.finish(Attempt("r", 0))
    before = engine.facts(turn())
    assert (before.held_tokens, before.reserved_tokens, before.evictable_tokens) == (0, 0, 300)
    outcome = engine.admit(Attempt("r", 1), turn("s", run("p", 35), 350, output_reserve_tokens=20, turn_index=1))
    assert isinstance(outcome, Admission)
    after = engine.facts(turn())
    assert (after.held_tokens, after.reserved_tokens, after.evictable_tokens) == (300, 70, 0)
    assert after.held_tokens + after.reserved_tokens == outcome.need_tokens


def test_ticket_2() -> None:
    """TICKET-2: "A ticket ends once: by arrival (its tokens become the turn's), release, or TTL"."""
    engine = ModelEngine(params_for("default", ticket_ttl_s=5.0), 1000)
    for number in range(3):
        engine.admit(Attempt(f"r{number}", 0), turn(f"s{number}", input_tokens=100), now_s=float(number))
    assert engine.arrive(Attempt("r0", 0))
    engine.release(Attempt("r1", 0))
    assert not engine.arrive(Attempt("r1", 0))
    engine.expire(6.9)
    assert engine.tickets.keys() == {Attempt("r2", 0)}
    engine.expire(7.0)
    assert (engine.tickets, engine.committed_tokens) == ({}, 100)


def test_ticket_3() -> None:
    """TICKET-3: "The same attempt gets the same answer and reserves nothing more"."""
    engine = ModelEngine(PARAMS, 1000)
    asked = turn(input_tokens=500)
    first = engine.admit(Attempt("r", 0), asked)
    assert engine.admit(Attempt("r", 0), asked) is first
    assert engine.committed_tokens == 500


def test_ticket_4() -> None:
    """TICKET-4: "A turn without a ticket (Fallback) starts when held + reserved + its need ≤ ρK and is queued until then"."""
    engine = ModelEngine(PARAMS, 1000)
    engine.admit(Attempt("r", 0), turn(input_tokens=500))
    assert not engine.start_without_ticket(Attempt("f", 0), turn("t", input_tokens=451))
    engine.release(Attempt("r", 0))
    assert engine.start_without_ticket(Attempt("f", 0), turn("t", input_tokens=451))


def test_f67_in_flight_sessions_are_refused_idle_ones_make_way() -> None:
    """F67: K = 100k. Five 30k sessions in flight: the 4th is refused with a reason. The same five idle: all admitted, oldest evicted."""
    params = params_for("default", block_tokens=1000)
    crowd = ModelEngine(params, 100_000)
    answers = [crowd.admit(Attempt(f"r{n}", 0), turn(f"s{n}", run(f"s{n}-", 30), 30_000, output_reserve_tokens=500)) for n in range(5)]
    assert [isinstance(answer, Admission) for answer in answers] == [True, True, True, False, False]
    assert answers[3] == refused(Reason.SESSION_NOT_RESIDENT_NO_CAPACITY)
    for n in range(3):
        crowd.arrive(Attempt(f"r{n}", 0))
    crowd.finish(Attempt("r0", 0))
    assert isinstance(crowd.admit(Attempt("r3", 1), turn("s3", run("s3-", 30), 30_000, output_reserve_tokens=500)), Admission)
    idle = ModelEngine(params, 100_000)
    for n in range(5):
        attempt = Attempt(f"r{n}", 0)
        assert isinstance(idle.admit(attempt, turn(f"s{n}", run(f"s{n}-", 30), 30_000, output_reserve_tokens=500)), Admission)
        assert idle.arrive(attempt)
        idle.finish(attempt)
    assert set(idle.evicted) <= {*run("s0-", 30), *run("s1-", 30)}
    assert set(idle.evicted) >= set(run("s0-", 30))
    assert [len(idle.matched(turn(f"s{n}", run(f"s{n}-", 30)))) for n in (2, 3, 4)] == [30, 30, 30]
