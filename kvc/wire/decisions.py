"""What a router decided, and whom it asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc import checks
from kvc.core.types import Probe
from kvc.v1 import router_pb2, types_pb2
from kvc.wire.enums import EXECUTOR_TO_PB, MODE_TO_PB, REASON_FROM_PB, REASON_TO_PB, known
from kvc.wire.turns import ref_from_pb, ref_to_pb

if TYPE_CHECKING:
    from kvc.core.types import Decision


def probe_to_pb(probe: Probe) -> router_pb2.Probe:
    """Probe."""
    return router_pb2.Probe(
        worker=ref_to_pb(probe.worker),
        admitted=probe.admitted,
        reason=types_pb2.REASON_UNSPECIFIED if probe.reason is None else REASON_TO_PB[probe.reason],
        error=probe.error,
        elapsed_s=probe.elapsed_s,
    )


def probe_from_pb(pb: router_pb2.Probe, field: str = "probe") -> Probe:
    """Probe.

    Raises:
        InvalidField: a field is out of its range.
    """
    return Probe(
        worker=ref_from_pb(pb.worker, f"{field}.worker"),
        admitted=pb.admitted,
        reason=None if pb.reason == types_pb2.REASON_UNSPECIFIED else known(REASON_FROM_PB, pb.reason, f"{field}.reason"),
        error=pb.error,
        elapsed_s=checks.amount(pb.elapsed_s, f"{field}.elapsed_s"),
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
