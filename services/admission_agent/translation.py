"""Between AdmissionService and the engine link, for Admit: what arrives is checked, then copied from one message into the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvc.core.types import Reason
from kvc.engine.link import Admit, Admitted, Offer, Refused
from kvc.wire import REASON_TO_PB, admission_into, check_admit_request, facts_into, rejection_into

if TYPE_CHECKING:
    from kvc.core.types import WorkerRef
    from kvc.v1 import admission_pb2, types_pb2


class Ask(NamedTuple):
    """One Admit. `message` goes to the engine; `timeout_s` is the longest wait for it, seconds."""

    worker: WorkerRef
    message: Admit
    timeout_s: float


class Answer(NamedTuple):
    """Who answered what; a Reason when the agent refuses by itself, without asking the engine."""

    worker: WorkerRef
    reply: Admitted | Refused | Reason


def admit_from_pb(pb: admission_pb2.AdmitRequest, block_tokens: int, traceparent: str) -> Admit:
    """What the engine is asked.

    Args:
        pb: the request; `worker`, `deadline_ms` and `traceparent` are checked too, and stay.
        block_tokens: routing block of the mesh, tokens.
        traceparent: the trace that the engine goes on with.

    Raises:
        InvalidField: a field is missing or out of its range.
    """
    check_admit_request(pb, block_tokens)
    attempt, turn, offered = pb.attempt, pb.turn, None
    if pb.HasField("offer"):
        offer = pb.offer
        offered = Offer(offer.backlog_s, offer.prefill_tokens_per_s, offer.transfer_tokens_per_s, offer.matched_tokens)
    return Admit(
        attempt.request_id,
        attempt.attempt_number,
        turn.session_id,
        turn.turn_index,
        turn.input_tokens,
        turn.output_reserve_tokens,
        turn.block_hashes,
        turn.known_session,
        turn.new_tokens,
        offered,
        traceparent,
    )


def answer_into(pb: admission_pb2.AdmitResponse, attempt: types_pb2.Attempt, answer: Answer) -> None:
    """Writes the answer to an attempt into an empty message, which may be part of another. Mutates `pb`."""
    asked, worker, reply = pb.attempt, pb.worker, answer.reply
    asked.request_id = attempt.request_id
    asked.attempt_number = attempt.attempt_number
    worker.worker_id, worker.epoch = answer.worker
    if isinstance(reply, Reason):
        pb.rejection.reason = REASON_TO_PB[reply]
        return
    if isinstance(reply, Admitted):
        admission_into(pb.admission, reply)
    else:
        rejection_into(pb.rejection, reply)
    facts_into(pb.facts, reply.facts)
