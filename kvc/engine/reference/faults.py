"""Errors that only an engine has, as part of the tree in kvc.errors. `reason` is what programs compare.

Over HTTP the reason is written as `ticket-expired`.

TICKET_EXPIRED     409  the rid is a ticket that is unknown, expired or released
TICKET_USED        409  the rid is a ticket that another request arrived with
TICKET_EXCEEDED    409  the request needs more than its ticket reserved, and there is no more
TICKET_MISMATCH    409  the rid is another session's ticket
HOP_REFUSED        409  the request asked for its own admission (kvc.engine.hop) and is not taken; `kvc` in the body says why
RID_IN_USE         409  another request with this rid is in flight
ROOM_IN_USE        409  another request with this bootstrap room is in flight
UNKNOWN_ROOM       504  the prefill engine never got a request for the room
BOOTSTRAP_TIMEOUT  504  no decode engine asked for the room
PROMPT_MISMATCH    409  the two halves of a room hold different prompts, or engines of different models or pages
PREFILL_FAILED     502  the prefill engine failed or went away
DECODE_GONE        502  the decode engine went away
QUEUE_FULL         503  too many requests wait; Retry-After says when to come back
ENGINE_BUSY        409  flush_cache while requests or tickets are open
CONTEXT_TOO_LONG   400  the request can never fit
KV_CHECKSUM        502  the KV arrived damaged, or is not what was asked for
STOPPING           503  the engine is shutting down
"""

from __future__ import annotations

from typing import Any

from kvc.errors import AlreadyExists, DeadlineExceeded, Exhausted, InvalidField, Precondition, Unavailable


class TicketError(Precondition):
    """The rid is a ticket that does not admit this request."""

    http_status = 409


class HopRefused(Precondition):
    """The request asked for its own admission on arrival and is not taken: an answer, not a failure.

    Attributes:
        answer: the `kvc` object of the reply (kvc.engine.hop).
    """

    http_status = 409
    reason = "HOP_REFUSED"

    def __init__(self, answer: dict[str, Any]) -> None:
        """Says why, in words and in the answer."""
        super().__init__(f"not admitted on arrival: {answer['reason']}", field="rid", retry_after_s=answer["retry_after_s"])
        self.answer = answer


class RidInUse(AlreadyExists):
    """Another request with this rid is in flight."""

    reason = "RID_IN_USE"


class RoomInUse(AlreadyExists):
    """Another request with this bootstrap room is in flight."""

    reason = "ROOM_IN_USE"


class UnknownRoom(DeadlineExceeded):
    """The prefill engine has no request for the room."""

    reason = "UNKNOWN_ROOM"


class BootstrapTimeout(DeadlineExceeded):
    """The other half of the room did not come."""

    reason = "BOOTSTRAP_TIMEOUT"


class PromptMismatch(Precondition):
    """The two halves of a room do not belong together."""

    http_status = 409
    reason = "PROMPT_MISMATCH"


class PrefillFailed(Unavailable):
    """The prefill engine failed or went away before the KV arrived."""

    http_status = 502
    reason = "PREFILL_FAILED"


class DecodeGone(Unavailable):
    """The decode engine went away before it had the KV."""

    http_status = 502
    reason = "DECODE_GONE"


class QueueFull(Exhausted):
    """Too many requests wait for memory."""

    http_status = 503
    reason = "QUEUE_FULL"


class EngineBusy(Precondition):
    """The engine must be idle for this."""

    http_status = 409
    reason = "ENGINE_BUSY"


class ContextTooLong(InvalidField):
    """The request can never fit into this engine."""

    reason = "CONTEXT_TOO_LONG"
