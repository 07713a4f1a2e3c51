"""docs/spec.md, Algorithm 3: one example a line; tests/property/test_dispatch.py answers at random."""

# ruff: noqa: RUF002 - quotations carry the symbols of the spec

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Ask, Pause, Refused, Resumed, Unreachable, WaitForRoom, dispatch
from kvc.core.params import params_for
from kvc.core.state import Sigma
from kvc.core.types import Admission, Attempt, Decision, Executor, Facts, GaveUp, Give, Mode, Reason, Rejection, Role, WorkerRef
from tests.support.builders import run, worker
from tests.support.driver import drive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvc.core.dispatch import Answer, Dispatch, Effect
    from tests.support.driver import Conversation

D = [WorkerRef(f"D{number}", 1) for number in range(5)]
P = [WorkerRef(f"P{number}", 1) for number in range(3)]
FULL = Facts(1000, held_tokens=1000)
YES: Answer = Admitted(Admission(Mode.SEED, Executor.LOCAL, 240, 256), Facts(1000))
REMOTE: Answer = Admitted(Admission(Mode.SEED, Executor.PREFILL, 240, 256), Facts(1000))
SILENCE: Answer = Unreachable("deadline exceeded", gone=False)


def no(reason: Reason = Reason.NO_D_CAPACITY, retry_after_s: float = 0.05) -> Answer:
    return Refused(Rejection(reason, retry_after_s, terminal=reason is Reason.EXCEEDS_CAPACITY), FULL)


def mesh(decode: int = 4, prefill: int = 1, profile: Any = "default", *, full: bool = True, **overrides: Any) -> Sigma:
    """Decode workers of 1,000 tokens that report no room unless told, prefill workers, and session "s" with a prompt of 10 blocks."""
    sigma = Sigma(params_for(profile, **overrides))
    for ref in D[:decode]:
        sigma.apply(ev.WorkerJoined(worker(ref.worker_id, capacity_tokens=1000)))
        sigma.apply(ev.ResidencyReset(ref, ()))
        if full:
            sigma.apply(ev.LoadReported(ref, FULL))
    for ref in P[:prefill]:
        sigma.apply(ev.WorkerJoined(worker(ref.worker_id, role=Role.PREFILL)))
    sigma.apply(ev.TurnArrived("s", run("p", 10), 240))
    return sigma


def prefer(sigma: Sigma, *refs: WorkerRef) -> None:
    """Route asks these first, in this order: each holds one block of the prompt less than the one before."""
    for number, ref in enumerate(refs):
        sigma.apply(ev.ResidencyReset(ref, tuple(run("p", 9 - number))))


def begin(sigma: Sigma, **options: Any) -> Dispatch:
    return dispatch(sigma.turn("s", run("p", 10), 240, 16), sigma, "r", **options)


def talk(sigma: Sigma, answers: Sequence[Answer], **options: Any) -> Conversation:
    """A dispatch that hears these answers, in order; all of them have to be asked for."""
    waiting = list(answers)

    def answer(effect: Effect) -> Answer:
        return waiting.pop(0)

    conversation = drive(begin(sigma, **options), answer)
    assert not waiting, f"nobody asked for {waiting}"
    return conversation


def test_disp_1() -> None:
    """DISP-1: "it yields an effect, receives its answer, and writes Σ only between two yields"."""
    sigma = mesh()
    generator = begin(sigma)
    assert not sigma.open
    effect = next(generator)
    assert isinstance(effect, Ask)
    assert (sigma.workers["D0"].inflight, sigma.workers["D0"].assigned, sigma.workers["D0"].asked) == (0, 1, 1)
    generator.close()
    assert not sigma.open, "a dispatch that is dropped leaves nothing in flight"
    assert sigma.workers["D0"].asked == 0


