"""docs/spec.md, Algorithm 3: one example a line; tests/property/test_dispatch.py answers at random.

What follows a worker's answer is in test_answers.py, how a turn waits in test_waiting.py.
"""

# ruff: noqa: RUF002 - quotations carry the symbols of the spec

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Ask, Refused, Resumed, dispatch
from kvc.core.types import Admission, Attempt, Decision, Executor, Facts, GaveUp, Give, Mode, Reason, Rejection, WorkerRef
from tests.support.builders import run, worker
from tests.support.dispatching import FULL, SILENCE, YES, D, P, begin, mesh, no, talk
from tests.support.driver import drive

if TYPE_CHECKING:
    from kvc.core.dispatch import Answer, Dispatch
    from kvc.core.state import Sigma


def prefer(sigma: Sigma, *refs: WorkerRef) -> None:
    """Route asks these first, in this order: each holds one block of the prompt less than the one before."""
    for number, ref in enumerate(refs):
        sigma.apply(ev.ResidencyReset(ref, tuple(run("p", 9 - number))))


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
