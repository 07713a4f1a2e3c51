"""Σ: single events whose effect is easy to get wrong."""

from __future__ import annotations

import random

import pytest

from kvc.core import events as ev
from kvc.core.blocks import hash_chain, pack_tokens
from kvc.core.params import Params, params_for
from kvc.core.route import route
from kvc.core.state import UNREACHABLE_LIMIT, Sigma
from kvc.core.types import Attempt, Executor, Facts, Mode, Reason, Role, WorkerRef
from tests.support.builders import run, worker

D0, D1, P0 = WorkerRef("D0", 1), WorkerRef("D1", 1), WorkerRef("P0", 1)
R1, R2 = Attempt("r1", 0), Attempt("r2", 0)


def mesh(profile: str = "default", **overrides: object) -> Sigma:
    """Two decode workers and a prefill worker, one session "s"."""
    sigma = Sigma(params_for("paper" if profile == "paper" else "default", **overrides))
    for ref, role in ((D0, Role.DECODE), (D1, Role.DECODE), (P0, Role.PREFILL)):
        sigma.apply(ev.WorkerJoined(worker(ref.worker_id, role=role)))
    sigma.apply(ev.TurnArrived("s", run("p", 3), 72))
    return sigma


def start(sigma: Sigma, attempt: Attempt = R1, ref: WorkerRef = D0, mode: Mode = Mode.SEED, session: str = "s", **fields: object) -> None:
    sigma.apply(ev.Started(attempt, session, ref, mode, Executor.LOCAL, 100, **fields))  # type: ignore[arg-type]


def end(sigma: Sigma, attempt: Attempt = R1, how: ev.End = ev.End.COMPLETED) -> None:
    sigma.apply(ev.TurnEnded(attempt, how, prompt_tokens=72, output_tokens=3))


@pytest.mark.parametrize("how", ev.End)
@pytest.mark.parametrize(
    "events",
    ["close", "close start", "end close", "close refuse", "close start close", "close refuse start", "end close start", "end close refuse"],
)
def test_f58_a_closed_session_leaves_nothing_behind(events: str, how: ev.End) -> None:
    """F58, STATE-8: a session that is closed while turns and dispatches of it are open leaves no state, no load, no chain."""
    sigma = mesh()
    start(sigma)
    for event in events.split():
        if event == "close":
            sigma.apply(ev.SessionClosed("s"))
        elif event == "refuse":
            sigma.apply(ev.Refused("s", D1, Reason.NO_D_CAPACITY))
        elif event == "start":
            start(sigma, R2, D1)
        else:
            end(sigma, R1, how)
        sigma.check_integrity()
    for attempt in (R1, R2):
        end(sigma, attempt, how)
        sigma.check_integrity()
    assert sigma.sessions == {}
    assert sigma.open == {}
    assert len(sigma.forest) == 0
    assert [(member.inflight, member.placed_tokens, member.placed_sessions) for member in sigma.decode_workers()] == [(0, 0, 0)] * 2


def test_f40_a_new_epoch_is_credited_with_nothing() -> None:
    """F40, STATE-2: same address, new epoch: resident[d], counters, pins, placement and load are those of a stranger."""
    sigma = mesh()
    start(sigma)
    end(sigma)
    sigma.apply(ev.ResidencyReset(D0, tuple(run("p", 3))))
    sigma.apply(ev.Refused("s", D0, Reason.NO_D_CAPACITY))
    sigma.apply(ev.LoadReported(D0, Facts(92_104, held_tokens=90_000)))
    sigma.apply(ev.WorkerJoined(worker("D0", epoch=2)))
    fresh = sigma.workers["D0"]
    assert (fresh.resident, fresh.facts, fresh.inflight, fresh.assigned, fresh.placed_tokens) == (set(), None, 0, 0, 0)
    assert sigma.sessions["s"].pin is None
    assert sigma.rejects("s", "D0") == 0
    assert route(sigma.turn("s", run("p", 3), 72, 0), sigma).overlap_blocks == 0


