"""Algorithm 3 under arbitrary answers: bounded probes, nobody asked twice, balanced books; Theorem 1 and the migration bound."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Ask, Pause, Refused, Resumed, Unreachable, dispatch
from kvc.core.params import Params, params_for
from kvc.core.route import route
from kvc.core.state import Sigma
from kvc.core.types import Admission, Attempt, Decision, Executor, Facts, GaveUp, Give, Mode, Reason, Rejection, Role, Turn, WorkerRef
from tests.support.builders import run, worker
from tests.support.driver import Conversation, busy, drive

if TYPE_CHECKING:
    from kvc.core.dispatch import Answer, Effect

pytestmark = pytest.mark.timeout(900)  # thousands of cases, on a shared machine

COUNTED = [reason for reason in Reason if reason.counts_as_reject]
CAPACITY = 1000
PARAMS = st.sampled_from([params_for("default", tau_append_tokens=100), params_for("default", fallback="rejects"), params_for("paper")])


@st.composite
def meshes(draw: st.DrawFn, params: Params | None = None) -> Sigma:
    """One to four decode workers and up to two prefill workers; any residency, load and counters."""
    sigma = Sigma(params if params is not None else draw(PARAMS))
    sigma.apply(ev.TurnArrived("s", run("p", 1), 24))
    for number in range(draw(st.integers(1, 4))):
        ref = WorkerRef(f"D{number}", 1)
        sigma.apply(
            ev.WorkerJoined(worker(ref.worker_id, capacity_tokens=CAPACITY, role=draw(st.sampled_from([Role.DECODE, Role.MONOLITHIC]))))
        )
        sigma.apply(ev.ResidencyReset(ref, tuple(run("p", draw(st.integers(0, 10))))))
        if draw(st.booleans()):
            sigma.apply(ev.LoadReported(ref, Facts(CAPACITY, held_tokens=draw(st.integers(0, CAPACITY)))))
        for _ in range(draw(st.integers(0, 4))):
            sigma.apply(ev.Refused("s", ref, Reason.NO_D_CAPACITY))
    for number in range(draw(st.integers(0, 2))):
        sigma.apply(ev.WorkerJoined(worker(f"P{number}", role=Role.PREFILL, capacity_tokens=CAPACITY)))
    return sigma


def arrive(sigma: Sigma, blocks: int = 10, reserve: int = 16) -> Turn:
    """A turn of the session "s"."""
    chain = run("p", blocks)
    sigma.apply(ev.TurnArrived("s", chain, blocks * 24))
    return sigma.turn("s", chain, blocks * 24, reserve)


def any_answer(data: st.DataObject, effect: Effect, left: int) -> Answer:
    """Whatever a worker, the queue or the clock may say; once nothing is `left`, the deadline has passed."""
    if not isinstance(effect, Ask):
        whys: list[Literal["room", "waited", "full", "deadline"]] = (
            ["room", "deadline"] if isinstance(effect, Pause) else ["room", "waited", "full", "deadline"]
        )
        return Resumed(data.draw(st.sampled_from(whys)) if left > 0 else "deadline", waited_s=1.0)
    kind = data.draw(st.sampled_from(["yes", "no", "no", "no", "unreachable"]))
    if kind == "unreachable":
        return Unreachable("deadline exceeded", gone=data.draw(st.booleans()))
    facts = Facts(CAPACITY, held_tokens=data.draw(st.integers(0, CAPACITY)))
    if kind == "yes":
        executor = data.draw(st.sampled_from(Executor)) if effect.offer is not None else Executor.LOCAL
        mode = data.draw(st.sampled_from([Mode.DIRECT, Mode.SEED, Mode.RESEED]))
        return Admitted(Admission(mode, executor, 10, 10, ticket="t", ttl_s=5.0), facts)
    reasons = [reason for reason in Reason if left > 0 or reason is not Reason.SESSION_BUSY]
    reason = data.draw(st.sampled_from(reasons))
    return Refused(Rejection(reason, retry_after_s=0.05, terminal=reason is Reason.EXCEEDS_CAPACITY), facts)


def epsilon(sigma: Sigma) -> int:
    """R1, or the paper's |D| - 1, before anything is asked."""
    members = list(sigma.decode_workers())
    if sigma.params.paper_epsilon:
        return len(members) - 1
    return max(1, sum(not member.why_not for member in members) - 1)


