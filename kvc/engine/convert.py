"""Between kvc.core values and engine link messages: one function a message and direction.

The engine's side reads `Admit` and writes the answers, the agent's side the reverse; both use these functions. msgspec has checked
types by then; ranges are checked here, with `InvalidField` naming the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvc import checks
from kvc.core.blocks import pack_hashes, unpack_hashes
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, PrefillOffer, Reason, Rejection, Role, Turn, WorkerInfo, WorkerRef
from kvc.engine import link
from kvc.errors import InvalidField, error_for

if TYPE_CHECKING:
    import enum
    from collections.abc import Mapping

    from kvc.core.types import Outcome
    from kvc.errors import KvcError

    E = TypeVar("E", bound=enum.Enum)


_MEMBERS: Final[Mapping[type, Mapping[str, Any]]] = {
    kind: {one.value: one for one in kind} for kind in (Role, Mode, Executor, Reason)
}  # an enum's own look-up by value takes three times as long


def admit_to_link(attempt: Attempt, turn: Turn, offer: PrefillOffer | None, traceparent: str = "") -> link.Admit:
    """Admit, for the engine."""
    return link.Admit(
        request_id=attempt.request_id,
        attempt_number=attempt.attempt_number,
        session_id=turn.session_id,
        turn_index=turn.turn_index,
        input_tokens=turn.input_tokens,
        output_reserve_tokens=turn.output_reserve_tokens,
        block_hashes=pack_hashes(turn.chain),
        known_session=turn.known_session,
        new_tokens=turn.new_tokens,
        offer=None if offer is None else _offer_to_link(offer),
        traceparent=traceparent,
    )


def admit_from_link(message: link.Admit, block_tokens: int) -> tuple[Attempt, Turn, PrefillOffer | None]:
    """Admit, in the engine.

    Args:
        message: the message; `traceparent` stays there.
        block_tokens: routing block, tokens; bounds the number of hashes.

    Raises:
        InvalidField: a field is out of its range.
    """
    attempt = Attempt(
        checks.identifier(message.request_id, "request_id"),
        checks.count(message.attempt_number, "attempt_number", 0, checks.MAX_U32),
    )
    input_tokens = checks.count(message.input_tokens, "input_tokens", 1, checks.MAX_TOKENS)
    turn = Turn(
        session_id=checks.session_id(message.session_id),
        turn_index=checks.count(message.turn_index, "turn_index", 0, checks.MAX_U32),
        chain=unpack_hashes(checks.packed_chain(message.block_hashes, "block_hashes", input_tokens, block_tokens)),
        input_tokens=input_tokens,
        output_reserve_tokens=checks.count(message.output_reserve_tokens, "output_reserve_tokens", 0, checks.MAX_TOKENS),
        known_session=message.known_session,
        new_tokens=checks.count(message.new_tokens, "new_tokens", 0, input_tokens),
    )
    checks.text(message.traceparent, "traceparent", 0, checks.MAX_TRACEPARENT_BYTES)
    return attempt, turn, None if message.offer is None else _offer_from_link(message.offer, input_tokens)


def _offer_to_link(offer: PrefillOffer) -> link.Offer:
    return link.Offer(offer.backlog_s, offer.prefill_tokens_per_s, offer.transfer_tokens_per_s, offer.matched_tokens)


def _offer_from_link(message: link.Offer, input_tokens: int) -> PrefillOffer:
    return PrefillOffer(
        backlog_s=checks.amount(message.backlog_s, "offer.backlog_s"),
        prefill_tokens_per_s=checks.rate(message.prefill_tokens_per_s, "offer.prefill_tokens_per_s"),
        transfer_tokens_per_s=checks.rate(message.transfer_tokens_per_s, "offer.transfer_tokens_per_s"),
        matched_tokens=checks.count(message.matched_tokens, "offer.matched_tokens", 0, input_tokens),
    )


def facts_to_link(facts: Facts) -> link.LinkFacts:
    """LinkFacts: the part of the facts that travels."""
    return link.LinkFacts(
        capacity_tokens=facts.capacity_tokens,
        held_tokens=facts.held_tokens,
        reserved_tokens=facts.reserved_tokens,
        evictable_tokens=facts.evictable_tokens,
        matched_tokens=facts.matched_tokens,
        host_matched_tokens=facts.host_matched_tokens,
        load_back_s=facts.load_back_s,
        prefill_backlog_s=facts.prefill_backlog_s,
        running=facts.running,
        pending_transfers=facts.pending_transfers,
        queued_tokens=facts.queued_tokens,
    )


def check_facts(message: link.LinkFacts) -> None:
    """Checks LinkFacts: what passes may be taken as it is.

    Raises:
        InvalidField: a number is negative, not finite or too large for the mesh's messages.
    """
    checks.count(message.capacity_tokens, "facts.capacity_tokens", 0, checks.MAX_U64)
    checks.count(message.held_tokens, "facts.held_tokens", 0, checks.MAX_U64)
    checks.count(message.reserved_tokens, "facts.reserved_tokens", 0, checks.MAX_U64)
    checks.count(message.evictable_tokens, "facts.evictable_tokens", 0, checks.MAX_U64)
    checks.count(message.matched_tokens, "facts.matched_tokens", 0, checks.MAX_U32)
    checks.count(message.host_matched_tokens, "facts.host_matched_tokens", 0, checks.MAX_U32)
    checks.amount(message.load_back_s, "facts.load_back_s")
    checks.amount(message.prefill_backlog_s, "facts.prefill_backlog_s")
    checks.count(message.running, "facts.running", 0, checks.MAX_U32)
    checks.count(message.pending_transfers, "facts.pending_transfers", 0, checks.MAX_U32)
    checks.count(message.queued_tokens, "facts.queued_tokens", 0, checks.MAX_U64)


def facts_from_link(message: link.LinkFacts) -> Facts:
    """Facts; what does not travel keeps its default.

    Raises:
        InvalidField: a number is negative, not finite or too large for the mesh's messages.
    """
    check_facts(message)
    return Facts(**msgspec.structs.asdict(message))


def outcome_to_link(outcome: Outcome, facts: Facts) -> link.Admitted | link.Refused:
    """Admitted or Refused, with what the answer was based on."""
    known = facts_to_link(facts)
    if isinstance(outcome, Rejection):
        return link.Refused(outcome.reason.value, outcome.retry_after_s, outcome.terminal, known)
    return link.Admitted(
        mode=outcome.mode.value,
        executor=outcome.executor.value,
        ticket=outcome.ticket,
        ttl_s=outcome.ttl_s,
        append_tokens=outcome.append_tokens,
        need_tokens=outcome.need_tokens,
        facts=known,
    )


def check_outcome(message: link.Admitted | link.Refused) -> None:
    """Checks the engine's answer: what passes may be taken as it is.

    Raises:
        InvalidField: a field is out of its range; the engine and the agent do not speak of the same thing.
    """
    check_facts(message.facts)
    if isinstance(message, link.Refused):
        _member(Reason, message.reason, "reason")
        checks.amount(message.retry_after_s, "retry_after_s")
        return
    _member(Mode, message.mode, "mode")
    _member(Executor, message.executor, "executor")
    checks.count(message.append_tokens, "append_tokens", 0, checks.MAX_U32)
    checks.count(message.need_tokens, "need_tokens", 0, checks.MAX_U32)
    checks.identifier(message.ticket, "ticket")
    checks.amount(message.ttl_s, "ttl_s")


def outcome_from_link(message: link.Admitted | link.Refused) -> tuple[Outcome, Facts]:
    """The engine's answer.

    Raises:
        InvalidField: a field is out of its range; the engine and the agent do not speak of the same thing.
    """
    check_outcome(message)
    facts = Facts(**msgspec.structs.asdict(message.facts))
    if isinstance(message, link.Refused):
        return Rejection(Reason(message.reason), message.retry_after_s, message.terminal), facts
    admission = Admission(
        mode=Mode(message.mode),
        executor=Executor(message.executor),
        append_tokens=message.append_tokens,
        need_tokens=message.need_tokens,
        ticket=message.ticket,
        ttl_s=message.ttl_s,
    )
    return admission, facts


def info_to_welcome(info: WorkerInfo) -> link.Welcome:
    """Welcome: what the engine is. Draining is no part of it: it changes."""
    return link.Welcome(
        version=link.LINK_VERSION,
        worker_id=info.ref.worker_id,
        epoch=info.ref.epoch,
        role=info.role.value,
        model=info.model,
        capacity_tokens=info.capacity_tokens,
        page_tokens=info.page_tokens,
        max_input_tokens=info.max_input_tokens,
        engine_url=info.engine_url,
        bootstrap_host=info.bootstrap_host,
        bootstrap_port=info.bootstrap_port,
        prefill_tokens_per_s=info.prefill_tokens_per_s,
        transfer_tokens_per_s=info.transfer_tokens_per_s,
        hash_seed=info.hash_seed,
        capabilities=list(info.capabilities),
        block_tokens=info.block_tokens,
    )


def info_from_welcome(message: link.Welcome, block_tokens: int) -> WorkerInfo:
    """What the engine is.

    Args:
        message: the engine's greeting.
        block_tokens: the mesh's routing block, tokens.

    Raises:
        InvalidField: a field is out of its range, or the engine hashes blocks of another size.
    """
    if message.block_tokens not in {0, block_tokens}:
        raise InvalidField(f"the engine says {message.block_tokens}, the mesh {block_tokens}", field="block_tokens")
    checks.count(len(message.capabilities), "capabilities", 0, checks.MAX_CAPABILITIES)
    return WorkerInfo(
        ref=WorkerRef(checks.identifier(message.worker_id, "worker_id"), checks.count(message.epoch, "epoch", 1, checks.MAX_U64)),
        role=_member(Role, message.role, "role"),
        model=checks.text(message.model, "model", 1, checks.MAX_NAME_BYTES),
        capacity_tokens=checks.count(message.capacity_tokens, "capacity_tokens", 1, checks.MAX_U64),
        page_tokens=checks.count(message.page_tokens, "page_tokens", 1, checks.MAX_TOKENS),
        block_tokens=block_tokens,
        engine_url=checks.url(message.engine_url, "engine_url", checks.MAX_URL_BYTES),
        bootstrap_host=checks.text(message.bootstrap_host, "bootstrap_host", 0, checks.MAX_NAME_BYTES),
        bootstrap_port=checks.count(message.bootstrap_port, "bootstrap_port", 0, 65535),
        prefill_tokens_per_s=checks.rate(message.prefill_tokens_per_s, "prefill_tokens_per_s"),
        transfer_tokens_per_s=checks.rate(message.transfer_tokens_per_s, "transfer_tokens_per_s"),
        hash_seed=checks.count(message.hash_seed, "hash_seed", 0, checks.MAX_U64),
        max_input_tokens=checks.count(message.max_input_tokens, "max_input_tokens", 1, checks.MAX_TOKENS),
        capabilities=tuple(checks.identifier(one, "capabilities") for one in message.capabilities),
    )


def error_to_link(error: KvcError) -> link.Failed:
    """Failed: the request could not be answered."""
    return link.Failed(error.code, error.message, error.field)


def error_from_link(message: link.Failed) -> KvcError:
    """The typed error; a code that does not exist makes an `Internal`."""
    return error_for(message.code, message.message, field=message.field)


def _member(kind: type[E], value: str, field: str) -> E:
    """The enum member of a value."""
    found: E | None = _MEMBERS[kind].get(value)
    if found is None:
        raise InvalidField(f"must be one of {' | '.join(_MEMBERS[kind])}", field=field)
    return found
