"""Where a missing prefix is prefilled: the cost rule R24, and the choice of a prefill worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.core.types import Executor

if TYPE_CHECKING:
    from kvc.core.params import Params
    from kvc.core.types import Facts, PrefillOffer


def local_cost_s(facts: Facts, append_tokens: int, params: Params) -> float:
    """Seconds until the decode worker itself has prefilled `append_tokens` (R24, left side)."""
    prefill_s = append_tokens / facts.prefill_tokens_per_s
    return facts.prefill_backlog_s + prefill_s * (1.0 + params.interference * facts.running) + facts.load_back_s


def remote_cost_s(offer: PrefillOffer, input_tokens: int, resident_tokens: int, params: Params) -> float:
    """Seconds until a prefill worker has prefilled its missing part and transferred the decode worker's (R24, right side)."""
    prefill_s = (input_tokens - offer.matched_tokens) / offer.prefill_tokens_per_s
    transfer_s = (input_tokens - resident_tokens) / offer.transfer_tokens_per_s
    return offer.backlog_s + prefill_s + transfer_s + params.transfer_overhead_s


def choose_executor(facts: Facts, input_tokens: int, params: Params, offer: PrefillOffer | None) -> Executor:
    """R24: local below tau_append_tokens or without a prefill worker (R25), else wherever it is done first."""
    if offer is None:
        return Executor.LOCAL
    if params.executor == "prefill":
        return Executor.PREFILL
    resident_tokens = facts.matched_tokens + facts.host_matched_tokens
    append_tokens = input_tokens - resident_tokens
    if append_tokens <= params.tau_append_tokens:
        return Executor.LOCAL
    here_s = local_cost_s(facts, append_tokens, params)
    there_s = remote_cost_s(offer, input_tokens, facts.matched_tokens, params)
    return Executor.LOCAL if here_s <= there_s else Executor.PREFILL
