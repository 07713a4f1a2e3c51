from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, PrefillOffer, Reason, Rejection, Role, Turn, WorkerInfo, WorkerRef
from kvc.engine import convert, link
from kvc.errors import Exhausted, InvalidField, NotFound

BLOCK_TOKENS = 24
ATTEMPT = Attempt("r", 1)
TURN = Turn("s", 3, array("Q", [1, 2]), input_tokens=50, output_reserve_tokens=10, known_session=True, new_tokens=7)
OFFER = PrefillOffer(0.5, 7000.0, 20000.0, 24)
FACTS = Facts(1000, 1, 2, 3, 4, 0, 5, 0.5, 0.25, running=6, pending_transfers=7, queued_tokens=8)
INFO = WorkerInfo(
    WorkerRef("d0", 5),
    Role.DECODE,
    "m",
    1000,
    16,
    BLOCK_TOKENS,
    "http://127.0.0.1:1",
    "h",
    99,
    hash_seed=2**64 - 1,
    capabilities=("admit",),
)


def over_the_link(message: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@pytest.mark.parametrize("offer", [None, OFFER])
def test_admit_round_trip(offer: PrefillOffer | None) -> None:
    message = over_the_link(convert.admit_to_link(ATTEMPT, TURN, offer, "00-x"))
    assert convert.admit_from_link(message, BLOCK_TOKENS) == (ATTEMPT, TURN, offer)
    assert message.traceparent == "00-x"


@pytest.mark.parametrize(
    "outcome", [Admission(Mode.SEED, Executor.PREFILL, 10, 20, "t", 5.0), Rejection(Reason.SEED_BUDGET, 0.5, terminal=True)]
)
def test_outcome_round_trip(outcome: Admission | Rejection) -> None:
    assert convert.outcome_from_link(over_the_link(convert.outcome_to_link(outcome, FACTS))) == (outcome, FACTS)


def test_every_fact_that_travels_on_the_wire_travels_on_the_link() -> None:
    assert convert.facts_from_link(over_the_link(convert.facts_to_link(FACTS))) == FACTS


def test_welcome_round_trip() -> None:
    assert convert.info_from_welcome(over_the_link(convert.info_to_welcome(INFO)), BLOCK_TOKENS) == INFO


def test_an_engine_that_hashes_other_blocks_is_refused() -> None:
    with pytest.raises(InvalidField, match="block_tokens: the engine says 24, the mesh 16"):
        convert.info_from_welcome(convert.info_to_welcome(INFO), 16)
    silent = msgspec.structs.replace(convert.info_to_welcome(INFO), block_tokens=0)
    assert convert.info_from_welcome(silent, 16).block_tokens == 16


def test_errors_round_trip() -> None:
    for error in (InvalidField("is odd", field="ticket"), NotFound("no room"), Exhausted("full")):
        back = convert.error_from_link(over_the_link(convert.error_to_link(error)))
        assert (type(back), back.message, back.field) == (type(error), error.message, error.field)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("request_id", {"request_id": ""}),
        ("attempt_number", {"attempt_number": -1}),
        ("attempt_number", {"attempt_number": 2**32}),
        ("session_id", {"session_id": ""}),
        ("session_id", {"session_id": "\ud800"}),
        ("turn_index", {"turn_index": -1}),
        ("input_tokens", {"input_tokens": 0}),
        ("input_tokens", {"input_tokens": -(2**63)}),
        ("output_reserve_tokens", {"output_reserve_tokens": -1}),
        ("new_tokens", {"new_tokens": 51}),
        ("new_tokens", {"new_tokens": -1}),
        ("block_hashes", {"block_hashes": b"123"}),
        ("block_hashes", {"block_hashes": bytes(24)}),
        ("traceparent", {"traceparent": "x" * 65}),
        ("offer.backlog_s", {"offer": link.Offer(math.nan, 1.0, 1.0)}),
        ("offer.prefill_tokens_per_s", {"offer": link.Offer(0.0, 0.0, 1.0)}),
        ("offer.transfer_tokens_per_s", {"offer": link.Offer(0.0, 1.0, math.inf)}),
        ("offer.matched_tokens", {"offer": link.Offer(0.0, 1.0, 1.0, 51)}),
    ],
)
def test_every_violation_names_its_field(field: str, change: dict[str, Any]) -> None:
    message = msgspec.structs.replace(convert.admit_to_link(ATTEMPT, TURN, OFFER), **change)
    with pytest.raises(InvalidField) as caught:
        convert.admit_from_link(message, BLOCK_TOKENS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("worker_id", {"worker_id": "é"}),
        ("epoch", {"epoch": 0}),
        ("role", {"role": "king"}),
        ("model", {"model": ""}),
        ("capacity_tokens", {"capacity_tokens": 0}),
        ("page_tokens", {"page_tokens": 0}),
        ("engine_url", {"engine_url": "unix:/x"}),
        ("bootstrap_port", {"bootstrap_port": -1}),
        ("prefill_tokens_per_s", {"prefill_tokens_per_s": math.nan}),
        ("hash_seed", {"hash_seed": -1}),
        ("max_input_tokens", {"max_input_tokens": 2**31}),
        ("capabilities", {"capabilities": ["x"] * 65}),
    ],
)
def test_an_engine_that_greets_wrongly_is_named(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        convert.info_from_welcome(msgspec.structs.replace(convert.info_to_welcome(INFO), **change), BLOCK_TOKENS)
    assert caught.value.field == field


def test_answers_out_of_range_are_named() -> None:
    admitted = convert.outcome_to_link(Admission(Mode.SEED, Executor.LOCAL, 1, 1, "t", 1.0), FACTS)
    refused = convert.outcome_to_link(Rejection(Reason.DRAINING), FACTS)
    for field, message in (
        ("mode", msgspec.structs.replace(admitted, mode="")),
        ("executor", msgspec.structs.replace(admitted, executor="x")),
        ("ticket", msgspec.structs.replace(admitted, ticket="")),
        ("ttl_s", msgspec.structs.replace(admitted, ttl_s=math.inf)),
        ("need_tokens", msgspec.structs.replace(admitted, need_tokens=-1)),
        ("reason", msgspec.structs.replace(refused, reason="no-mood")),
        ("retry_after_s", msgspec.structs.replace(refused, retry_after_s=-1.0)),
        ("facts.held_tokens", msgspec.structs.replace(refused, facts=link.LinkFacts(1, held_tokens=-1))),
        ("facts.load_back_s", msgspec.structs.replace(refused, facts=link.LinkFacts(1, load_back_s=math.nan))),
    ):
        with pytest.raises(InvalidField) as caught:
            convert.outcome_from_link(message)
        assert caught.value.field == field


wild_int = st.integers(-(2**63), 2**64 - 1)
wild_admit = st.builds(
    link.Admit,
    request_id=st.text(max_size=200),
    attempt_number=wild_int,
    session_id=st.text(max_size=300),
    turn_index=wild_int,
    input_tokens=wild_int,
    output_reserve_tokens=wild_int,
    block_hashes=st.binary(max_size=64),
    known_session=st.booleans(),
    new_tokens=wild_int,
    offer=st.none() | st.builds(link.Offer, st.floats(), st.floats(), st.floats(), wild_int),
    traceparent=st.text(max_size=80),
)


@given(wild_admit)
def test_any_admit_is_taken_or_names_its_field(message: link.Admit) -> None:
    field = "none"
    try:
        convert.admit_from_link(message, BLOCK_TOKENS)
    except InvalidField as error:
        field = error.field
    assert field
