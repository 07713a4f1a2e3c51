"""Admit on its way through the agent: straight from message to message is as through the core, whatever comes in."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvc import wire
from kvc.core.types import Executor, Facts, Mode, Reason, Rejection, WorkerRef
from kvc.engine import link
from kvc.engine.convert import admit_to_link, outcome_from_link
from kvc.errors import Internal, InvalidField
from kvc.v1 import admission_pb2, types_pb2
from services.admission_agent.replies import decision_of
from services.admission_agent.translation import Answer, admit_from_pb, answer_into
from tests.support.wire_values import BLOCK_TOKENS, admissions, attempts, facts, offers, refs, rejections, turns, u32

if TYPE_CHECKING:
    from kvc.core.types import Attempt, Outcome

TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
names = texts | st.sampled_from(["", "r", "x" * 128, "x" * 129, "é", "a\n", "s" * 256, "é" * 128, "é" * 129, "\x00"])
counts = u32 | st.sampled_from([0, 1, 23, 24, 48, 2**31 - 1, 2**31])
anything = st.builds(
    admission_pb2.AdmitRequest,
    attempt=st.none() | st.builds(types_pb2.Attempt, request_id=names, attempt_number=u32),
    worker=st.none() | st.builds(types_pb2.WorkerRef, worker_id=names, epoch=u32),
    turn=st.none()
    | st.builds(
        types_pb2.Turn,
        session_id=names,
        turn_index=u32,
        input_tokens=counts,
        output_reserve_tokens=counts,
        block_hashes=st.binary(max_size=40) | st.integers(0, 4).map(lambda count: bytes(8 * count)),
        known_session=st.booleans(),
        new_tokens=counts,
    ),
    offer=st.none() | st.builds(types_pb2.PrefillOffer, backlog_s=st.floats(), prefill_tokens_per_s=st.floats(), matched_tokens=u32),
    deadline_ms=st.integers(0, 70_000),
    traceparent=st.sampled_from(["", TRACE, "x" * 64, "x" * 65, "é" * 32, "é" * 33]),
)


def the_long_way(pb: admission_pb2.AdmitRequest, traceparent: str) -> link.Admit:
    attempt, _, turn, offer = wire.admit_request_to_core(pb, BLOCK_TOKENS)
    return admit_to_link(attempt, turn, offer, traceparent)


@given(anything)
def test_any_request_is_taken_or_refused_as_on_the_long_way(pb: admission_pb2.AdmitRequest) -> None:
    results: list[Any] = []
    for way in (the_long_way, lambda pb, traceparent: admit_from_pb(pb, BLOCK_TOKENS, traceparent)):
        try:
            results.append(way(pb, pb.traceparent))
        except InvalidField as error:
            results.append((error.field, error.message))
    assert results[0] == results[1]


@given(st.data(), attempts, refs, turns(), st.sampled_from(["", TRACE]))
def test_a_sound_request_reaches_the_engine_whole(
    data: st.DataObject, attempt: Attempt, worker: WorkerRef, turn: Any, traceparent: str
) -> None:
    offer = data.draw(st.none() | offers(turn.input_tokens))
    pb = wire.admit_request_to_pb(attempt, worker, turn, offer)
    assert admit_from_pb(pb, BLOCK_TOKENS, traceparent) == admit_to_link(attempt, turn, offer, traceparent)


def reply_of(outcome: Outcome, known: Facts) -> link.Admitted | link.Refused:
    numbers = link.LinkFacts(**{name: getattr(known, name) for name in link.LinkFacts.__struct_fields__})
    if isinstance(outcome, Rejection):
        return link.Refused(outcome.reason.value, outcome.retry_after_s, outcome.terminal, numbers)
    return link.Admitted(
        outcome.mode.value, outcome.executor.value, outcome.ticket, outcome.ttl_s, outcome.append_tokens, outcome.need_tokens, numbers
    )


@given(admissions | rejections, facts, attempts, refs)
def test_an_answer_of_the_engine_is_written_as_on_the_long_way(outcome: Outcome, known: Facts, attempt: Attempt, worker: WorkerRef) -> None:
    reply = reply_of(outcome, known)
    pb = admission_pb2.AdmitResponse()
    answer_into(pb, wire.attempt_to_pb(attempt), Answer(worker, decision_of(reply)))
    assert pb == wire.outcome_to_pb(*outcome_from_link(reply)[:1], attempt, worker, outcome_from_link(reply)[1])


@given(attempts, refs, st.sampled_from([Reason.STALE_EPOCH, Reason.DRAINING]))
def test_a_refusal_of_the_agents_own_has_no_facts(attempt: Attempt, worker: WorkerRef, reason: Reason) -> None:
    pb = admission_pb2.AdmitResponse()
    answer_into(pb, wire.attempt_to_pb(attempt), Answer(worker, reason))
    assert pb == wire.outcome_to_pb(Rejection(reason), attempt, worker)


wild_counts = st.sampled_from([-1, 0, 2**32 - 1, 2**32, 2**64 - 1, 2**64])
wild_amounts = st.sampled_from([-0.1, -0.0, 0.0, 1.0, math.inf, -math.inf, math.nan])
wild_facts = st.builds(
    link.LinkFacts,
    **{
        name: wild_amounts if name.endswith("_s") else st.just(5) | wild_counts
        for name in link.LinkFacts.__struct_fields__
    },
) | st.just(link.LinkFacts(1000))  # fmt: skip
wild_replies = st.builds(
    link.Admitted,
    mode=st.sampled_from([*(mode.value for mode in Mode), "x"]),
    executor=st.sampled_from([*(executor.value for executor in Executor), ""]),
    ticket=st.sampled_from(["t", "", "t" * 128, "t" * 129, "é"]),
    ttl_s=wild_amounts,
    append_tokens=wild_counts,
    need_tokens=wild_counts,
    facts=wild_facts,
) | st.builds(
    link.Refused,
    reason=st.sampled_from([*(reason.value for reason in Reason), "x"]),
    retry_after_s=wild_amounts,
    terminal=st.booleans(),
    facts=wild_facts,
)


@given(wild_replies)
@example(link.Admitted("direct", "local", "t", 1.0, 0, 2**32 - 1, link.LinkFacts(2**64 - 1)))
def test_an_answer_that_makes_no_sense_is_the_engines_fault(reply: link.Admitted | link.Refused) -> None:
    try:
        outcome_from_link(reply)
    except InvalidField as error:
        with pytest.raises(Internal, match=re.escape(error.field)) as caught:
            decision_of(reply)
        assert caught.value.reason == "ENGINE_PROTOCOL"
    else:
        assert decision_of(reply) is reply


@pytest.mark.parametrize("reply", [link.Released(released=True), link.LoadReport(link.LinkFacts(1))])
def test_something_else_is_no_answer(reply: link.ReplyBody) -> None:
    with pytest.raises(Internal) as caught:
        decision_of(reply)
    assert caught.value.reason == "ENGINE_PROTOCOL"
