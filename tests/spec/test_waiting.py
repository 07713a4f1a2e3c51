"""docs/spec.md, Algorithm 3: a sweep without a yes waits for room, and how that ends."""

from __future__ import annotations

from kvc.core import events as ev
from kvc.core.dispatch import Resumed, WaitForRoom
from kvc.core.types import Decision, GaveUp, Give, Mode
from tests.support.builders import run
from tests.support.dispatching import SILENCE, YES, D, mesh, no, talk


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