@pytest.mark.parametrize(("decode", "epsilon"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_disp_2(decode: int, epsilon: int) -> None:
    """DISP-2: "A sweep asks until it has ε answers; ε = max(1, eligible − 1)"."""
    conversation = talk(mesh(decode), [*[no()] * epsilon, Resumed("deadline")])
    assert len(conversation.asked) == epsilon


def test_disp_2_paper() -> None:
    """DISP-2: "`paper`: |D| − 1, which is 0 for one worker"."""
    assert len(talk(mesh(3, profile="paper"), [no()] * 2).asked) == 2
    alone = talk(mesh(1, profile="paper"), [])
    assert isinstance(alone.result, Decision)
    assert alone.result.mode is Mode.FALLBACK


def test_r1_a_fixed_epsilon() -> None:
    """R1, switch `epsilon`: a number fixes it, 0 asks nobody."""
    assert len(talk(mesh(4, epsilon=1), [no(), Resumed("deadline")]).asked) == 1
    assert talk(mesh(4, epsilon=0), [Resumed("deadline")]).asked == []


def test_disp_3() -> None:
    """DISP-3: "Each step asks the worker that Route names. Route without an answer ends the sweep"."""
    sigma = mesh(3)
    sigma.apply(ev.ResidencyReset(D[2], tuple(run("p", 4))))
    sigma.apply(ev.ResidencyReset(D[1], tuple(run("p", 2))))
    assert talk(sigma, [no(), no(), Resumed("deadline")]).asked == [D[2], D[1]]
    nobody = talk(mesh(0), [Resumed("full")])
    assert nobody.result == GaveUp(Give.NO_WORKER)


def test_disp_4() -> None:
    """DISP-4: "Excluded from Route: workers that did not answer, that are draining or of another epoch, that said terminal"; R2."""
    sigma = mesh(5, tau_reject=99)
    answers = [SILENCE, no(Reason.DRAINING), no(Reason.EXCEEDS_CAPACITY), no(), Resumed("deadline")]
    conversation = talk(sigma, answers)
    assert len(set(conversation.asked)) == 4


def test_disp_4_paper() -> None:
    """DISP-4: "`paper`: refusals exclude nobody"."""
    sigma = mesh(3, profile="paper")
    sigma.apply(ev.ResidencyReset(D[1], tuple(run("p", 4))))
    assert talk(sigma, [no(), no()]).asked == [D[1], D[1]]


def test_disp_5() -> None:
    """DISP-5: "Every worker chosen counts once in assigned"."""
    sigma = mesh(3)
    talk(sigma, [no(), no(Reason.SESSION_BUSY), Resumed("room"), YES])
    assert [member.assigned for member in sigma.decode_workers()] == [1, 1, 0]


def test_disp_6() -> None:
    """DISP-6: "Every Ask has an attempt number of its own; a request that is dispatched again counts on"."""
    conversation = talk(mesh(4), [no(), SILENCE, YES], first_attempt=7)
    assert [effect.attempt for effect, _ in conversation.said if isinstance(effect, Ask)] == [Attempt("r", number) for number in (7, 8, 9)]
    assert isinstance(conversation.result, Decision)
    assert conversation.result.attempt == Attempt("r", 9)


@pytest.mark.parametrize("prefill", [0, 1])
def test_disp_7(prefill: int) -> None:
    """DISP-7: "Ask carries the terms of a prefill worker (COST-4), or none"."""
    effect = next(begin(mesh(prefill=prefill)))
    assert isinstance(effect, Ask)
    assert (effect.offer is not None) == bool(prefill)


def test_disp_8() -> None:
    """DISP-8: "Admitted: inflight[d] + 1, rejects[s,d] = 0, pin[s] = d if s had none"."""
    sigma = mesh()
    sigma.apply(ev.Refused("s", D[0], Reason.NO_D_CAPACITY))
    sigma.apply(ev.Refused("s", D[1], Reason.NO_D_CAPACITY))
    result = talk(sigma, [REMOTE]).result
    assert isinstance(result, Decision)
    assert (result.decode, result.prefill, result.attempt, result.executor) == (D[0], P[0], Attempt("r", 0), Executor.PREFILL)
    assert sigma.workers["D0"].inflight == 1
    assert (sigma.rejects("s", "D0"), sigma.rejects("s", "D1")) == (0, 1)
    assert sigma.sessions["s"].pin == D[0]
    assert sigma.workers["P0"].prefill_tokens == 240


@pytest.mark.parametrize(("profile", "pin"), [("default", D[0]), ("paper", D[1])])
def test_disp_8_an_admission_elsewhere(profile: str, pin: WorkerRef) -> None:
    """DISP-8: "(`paper`: always)"; R20: under the rulings a pin moves by a turn that completed elsewhere."""
    sigma = mesh(profile=profile, exclude_tried=True)
    first = talk(sigma, [YES]).result
    assert isinstance(first, Decision)
    sigma.apply(ev.TurnEnded(first.attempt, ev.End.COMPLETED, 240))
    second = talk(sigma, [no(), YES], first_attempt=5).result
    assert isinstance(second, Decision)
    assert second.decode == D[1]
    assert sigma.sessions["s"].pin == pin
    sigma.apply(ev.TurnEnded(second.attempt, ev.End.COMPLETED, 240))
    assert sigma.sessions["s"].pin == D[1]


def test_disp_9() -> None:
    """DISP-9: "a prefill worker that left is replaced, a yes from a life that is over is none"."""
    sigma = mesh(prefill=2)
    generator = begin(sigma)
    next(generator)
    sigma.apply(ev.WorkerLeft("P0"))
    with pytest.raises(StopIteration) as stop:
        generator.send(REMOTE)
    assert stop.value.value.prefill == P[1]
    sigma = mesh(prefill=1)
    generator = begin(sigma)
    next(generator)
    sigma.apply(ev.WorkerLeft("P0"))
    with pytest.raises(StopIteration) as stop:
        generator.send(REMOTE)
    assert (stop.value.value.prefill, stop.value.value.executor) == (None, Executor.LOCAL)
    for answer in (YES, no()):
        sigma = mesh()
        generator = begin(sigma)
        next(generator)
        sigma.apply(ev.WorkerJoined(worker("D0", epoch=2)))
        effect = generator.send(answer)
        assert isinstance(effect, Ask)
        assert effect.worker != D[0]
        assert not sigma.open
        assert sigma.rejects("s", "D0") == 0


@pytest.mark.parametrize("reason", Reason)
def test_disp_10(reason: Reason) -> None:
    """DISP-10: "Refused: rejects[s,d] + 1 for `real-large-append`, `no-d-capacity`, `session-not-resident-no-capacity`"."""
    sigma = mesh(4)
    answers: list[Answer] = [no(reason), Resumed("deadline")] if reason is Reason.SESSION_BUSY else [no(reason), YES]
    talk(sigma, answers)
    counted = reason.value in ("real-large-append", "no-d-capacity", "session-not-resident-no-capacity")
    assert sigma.rejects("s", "D0") == counted
    assert reason.counts_as_reject == counted


def test_disp_11() -> None:
    """DISP-11: "`seed-budget`: the next worker, without a count"."""
    sigma = mesh(3)
    conversation = talk(sigma, [no(Reason.SEED_BUDGET), YES])
    assert conversation.asked == D[:2]
    assert sigma.sessions["s"].rejects == {}


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.STALE_EPOCH])
def test_disp_12(reason: Reason) -> None:
    """DISP-12: "`draining`, `stale-epoch`: the next worker, without a count"."""
    sigma = mesh(3)
    conversation = talk(sigma, [no(reason), YES])
    assert conversation.asked == D[:2]
    assert sigma.sessions["s"].rejects == {}