def converse(data: st.DataObject, sigma: Sigma, asked: Turn, limit: int = 12) -> Conversation:
    """A whole dispatch with arbitrary answers."""
    left = [limit]

    def answer(effect: Effect) -> Answer:
        left[0] -= 1
        return any_answer(data, effect, left[0])

    return drive(dispatch(asked, sigma, "r"), answer)


@settings(max_examples=1000)
@given(data=st.data(), sigma=meshes())
def test_probes_are_bounded_and_nobody_is_asked_twice(data: st.DataObject, sigma: Sigma) -> None:
    """I2 and I3: at most epsilon answers a sweep, and by default no worker that answered is asked again in it."""
    first_limit = epsilon(sigma)
    conversation = converse(data, sigma, arrive(sigma))
    for sweep in conversation.sweeps():
        answered = [ask.worker for ask, answer in sweep if isinstance(answer, Admitted | Refused) and not busy(answer)]
        assert len(answered) <= first_limit
        if sigma.params.exclude_tried:
            assert len(set(answered)) == len(answered)
        unreachable = [ask.worker for ask, answer in sweep if isinstance(answer, Unreachable)]
        assert len(set(unreachable)) == len(unreachable), "asked again a worker that did not answer"
        for (before, answer), (after, _) in pairwise(sweep):
            assert not isinstance(answer, Admitted), "asked on after a yes"
            assert not busy(answer) or before.worker == after.worker


@settings(max_examples=1000)
@given(data=st.data(), sigma=meshes())
def test_books_balance_whatever_is_answered(data: st.DataObject, sigma: Sigma) -> None:
    """I4 and R11: an ended dispatch has exactly its decision in flight, and nothing once the turn has ended."""
    asked = arrive(sigma)
    assigned_before = sum(member.assigned for member in sigma.decode_workers())
    conversation = converse(data, sigma, asked)
    result = conversation.result
    sigma.check_integrity()
    assert not sigma.asking
    attempts = [effect.attempt for effect, _ in conversation.said if isinstance(effect, Ask)]
    assert [attempt.attempt_number for attempt in attempts] == list(range(len(attempts)))
    assigned = sum(member.assigned for member in sigma.decode_workers()) - assigned_before
    answers = [answer for effect, answer in conversation.said if isinstance(effect, Ask)]
    chosen = len(attempts) - sum(busy(answer) for answer in answers[:-1])
    if isinstance(result, GaveUp):
        assert not sigma.open
        assert assigned == chosen
    else:
        assert isinstance(result, Decision)
        assert set(sigma.open) == {result.attempt}
        fell_back = result.mode is Mode.FALLBACK
        assert assigned == chosen + fell_back
        assert result.attempt.attempt_number == len(attempts) - (not fell_back)
        sigma.apply(ev.TurnEnded(result.attempt, data.draw(st.sampled_from(ev.End)), prompt_tokens=240, output_tokens=4))
        sigma.apply(ev.TurnEnded(result.attempt, ev.End.CANCELLED))
    sigma.check_integrity()
    assert all(member.inflight == 0 and member.prefill_tokens == 0 for member in sigma.workers.values())
    assert len(result.probes) == len(attempts)


@settings(max_examples=1000)
@given(data=st.data(), sigma=meshes())
def test_only_answers_count_as_rejects(data: st.DataObject, sigma: Sigma) -> None:
    """R13 and R4: rejects grow by counted answers only, and an admission clears those of its worker."""
    before = {member.ref: sigma.rejects("s", member.ref.worker_id) for member in sigma.decode_workers()}
    conversation = converse(data, sigma, arrive(sigma))
    for ref, count in before.items():
        expected = count
        for effect, answer in conversation.said:
            if isinstance(effect, Ask) and effect.worker == ref:
                if isinstance(answer, Refused) and answer.rejection.reason in COUNTED:
                    expected += 1
                elif isinstance(answer, Admitted):
                    expected = 0
        assert sigma.rejects("s", ref.worker_id) == expected


