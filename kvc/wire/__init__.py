"""Between kvc.core values and kvc.v1 messages: one function a message and direction.

Every value that arrives is checked here and nowhere else: a violation is an `InvalidField` that names the field by its path in the
message (`turn.session_id`). Values that leave come from the core and are trusted.
"""

from __future__ import annotations

from kvc.wire.decisions import decision_to_pb, probe_to_pb
from kvc.wire.enums import (
    EXECUTOR_FROM_PB,
    EXECUTOR_TO_PB,
    MODE_FROM_PB,
    MODE_TO_PB,
    REASON_FROM_PB,
    REASON_TO_PB,
    ROLE_FROM_PB,
    ROLE_TO_PB,
)
from kvc.wire.turns import (
    admission_into,
    admit_request_into,
    admit_request_to_core,
    admit_request_to_pb,
    attempt_from_pb,
    attempt_to_pb,
    check_admit_request,
    facts_from_pb,
    facts_into,
    facts_to_pb,
    outcome_from_pb,
    outcome_to_pb,
    ref_from_pb,
    ref_to_pb,
    rejection_into,
    stream_error_from_pb,
    stream_error_to_pb,
)
from kvc.wire.workers import load_to_pb, worker_info_from_pb, worker_info_to_pb

__all__ = [
    "EXECUTOR_FROM_PB",
    "EXECUTOR_TO_PB",
    "MODE_FROM_PB",
    "MODE_TO_PB",
    "REASON_FROM_PB",
    "REASON_TO_PB",
    "ROLE_FROM_PB",
    "ROLE_TO_PB",
    "admission_into",
    "admit_request_into",
    "admit_request_to_core",
    "admit_request_to_pb",
    "attempt_from_pb",
    "attempt_to_pb",
    "check_admit_request",
    "decision_to_pb",
    "facts_from_pb",
    "facts_into",
    "facts_to_pb",
    "load_to_pb",
    "outcome_from_pb",
    "outcome_to_pb",
    "probe_to_pb",
    "ref_from_pb",
    "ref_to_pb",
    "rejection_into",
    "stream_error_from_pb",
    "stream_error_to_pb",
    "worker_info_from_pb",
    "worker_info_to_pb",
]
