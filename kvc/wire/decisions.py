"""What a router decided, and whom it asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.v1 import router_pb2, types_pb2
from kvc.wire.enums import EXECUTOR_TO_PB, MODE_TO_PB, REASON_TO_PB
from kvc.wire.turns import ref_to_pb

if TYPE_CHECKING:
    from kvc.core.types import Decision, Probe


def probe_to_pb(probe: Probe) -> router_pb2.Probe:
    """Probe."""
    return router_pb2.Probe(
        worker=ref_to_pb(probe.worker),
        admitted=probe.admitted,
        reason=types_pb2.REASON_UNSPECIFIED if probe.reason is None else REASON_TO_PB[probe.reason],
        error=probe.error,
        elapsed_s=probe.elapsed_s,
    )


def decision_to_pb(decision: Decision, *, decide_s: float = 0.0) -> router_pb2.Decision:
    """Decision.

    Args:
        decision: what Dispatch decided.
        decide_s: seconds it took, waiting included.
    """
    return router_pb2.Decision(
        request_id=decision.attempt.request_id,
        mode=MODE_TO_PB[decision.mode],
        executor=EXECUTOR_TO_PB[decision.executor],
        decode=ref_to_pb(decision.decode),
        prefill=None if decision.prefill is None else ref_to_pb(decision.prefill),
        probes=[probe_to_pb(probe) for probe in decision.probes],
        overlap_blocks=decision.overlap_blocks,
        decide_s=decide_s,
        queued_s=decision.queued_s,
    )
