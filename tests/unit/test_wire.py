"""Values of the core travel as messages, and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc import errors, wire
from kvc.core.types import Admission, Attempt, Decision, Executor, Facts, Mode, Probe, Reason, Rejection, Role, Turn, WorkerInfo, WorkerRef
from kvc.errors import KvcError
from kvc.v1 import admission_pb2, types_pb2
from tests.support.wire_values import (
    BLOCK_TOKENS,
    admissions,
    amounts,
    attempts,
    facts,
    identifiers,
    infos,
    offers,
    over_the_wire,
    probes,
    refs,
    rejections,
    session_ids,
    turns,
    u32,
)


@given(st.data(), attempts, refs, turns(), st.integers(0, 60_000), st.sampled_from(["", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"]))
def test_admit_request_round_trip(
    data: st.DataObject, attempt: Attempt, worker: WorkerRef, turn: Turn, deadline_ms: int, traceparent: str
) -> None:
    offer = data.draw(st.none() | offers(turn.input_tokens))
    pb = over_the_wire(wire.admit_request_to_pb(attempt, worker, turn, offer, deadline_ms=deadline_ms, traceparent=traceparent))
    assert wire.admit_request_to_core(pb, BLOCK_TOKENS) == (attempt, worker, turn, offer)
    assert (pb.deadline_ms, pb.traceparent) == (deadline_ms, traceparent)


@given(facts)
def test_facts_round_trip(known: Facts) -> None:
    assert wire.facts_from_pb(over_the_wire(wire.facts_to_pb(known))) == known


@given(admissions | rejections, attempts, refs, st.none() | facts)
def test_outcome_round_trip(outcome: Admission | Rejection, attempt: Attempt, worker: WorkerRef, known: Facts | None) -> None:
    pb = over_the_wire(wire.outcome_to_pb(outcome, attempt, worker, known))
    assert wire.outcome_from_pb(pb) == outcome
    assert (wire.attempt_from_pb(pb.attempt), wire.ref_from_pb(pb.worker)) == (attempt, worker)
    assert pb.HasField("facts") == (known is not None)


@given(infos)
def test_worker_info_round_trip(info: WorkerInfo) -> None:
    assert wire.worker_info_from_pb(over_the_wire(wire.worker_info_to_pb(info))) == info


@given(probes)
def test_probe_round_trip(probe: Probe) -> None:
    pb = over_the_wire(wire.probe_to_pb(probe))
    reason = wire.REASON_FROM_PB[pb.reason] if pb.reason else None
    assert Probe(wire.ref_from_pb(pb.worker), pb.admitted, reason, pb.error, pb.elapsed_s) == probe


@given(st.sampled_from(Mode), st.sampled_from(Executor), refs, st.none() | refs, attempts, st.lists(probes, max_size=3), u32, amounts)
def test_decision_to_pb_keeps_every_field(
    mode: Mode,
    executor: Executor,
    decode: WorkerRef,
    prefill: WorkerRef | None,
    attempt: Attempt,
    asked: list[Probe],
    overlap: int,
    queued_s: float,
) -> None:
    decision = Decision(mode, executor, decode, prefill, attempt, None, tuple(asked), overlap, queued_s)
    pb = over_the_wire(wire.decision_to_pb(decision, decide_s=0.5))
    assert (pb.request_id, pb.overlap_blocks, pb.queued_s, pb.decide_s) == (attempt.request_id, overlap, queued_s, 0.5)
    assert (wire.MODE_FROM_PB[pb.mode], wire.EXECUTOR_FROM_PB[pb.executor]) == (mode, executor)
    assert wire.ref_from_pb(pb.decode) == decode
    assert (wire.ref_from_pb(pb.prefill) if pb.HasField("prefill") else None) == prefill
    assert list(pb.probes) == [wire.probe_to_pb(one) for one in asked]


def test_load_to_pb() -> None:
    pb = wire.load_to_pb(Facts(100, held_tokens=7), sessions=1, open_tickets=2, evicted_tokens=3, peak_use=0.5)
    assert wire.facts_from_pb(pb.facts) == Facts(100, held_tokens=7)
    assert (pb.sessions, pb.open_tickets, pb.evicted_tokens, pb.peak_use) == (1, 2, 3, 0.5)


@given(st.sampled_from(sorted(KvcError.__subclasses__(), key=lambda kind: kind.__name__)), session_ids, identifiers)
def test_stream_error_round_trip(kind: type[KvcError], message: str, field: str) -> None:
    error = kind(message, field=field, reason="OWN")
    back = wire.stream_error_from_pb(over_the_wire(wire.stream_error_to_pb(error)))
    assert (type(back), back.message, back.field, back.reason) == (kind, error.message, error.field, "OWN")


def test_a_stream_error_of_an_unknown_code_is_internal() -> None:
    assert type(wire.stream_error_from_pb(admission_pb2.StreamError(code=99, message="x"))) is errors.Internal


@pytest.mark.parametrize(
    ("core", "enum", "to_pb", "from_pb"),
    [
        (Role, types_pb2.Role, wire.ROLE_TO_PB, wire.ROLE_FROM_PB),
        (Mode, types_pb2.Mode, wire.MODE_TO_PB, wire.MODE_FROM_PB),
        (Executor, types_pb2.Executor, wire.EXECUTOR_TO_PB, wire.EXECUTOR_FROM_PB),
        (Reason, types_pb2.Reason, wire.REASON_TO_PB, wire.REASON_FROM_PB),
    ],
)
def test_enums_map_one_to_one_by_name(core: Any, enum: Any, to_pb: Any, from_pb: Any) -> None:
    lead = enum.DESCRIPTOR.name.upper() + "_"
    assert {lead + member.name for member in core} == set(enum.keys()) - {lead + "UNSPECIFIED"}
    assert {member: enum.Value(lead + member.name) for member in core} == to_pb
    assert {number: member for member, number in to_pb.items()} == from_pb