@pytest.mark.parametrize(
    "late",
    [
        ev.ResidencyReset(D0, tuple(run("p", 3))),
        ev.ResidencyChanged(D0, tuple(run("p", 3))),
        ev.ResidencyStale(D0),
        ev.LoadReported(D0, Facts(92_104, held_tokens=1)),
        ev.Refused("s", D0, Reason.NO_D_CAPACITY),
        ev.WorkerUnreachable(D0, gone=True),
        ev.WorkerHealth(D0, healthy=False),
        ev.Assigned(D0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_an_old_epoch_change_nothing_about_the_new_one(late: ev.Event) -> None:
    """STATE-2."""
    sigma, untouched = mesh(), mesh()
    for one in (sigma, untouched):
        one.apply(ev.WorkerJoined(worker("D0", epoch=2)))
    sigma.apply(late)
    assert sigma.workers == untouched.workers
    assert sigma.sessions == untouched.sessions


def test_an_admission_of_an_old_epoch_starts_nothing_on_the_new_one() -> None:
    """STATE-2: an answer that raced with the restart neither pins the session to a dead life nor counts on the living one."""
    sigma = mesh()
    sigma.apply(ev.WorkerJoined(worker("D0", epoch=2)))
    sigma.apply(ev.Refused("s", WorkerRef("D0", 2), Reason.NO_D_CAPACITY))
    start(sigma, ref=D0)
    sigma.check_integrity()
    assert sigma.workers["D0"].inflight == 0
    assert sigma.sessions["s"].pin is None
    assert sigma.rejects("s", "D0") == 1
    end(sigma)
    sigma.check_integrity()
    assert sigma.sessions["s"].pin is None


def test_f35_a_worker_that_left_and_is_back_still_has_its_turns() -> None:
    """F35: a lease that was lost and granted again under the same epoch does not lose count."""
    sigma = mesh()
    start(sigma, prefill=P0, prefill_tokens=50)
    for ref, role in ((D0, Role.DECODE), (P0, Role.PREFILL)):
        sigma.apply(ev.WorkerLeft(ref.worker_id))
        sigma.apply(ev.WorkerJoined(worker(ref.worker_id, role=role)))
    sigma.check_integrity()
    assert (sigma.workers["D0"].inflight, sigma.workers["P0"].inflight, sigma.workers["P0"].prefill_tokens) == (1, 1, 50)
    end(sigma)
    sigma.check_integrity()
    assert (sigma.workers["D0"].inflight, sigma.workers["P0"].inflight, sigma.workers["P0"].prefill_tokens) == (0, 0, 0)


def test_prefill_work_ends_once() -> None:
    """STATE-4: inflight of P and its backlog end with the prefill, or with the turn if that comes first, and only once."""
    sigma = mesh()
    start(sigma, prefill=P0, prefill_tokens=7000)
    prefill = sigma.workers["P0"]
    assert (prefill.inflight, prefill.assigned, prefill.prefill_backlog_s) == (1, 1, 1.0)
    for _ in range(2):
        sigma.apply(ev.PrefillDone(R1))
        assert (prefill.inflight, prefill.prefill_tokens) == (0, 0)
    end(sigma)
    assert prefill.inflight == 0
    start(sigma, R2, prefill=P0, prefill_tokens=7000)
    end(sigma, R2, ev.End.FAILED)
    assert (prefill.inflight, prefill.prefill_tokens) == (0, 0)


def test_the_backlog_is_the_larger_of_ours_and_theirs() -> None:
    """COST-4: other routers give work to P, too."""
    sigma = mesh()
    sigma.apply(ev.LoadReported(P0, Facts(92_104, prefill_backlog_s=3.0)))
    assert sigma.workers["P0"].prefill_backlog_s == 3.0
    start(sigma, prefill=P0, prefill_tokens=70_000)
    assert sigma.workers["P0"].prefill_backlog_s == 10.0


def test_silence_is_health_not_a_reject() -> None:
    """STATE-7, R13: three unanswered questions in a row make a worker unhealthy; an answer in between starts over."""
    sigma = mesh()
    for _ in range(UNREACHABLE_LIMIT - 1):
        sigma.apply(ev.WorkerUnreachable(D0, gone=False))
    sigma.apply(ev.Refused("s", D0, Reason.SEED_BUDGET))
    for _ in range(UNREACHABLE_LIMIT - 1):
        sigma.apply(ev.WorkerUnreachable(D0, gone=False))
        assert sigma.workers["D0"].why_not == ""
    sigma.apply(ev.WorkerUnreachable(D0, gone=False))
    assert sigma.workers["D0"].why_not == "unhealthy"
    sigma.apply(ev.WorkerHealth(D0, healthy=True))
    assert sigma.workers["D0"].why_not == ""
    sigma.apply(ev.WorkerUnreachable(D0, gone=True))
    assert sigma.workers["D0"].why_not == "unhealthy"
    assert sigma.rejects("s", "D0") == 0
    sigma.apply(ev.WorkerJoined(worker("D0")))
    assert sigma.workers["D0"].why_not == ""


def test_a_drain_outlives_a_restart_but_not_a_departure() -> None:
    """ROUTE-1: the operator's drain is about the name, the engine's own about its life."""
    sigma = mesh()
    sigma.apply(ev.WorkerDraining("D0", draining=True))
    sigma.apply(ev.WorkerDraining("nobody", draining=True))
    sigma.apply(ev.WorkerJoined(worker("D0", epoch=2)))
    assert sigma.workers["D0"].why_not == "draining"
    sigma.apply(ev.WorkerLeft("D0"))
    sigma.apply(ev.WorkerLeft("nobody"))
    sigma.apply(ev.WorkerJoined(worker("D0", epoch=2)))
    assert sigma.workers["D0"].why_not == ""
    sigma.apply(ev.WorkerJoined(worker("D1", draining=True)))
    assert sigma.workers["D1"].why_not == "draining"


def test_f41_cleared_means_overlap_zero() -> None:
    """F41: after the worker cleared everything Route credits nothing."""
    sigma = mesh()
    chain = run("p", 3)
    sigma.apply(ev.ResidencyReset(D0, tuple(chain)))
    assert route(sigma.turn("s", chain, 72, 0), sigma).overlap_blocks == 3
    sigma.apply(ev.ResidencyChanged(D0, cleared=True))
    assert sigma.workers["D0"].resident == set()
    assert route(sigma.turn("s", chain, 72, 0), sigma).overlap_blocks == 0


def test_a_delta_removes_before_it_stores() -> None:
    """STATE-3: what was evicted and came back within one delta is there."""
    sigma = mesh()
    a, b, c = run("p", 3)
    sigma.apply(ev.ResidencyReset(D0, (a, b)))
    sigma.apply(ev.ResidencyChanged(D0, stored=(b, c), removed=(b,)))
    assert sigma.workers["D0"].resident == {a, b, c}


def test_without_events_residency_is_an_estimate() -> None:
    """STATE-3, R18: a worker whose events are missing is credited with what completed there, at most with what fits."""
    sigma = Sigma(params_for("default"))
    sigma.apply(ev.WorkerJoined(worker("D0", capacity_tokens=24 * 5)))
    for attempt, session, blocks in ((R1, "a", 3), (R2, "b", 4)):
        sigma.apply(ev.TurnArrived(session, run(session, blocks), blocks * 24))
        start(sigma, attempt, session=session)
        assert sigma.workers["D0"].fresh is False
        end(sigma, attempt)
        assert sigma.workers["D0"].resident == set(run(session, blocks)), "the first estimate gave way to the second"
    start(sigma, R1, session="a")
    end(sigma, R1, ev.End.CANCELLED)
    assert sigma.workers["D0"].resident == set(run("b", 4)), "a turn that did not complete adds nothing"


def test_fresh_residency_is_not_estimated_until_it_is_stale() -> None:
    """STATE-3: the worker's own events outrank the estimate; after a gap the estimate serves until the next snapshot."""
    sigma = mesh()
    sigma.apply(ev.ResidencyReset(D0, ()))
    start(sigma)
    end(sigma)
    assert sigma.workers["D0"].resident == set()
    sigma.apply(ev.ResidencyStale(D0))
    start(sigma)
    end(sigma)
    assert sigma.workers["D0"].resident == set(run("p", 3))


def test_f66_ids_that_begin_alike_are_strangers() -> None:
    """F66, STATE-9: session-1 and session-12 have their own pins and counters."""
    sigma = mesh()
    for session, ref, attempt in (("session-1", D0, R1), ("session-12", D1, R2)):
        sigma.apply(ev.TurnArrived(session, run("p", 3), 72))
        start(sigma, attempt, ref, session=session)
        end(sigma, attempt)
    sigma.apply(ev.Refused("session-1", D0, Reason.NO_D_CAPACITY))
    assert (sigma.sessions["session-1"].pin, sigma.sessions["session-12"].pin) == (D0, D1)
    assert (sigma.rejects("session-1", "D0"), sigma.rejects("session-12", "D0")) == (1, 0)
    sigma.apply(ev.SessionClosed("session-1"))
    assert sigma.session("session-1") is None
    assert sigma.session("session-12") is not None


def test_room_is_the_pool_until_the_worker_reports() -> None:
    """DISP-22: room = capacity - held - reserved - queued; evictable KV counts as room."""
    sigma = mesh()
    state = sigma.workers["D0"]
    assert state.room_tokens == 92_104
    sigma.apply(ev.LoadReported(D0, Facts(1000, held_tokens=100, reserved_tokens=50, queued_tokens=30, evictable_tokens=800)))
    assert state.room_tokens == 820


def test_f56_a_full_worker_is_seen_by_the_router_that_did_not_fill_it() -> None:
    """F56: D0 holds three long sessions, D1 twenty short ones, none through this router: a new seed avoids D0."""
    sigma = mesh()
    sigma.apply(ev.LoadReported(D0, Facts(184_000, held_tokens=180_000)))
    sigma.apply(ev.LoadReported(D1, Facts(184_000, held_tokens=20_000)))
    assert route(sigma.turn("s", run("p", 3), 72, 0), sigma).ref == D1


def test_a_question_is_counted_once_and_follows_its_worker() -> None:
    """STATE-4: repeated questions and answers change nothing; a worker that left and is back still has its questions, a new life none."""
    sigma = mesh()
    for _ in range(2):
        sigma.apply(ev.Asked(R1, D0))
    sigma.apply(ev.Asked(R2, WorkerRef("D0", 7)))
    assert sigma.workers["D0"].asked == 1
    sigma.apply(ev.WorkerLeft("D0"))
    sigma.apply(ev.WorkerJoined(worker("D0")))
    sigma.check_integrity()
    assert sigma.workers["D0"].asked == 1
    sigma.apply(ev.WorkerJoined(worker("D0", epoch=2)))
    for attempt in (R1, R1, R2):
        sigma.apply(ev.Answered(attempt))
    sigma.check_integrity()
    assert (sigma.workers["D0"].asked, sigma.asking) == (0, {})


def test_a_chain_that_the_cap_dropped_is_not_estimated() -> None:
    """STATE-6: a session whose chain was dropped is still served; its worker is just not credited."""
    sigma = Sigma(params_for("default"), forest_bytes=1)
    sigma.apply(ev.WorkerJoined(worker("D0")))
    for session in "ab":
        sigma.apply(ev.TurnArrived(session, run(session, 3), 72))
    start(sigma, session="a")
    end(sigma)
    assert sigma.workers["D0"].resident == set()
    assert sigma.sessions["a"].pin == D0
    sigma.check_integrity()


def test_completed_modes_are_counted() -> None:
    """The counts behind the mode shares of `kvc up`."""
    sigma = mesh()
    start(sigma, mode=Mode.DIRECT)
    end(sigma)
    start(sigma, mode=Mode.DIRECT)
    end(sigma, how=ev.End.FAILED)
    assert sigma.workers["D0"].modes == {Mode.DIRECT: 1}


def test_a_preview_counts_blocks_as_the_arrival_will() -> None:
    """R14: explaining a prompt and routing it agree on what is shared, also for a session that is new to the prefix."""
    rng = random.Random(5)
    for shared_after in (0, 1, 2, 4):
        sigma = Sigma(Params(shared_after=shared_after))
        for _ in range(300):
            session = f"s{rng.randrange(6)}"
            chain = hash_chain(pack_tokens([rng.randrange(2) for _ in range(rng.randrange(8))]), 1, 3)
            preview = sigma.preview(session, chain, len(chain))
            sigma.apply(ev.TurnArrived(session, chain, len(chain)))
            assert preview.shared_blocks == sigma.turn(session, chain, len(chain), 0).shared_blocks


def test_ends_of_what_is_gone_are_fine() -> None:
    """STATE-2, STATE-8: a prefill worker that left while it worked, a session that nobody knows."""
    sigma = mesh()
    start(sigma, prefill=P0, prefill_tokens=50)
    sigma.apply(ev.WorkerJoined(worker("P0", epoch=2, role=Role.PREFILL)))
    sigma.apply(ev.PrefillDone(R1))
    sigma.apply(ev.PrefillDone(R2))
    assert (sigma.workers["P0"].inflight, sigma.workers["P0"].prefill_tokens) == (0, 0)
    sigma.apply(ev.SessionClosed("nobody"))
    end(sigma)
    sigma.check_integrity()
