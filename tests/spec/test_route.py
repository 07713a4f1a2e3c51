"""docs/spec.md, Algorithm 1: one example a line; tests/property/test_route.py compares with the text over sets."""

# ruff: noqa: RUF002 - quotations carry the symbols of the spec

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvc.core import events as ev
from kvc.core.params import params_for
from kvc.core.route import Routing, explain, route
from kvc.core.state import Sigma
from kvc.core.types import Attempt, Executor, Facts, Mode, Reason, Role, WorkerRef
from tests.support.builders import run, worker

if TYPE_CHECKING:
    from array import array

    from kvc.core.types import Turn

A, B, C = (WorkerRef(name, 1) for name in "ABC")
PROMPT = run("p", 10)


def mesh(profile: Any = "default", **overrides: Any) -> Sigma:
    """Three decode workers and a prefill worker; session "s" has sent 10 blocks."""
    sigma = Sigma(params_for(profile, **overrides))
    for ref in (A, B, C):
        sigma.apply(ev.WorkerJoined(worker(ref.worker_id, capacity_tokens=1000)))
        sigma.apply(ev.ResidencyReset(ref, ()))
    sigma.apply(ev.WorkerJoined(worker("P", role=Role.PREFILL)))
    sigma.apply(ev.TurnArrived("s", PROMPT, 240))
    return sigma


def hold(sigma: Sigma, ref: WorkerRef, blocks: int, chain: array[int] = PROMPT) -> None:
    sigma.apply(ev.ResidencyReset(ref, tuple(chain[:blocks])))


def refuse(sigma: Sigma, ref: WorkerRef, times: int) -> None:
    for _ in range(times):
        sigma.apply(ev.Refused("s", ref, Reason.NO_D_CAPACITY))


def start(sigma: Sigma, ref: WorkerRef, session: str, tokens: int = 100, *, complete: bool = False) -> None:
    attempt = Attempt(f"{session}@{ref.worker_id}", sigma.workers[ref.worker_id].assigned)
    sigma.apply(ev.Started(attempt, session, ref, Mode.SEED, Executor.LOCAL, tokens))
    if complete:
        sigma.apply(ev.TurnEnded(attempt, ev.End.COMPLETED, tokens))


def ask(sigma: Sigma) -> Turn:
    return sigma.turn("s", PROMPT, 240, 0)


def chosen(sigma: Sigma, exclude: frozenset[WorkerRef] = frozenset()) -> WorkerRef | None:
    return route(ask(sigma), sigma, exclude).ref


@pytest.mark.parametrize(
    "event",
    [ev.WorkerHealth(A, healthy=False), ev.WorkerDraining("A", draining=True), ev.WorkerLeft("A"), ev.WorkerUnreachable(A, gone=True)],
    ids=lambda event: type(event).__name__,
)
def test_route_1(event: ev.Event) -> None:
    """ROUTE-1: "Members of D that are healthy, in their current epoch and not draining are eligible"."""
    sigma = mesh()
    hold(sigma, A, 10)
    assert chosen(sigma) == A
    sigma.apply(event)
    assert chosen(sigma) == B


def test_route_2() -> None:
    """ROUTE-2: "Without the workers excluded by the dispatch"."""
    sigma = mesh()
    hold(sigma, A, 10)
    assert chosen(sigma, frozenset({A})) == B
    assert chosen(sigma, frozenset({A, B})) == C


def test_route_3() -> None:
    """ROUTE-3: "d is blacklisted for s when rejects[s,d] ≥ τ_reject"."""
    sigma = mesh()
    hold(sigma, A, 10)
    refuse(sigma, A, 2)
    assert chosen(sigma) == A
    refuse(sigma, A, 1)
    assert chosen(sigma) == B


def test_route_4() -> None:
    """ROUTE-4: "The candidates C are the eligible workers that are not blacklisted"."""
    sigma = mesh()
    refuse(sigma, A, 3)
    sigma.apply(ev.WorkerDraining("B", draining=True))
    excluded = {row.ref: row.excluded for row in explain(ask(sigma), sigma)}
    assert excluded == {A: "blacklisted", B: "draining", C: ""}
    assert chosen(sigma) == C


def test_route_5() -> None:
    """ROUTE-5: "If C is empty, the answer is the eligible worker with the fewest rejects: degenerate"."""
    sigma = mesh()
    hold(sigma, A, 10)
    refuse(sigma, A, 5)
    refuse(sigma, B, 4)
    refuse(sigma, C, 3)
    assert route(ask(sigma), sigma) == Routing(C, 0, degenerate=True)
    assert chosen(sigma, frozenset({C})) == B


def test_route_6() -> None:
    """ROUTE-6: "If no worker is eligible there is no answer"."""
    sigma = mesh()
    assert chosen(sigma, frozenset({A, B, C})) is None
    assert route(Sigma(params_for("paper")).preview("s", PROMPT, 240), Sigma(params_for("paper"))).ref is None


def test_route_7() -> None:
    """ROUTE-7: "overlap(d) = leading blocks of r in resident[d]"; `exclusive` leaves out what more than `shared_after` sessions own."""
    sigma, full = mesh(shared_after=2), mesh(overlap="full")
    for one in (sigma, full):
        hold(one, A, 6)
        hold(one, B, 7)
        for other in ("t", "u"):
            one.apply(ev.TurnArrived(other, run(other, 2, PROMPT[:5]), 168))
    assert [row.overlap_blocks for row in sorted(explain(ask(sigma), sigma), key=lambda row: row.ref)] == [1, 2, 0]
    assert [row.overlap_blocks for row in sorted(explain(ask(full), full), key=lambda row: row.ref)] == [6, 7, 0]
    assert [row.resident_blocks for row in sorted(explain(ask(sigma), sigma), key=lambda row: row.ref)] == [6, 7, 0]


