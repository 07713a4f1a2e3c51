"""Between AdmissionService and the engine link, for Admit: one function a message.

What is right passes in a few comparisons and is copied from one message into the other. What is not goes the long way through the values
of the core (`kvc.wire`, `kvc.engine.convert`), whose checks name the field: so there is one truth about what is allowed, and a test that
both ways agree.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from kvc.checks import (
    MAX_DEADLINE_MS,
    MAX_HASHES_BYTES,
    MAX_ID_CHARS,
    MAX_SESSION_ID_BYTES,
    MAX_TOKENS,
    MAX_TRACEPARENT_BYTES,
    MAX_U32,
    MAX_U64,
)
from kvc.core.blocks import HASH_BYTES
from kvc.core.types import Reason
from kvc.engine.convert import admit_to_link
from kvc.engine.link import Admit, Admitted, Refused
from kvc.wire import EXECUTOR_TO_PB, MODE_TO_PB, REASON_TO_PB, admit_request_to_core
from services.admission_agent.replies import outcome_of

if TYPE_CHECKING:
    from kvc.core.types import WorkerRef
    from kvc.engine.link import LinkFacts, ReplyBody
    from kvc.v1 import admission_pb2, types_pb2

_MODES: Final = {mode.value: pb for mode, pb in MODE_TO_PB.items()}
_EXECUTORS: Final = {executor.value: pb for executor, pb in EXECUTOR_TO_PB.items()}
_REASONS: Final = {reason.value: pb for reason, pb in REASON_TO_PB.items()}


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
    attempt, turn, worker_id, trace = pb.attempt, pb.turn, pb.worker.worker_id, pb.traceparent
    request_id, session_id, packed = attempt.request_id, turn.session_id, turn.block_hashes
    input_tokens, reserve_tokens, new_tokens = turn.input_tokens, turn.output_reserve_tokens, turn.new_tokens
    if (
        0 < len(request_id) <= MAX_ID_CHARS
        and request_id.isascii()
        and request_id.isprintable()
        and 0 < len(worker_id) <= MAX_ID_CHARS
        and worker_id.isascii()
        and worker_id.isprintable()
        and 0 < len(session_id) <= MAX_SESSION_ID_BYTES
        and session_id.isascii()
        and 0 < input_tokens <= MAX_TOKENS
        and reserve_tokens <= MAX_TOKENS
        and new_tokens <= input_tokens
        and len(packed) <= MAX_HASHES_BYTES
        and len(packed) % HASH_BYTES == 0
        and len(packed) // HASH_BYTES <= input_tokens // block_tokens
        and pb.deadline_ms <= MAX_DEADLINE_MS
        and (not trace or (len(trace) <= MAX_TRACEPARENT_BYTES and trace.isascii()))
        and not pb.HasField("offer")
    ):
        number, index, known = attempt.attempt_number, turn.turn_index, turn.known_session
        return Admit(
            request_id, number, session_id, index, input_tokens, reserve_tokens, packed, known, new_tokens, None, traceparent
        )  # fmt: skip
    tried, _, asked, offer = admit_request_to_core(pb, block_tokens)
    return admit_to_link(tried, asked, offer, traceparent)


def checked(reply: ReplyBody) -> Admitted | Refused:
    """The engine's answer to Admit.

    Raises:
        Internal: it is none, or a field of it is out of its range.
    """
    if isinstance(reply, Admitted):
        ticket = reply.ticket
        good = (
            reply.mode in _MODES
            and reply.executor in _EXECUTORS
            and 0 < len(ticket) <= MAX_ID_CHARS
            and ticket.isascii()
            and ticket.isprintable()
            and 0.0 <= reply.ttl_s < inf
            and 0 <= reply.append_tokens <= MAX_U32
            and 0 <= reply.need_tokens <= MAX_U32
            and _sound(reply.facts)
        )
    elif isinstance(reply, Refused):
        good = reply.reason in _REASONS and 0.0 <= reply.retry_after_s < inf and _sound(reply.facts)
    else:
        good = False
    if not good:
        outcome_of(reply)  # says what is wrong
    assert isinstance(reply, Admitted | Refused), "anything else was wrong"
    return reply


def _sound(facts: LinkFacts) -> bool:
    return (
        0 <= facts.capacity_tokens <= MAX_U64
        and 0 <= facts.held_tokens <= MAX_U64
        and 0 <= facts.reserved_tokens <= MAX_U64
        and 0 <= facts.evictable_tokens <= MAX_U64
        and 0 <= facts.matched_tokens <= MAX_U32
        and 0 <= facts.host_matched_tokens <= MAX_U32
        and 0.0 <= facts.load_back_s < inf
        and 0.0 <= facts.prefill_backlog_s < inf
        and 0 <= facts.running <= MAX_U32
        and 0 <= facts.pending_transfers <= MAX_U32
        and 0 <= facts.queued_tokens <= MAX_U64
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
        yes = pb.admission
        yes.mode = _MODES[reply.mode]
        yes.executor = _EXECUTORS[reply.executor]
        yes.ticket = reply.ticket
        yes.ttl_s = reply.ttl_s
        yes.append_tokens = reply.append_tokens
        yes.need_tokens = reply.need_tokens
    else:
        no = pb.rejection
        no.reason = _REASONS[reply.reason]
        no.retry_after_s = reply.retry_after_s
        no.terminal = reply.terminal
    _facts_into(pb.facts, reply.facts)


def _facts_into(pb: types_pb2.Facts, facts: LinkFacts) -> None:
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
