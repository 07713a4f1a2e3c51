"""Messages that must not become values: the error names the field, whatever the bytes."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kvc import wire
from kvc.core.types import Attempt, PrefillOffer, Role, Turn, WorkerInfo, WorkerRef
from kvc.errors import InvalidField
from kvc.v1 import admission_pb2, types_pb2
from tests.support.wire_values import BLOCK_TOKENS, over_the_wire, u32, u64

if TYPE_CHECKING:
    from collections.abc import Callable

    Change = Callable[[admission_pb2.AdmitRequest], None]


def request() -> admission_pb2.AdmitRequest:
    turn = Turn("s", 0, array("Q", [1, 2]), input_tokens=50, output_reserve_tokens=10)
    return wire.admit_request_to_pb(Attempt("r", 0), WorkerRef("d0", 1), turn, PrefillOffer(0.0, 1.0, 1.0))


def put(path: str, value: Any) -> Change:
    def change(pb: admission_pb2.AdmitRequest) -> None:
        *lead, name = path.split(".")
        message: Any = pb
        for one in lead:
            message = getattr(message, one)
        setattr(message, name, value)

    return change


def drop(field: str) -> Change:
    def change(pb: admission_pb2.AdmitRequest) -> None:
        pb.ClearField(field)  # type: ignore[arg-type]  # any field's name

    return change


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("attempt", drop("attempt")),
        ("worker", drop("worker")),
        ("turn", drop("turn")),
        ("attempt.request_id", put("attempt.request_id", "")),
        ("attempt.request_id", put("attempt.request_id", "x" * 129)),
        ("attempt.request_id", put("attempt.request_id", "a\nb")),
        ("attempt.request_id", put("attempt.request_id", "é")),
        ("worker.worker_id", put("worker.worker_id", "")),
        ("worker.worker_id", put("worker.worker_id", "d\x00")),
        ("turn.session_id", put("turn.session_id", "")),
        ("turn.session_id", put("turn.session_id", "x" * 257)),
        ("turn.session_id", put("turn.session_id", "é" * 129)),
        ("turn.input_tokens", put("turn.input_tokens", 0)),
        ("turn.input_tokens", put("turn.input_tokens", 2**31)),
        ("turn.output_reserve_tokens", put("turn.output_reserve_tokens", 2**31)),
        ("turn.new_tokens", put("turn.new_tokens", 51)),
        ("turn.block_hashes", put("turn.block_hashes", b"1234567")),
        ("turn.block_hashes", put("turn.block_hashes", bytes(24))),
        ("offer.backlog_s", put("offer.backlog_s", -0.1)),
        ("offer.backlog_s", put("offer.backlog_s", math.nan)),
        ("offer.backlog_s", put("offer.backlog_s", math.inf)),
        ("offer.prefill_tokens_per_s", put("offer.prefill_tokens_per_s", 0.0)),
        ("offer.prefill_tokens_per_s", put("offer.prefill_tokens_per_s", math.inf)),
        ("offer.transfer_tokens_per_s", put("offer.transfer_tokens_per_s", math.nan)),
        ("offer.transfer_tokens_per_s", put("offer.transfer_tokens_per_s", -1.0)),
        ("offer.matched_tokens", put("offer.matched_tokens", 51)),
        ("deadline_ms", put("deadline_ms", 60_001)),
        ("traceparent", put("traceparent", "0" * 65)),
    ],
)
def test_every_violation_names_its_field(field: str, change: Change) -> None:
    """F76: whatever is wrong with a request, one typed error names the field and the allowed range."""
    pb = request()
    wire.admit_request_to_core(pb, BLOCK_TOKENS)
    change(pb)
    with pytest.raises(InvalidField) as caught:
        wire.admit_request_to_core(over_the_wire(pb), BLOCK_TOKENS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "change",
    [
        drop("offer"),
        put("turn.session_id", "é" * 128),
        put("turn.session_id", "\x00"),
        put("turn.block_hashes", b""),
        put("turn.new_tokens", 50),
        put("offer.matched_tokens", 50),
        put("offer.backlog_s", 0.0),
        put("deadline_ms", 60_000),
        put("attempt.request_id", " ~" * 64),
        put("worker.epoch", 0),
    ],
)
def test_values_at_the_limits_pass(change: Change) -> None:
    pb = request()
    change(pb)
    wire.admit_request_to_core(over_the_wire(pb), BLOCK_TOKENS)


def test_the_largest_chain_passes_and_one_block_more_does_not() -> None:
    """F78: 8 MiB + 64 bytes of hashes are the limit."""
    pb = request()
    pb.turn.input_tokens = 2**31 - 1
    pb.turn.block_hashes = bytes(8 * 1024 * 1024 + 64)
    _, _, turn, _ = wire.admit_request_to_core(pb, BLOCK_TOKENS)
    assert len(turn.chain) == 1024 * 1024 + 8
    pb.turn.block_hashes += bytes(8)
    with pytest.raises(InvalidField, match=r"turn\.block_hashes: must be at most 8388672 bytes, is 8388680"):
        wire.admit_request_to_core(pb, BLOCK_TOKENS)


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x0a\x03\x0a\x01r\x12\x04\x0a\x02d0\x1a\x05\x0a\x01s\x18\x01")
def test_any_bytes_are_a_request_or_an_invalid_field(raw: bytes) -> None:
    """F76: fuzzed requests never raise anything else."""
    try:
        pb = admission_pb2.AdmitRequest.FromString(raw)
    except DecodeError:
        return
    with_error(wire.admit_request_to_core, pb, BLOCK_TOKENS)


wild_floats = st.floats() | st.sampled_from([0.0, -0.0, math.nan, math.inf])
wild_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(
    st.builds(types_pb2.Attempt, request_id=wild_text, attempt_number=u32) | st.none(),
    st.builds(types_pb2.WorkerRef, worker_id=wild_text, epoch=u64) | st.none(),
    st.builds(
        types_pb2.Turn,
        session_id=wild_text,
        turn_index=u32,
        input_tokens=u32,
        output_reserve_tokens=u32,
        block_hashes=st.binary(max_size=64),
        new_tokens=u32,
    )
    | st.none(),
    st.builds(
        types_pb2.PrefillOffer,
        backlog_s=wild_floats,
        prefill_tokens_per_s=wild_floats,
        transfer_tokens_per_s=wild_floats,
        matched_tokens=u32,
    )
    | st.none(),
    u32,
    wild_text,
)
def test_any_well_formed_request_is_checked_or_named(
    attempt: Any, worker: Any, turn: Any, offer: Any, deadline_ms: int, traceparent: str
) -> None:
    pb = admission_pb2.AdmitRequest(
        attempt=attempt, worker=worker, turn=turn, offer=offer, deadline_ms=deadline_ms, traceparent=traceparent
    )
    with_error(wire.admit_request_to_core, pb, BLOCK_TOKENS)


@given(st.binary(max_size=300), st.integers(0, 2))
def test_any_bytes_from_a_peer_are_an_answer_or_an_invalid_field(raw: bytes, which: int) -> None:
    kinds: list[tuple[Any, Any]] = [
        (admission_pb2.AdmitResponse, wire.outcome_from_pb),
        (types_pb2.WorkerInfo, wire.worker_info_from_pb),
        (types_pb2.Facts, wire.facts_from_pb),
    ]
    kind, convert = kinds[which]
    try:
        pb = kind.FromString(raw)
    except DecodeError:
        return
    with_error(convert, pb)


def with_error(convert: Callable[..., Any], *args: Any) -> None:
    """Calls; an `InvalidField` must name a field, and nothing else may be raised."""
    error: InvalidField | None = None
    try:
        convert(*args)
    except InvalidField as raised:
        error = raised
    assert error is None or error.field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ref": WorkerRef("d0", 0)}, "info.worker.epoch"),
        ({"model": ""}, "info.model"),
        ({"capacity_tokens": 0}, "info.capacity_tokens"),
        ({"page_tokens": 0}, "info.page_tokens"),
        ({"block_tokens": 0}, "info.block_tokens"),
        ({"engine_url": ""}, "info.engine_url"),
        ({"engine_url": "ftp://x"}, "info.engine_url"),
        ({"engine_url": "http://"}, "info.engine_url"),
        ({"engine_url": "http://h:99999"}, "info.engine_url"),
        ({"engine_url": "http://h/a b"}, "info.engine_url"),
        ({"engine_url": "http://h/\r\nX: y"}, "info.engine_url"),
        ({"bootstrap_port": 65536}, "info.bootstrap_port"),
        ({"prefill_tokens_per_s": 0.0}, "info.prefill_tokens_per_s"),
        ({"max_input_tokens": 0}, "info.max_input_tokens"),
        ({"capabilities": ("",)}, "info.capabilities"),
        ({"capabilities": ("x",) * 65}, "info.capabilities"),
    ],
)
def test_a_worker_that_describes_itself_wrongly_is_named(change: dict[str, Any], field: str) -> None:
    info = WorkerInfo(WorkerRef("d0", 1), Role.DECODE, "m", 1000, 1, 24, "http://127.0.0.1:1")
    wire.worker_info_from_pb(wire.worker_info_to_pb(info))
    with pytest.raises(InvalidField) as caught:
        wire.worker_info_from_pb(wire.worker_info_to_pb(replace(info, **change)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("response", "field"),
    [
        (admission_pb2.AdmitResponse(), "outcome"),
        (admission_pb2.AdmitResponse(rejection=types_pb2.Rejection()), "rejection.reason"),
        (admission_pb2.AdmitResponse(admission=types_pb2.Admission(mode=types_pb2.MODE_SEED, ticket="t")), "admission.executor"),
        (admission_pb2.AdmitResponse(admission=types_pb2.Admission(executor=types_pb2.EXECUTOR_LOCAL, ticket="t")), "admission.mode"),
    ],
)
def test_an_answer_without_a_meaning_is_named(response: admission_pb2.AdmitResponse, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        wire.outcome_from_pb(response)
    assert caught.value.field == field


def test_a_reason_from_the_future_is_named() -> None:
    response = admission_pb2.AdmitResponse.FromString(b"\x22\x02\x08\x63")
    with pytest.raises(InvalidField, match=r"rejection\.reason: must be one of .*, is 99"):
        wire.outcome_from_pb(response)
