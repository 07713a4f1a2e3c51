"""The baselines that the algorithm is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from kvc.core import events as ev
from kvc.core.baselines import Baseline, baseline
from kvc.core.dispatch import Ask, Resumed
from kvc.core.params import params_for
from kvc.core.state import Sigma
from kvc.core.types import Decision, Executor, GaveUp, Give, Mode, Role, WorkerRef
from tests.support.builders import run, worker
from tests.support.driver import drive

if TYPE_CHECKING:
    from kvc.core.dispatch import Answer, Effect


def mesh(decode: int = 3, prefill: int = 2) -> Sigma:
    sigma = Sigma(params_for("default"))
    for number in range(decode):
        sigma.apply(ev.WorkerJoined(worker(f"D{number}")))
    for number in range(prefill):
        sigma.apply(ev.WorkerJoined(worker(f"P{number}", role=Role.PREFILL)))
    return sigma


def never(effect: Effect) -> Answer:
    raise AssertionError(effect)


def decide(policy: Baseline, sigma: Sigma, session: str, number: int, avoid: frozenset[WorkerRef] = frozenset()) -> Decision:
    chain = run(session, 3)
    sigma.apply(ev.TurnArrived(session, chain, 72))
    result = drive(baseline(policy, sigma.turn(session, chain, 72, 8), sigma, f"r{number}", avoid=avoid), never).result
    assert isinstance(result, Decision)
    sigma.apply(ev.TurnEnded(result.attempt, ev.End.COMPLETED, 72, 8))
    sigma.check_integrity()
    return result


def test_round_robin_takes_turns_on_both_sides() -> None:
    """Seed 000 section 5: every turn goes to the next D and the next P, whatever they hold, without admission."""
    sigma = mesh()
    decisions = [decide("round_robin", sigma, "s", number) for number in range(6)]
    assert [decision.decode.worker_id for decision in decisions] == ["D0", "D1", "D2"] * 2
    assert [decision.prefill.worker_id for decision in decisions if decision.prefill is not None] == ["P0", "P1"] * 3
    assert all(decision.mode is Mode.FALLBACK and decision.admission is None for decision in decisions)
    assert all(decision.executor is Executor.PREFILL for decision in decisions)


def test_sticky_stays_where_it_was() -> None:
    sigma = mesh()
    homes = {session: decide("sticky", sigma, session, number).decode for number, session in enumerate("abc")}
    assert len(set(homes.values())) == 3
    for number, session in enumerate("cabcab"):
        assert decide("sticky", sigma, session, 10 + number).decode == homes[session]
    sigma.apply(ev.WorkerDraining(homes["a"].worker_id, draining=True))
    assert decide("sticky", sigma, "a", 20).decode != homes["a"], "its home is there and takes nothing"
    sigma.apply(ev.WorkerLeft(homes["b"].worker_id))
    assert decide("sticky", sigma, "b", 21).decode != homes["b"]


def test_a_worker_that_failed_this_request_is_avoided() -> None:
    sigma = mesh(decode=2, prefill=2)
    avoid = frozenset({WorkerRef("D0", 1), WorkerRef("P0", 1)})
    for number in range(4):
        decision = decide("round_robin", sigma, "s", number, avoid)
        assert (decision.decode.worker_id, decision.prefill) == ("D1", WorkerRef("P1", 1))
    everybody = avoid | {WorkerRef("D1", 1), WorkerRef("P1", 1)}
    assert decide("sticky", sigma, "s", 9, everybody).decode in everybody


def test_a_prefill_worker_that_takes_no_such_prompt_is_passed_over() -> None:
    """A baseline's turn has 72 tokens; one that nobody of P takes is prefilled where it is decoded."""
    sigma = mesh(decode=1, prefill=0)
    sigma.apply(ev.WorkerJoined(worker("P0", role=Role.PREFILL, max_input_tokens=71)))
    assert decide("round_robin", sigma, "s", 0).executor is Executor.LOCAL
    sigma.apply(ev.WorkerJoined(worker("P1", role=Role.PREFILL, max_input_tokens=72)))
    for number in (1, 2, 3):
        assert decide("round_robin", sigma, "s", number).prefill == WorkerRef("P1", 1)
    assert decide("round_robin", sigma, "s", 4, frozenset({WorkerRef("P1", 1)})).prefill == WorkerRef("P1", 1), "rather than none"


@pytest.mark.parametrize("role", [Role.DECODE, Role.MONOLITHIC])
def test_without_prefill_workers_everything_is_local(role: Role) -> None:
    sigma = mesh(decode=0, prefill=0 if role is Role.DECODE else 1)
    sigma.apply(ev.WorkerJoined(worker("D0", role=role)))
    decision = decide("round_robin", sigma, "s", 0)
    assert (decision.prefill, decision.executor) == (None, Executor.LOCAL)


@pytest.mark.parametrize(("why", "give"), [("deadline", Give.DEADLINE), ("full", Give.NO_WORKER), ("waited", Give.NO_WORKER)])
def test_nobody_there(why: Literal["waited", "full", "deadline"], give: Give) -> None:
    sigma = mesh(decode=0)
    sigma.apply(ev.TurnArrived("s", run("s", 3), 72))
    waits = iter([Resumed("room", 2.0), Resumed(why, 1.0)])

    def answer(effect: Effect) -> Answer:
        assert not isinstance(effect, Ask)
        return next(waits)

    result = drive(baseline("sticky", sigma.turn("s", run("s", 3), 72, 8), sigma, "r"), answer).result
    assert result == GaveUp(give, queued_s=3.0)
