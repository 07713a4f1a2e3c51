"""One-hop admission, the router's side: a turn on hot KV takes its question along (kvc/engine/hop.py is what the engine does with it).

A question that would be asked and answered yes costs a round trip for nothing. When the session's pin is the worker that Route chose, the
worker's residency is its own and current, and its last numbers say that the turn is Direct there, the request is sent with an rid that
carries the attempt, and the reply's beginning is the worker's yes:

    Ask -> promise? -> request with hop rid -> first byte of the reply   -> Admitted, as promised
                                            -> 409 or another refusal    -> the question is asked after all, by the way that is set
                                            -> the connection failed     -> Unreachable, and the next candidate
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.core.dispatch import Admitted
from kvc.core.types import Mode
from kvc.engine.hop import HOP_CAPABILITY
from services.router.door.admission import local_answer

if TYPE_CHECKING:
    from kvc.core.dispatch import Ask
    from kvc.core.members import WorkerState
    from kvc.core.state import Sigma


def promise(ask: Ask, worker: WorkerState, sigma: Sigma) -> Admitted | None:
    """What the worker will most probably answer to a turn on hot KV; None: the turn is not hot, or the engine does not decide on arrival.

    Reads Σ only. The facts are those the worker reported last, none of ours.

    Args:
        ask: the question.
        worker: whom it is for.
        sigma: Σ.
    """
    session = sigma.session(ask.turn.session_id)
    if session is None or session.pin != ask.worker or not ask.turn.known_session:
        return None
    if not worker.fresh or worker.facts is None or HOP_CAPABILITY not in worker.info.capabilities:
        return None
    answer = local_answer(ask, worker, sigma.params)
    if not isinstance(answer, Admitted) or answer.admission.mode is not Mode.DIRECT:
        return None
    return Admitted(answer.admission, worker.facts)