@settings(max_examples=700)
@given(data=st.data(), sigma=meshes())
def test_the_worker_that_admitted_is_the_worker_that_runs(data: st.DataObject, sigma: Sigma) -> None:
    """F74: one decision names the decode worker once: the one that answered yes; a prefill worker only when it was offered."""
    conversation = converse(data, sigma, arrive(sigma))
    result = conversation.result
    assert result is not None
    if not isinstance(result, Decision) or result.mode is Mode.FALLBACK:
        return
    effect, answer = conversation.said[-1]
    assert isinstance(effect, Ask)
    assert isinstance(answer, Admitted)
    assert (result.decode, result.attempt, result.admission) == (effect.worker, effect.attempt, answer.admission)
    assert (result.prefill is not None) == (answer.admission.executor is Executor.PREFILL)
    assert (result.mode, result.executor) == (answer.admission.mode, answer.admission.executor)


@settings(max_examples=700)
@given(data=st.data(), sigma=meshes(params_for("default", tau_append_tokens=100)))
def test_fallback_avoids_who_just_refused(data: st.DataObject, sigma: Sigma) -> None:
    """R3, R27, R23: Fallback goes to a worker that did not refuse in this sweep, with most room, while there is one; without ticket."""
    conversation = converse(data, sigma, arrive(sigma))
    result = conversation.result
    if not isinstance(result, Decision) or result.mode is not Mode.FALLBACK:
        return
    assert result.admission is None
    last = conversation.sweeps()
    sweep = last[-1] if last[-1] or len(last) == 1 else last[-2]
    refused = {ask.worker for ask, answer in sweep if isinstance(answer, Refused)}
    silent = {
        ask.worker
        for ask, answer in sweep
        if not isinstance(answer, Refused) or answer.rejection.reason in (Reason.DRAINING, Reason.STALE_EPOCH)
    }
    able = [member for member in sigma.decode_workers() if not member.why_not and member.ref not in silent]
    others = [member for member in able if member.ref not in refused]
    if result.decode in refused:
        assert not others
    # The decision itself did not change what the workers report.
    pool = others or able
    terminal = {
        effect.worker for effect, a in conversation.said if isinstance(effect, Ask) and isinstance(a, Refused) and a.rejection.terminal
    }
    best = max((member.room_tokens for member in pool if member.ref not in terminal), default=None)
    chosen = sigma.worker(result.decode)
    assert chosen is not None
    assert best is None or chosen.room_tokens == best


@settings(max_examples=500)
@given(sigma=meshes(params_for("default")), holder=st.integers(0, 3), mode=st.sampled_from([Mode.DIRECT, Mode.SEED, Mode.RESEED]))
def test_theorem_1_whoever_can_hold_the_turn_gets_it(sigma: Sigma, holder: int, mode: Mode) -> None:
    """THM-1, R6: whatever was refused before, if some D can hold r and reports so, one sweep admits r there or falls back to it."""
    asked = arrive(sigma)
    members = list(sigma.decode_workers())
    able = members[holder % len(members)].ref
    for member in members:
        sigma.apply(ev.LoadReported(member.ref, Facts(CAPACITY, held_tokens=0 if member.ref == able else CAPACITY)))

    def answer(effect: Effect) -> Answer:
        assert isinstance(effect, Ask), "one sweep was not enough"
        if effect.worker == able:
            return Admitted(Admission(mode, Executor.LOCAL, 10, 10), Facts(CAPACITY))
        return Refused(Rejection(Reason.NO_D_CAPACITY), Facts(CAPACITY, held_tokens=CAPACITY))

    conversation = drive(dispatch(asked, sigma, "r"), answer)
    assert isinstance(conversation.result, Decision)
    assert conversation.result.decode == able