def test_disp_13() -> None:
    """DISP-13: "`exceeds-capacity`: d is never asked again in this dispatch"."""
    conversation = talk(mesh(3), [no(Reason.EXCEEDS_CAPACITY), no(), Resumed("room"), no(), no(), Resumed("deadline")])
    assert conversation.asked.count(D[0]) == 1


def test_disp_14() -> None:
    """DISP-14: "`session-busy`: Pause, then the same worker is asked again; it spends none of ε"."""
    conversation = talk(mesh(3), [*[no(Reason.SESSION_BUSY), Resumed("room", 0.1)] * 5, no(), YES])
    assert conversation.asked == [D[0]] * 6 + [D[1]]
    pauses = [effect for effect, _ in conversation.said if isinstance(effect, Pause)]
    assert pauses == [Pause(D[0], 0.05, 0.02)] * 5
    assert isinstance(conversation.result, Decision)
    assert conversation.result.queued_s == pytest.approx(0.5)


def test_disp_14_the_worker_may_go_while_it_is_busy() -> None:
    """DISP-14: the pause ends with another worker when the busy one is gone, and with an error at the deadline."""
    sigma = mesh(3)
    generator = begin(sigma)
    next(generator)
    assert isinstance(generator.send(no(Reason.SESSION_BUSY)), Pause)
    sigma.apply(ev.WorkerLeft("D0"))
    effect = generator.send(Resumed("room"))
    assert isinstance(effect, Ask)
    assert effect.worker == D[1]
    late = talk(mesh(3), [no(Reason.SESSION_BUSY), Resumed("deadline", 2.0)]).result
    assert isinstance(late, GaveUp)
    assert (late.why, late.queued_s) == (Give.DEADLINE, 2.0)


