"""docs/spec.md, Σ, waiting and memory order: one example a line; tests/unit/test_core_state.py and tests/property have the rest."""

from __future__ import annotations

from kvc.core import events as ev
from kvc.core.acquire import Memory, acquisition_order, next_acquisition
from kvc.core.params import params_for
from kvc.core.queue import WaitQueue
from kvc.core.state import UNREACHABLE_LIMIT, Sigma
from kvc.core.types import Attempt, Executor, Mode, Reason, Role, WorkerRef
from tests.support.builders import run, worker

A, B, P = (WorkerRef(name, 1) for name in "ABP")
R = Attempt("r", 0)


def mesh(profile: str = "default", **overrides: object) -> Sigma:
    sigma = Sigma(params_for("paper" if profile == "paper" else "default", **overrides))
    for ref, role in ((A, Role.DECODE), (B, Role.DECODE), (P, Role.PREFILL)):
        sigma.apply(ev.WorkerJoined(worker(ref.worker_id, role=role)))
    sigma.apply(ev.TurnArrived("s", run("p", 3), 72))
    return sigma


def serve(sigma: Sigma, ref: WorkerRef, mode: Mode = Mode.SEED) -> None:
    sigma.apply(ev.Started(R, "s", ref, mode, Executor.LOCAL, 100))
    sigma.apply(ev.TurnEnded(R, ev.End.COMPLETED, 72, 8))


def test_state_1() -> None:
    """STATE-1: "A log of events replays Σ bit-exact"."""
    log: list[ev.Event] = [
        ev.WorkerJoined(worker("A")),
        ev.TurnArrived("s", run("p", 3), 72),
        ev.Started(R, "s", A, Mode.SEED, Executor.LOCAL, 100),
        ev.TurnEnded(R, ev.End.COMPLETED, 72, 8),
    ]
    once, again = Sigma(params_for("default")), Sigma(params_for("default"))
    for sigma in (once, again):
        for event in log:
            sigma.apply(event)
    assert (once.workers, once.sessions, once.open) == (again.workers, again.sessions, again.open)


def test_state_2() -> None:
    """STATE-2: "A new epoch of a worker voids what was learnt from the one before"."""
    sigma = mesh()
    serve(sigma, A)
    sigma.apply(ev.Refused("s", A, Reason.NO_D_CAPACITY))
    sigma.apply(ev.WorkerJoined(worker("A", epoch=2)))
    assert sigma.worker(A) is None
    assert sigma.workers["A"].resident == set()
    assert (sigma.sessions["s"].pin, sigma.rejects("s", "A")) == (None, 0)


def test_state_3() -> None:
    """STATE-3: "a snapshot, then deltas (cleared, removed, stored)"."""
    sigma = mesh()
    first, second, third = run("p", 3)
    sigma.apply(ev.ResidencyReset(A, (first, second)))
    sigma.apply(ev.ResidencyChanged(A, stored=(third,), removed=(third,)))
    assert sigma.workers["A"].resident == {first, second, third}
    sigma.apply(ev.ResidencyChanged(A, stored=(first,), cleared=True))
    assert sigma.workers["A"].resident == {first}


def test_state_4() -> None:
    """STATE-4: "inflight[d] is 1 for each started turn that has not ended, 1 for each prefill that is not done"."""
    sigma = mesh()
    for _ in range(2):
        sigma.apply(ev.Started(R, "s", A, Mode.SEED, Executor.PREFILL, 100, P, 72))
    assert (sigma.workers["A"].inflight, sigma.workers["P"].inflight) == (1, 1)
    sigma.apply(ev.PrefillDone(R))
    assert (sigma.workers["A"].inflight, sigma.workers["P"].inflight) == (1, 0)
    for _ in range(2):
        sigma.apply(ev.TurnEnded(R, ev.End.CANCELLED))
    assert (sigma.workers["A"].inflight, sigma.workers["P"].inflight) == (0, 0)


def test_state_5() -> None:
    """STATE-5: "from admission on with prompt and reserve, after the turn with its committed length, until it is closed"."""
    sigma = mesh()
    sigma.apply(ev.Started(R, "s", A, Mode.SEED, Executor.LOCAL, 100))
    assert sigma.workers["A"].placed_tokens == 100
    sigma.apply(ev.TurnEnded(R, ev.End.COMPLETED, 72, 8))
    assert sigma.workers["A"].placed_tokens == 80
    sigma.apply(ev.Started(Attempt("r", 1), "s", B, Mode.FALLBACK, Executor.LOCAL, 150))
    assert (sigma.workers["A"].placed_tokens, sigma.workers["B"].placed_tokens) == (0, 150)
    sigma.apply(ev.TurnEnded(Attempt("r", 1), ev.End.FAILED))
    assert (sigma.workers["A"].placed_tokens, sigma.workers["B"].placed_tokens) == (80, 0)
    sigma.apply(ev.SessionClosed("s"))
    assert sigma.workers["A"].placed_tokens == 0


def test_state_6() -> None:
    """STATE-6: "Chains of live sessions form one tree whose nodes count their owners"."""
    sigma = mesh(shared_after=2)
    for session in ("t", "u"):
        sigma.apply(ev.TurnArrived(session, run(session, 4, run("p", 2)), 144))
    assert sigma.turn("s", run("p", 3), 72, 0).shared_blocks == 2
    sigma.apply(ev.SessionClosed("t"))
    assert sigma.turn("s", run("p", 3), 72, 0).shared_blocks == 0


