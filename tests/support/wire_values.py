"""Hypothesis strategies for what travels between services, and the way there and back."""

from __future__ import annotations

from array import array
from typing import Any

from hypothesis import strategies as st

from kvc.core.types import (
    Admission,
    Attempt,
    Executor,
    Facts,
    Mode,
    PrefillOffer,
    Probe,
    Reason,
    Rejection,
    Role,
    Turn,
    WorkerInfo,
    WorkerRef,
)

BLOCK_TOKENS = 24

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
tokens = st.integers(0, 2**31 - 1)
amounts = st.floats(0, allow_nan=False, allow_infinity=False)
rates = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)
identifiers = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128)
session_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64).filter(lambda text: len(text.encode()) <= 256)

attempts = st.builds(Attempt, identifiers, u32)
refs = st.builds(WorkerRef, identifiers, u64)
lives = st.builds(WorkerRef, identifiers, st.integers(1, 2**64 - 1))


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Turns whose fields agree with one another."""
    input_tokens = draw(st.integers(1, 2**31 - 1))
    blocks = draw(st.lists(u64, max_size=min(20, input_tokens // BLOCK_TOKENS)))
    return Turn(
        session_id=draw(session_ids),
        turn_index=draw(u32),
        chain=array("Q", blocks),
        input_tokens=input_tokens,
        output_reserve_tokens=draw(tokens),
        known_session=draw(st.booleans()),
        new_tokens=draw(st.integers(0, input_tokens)),
    )


def offers(input_tokens: int) -> st.SearchStrategy[PrefillOffer]:
    """Offers for a prompt of this length."""
    return st.builds(PrefillOffer, amounts, rates, rates, st.integers(0, input_tokens))


facts = st.builds(
    Facts,
    capacity_tokens=u64,
    held_tokens=u64,
    reserved_tokens=u64,
    evictable_tokens=u64,
    matched_tokens=u32,
    host_matched_tokens=u32,
    load_back_s=amounts,
    prefill_backlog_s=amounts,
    running=u32,
    pending_transfers=u32,
    queued_tokens=u64,
)
admissions = st.builds(
    Admission,
    mode=st.sampled_from(Mode),
    executor=st.sampled_from(Executor),
    append_tokens=u32,
    need_tokens=u32,
    ticket=identifiers,
    ttl_s=amounts,
)
rejections = st.builds(Rejection, st.sampled_from(Reason), amounts, st.booleans())
infos = st.builds(
    WorkerInfo,
    ref=lives,
    role=st.sampled_from(Role),
    model=session_ids,
    capacity_tokens=st.integers(1, 2**64 - 1),
    page_tokens=st.integers(1, 2**31 - 1),
    block_tokens=st.integers(1, 2**31 - 1),
    engine_url=st.sampled_from(["http://127.0.0.1:30000", "https://worker.example/base", "http://[::1]:1"]),
    bootstrap_host=st.sampled_from(["", "10.0.0.1"]),
    bootstrap_port=st.integers(0, 65535),
    prefill_tokens_per_s=rates,
    transfer_tokens_per_s=rates,
    draining=st.booleans(),
    hash_seed=u64,
    max_input_tokens=st.integers(1, 2**31 - 1),
    capabilities=st.lists(identifiers, max_size=8).map(tuple),
)
probes = st.builds(
    Probe,
    worker=refs,
    admitted=st.booleans(),
    reason=st.none() | st.sampled_from(Reason),
    error=st.sampled_from(["", "UNAVAILABLE"]),
    elapsed_s=amounts,
)


def over_the_wire(message: Any) -> Any:
    """The message as its receiver gets it."""
    return type(message).FromString(message.SerializeToString())