def test_disp_15() -> None:
    """DISP-15: "Unreachable: health (STATE-7), the next worker, none of ε"."""
    sigma = mesh(4)
    conversation = talk(sigma, [SILENCE, Unreachable("refused", gone=True), no(), Resumed("deadline")])
    assert conversation.asked == D[:3]
    assert (sigma.workers["D0"].failures, sigma.workers["D1"].why_not) == (1, "unhealthy")
    assert [probe.error for probe in conversation.result.probes] == ["deadline exceeded", "refused", ""]  # type: ignore[union-attr]


def test_disp_16() -> None:
    """DISP-16: "if no worker of the mesh could hold the turn even when empty, GaveUp(exceeds-capacity)"."""
    result = talk(mesh(3), [*[no(Reason.EXCEEDS_CAPACITY)] * 2, Resumed("deadline")]).result
    assert isinstance(result, GaveUp)
    assert result.why is Give.DEADLINE, "the third was not asked and could"
    sigma = mesh(2)
    sigma.apply(ev.TurnArrived("s", run("p", 50), 1200))
    asked = sigma.turn("s", run("p", 50), 1200, 0)
    result = drive(dispatch(asked, sigma, "r"), lambda _: no(Reason.EXCEEDS_CAPACITY)).result
    assert isinstance(result, GaveUp)
    assert (result.why, len(result.probes)) == (Give.EXCEEDS_CAPACITY, 1)
    sigma.apply(ev.WorkerJoined(worker("D4", capacity_tokens=10_000)))
    sigma.apply(ev.WorkerHealth(D[4], healthy=False))
    result = drive(
        dispatch(asked, sigma, "r"), lambda effect: no(Reason.EXCEEDS_CAPACITY) if isinstance(effect, Ask) else Resumed("deadline")
    ).result
    assert isinstance(result, GaveUp)
    assert result.why is Give.DEADLINE, "a bigger worker is only away"


def test_disp_17() -> None:
    """DISP-17: "if a worker that did not refuse reports room: Fallback there"."""
    sigma = mesh(3)
    prefer(sigma, *D[:2])
    sigma.apply(ev.LoadReported(D[2], Facts(1000, held_tokens=690)))
    result = talk(sigma, [no(), no()]).result
    assert isinstance(result, Decision)
    assert (result.mode, result.decode) == (Mode.FALLBACK, D[2])
    sigma = mesh(3)
    prefer(sigma, *D[:2])
    sigma.apply(ev.LoadReported(D[2], Facts(1000, held_tokens=700)))
    assert isinstance(talk(sigma, [no(), no(), Resumed("deadline")]).result, GaveUp)


def test_disp_17_paper() -> None:
    """DISP-17: "Without a queue (`paper`): Fallback at once"."""
    result = talk(mesh(3, profile="paper"), [no(), no()]).result
    assert isinstance(result, Decision)
    assert result.mode is Mode.FALLBACK