@settings(max_examples=300)
@given(sigma=meshes(), rounds=st.integers(1, 6))
def test_theorem_1_saturation(sigma: Sigma, rounds: int) -> None:
    """THM-1: refusals without end blacklist every D within |D| tau_reject counted answers; Route then still names the least rejected."""
    asked = arrive(sigma)
    members = [member.ref.worker_id for member in sigma.decode_workers()]
    tau = sigma.params.tau_reject
    counted = 0
    while any(sigma.rejects("s", member) < tau for member in members):
        routing = route(asked, sigma)
        assert routing.ref is not None
        assert not routing.degenerate
        sigma.apply(ev.Refused("s", routing.ref, Reason.NO_D_CAPACITY))
        counted += 1
        assert counted <= len(members) * tau
    for _ in range(rounds):
        routing = route(asked, sigma)
        assert routing.degenerate
        assert routing.ref is not None
        assert sigma.rejects("s", routing.ref.worker_id) == min(sigma.rejects("s", member) for member in members)
        sigma.apply(ev.Refused("s", routing.ref, Reason.NO_D_CAPACITY))


@settings(max_examples=500)
@given(data=st.data(), sigma=meshes())
def test_r5_migrations_between_two_successes(data: st.DataObject, sigma: Sigma) -> None:
    """R5, I5: between two successes at most (|D| - 1) tau_reject counted refusals send s away from its pin before all are blacklisted."""
    asked = arrive(sigma)
    members = list(sigma.decode_workers())
    home = members[0].ref
    sigma.apply(ev.SessionClosed("s"))
    asked = arrive(sigma)
    sigma.apply(ev.Started(Attempt("first", 0), "s", home, Mode.DIRECT, Executor.LOCAL, 10))
    sigma.apply(ev.TurnEnded(Attempt("first", 0), ev.End.COMPLETED, 240, 4))
    away = 0
    for _ in range(data.draw(st.integers(0, 30))):
        routing = route(asked, sigma)
        assert routing.ref is not None
        if routing.degenerate:
            break
        away += routing.ref != home
        sigma.apply(ev.Refused("s", routing.ref, data.draw(st.sampled_from(COUNTED))))
        other = data.draw(st.sampled_from(members))
        sigma.apply(ev.ResidencyReset(other.ref, tuple(run("p", data.draw(st.integers(0, 10))))))
    assert away <= (len(members) - 1) * sigma.params.tau_reject


@settings(max_examples=500)
@given(data=st.data(), capacities=st.lists(st.sampled_from([100, 200, 1000]), min_size=1, max_size=4), blocks=st.integers(1, 60))
def test_f19_an_over_long_turn_is_answered_at_once(data: st.DataObject, capacities: list[int], blocks: int) -> None:
    """F19, R23: input + reserve > rho K on every D: one pass, a permanent answer, never a fallback; else never that answer."""
    sigma = Sigma(params_for("default"))
    for number, capacity in enumerate(capacities):
        sigma.apply(ev.WorkerJoined(worker(f"D{number}", capacity_tokens=capacity)))
    asked = arrive(sigma, blocks, reserve=0)
    possible = asked.input_tokens <= 0.95 * max(capacities)

    def answer(effect: Effect) -> Answer:
        if not isinstance(effect, Ask):
            return Resumed(data.draw(st.sampled_from(["waited", "full", "deadline"])))
        member = sigma.worker(effect.worker)
        assert member is not None
        if asked.input_tokens > 0.95 * member.info.capacity_tokens:
            return Refused(Rejection(Reason.EXCEEDS_CAPACITY, terminal=True))
        return Refused(Rejection(Reason.SESSION_NOT_RESIDENT_NO_CAPACITY))

    conversation = drive(dispatch(asked, sigma, "r"), answer)
    gave_up = isinstance(conversation.result, GaveUp) and conversation.result.why is Give.EXCEEDS_CAPACITY
    assert gave_up == (not possible)
    if not possible:
        assert len(conversation.said) <= max(1, len(capacities) - 1)
