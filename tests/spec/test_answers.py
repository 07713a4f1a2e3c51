"""docs/spec.md, Algorithm 3: what follows each answer of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvc.core import events as ev
from kvc.core.dispatch import Ask, Pause, Resumed, Unreachable
from kvc.core.types import Attempt, Decision, Executor, GaveUp, Give, Reason, WorkerRef
from tests.support.builders import worker
from tests.support.dispatching import REMOTE, SILENCE, YES, D, P, begin, mesh, no, talk

if TYPE_CHECKING:
    from kvc.core.dispatch import Answer


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
    for prefill, chosen, executor in ((2, P[1], Executor.PREFILL), (1, None, Executor.LOCAL)):
        sigma = mesh(prefill=prefill)
        generator = begin(sigma)
        next(generator)
        sigma.apply(ev.WorkerLeft("P0"))
        with pytest.raises(StopIteration) as stop:
            generator.send(REMOTE)
        assert (stop.value.value.prefill, stop.value.value.executor) == (chosen, executor)
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