def test_disp_18() -> None:
    """DISP-18: "with the turn's missing tokens, the workers' pause hint, and full jitter that doubles every sweep up to a cap"."""
    sigma = mesh(2, backoff_base_s=0.1, backoff_cap_s=0.3, queue_wait_s=10.0)
    sigma.apply(ev.ResidencyReset(D[1], tuple(run("p", 4))))
    answers = [no(retry_after_s=0.7), Resumed("room", 1.0), no(), Resumed("room", 2.0), no(), Resumed("deadline")]
    waits = [effect for effect, _ in talk(sigma, answers).said if isinstance(effect, WaitForRoom)]
    assert [wait.prefill_tokens for wait in waits] == [240 - 96] * 3
    assert [wait.at_least_s for wait in waits] == [0.7, 0.05, 0.05]
    assert [wait.jitter_s for wait in waits] == [0.1, 0.2, 0.3]
    assert [wait.at_most_s for wait in waits] == [10.0, 9.0, 7.0]


def test_disp_19() -> None:
    """DISP-19: "Room: a new sweep in which everybody may be asked again"."""
    conversation = talk(mesh(2), [no(), Resumed("room"), SILENCE, YES])
    assert len(conversation.sweeps()) == 2
    assert isinstance(conversation.result, Decision)


def test_disp_20() -> None:
    """DISP-20: "The queue is full: GaveUp(queue-full) with a retry hint; without any worker GaveUp(no-worker)"."""
    result = talk(mesh(2), [no(), Resumed("full")]).result
    assert isinstance(result, GaveUp)
    assert (result.why, result.retry_after_s) == (Give.QUEUE_FULL, 0.05)
    silent = talk(mesh(2), [SILENCE, SILENCE, Resumed("full")]).result
    assert isinstance(silent, GaveUp)
    assert silent.why is Give.NO_WORKER


def test_disp_21() -> None:
    """DISP-21: "Waited `queue_wait_s`: Fallback, or GaveUp(no-worker). The request's deadline: GaveUp(deadline)"."""
    result = talk(mesh(2), [no(), Resumed("waited", 30.0)]).result
    assert isinstance(result, Decision)
    assert (result.mode, result.queued_s) == (Mode.FALLBACK, 30.0)
    nobody = talk(mesh(0), [Resumed("waited", 30.0)]).result
    assert nobody == GaveUp(Give.NO_WORKER, queued_s=30.0)
    late = talk(mesh(2), [no(), Resumed("deadline", 3.0)]).result
    assert isinstance(late, GaveUp)
    assert (late.why, late.queued_s) == (Give.DEADLINE, 3.0)


def test_disp_22() -> None:
    """DISP-22: "Fallback goes to a worker that did not refuse while there is one; of those to the one with most room"."""
    sigma = mesh(4, full=False)
    for ref, held in zip(D, (0, 100, 700, 750), strict=False):
        sigma.apply(ev.LoadReported(ref, Facts(1000, held_tokens=held)))
    prefer(sigma, *D[:3])
    refusal = Refused(Rejection(Reason.NO_D_CAPACITY), None)
    result = talk(sigma, [refusal, refusal, refusal, Resumed("waited")]).result
    assert isinstance(result, Decision)
    assert result.decode == D[3], "the others refused, whatever room they report"


def test_disp_22_when_all_refused() -> None:
    """DISP-22: when everybody refused, the one with most room of all."""
    sigma = mesh(2, epsilon=2, full=False)
    refusals = [Refused(Rejection(Reason.NO_D_CAPACITY), Facts(1000, held_tokens=held)) for held in (900, 800)]
    result = talk(sigma, [*refusals, Resumed("waited")]).result
    assert isinstance(result, Decision)
    assert result.decode == D[1]


def test_disp_22_rejects() -> None:
    """DISP-22: "`rejects`: fewest rejects, then least inflight"."""
    sigma = mesh(4, fallback="rejects", epsilon=0)
    sigma.apply(ev.Refused("s", D[0], Reason.NO_D_CAPACITY))
    sigma.apply(ev.TurnArrived("t", run("t", 1), 24))
    sigma.apply(ev.Started(Attempt("t", 0), "t", D[1], Mode.SEED, Executor.LOCAL, 10))
    result = talk(sigma, [Resumed("waited")]).result
    assert isinstance(result, Decision)
    assert result.decode == D[2]


