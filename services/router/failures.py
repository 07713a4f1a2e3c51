"""What goes wrong with a turn: which worker is at fault, and what the caller is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.core.types import Give
from kvc.errors import DeadlineExceeded, Exhausted, InvalidField, KvcError, Precondition, TooLarge, Unavailable
from services.router.ports import EngineError
from services.router.runner import PrefillFailedError

if TYPE_CHECKING:
    from kvc.core.types import Decision, GaveUp, Turn, WorkerRef

# The request or the moment was wrong, no worker: the next try may use the same ones.
_NOBODYS = frozenset(
    {"ticket-expired", "ticket-used", "ticket-exceeded", "ticket-mismatch", "rid-in-use", "room-in-use", "prompt-mismatch"}
)
# What one half of a pair says about the other one.
_SAID_OF_PREFILL = frozenset({"prefill-failed", "unknown-room", "kv-checksum"})
_SAID_OF_DECODE = frozenset({"decode-gone", "bootstrap-timeout"})
# Fields by the names that engines give them, and by those of DispatchRequest.
_FIELDS = {"sampling_params.max_new_tokens": "max_new_tokens", "sampling_params.temperature": "temperature", "text": "text"}


class TurnFailedError(Exception):
    """An engine failed during an attempt; `started`: after the first token, so that nothing can be repeated."""

    def __init__(self, error: EngineError, *, started: bool) -> None:
        """Keeps the engine's error."""
        super().__init__(str(error))
        self.error = error
        self.started = started


def lost(decision: Decision, ref: WorkerRef) -> EngineError:
    """A worker went away, engine or agent, before it gave the turn its first token."""
    kind = PrefillFailedError if ref == decision.prefill else EngineError
    return kind(0, "worker-lost", f"nobody hears of worker {ref.worker_id} any more", gone=True)


def guilty(decision: Decision, error: EngineError) -> WorkerRef | None:
    """The worker that a next try should not use; None when it was no worker's fault."""
    if error.reason in _NOBODYS:
        return None
    if decision.prefill is None:
        return decision.decode
    if isinstance(error, PrefillFailedError):
        return decision.decode if error.reason in _SAID_OF_DECODE else decision.prefill
    return decision.prefill if error.reason in _SAID_OF_PREFILL else decision.decode


def typed(error: EngineError) -> KvcError:
    """The caller's error for an engine's."""
    field = _FIELDS.get(error.field, "prompt" if error.field else "")
    if error.status in (400, 422):
        return InvalidField(error.message, field=field)
    if error.status == 413:  # noqa: PLR2004 - HTTP
        return TooLarge(error.message, field=field)
    if error.status in (429, 503):
        return Exhausted(error.message, reason="ENGINE_BUSY", retry_after_s=error.retry_after_s or 1.0)
    if error.status == 404:  # noqa: PLR2004 - HTTP
        return Precondition(error.message, reason="ENGINE_LACKS_API")
    reason = "PREFILL_FAILED" if isinstance(error, PrefillFailedError) else "ENGINE_FAILED"
    return Unavailable(str(error), reason=reason, retry_after_s=0.1)


def gave_up(outcome: GaveUp, turn: Turn, waiting: int) -> KvcError:
    """The caller's error for a dispatch without a decision."""
    if outcome.why is Give.EXCEEDS_CAPACITY:
        wanted = f"{turn.input_tokens} prompt and {turn.output_reserve_tokens} output tokens"
        return TooLarge(f"{wanted} fit on no worker, however empty", field="prompt", reason="EXCEEDS_CAPACITY")
    if outcome.why is Give.QUEUE_FULL:
        return Exhausted(
            f"no worker has room and {waiting} turns wait already", reason="QUEUE_FULL", retry_after_s=max(1.0, outcome.retry_after_s)
        )
    if outcome.why is Give.NO_WORKER:
        return no_worker()
    return DeadlineExceeded("the request's deadline passed while it waited for room")


def no_worker() -> KvcError:
    """Nobody can do the turn."""
    return Unavailable("no decode worker is available", reason="NO_WORKER", retry_after_s=1.0)


def out_of_time(doing: str) -> KvcError:
    """The request's deadline passed while the router was `doing` something."""
    return DeadlineExceeded(f"the request's deadline passed while {doing}")
