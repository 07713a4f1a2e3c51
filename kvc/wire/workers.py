"""What a worker is, and how busy it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc import checks
from kvc.core.types import WorkerInfo
from kvc.v1 import types_pb2
from kvc.wire.enums import ROLE_FROM_PB, ROLE_TO_PB, known
from kvc.wire.turns import facts_to_pb, ref_from_pb, ref_to_pb

if TYPE_CHECKING:
    from kvc.core.types import Facts


def worker_info_to_pb(info: WorkerInfo) -> types_pb2.WorkerInfo:
    """WorkerInfo."""
    return types_pb2.WorkerInfo(
        worker=ref_to_pb(info.ref),
        role=ROLE_TO_PB[info.role],
        model=info.model,
        capacity_tokens=info.capacity_tokens,
        page_tokens=info.page_tokens,
        block_tokens=info.block_tokens,
        engine_url=info.engine_url,
        bootstrap_host=info.bootstrap_host,
        bootstrap_port=info.bootstrap_port,
        prefill_tokens_per_s=info.prefill_tokens_per_s,
        transfer_tokens_per_s=info.transfer_tokens_per_s,
        draining=info.draining,
        hash_seed=info.hash_seed,
        max_input_tokens=info.max_input_tokens,
        capabilities=info.capabilities,
    )


def worker_info_from_pb(pb: types_pb2.WorkerInfo, field: str = "info") -> WorkerInfo:
    """WorkerInfo.

    Raises:
        InvalidField: a field is missing or out of its range; a worker without a life (epoch 0) is no worker.
    """
    ref = ref_from_pb(pb.worker, f"{field}.worker")
    checks.count(ref.epoch, f"{field}.worker.epoch", 1, checks.MAX_U64)
    checks.count(len(pb.capabilities), f"{field}.capabilities", 0, checks.MAX_CAPABILITIES)
    return WorkerInfo(
        ref=ref,
        role=known(ROLE_FROM_PB, pb.role, f"{field}.role"),
        model=checks.text(pb.model, f"{field}.model", 1, checks.MAX_NAME_BYTES),
        capacity_tokens=checks.count(pb.capacity_tokens, f"{field}.capacity_tokens", 1, checks.MAX_U64),
        page_tokens=checks.count(pb.page_tokens, f"{field}.page_tokens", 1, checks.MAX_TOKENS),
        block_tokens=checks.count(pb.block_tokens, f"{field}.block_tokens", 1, checks.MAX_TOKENS),
        engine_url=checks.url(pb.engine_url, f"{field}.engine_url", checks.MAX_URL_BYTES),
        bootstrap_host=checks.text(pb.bootstrap_host, f"{field}.bootstrap_host", 0, checks.MAX_NAME_BYTES),
        bootstrap_port=checks.count(pb.bootstrap_port, f"{field}.bootstrap_port", 0, 65535),
        prefill_tokens_per_s=checks.rate(pb.prefill_tokens_per_s, f"{field}.prefill_tokens_per_s"),
        transfer_tokens_per_s=checks.rate(pb.transfer_tokens_per_s, f"{field}.transfer_tokens_per_s"),
        draining=pb.draining,
        hash_seed=pb.hash_seed,
        max_input_tokens=checks.count(pb.max_input_tokens, f"{field}.max_input_tokens", 1, checks.MAX_TOKENS),
        capabilities=tuple(checks.identifier(one, f"{field}.capabilities") for one in pb.capabilities),
    )


def load_to_pb(facts: Facts, *, sessions: int, open_tickets: int, evicted_tokens: int, peak_use: float) -> types_pb2.WorkerLoad:
    """WorkerLoad from a worker's facts and counters; `peak_use` is a share of the pool, 0 to 1."""
    return types_pb2.WorkerLoad(
        facts=facts_to_pb(facts),
        sessions=sessions,
        open_tickets=open_tickets,
        evicted_tokens=evicted_tokens,
        peak_use=peak_use,
    )