def test_disp_22_round_robin() -> None:
    """DISP-22: "`round_robin`: the next"."""
    sigma = mesh(3, profile="paper", epsilon=0)
    chosen = []
    for number in range(4):
        result = talk(sigma, [], first_attempt=number).result
        assert isinstance(result, Decision)
        chosen.append(result.decode)
        sigma.apply(ev.TurnEnded(result.attempt, ev.End.CANCELLED))
    assert chosen == [D[0], D[1], D[2], D[0]]


def test_disp_23() -> None:
    """DISP-23: "Fallback has no ticket, changes no counter of s, and keeps its KV: when completed it moves the pin"."""
    sigma = mesh(3)
    first = talk(sigma, [YES]).result
    assert isinstance(first, Decision)
    sigma.apply(ev.TurnEnded(first.attempt, ev.End.COMPLETED, 240))
    sigma.apply(ev.Refused("s", D[2], Reason.NO_D_CAPACITY))
    for member in list(sigma.decode_workers()):
        sigma.apply(ev.LoadReported(member.ref, FULL))
    sigma.apply(ev.LoadReported(D[2], Facts(1000)))
    prefer(sigma, *D[:2])
    result = talk(sigma, [no(), no()], first_attempt=5).result
    assert isinstance(result, Decision)
    assert (result.mode, result.decode, result.admission) == (Mode.FALLBACK, D[2], None)
    assert sigma.workers["D2"].inflight == 1
    assert sigma.rejects("s", "D2") == 1
    assert sigma.sessions["s"].pin == D[0]
    sigma.apply(ev.TurnEnded(result.attempt, ev.End.COMPLETED, 240))
    assert sigma.sessions["s"].pin == D[2]


def test_r24_fallback_prefills_where_it_is_cheaper() -> None:
    """R24, DISP-23: Fallback asks COST, too; other turns' facts about matched tokens do not count."""
    for backlog_s, prefill in ((0.0, None), (9.0, P[0])):
        sigma = mesh(2, epsilon=0, tau_append_tokens=100)
        report = Facts(1000, held_tokens=1000, prefill_backlog_s=backlog_s, matched_tokens=240, host_matched_tokens=240)
        for ref in D[:2]:
            sigma.apply(ev.LoadReported(ref, report))
        result = talk(sigma, [Resumed("waited")]).result
        assert isinstance(result, Decision)
        assert result.prefill == prefill
        assert result.executor is (Executor.LOCAL if prefill is None else Executor.PREFILL)


def test_disp_24() -> None:
    """DISP-24: "The end of a turn: inflight − 1, once. Completed: pin[s] = d, the session's length is committed"."""
    sigma = mesh()
    for number, (mode, end) in enumerate([(Mode.SEED, ev.End.COMPLETED), (Mode.DIRECT, ev.End.FAILED), (Mode.DIRECT, ev.End.COMPLETED)]):
        sigma.apply(ev.Refused("s", D[3], Reason.NO_D_CAPACITY))
        answer = Admitted(Admission(mode, Executor.LOCAL, 1, 1), FULL)
        result = talk(sigma, [answer], first_attempt=number).result
        assert isinstance(result, Decision)
        for _ in range(2):
            sigma.apply(ev.TurnEnded(result.attempt, end, 240, 10 + number))
        assert sigma.workers["D0"].inflight == 0
        session = sigma.sessions["s"]
        expected = {0: (1, 250, 1), 1: (1, 250, 2), 2: (2, 252, 0)}[number]
        assert (session.turns, session.context_tokens, sigma.rejects("s", "D3")) == expected


