"""Which prefill worker a turn would use, and its terms (R24, R25)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.core.members import matched_blocks
from kvc.core.types import PrefillOffer, Role

if TYPE_CHECKING:
    from kvc.core.members import WorkerState
    from kvc.core.state import Sigma
    from kvc.core.types import Turn, WorkerRef


def prefill_pool(turn: Turn, sigma: Sigma, decode: WorkerState, avoid: frozenset[WorkerRef] = frozenset()) -> list[WorkerState]:
    """Members of P that can prefill a turn for `decode`.

    Empty when |P| = 0, when none of P takes prompts of this length (F10), and when the decode worker takes no KV from others (R25).
    """
    if decode.info.role is Role.MONOLITHIC:
        return []
    return [p for p in sigma.prefill_workers() if turn.input_tokens <= p.info.max_input_tokens and p.ref not in avoid]


def prefill_offer(
    turn: Turn, sigma: Sigma, decode: WorkerState, avoid: frozenset[WorkerRef] = frozenset()
) -> tuple[WorkerState | None, PrefillOffer | None]:
    """The prefill worker that would be done first, and its terms (R24); round robin over healthy P when executor is "prefill".

    Returns:
        (None, None) when no prefill worker can do it.
    """
    pool = prefill_pool(turn, sigma, decode, avoid) if sigma.has_prefill else None
    if not pool:
        return None, None
    if sigma.params.executor == "prefill":
        pool = [pool[sigma.prefill_cursor % len(pool)]]
    found = ((p, matched_tokens(turn, p)) for p in pool)
    worker, matched = min(found, key=lambda one: one[0].prefill_backlog_s + (turn.input_tokens - one[1]) / one[0].info.prefill_tokens_per_s)
    speed = min(worker.info.transfer_tokens_per_s, decode.info.transfer_tokens_per_s)
    return worker, PrefillOffer(worker.prefill_backlog_s, worker.info.prefill_tokens_per_s, speed, matched)


def matched_tokens(turn: Turn, worker: WorkerState) -> int:
    """Leading prompt tokens that the router believes resident on a worker."""
    return turn.tokens_of(matched_blocks(turn, worker), worker.info.block_tokens)
