"""Prompts as the router sees them: what they cost to check, and their chains."""

from __future__ import annotations

import random
import time
from array import array
from typing import TYPE_CHECKING

import pytest

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.v1 import router_pb2
from services.router.prompts import Chains, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = random.Random(7)
IDS = [RNG.randrange(2**31) for _ in range(100_000)]


def best_s(doing: Callable[[], object]) -> float:
    """The fastest of many tries: what it costs when nothing else runs."""

    def once() -> float:
        start_s = time.perf_counter()
        doing()
        return time.perf_counter() - start_s

    return min(once() for _ in range(30))


@pytest.mark.parametrize(
    "request_",
    [router_pb2.DispatchRequest(packed_input_ids=pack_tokens(IDS)), router_pb2.DispatchRequest(text="x" * 100_000)],
    ids=["packed", "text"],
)
def test_a_hundred_thousand_tokens_are_checked_in_two_milliseconds(request_: router_pb2.DispatchRequest) -> None:
    assert best_s(lambda: tokens_of(request_, 1_000_000)) <= 0.002


def test_every_way_to_give_a_prompt_means_the_same() -> None:
    packed = pack_tokens(IDS)
    assert tokens_of(router_pb2.DispatchRequest(input_ids=router_pb2.TokenIds(ids=IDS)), 1_000_000) == packed
    assert tokens_of(router_pb2.DispatchRequest(packed_input_ids=packed), 1_000_000) == packed


def test_chains_before_and_after_the_first_worker() -> None:
    chains = Chains(24)
    prompt = pack_tokens(IDS[:240])
    assert not chains.seeded
    assert len(chains.chain("s", prompt, None)) == len(chains.fresh(prompt)) == 0
    chains.use_seed(5)
    assert chains.seeded
    assert chains.chain("s", prompt, None) == chains.fresh(prompt) == hash_chain(prompt, 24, 5)


def test_a_chain_is_extended_by_the_append() -> None:
    chains = Chains(24)
    chains.use_seed(5)
    first = chains.chain("s", pack_tokens(IDS[:480]), None)
    longer = pack_tokens(IDS[:960])
    assert chains.chain("s", longer, array("Q", first)) == hash_chain(longer, 24, 5)
    assert chains.chain("s", pack_tokens(IDS[1:200]), array("Q", first)) == hash_chain(pack_tokens(IDS[1:200]), 24, 5)


def test_another_seed_forgets_everything() -> None:
    """The mesh serves another model now: no hash of the old one is reused."""
    chains = Chains(24)
    prompt = pack_tokens(IDS[:480])
    chains.use_seed(5)
    old = chains.chain("s", prompt, None)
    chains.use_seed(5)
    assert chains.chain("s", prompt, array("Q", old)) == old
    chains.use_seed(6)
    assert chains.chain("s", prompt, array("Q", old)) == hash_chain(prompt, 24, 6)
    chains.forget("s")
    chains.forget("never seen")