def test_state_7() -> None:
    """STATE-7: "No answer from a worker is health, never a reject"."""
    sigma = mesh()
    for _ in range(UNREACHABLE_LIMIT):
        assert sigma.workers["A"].why_not == ""
        sigma.apply(ev.WorkerUnreachable(A, gone=False))
    assert sigma.workers["A"].why_not == "unhealthy"
    assert sigma.rejects("s", "A") == 0


def test_state_8() -> None:
    """STATE-8: "A closed session leaves nothing behind, whatever of it is still in flight"."""
    sigma = mesh()
    sigma.apply(ev.Started(R, "s", A, Mode.SEED, Executor.LOCAL, 100))
    sigma.apply(ev.SessionClosed("s"))
    sigma.apply(ev.TurnEnded(R, ev.End.COMPLETED, 72, 8))
    assert (sigma.sessions, len(sigma.forest), sigma.workers["A"].placed_tokens) == ({}, 0, 0)


def test_state_9() -> None:
    """STATE-9: "Session ids are compared exactly"."""
    sigma = mesh()
    serve(sigma, A)
    assert sigma.session("s ") is None
    assert sigma.session("S") is None


def test_r4_both_resets() -> None:
    """R4: admission clears (s,d); a completed Direct clears s; each has its switch."""
    for profile, overrides, after_admission, after_direct in (
        ("default", {}, {"B": 1}, {}),
        ("default", {"reset_on_admit": False}, {"A": 1, "B": 1}, {}),
        ("paper", {}, {"B": 1}, {"B": 1}),
        ("paper", {"reset_on_admit": False}, {"A": 1, "B": 1}, {"A": 1, "B": 1}),
    ):
        sigma = mesh(profile, **overrides)
        for ref in (A, B):
            sigma.apply(ev.Refused("s", ref, Reason.NO_D_CAPACITY))
        sigma.apply(ev.Started(R, "s", A, Mode.DIRECT, Executor.LOCAL, 100))
        assert sigma.sessions["s"].rejects == after_admission
        sigma.apply(ev.TurnEnded(R, ev.End.COMPLETED, 72, 8))
        assert sigma.sessions["s"].rejects == after_direct


def test_r4_a_failed_turn_is_no_success() -> None:
    """R4: what fails after admission clears nothing more; a completed Seed clears nothing of other workers."""
    for mode, how in ((Mode.DIRECT, ev.End.FAILED), (Mode.DIRECT, ev.End.CANCELLED), (Mode.SEED, ev.End.COMPLETED)):
        sigma = mesh()
        sigma.apply(ev.Refused("s", B, Reason.NO_D_CAPACITY))
        sigma.apply(ev.Started(R, "s", A, mode, Executor.LOCAL, 100))
        sigma.apply(ev.TurnEnded(R, how, 72, 8))
        assert sigma.sessions["s"].rejects == {"B": 1}


def test_r20_the_pin_moves_by_success() -> None:
    """R20: an admission elsewhere that fails leaves the pin; one that completes moves it; a Fallback that starts does not."""
    sigma = mesh()
    serve(sigma, A)
    for mode in (Mode.RESEED, Mode.FALLBACK):
        sigma.apply(ev.Started(R, "s", B, mode, Executor.LOCAL, 100))
        assert sigma.sessions["s"].pin == A
        sigma.apply(ev.TurnEnded(R, ev.End.FAILED))
        assert sigma.sessions["s"].pin == A
    serve(sigma, B, Mode.RESEED)
    assert sigma.sessions["s"].pin == B


def test_queue_1() -> None:
    """QUEUE-1: "At most `queue_limit` turns wait in one router"."""
    queue = WaitQueue(2, 1.0)
    assert [queue.push(name, 1, 0.0) for name in "abc"] == [True, True, False]
    assert not WaitQueue(0, 1.0).push("a", 1, 0.0)


def test_queue_2() -> None:
    """QUEUE-2: "prefill tokens + `ageing_tokens_per_s` · arrival, then first come first"."""
    queue = WaitQueue(9, 100.0)
    for name, tokens, arrival_s in (
        ("long", 1000, 0.0),
        ("late and short", 10, 5.0),
        ("as late as it is long", 500, 5.0),
        ("short", 10, 0.0),
    ):
        queue.push(name, tokens, arrival_s)
    assert [queue.pop() for _ in range(5)] == ["short", "late and short", "long", "as late as it is long", None]


def test_queue_3() -> None:
    """QUEUE-3: "A turn of T tokens is overtaken only by turns that arrive less than T ÷ ageing seconds after it"."""
    queue = WaitQueue(9, 100.0)
    queue.push("T", 1000, 0.0)
    queue.push("just in time", 0, 9.9)
    queue.push("too late", 0, 10.1)
    assert [queue.pop() for _ in range(3)] == ["just in time", "T", "too late"]


def test_queue_4() -> None:
    """QUEUE-4: "A turn that comes back keeps its place"."""
    queue = WaitQueue(9, 100.0)
    queue.push("a", 10, 0.0)
    queue.push("b", 10, 0.1)
    assert queue.pop() == "a"
    assert queue.push("a", 10, 0.0)
    assert queue.pop() == "a"


def test_acq_1() -> None:
    """ACQ-1: "Memory on the decode worker is acquired before memory on the prefill worker"."""
    assert acquisition_order(Executor.PREFILL) == (Memory.DECODE, Memory.PREFILL)
    assert acquisition_order(Executor.LOCAL) == (Memory.DECODE,)


def test_acq_2() -> None:
    """ACQ-2: "A turn that waits for decode memory holds no prefill memory"."""
    assert next_acquisition(Executor.PREFILL, frozenset()) is Memory.DECODE
    assert next_acquisition(Executor.PREFILL, frozenset({Memory.DECODE})) is Memory.PREFILL
