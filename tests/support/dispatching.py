"""A mesh of full decode workers, and a dispatch over it that hears what a test answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Refused, Unreachable, dispatch
from kvc.core.params import params_for
from kvc.core.state import Sigma
from kvc.core.types import Admission, Executor, Facts, Mode, Reason, Rejection, Role, WorkerRef
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
    """A refusal."""
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


def begin(sigma: Sigma, **options: Any) -> Dispatch:
    """The dispatch of the session's turn."""
    return dispatch(sigma.turn("s", run("p", 10), 240, 16), sigma, "r", **options)


def talk(sigma: Sigma, answers: Sequence[Answer], **options: Any) -> Conversation:
    """A dispatch that hears these answers, in order; all of them have to be asked for."""
    waiting = list(answers)

    def answer(effect: Effect) -> Answer:
        return waiting.pop(0)

    conversation = drive(begin(sigma, **options), answer)
    assert not waiting, f"nobody asked for {waiting}"
    return conversation