def test_route_8() -> None:
    """ROUTE-8: "sticky(d) = 1 if pin[s] = d, else 0"."""
    sigma = mesh()
    start(sigma, B, "s", complete=True)
    assert [row.ref for row in explain(ask(sigma), sigma) if row.sticky] == [B]


def test_route_9() -> None:
    """ROUTE-9: "primary(d) = overlap(d) + α · sticky(d) + `load_floor_bonus` if inflight[d] = 0"."""
    sigma = mesh(alpha=2.5, load_floor_bonus=0.5)
    hold(sigma, A, 3)
    hold(sigma, B, 1)
    start(sigma, B, "s", complete=True)
    start(sigma, C, "t")
    primary = {row.ref: row.score[0] for row in explain(ask(sigma), sigma)}
    assert primary == {A: 3.5, B: 4.0, C: 0.0}
    assert chosen(sigma) == B


def test_route_10() -> None:
    """ROUTE-10: "score(d) = (primary, sticky, −load, −assigned)"; the text: (primary, sticky, −inflight, −assigned)."""
    sigma, paper = mesh(), mesh("paper")
    for one in (sigma, paper):
        for session in ("t", "u", "v"):
            one.apply(ev.TurnArrived(session, run(session, 1), 24))
        start(one, A, "t", 900, complete=True)
        start(one, B, "u", 100)
        start(one, C, "v", 100)
        one.apply(ev.Assigned(C))
    assert {row.ref: row.score for row in explain(ask(sigma), sigma)} == {A: (0, 0, -0.9, 0), B: (0, 0, -0.6, 0), C: (0, 0, -0.6, -1)}
    assert chosen(sigma) == B
    assert {row.ref: row.score for row in explain(ask(paper), paper)} == {A: (0, 0, 0, 0), B: (0, 0, -1, 0), C: (0, 0, -1, -1)}
    assert chosen(paper) == A


def test_route_10_asked() -> None:
    """ROUTE-10: "turns in flight on d and questions on their way to it": a burst within one round trip spreads."""
    sigma = mesh()
    asked = []
    for number in range(6):
        ref = chosen(sigma)
        assert ref is not None
        asked.append(ref)
        sigma.apply(ev.Asked(Attempt(f"r{number}", 0), ref))
    assert asked == [A, B, C] * 2
    for number in range(6):
        sigma.apply(ev.Answered(Attempt(f"r{number}", 0)))
    assert [member.asked for member in sigma.decode_workers()] == [0, 0, 0]


def test_route_10_reported() -> None:
    """ROUTE-10: "or what d itself reports as held, reserved and queued if that is more"."""
    sigma = mesh()
    sigma.apply(ev.LoadReported(A, Facts(1000, held_tokens=300, reserved_tokens=200, queued_tokens=100)))
    assert {row.ref: row.placement_load for row in explain(ask(sigma), sigma)} == {A: 0.6, B: 0.0, C: 0.0}


def test_route_11() -> None:
    """ROUTE-11: "among equals, the worker that joined first"; and a full worker is chosen like any other."""
    sigma = mesh("paper")
    assert chosen(sigma) == A
    hold(sigma, B, 4)
    sigma.apply(ev.LoadReported(B, Facts(1000, held_tokens=1000)))
    assert chosen(sigma) == B


def test_r12() -> None:
    """R12: "one block ties with α = 1, then sticky decides"."""
    sigma = mesh("paper")
    start(sigma, B, "s", complete=True)
    hold(sigma, A, 1)
    assert {row.ref: row.score[0] for row in explain(ask(sigma), sigma)} == {A: 1, B: 1, C: 0}
    assert chosen(sigma) == B
    hold(sigma, A, 2)
    assert chosen(sigma) == A


def test_f54_new_prompts_avoid_the_busy_worker() -> None:
    """F54, ROUTE-10: A holds next to nothing and has 200 turns in flight, B is idle and warm with others' KV: new prompts go to B."""
    for profile in ("default", "paper"):
        sigma = mesh(profile)
        sigma.apply(ev.WorkerLeft("C"))
        hold(sigma, B, 500, run("others", 500))
        for number in range(200):
            sigma.apply(ev.TurnArrived(f"t{number}", run("t", 1), 24))
            start(sigma, A, f"t{number}", 1)
        assert chosen(sigma) == B


def test_f56_a_full_worker_is_avoided() -> None:
    """F56, R26: D0 keeps three long sessions, D1 twenty short ones, all idle: a new seed goes to D1, by tokens and not by count."""
    sigma = mesh(capacity="headroom")
    sigma.apply(ev.WorkerLeft("C"))
    for number in range(23):
        where, tokens = (A, 300) if number < 3 else (B, 10)
        sigma.apply(ev.TurnArrived(f"t{number}", run(f"t{number}", 1), 24))
        start(sigma, where, f"t{number}", tokens, complete=True)
    assert chosen(sigma) == B


def test_explain_shows_everybody_and_changes_nothing() -> None:
    """ROUTE-11: "Route reads, never writes"."""
    sigma = mesh()
    hold(sigma, B, 4)
    refuse(sigma, C, 3)
    rows = explain(sigma.preview("s", PROMPT, 240), sigma, frozenset({A}))
    assert [(row.ref, row.excluded) for row in rows] == [(B, ""), (A, "tried"), (C, "blacklisted")]
    assert sigma.workers["B"].assigned == 0
    assert explain(sigma.preview("s", PROMPT, 240), sigma, frozenset({A})) == rows
