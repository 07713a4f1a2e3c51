"""Algorithm 2, Admit: whether a worker takes a turn, and how (docs/spec.md ADMIT-1 to ADMIT-9).

Runs inside the engine's scheduler, over facts read in one iteration. Pure: storing the reservation (ticket, locked prefix) is the
engine's part; it must happen before the next call sees new facts, which is what keeps two routers from over-committing (R8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.core.cost import choose_executor
from kvc.core.types import Admission, Executor, Mode, Reason, Rejection

if TYPE_CHECKING:
    from kvc.core.params import Params
    from kvc.core.types import Facts, Outcome, PrefillOffer, Turn


def need_tokens(facts: Facts, turn: Turn) -> int:
    """Tokens the turn adds to what is held: prompt and output, less the matched part that is held already (R7)."""
    return turn.input_tokens + turn.output_reserve_tokens - facts.matched_held_tokens


def fits(facts: Facts, turn: Turn, params: Params) -> bool:
    """cap_ok: the headroom rule of R7, or the paper's `used + input_len <= rho K` (seed 000 section 3.2 line 2)."""
    limit = params.rho * facts.capacity_tokens
    if params.capacity == "used":
        used = facts.held_tokens + facts.evictable_tokens + facts.reserved_tokens
        return used + turn.input_tokens <= limit
    return facts.held_tokens + facts.reserved_tokens + need_tokens(facts, turn) <= limit


def can_ever_fit(facts: Facts, turn: Turn, params: Params) -> bool:
    """False when no amount of eviction makes room for the turn, or the engine refuses prompts of its length (R23)."""
    return fits_empty(turn, params, facts.capacity_tokens, facts.max_input_tokens)


def fits_empty(turn: Turn, params: Params, capacity_tokens: int, max_input_tokens: int) -> bool:
    """True when an empty worker of this size takes the turn. The paper's rule counts the prompt alone."""
    total = turn.input_tokens + (0 if params.capacity == "used" else turn.output_reserve_tokens)
    return total <= params.rho * capacity_tokens and turn.input_tokens <= max_input_tokens


def admit(facts: Facts, turn: Turn, params: Params, offer: PrefillOffer | None = None) -> Outcome:
    """Decides on one turn.

    Args:
        facts: the worker's state, with the fields about the turn filled in.
        turn: the turn.
        params: rulings in force on this worker.
        offer: the cheapest prefill worker's terms, None without one (|P| = 0).

    Returns:
        An Admission whose ticket is still empty, or a Rejection.
    """
    if not can_ever_fit(facts, turn, params):
        return Rejection(Reason.EXCEEDS_CAPACITY, terminal=True)
    if facts.draining:
        return Rejection(Reason.DRAINING)
    if facts.session_busy:
        return Rejection(Reason.SESSION_BUSY, params.retry_after_s)
    if not params.partial_residency:
        return _by_session_record(facts, turn, params, offer)
    matched = facts.matched_tokens + facts.host_matched_tokens
    append = turn.input_tokens - matched
    returning = turn.known_session or turn.turn_index > 0
    if matched > 0 and append > params.tau_append_tokens and returning and not params.reseed_large_append:
        return Rejection(Reason.REAL_LARGE_APPEND, params.retry_after_s)
    if not fits(facts, turn, params):
        reason = Reason.NO_D_CAPACITY if matched > 0 else Reason.SESSION_NOT_RESIDENT_NO_CAPACITY
        return Rejection(reason, params.retry_after_s)
    if matched > 0 and append <= params.tau_append_tokens:
        return Admission(Mode.DIRECT, Executor.LOCAL, append, need_tokens(facts, turn))
    return _seed(facts, turn, params, offer, append)


def _by_session_record(facts: Facts, turn: Turn, params: Params, offer: PrefillOffer | None) -> Outcome:
    """The paper's text, lines 3-15: residency is a yes or no about the session."""
    room = fits(facts, turn, params)
    if not facts.session_resident:
        if not room:
            return Rejection(Reason.SESSION_NOT_RESIDENT_NO_CAPACITY, params.retry_after_s)
        return _seed(facts, turn, params, offer, turn.input_tokens - facts.matched_tokens)
    if turn.new_tokens > params.tau_append_tokens:
        if not params.reseed_large_append:
            return Rejection(Reason.REAL_LARGE_APPEND, params.retry_after_s)
        if room:
            return _seed(facts, turn, params, offer, turn.new_tokens)
    if not room:
        return Rejection(Reason.NO_D_CAPACITY, params.retry_after_s)
    return Admission(Mode.DIRECT, Executor.LOCAL, turn.new_tokens, need_tokens(facts, turn))


def _seed(facts: Facts, turn: Turn, params: Params, offer: PrefillOffer | None, append: int) -> Outcome:
    """Seed on a session's first turn, Reseed afterwards; a transfer needs a place in the worker's budget (R15)."""
    mode = Mode.RESEED if turn.known_session or turn.turn_index > 0 else Mode.SEED
    executor = choose_executor(facts, turn.input_tokens, params, offer)
    if executor is Executor.PREFILL and 0 < params.seed_budget <= facts.pending_transfers:
        return Rejection(Reason.SEED_BUDGET, params.retry_after_s)
    return Admission(mode, executor, append, need_tokens(facts, turn))