def test_r21_a_cancelled_turn_leaves_the_committed_length() -> None:
    """R21, F68: t0 ok, t1 cancelled, t2 at once: t2 is an append to t0."""
    sigma = mesh()
    first = talk(sigma, [YES]).result
    assert isinstance(first, Decision)
    sigma.apply(ev.TurnEnded(first.attempt, ev.End.COMPLETED, 240, 8))
    sigma.apply(ev.TurnArrived("s", run("p", 20), 480))
    second = talk(sigma, [YES], first_attempt=1).result
    assert isinstance(second, Decision)
    sigma.apply(ev.TurnEnded(second.attempt, ev.End.CANCELLED, 480, 1))
    third = sigma.turn("s", run("p", 12), 288, 0)
    assert (third.turn_index, third.known_session, third.new_tokens) == (1, True, 40)


def test_workers_that_failed_this_request_come_last() -> None:
    """DISP-4: a request that is dispatched again avoids the workers that failed it, unless there is nobody else."""
    avoid = frozenset(D[:2])
    assert talk(mesh(3), [YES], avoid=avoid).asked == [D[2]]
    assert talk(mesh(2), [YES], avoid=avoid).asked == [D[0]]
    again = talk(mesh(3), [no(), Resumed("room"), no(), Resumed("deadline")], avoid=avoid)
    assert again.asked == [D[2], D[2]]


def test_r16_answers_of_the_wrong_kind_are_a_bug_of_the_driver() -> None:
    """R16: a driver that answers Ask with Resumed, or a wait with an answer, is stopped at once."""
    for answers in ([Resumed("room")], [no(), YES], [no(Reason.SESSION_BUSY), YES]):
        with pytest.raises(AssertionError, match="does not answer"):
            talk(mesh(2), answers)


@pytest.mark.parametrize("step", range(7))
def test_f58_cancelled_at_every_await(step: int) -> None:
    """F58, I4: a client that goes away at any effect of a dispatch, a hundred times, leaves nothing in flight and nothing asked."""
    sigma = mesh(3)
    script: list[Answer] = [no(Reason.SESSION_BUSY), Resumed("room"), no(), SILENCE, no(), Resumed("room")]
    for _ in range(100):
        generator = begin(sigma)
        next(generator)
        for answer in script[:step]:
            generator.send(answer)
        generator.close()
        for ref in D[:3]:
            sigma.apply(ev.WorkerHealth(ref, healthy=True))
    sigma.check_integrity()
    assert [(member.inflight, member.asked, member.placed_tokens) for member in sigma.decode_workers()] == [(0, 0, 0)] * 3
    assert (sigma.open, sigma.asking) == ({}, {})


@pytest.mark.parametrize("at_once", [1, 52])
@pytest.mark.parametrize("prefill", [0, 1])
def test_f65_a_shared_system_prompt_does_not_pile_up(prefill: int, at_once: int) -> None:
    """F65, R14: 52 sessions with the same 12K-token prefix on 4 workers, one after the other or all at once: max/min bindings ≤ 2."""
    sigma = mesh(4, prefill, full=False)
    system = run("system", 500)
    bindings = dict.fromkeys(D[:4], 0)
    for batch in range(0, 52, at_once):
        pending: list[tuple[str, Dispatch, WorkerRef]] = []
        for number in range(batch, batch + at_once):
            session, chain = f"s{number}", run(f"s{number}-", 10, system)
            sigma.apply(ev.TurnArrived(session, chain, len(chain) * 24))
            generator = dispatch(sigma.turn(session, chain, len(chain) * 24, 256), sigma, f"r{number}")
            effect = next(generator)
            assert isinstance(effect, Ask)
            pending.append((session, generator, effect.worker))
        for session, generator, asked in pending:
            with pytest.raises(StopIteration) as stop:
                generator.send(YES)
            bindings[asked] += 1
            own = sigma.forest.chain(session)
            assert own is not None
            sigma.apply(ev.ResidencyChanged(asked, stored=tuple(own)))
            sigma.apply(ev.TurnEnded(stop.value.value.attempt, ev.End.COMPLETED, len(own) * 24, 256))
    assert sum(bindings.values()) == 52
    assert max(bindings.values()) <= 2 * min(bindings.values())
