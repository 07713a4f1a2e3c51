"""One turn's question and answer: who asks whom, about what, on what terms, and what was decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from kvc import checks
from kvc.core.blocks import pack_hashes, unpack_hashes
from kvc.core.types import Admission, Attempt, Facts, PrefillOffer, Rejection, Turn, WorkerRef
from kvc.errors import InvalidField, error_for
from kvc.v1 import admission_pb2, types_pb2
from kvc.wire.enums import EXECUTOR_FROM_PB, EXECUTOR_TO_PB, MODE_FROM_PB, MODE_TO_PB, REASON_FROM_PB, REASON_TO_PB, known

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvc.core.types import Outcome
    from kvc.errors import KvcError

_CODE_NAMES: Final[Mapping[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}


def attempt_to_pb(attempt: Attempt) -> types_pb2.Attempt:
    """Attempt."""
    return types_pb2.Attempt(request_id=attempt.request_id, attempt_number=attempt.attempt_number)


def attempt_from_pb(pb: types_pb2.Attempt) -> Attempt:
    """Attempt.

    Raises:
        InvalidField: request_id is not 1 to 128 printable ASCII characters.
    """
    return Attempt(checks.identifier(pb.request_id, "attempt.request_id"), pb.attempt_number)


def ref_to_pb(ref: WorkerRef) -> types_pb2.WorkerRef:
    """WorkerRef."""
    return types_pb2.WorkerRef(worker_id=ref.worker_id, epoch=ref.epoch)


def ref_from_pb(pb: types_pb2.WorkerRef, field: str = "worker") -> WorkerRef:
    """WorkerRef; epoch 0 is "whichever lives now".

    Raises:
        InvalidField: worker_id is not 1 to 128 printable ASCII characters.
    """
    return WorkerRef(checks.identifier(pb.worker_id, f"{field}.worker_id"), pb.epoch)


def admit_request_to_pb(
    attempt: Attempt,
    worker: WorkerRef,
    turn: Turn,
    offer: PrefillOffer | None,
    *,
    deadline_ms: int = 0,
    traceparent: str = "",
) -> admission_pb2.AdmitRequest:
    """AdmitRequest.

    Args:
        attempt: which try.
        worker: the life that is asked.
        turn: the turn.
        offer: the alternative to a local prefill, None when there is none.
        deadline_ms: milliseconds the caller waits; 0 = the agent's default.
        traceparent: W3C context, for calls on AdmitStream.
    """
    pb = admission_pb2.AdmitRequest()
    admit_request_into(pb, attempt, worker, turn, offer, deadline_ms=deadline_ms, traceparent=traceparent)
    return pb


def admit_request_into(
    pb: admission_pb2.AdmitRequest,
    attempt: Attempt,
    worker: WorkerRef,
    turn: Turn,
    offer: PrefillOffer | None,
    *,
    deadline_ms: int = 0,
    traceparent: str = "",
) -> None:
    """As `admit_request_to_pb`, into an empty message that is part of another: a message that is handed over is copied, field by field.

    `turn.shared_blocks` stays: only the router that counted them reads them.
    """
    pb.attempt.request_id, pb.attempt.attempt_number = attempt
    pb.worker.worker_id, pb.worker.epoch = worker
    asked = pb.turn
    asked.session_id = turn.session_id
    asked.turn_index = turn.turn_index
    asked.input_tokens = turn.input_tokens
    asked.output_reserve_tokens = turn.output_reserve_tokens
    if turn.confirmed is None:  # of an estimate only lengths travel
        asked.block_hashes = pack_hashes(turn.chain)
    asked.known_session = turn.known_session
    asked.new_tokens = turn.new_tokens
    if offer is not None:
        pb.offer.backlog_s = offer.backlog_s
        pb.offer.prefill_tokens_per_s = offer.prefill_tokens_per_s
        pb.offer.transfer_tokens_per_s = offer.transfer_tokens_per_s
        pb.offer.matched_tokens = offer.matched_tokens
    if deadline_ms:
        pb.deadline_ms = deadline_ms
    if traceparent:
        pb.traceparent = traceparent


def check_admit_request(pb: admission_pb2.AdmitRequest, block_tokens: int) -> None:
    """Checks all of an AdmitRequest: what passes may be taken as it is.

    Args:
        pb: the message.
        block_tokens: routing block of the mesh, tokens; bounds the number of hashes.

    Raises:
        InvalidField: a field is missing or out of its range.
    """
    if not (pb.HasField("attempt") and pb.HasField("worker") and pb.HasField("turn")):
        raise InvalidField("is required", field=next(name for name in ("attempt", "worker", "turn") if not pb.HasField(name)))
    checks.identifier(pb.attempt.request_id, "attempt.request_id")
    checks.identifier(pb.worker.worker_id, "worker.worker_id")
    turn = pb.turn
    input_tokens = checks.count(turn.input_tokens, "turn.input_tokens", 1, checks.MAX_TOKENS)
    checks.session_id(turn.session_id, "turn.session_id")
    checks.packed_chain(turn.block_hashes, "turn.block_hashes", input_tokens, block_tokens)
    checks.count(turn.output_reserve_tokens, "turn.output_reserve_tokens", 0, checks.MAX_TOKENS)
    checks.count(turn.new_tokens, "turn.new_tokens", 0, input_tokens)
    if pb.HasField("offer"):
        offer = pb.offer
        checks.amount(offer.backlog_s, "offer.backlog_s")
        checks.rate(offer.prefill_tokens_per_s, "offer.prefill_tokens_per_s")
        checks.rate(offer.transfer_tokens_per_s, "offer.transfer_tokens_per_s")
        checks.count(offer.matched_tokens, "offer.matched_tokens", 0, input_tokens)
    checks.count(pb.deadline_ms, "deadline_ms", 0, checks.MAX_DEADLINE_MS)
    checks.text(pb.traceparent, "traceparent", 0, checks.MAX_TRACEPARENT_BYTES)


def admit_request_to_core(pb: admission_pb2.AdmitRequest, block_tokens: int) -> tuple[Attempt, WorkerRef, Turn, PrefillOffer | None]:
    """AdmitRequest; `deadline_ms` and `traceparent` the caller reads from the message.

    Args:
        pb: the message.
        block_tokens: routing block of the mesh, tokens.

    Raises:
        InvalidField: a field is missing or out of its range.
    """
    check_admit_request(pb, block_tokens)
    asked, offered = pb.turn, pb.offer
    turn = Turn(
        session_id=asked.session_id,
        turn_index=asked.turn_index,
        chain=unpack_hashes(asked.block_hashes),
        input_tokens=asked.input_tokens,
        output_reserve_tokens=asked.output_reserve_tokens,
        known_session=asked.known_session,
        new_tokens=asked.new_tokens,
    )
    offer = PrefillOffer(
        backlog_s=offered.backlog_s,
        prefill_tokens_per_s=offered.prefill_tokens_per_s,
        transfer_tokens_per_s=offered.transfer_tokens_per_s,
        matched_tokens=offered.matched_tokens,
    )
    attempt, worker = Attempt(pb.attempt.request_id, pb.attempt.attempt_number), WorkerRef(pb.worker.worker_id, pb.worker.epoch)
    return attempt, worker, turn, offer if pb.HasField("offer") else None


def facts_to_pb(facts: Facts) -> types_pb2.Facts:
    """Facts, the part that travels."""
    pb = types_pb2.Facts()
    facts_into(pb, facts)
    return pb


def facts_into(pb: types_pb2.Facts, facts: Any) -> None:
    """As `facts_to_pb`, into an empty message, from Facts or from a message of the engine link, whose fields are named alike."""
    pb.capacity_tokens = facts.capacity_tokens
    pb.held_tokens = facts.held_tokens
    pb.reserved_tokens = facts.reserved_tokens
    pb.evictable_tokens = facts.evictable_tokens
    pb.matched_tokens = facts.matched_tokens
    pb.host_matched_tokens = facts.host_matched_tokens
    pb.load_back_s = facts.load_back_s
    pb.prefill_backlog_s = facts.prefill_backlog_s
    pb.running = facts.running
    pb.pending_transfers = facts.pending_transfers
    pb.queued_tokens = facts.queued_tokens


def facts_from_pb(pb: types_pb2.Facts) -> Facts:
    """Facts; what does not travel keeps its default.

    Raises:
        InvalidField: a time is negative or not finite.
    """
    return Facts(
        capacity_tokens=pb.capacity_tokens,
        held_tokens=pb.held_tokens,
        reserved_tokens=pb.reserved_tokens,
        evictable_tokens=pb.evictable_tokens,
        matched_tokens=pb.matched_tokens,
        host_matched_tokens=pb.host_matched_tokens,
        load_back_s=checks.amount(pb.load_back_s, "facts.load_back_s"),
        prefill_backlog_s=checks.amount(pb.prefill_backlog_s, "facts.prefill_backlog_s"),
        running=pb.running,
        pending_transfers=pb.pending_transfers,
        queued_tokens=pb.queued_tokens,
    )


def outcome_to_pb(outcome: Outcome, attempt: Attempt, worker: WorkerRef, facts: Facts | None = None) -> admission_pb2.AdmitResponse:
    """AdmitResponse around an outcome.

    Args:
        outcome: yes or no.
        attempt: which try is answered.
        worker: who answers.
        facts: what the answer was based on; None when the worker was not asked (stale epoch).
    """
    pb = admission_pb2.AdmitResponse(attempt=attempt_to_pb(attempt), worker=ref_to_pb(worker))
    if facts is not None:
        facts_into(pb.facts, facts)
    if isinstance(outcome, Admission):
        admission_into(pb.admission, outcome)
    else:
        rejection_into(pb.rejection, outcome)
    return pb


def admission_into(pb: types_pb2.Admission, yes: Any) -> None:
    """Into an empty message, from Admission or from a message of the engine link, whose fields are named alike."""
    pb.mode = MODE_TO_PB[yes.mode]
    pb.executor = EXECUTOR_TO_PB[yes.executor]
    pb.ticket = yes.ticket
    pb.ttl_s = yes.ttl_s
    pb.append_tokens = yes.append_tokens
    pb.need_tokens = yes.need_tokens


def rejection_into(pb: types_pb2.Rejection, no: Any) -> None:
    """Into an empty message, from Rejection or from a message of the engine link, whose fields are named alike."""
    pb.reason = REASON_TO_PB[no.reason]
    pb.retry_after_s = no.retry_after_s
    pb.terminal = no.terminal


def outcome_from_pb(pb: admission_pb2.AdmitResponse) -> Outcome:
    """The outcome in an AdmitResponse; `attempt`, `worker` and `facts` have functions of their own.

    Raises:
        InvalidField: there is none, or one of its fields is out of its range.
    """
    kind = pb.WhichOneof("outcome")
    if kind == "admission":
        yes = pb.admission
        return Admission(
            mode=known(MODE_FROM_PB, yes.mode, "admission.mode"),
            executor=known(EXECUTOR_FROM_PB, yes.executor, "admission.executor"),
            append_tokens=yes.append_tokens,
            need_tokens=yes.need_tokens,
            ticket=checks.identifier(yes.ticket, "admission.ticket"),
            ttl_s=checks.amount(yes.ttl_s, "admission.ttl_s"),
        )
    if kind == "rejection":
        no = pb.rejection
        return Rejection(
            reason=known(REASON_FROM_PB, no.reason, "rejection.reason"),
            retry_after_s=checks.amount(no.retry_after_s, "rejection.retry_after_s"),
            terminal=no.terminal,
        )
    raise InvalidField("is required: admission or rejection", field="outcome")


def stream_error_to_pb(error: KvcError) -> admission_pb2.StreamError:
    """StreamError: what a failed call would have ended with, for one element of a batch."""
    return admission_pb2.StreamError(
        code=grpc.StatusCode[error.code].value[0], message=error.message, reason=error.reason, field=error.field
    )


def stream_error_from_pb(pb: admission_pb2.StreamError) -> KvcError:
    """The typed error; a code that does not exist makes an `Internal`."""
    return error_for(_CODE_NAMES.get(pb.code, "UNKNOWN"), pb.message, field=pb.field, reason=pb.reason)
