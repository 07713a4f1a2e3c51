"""The presets reproduce the measurements they are made from."""

from __future__ import annotations

import pytest

from kvc.engine.reference.costs import PRESETS, CostModel

TCP, RDMA = PRESETS["h100-tcp"], PRESETS["h100-rdma"]


def prefill_s(cost: CostModel, tokens: int, chunk: int) -> float:
    whole, rest = divmod(tokens, chunk)
    return whole * cost.prefill_s(chunk) + (cost.prefill_s(rest) if rest else 0.0)


@pytest.mark.parametrize("tokens", [50_000, 90_000])
def test_reseed_costs_are_in_the_measured_ranges(tokens: int) -> None:
    """Seed 000 section 9 item 3: re-prefill 1.5-3 s, transfer 1.5-4 s over TCP, about 0.2 s over RDMA."""
    assert 1.5 <= prefill_s(TCP, tokens, 8192) <= 3.2
    assert 1.5 <= TCP.transfer_s(tokens) + TCP.transfer_latency_s <= 4.0
    assert 0.15 <= RDMA.transfer_s(tokens) + RDMA.transfer_latency_s <= 0.4


def test_bytes_per_token() -> None:
    """R22: 98,304 bytes a token, 4 microseconds at 200 Gb/s."""
    assert RDMA.kv_bytes_per_token == 2 * 48 * 4 * 128 * 2 == 98_304
    assert RDMA.transfer_s(1) == pytest.approx(3.93e-6, rel=0.01)
    assert RDMA.transfer_tokens_per_s == pytest.approx(254_313, rel=0.01)


def test_direct_turns_cost_what_was_measured() -> None:
    """Seed 003, direct-to-D: TTFT p50 0.043 s and p90 0.054 s, latency p50 0.495 s; seed 002: 5K of append in about 0.2 s."""
    assert RDMA.prefill_s(640) == pytest.approx(0.043, abs=0.002)
    assert RDMA.prefill_s(1000) == pytest.approx(0.054, abs=0.002)
    assert RDMA.prefill_s(640) + RDMA.decode_s(1, 30_000, 120) == pytest.approx(0.495, abs=0.05)
    assert RDMA.prefill_s(5000) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("requests", [1, 7])
def test_many_decode_steps_cost_the_sum_of_single_ones(requests: int) -> None:
    single = sum(RDMA.decode_s(requests, 1000 + index * requests) for index in range(25))
    assert RDMA.decode_s(requests, 1000, 25) == pytest.approx(single)


def test_quoted_prefill_speed_counts_the_fixed_cost_of_chunks() -> None:
    assert RDMA.chunked_prefill_tokens_per_s(2048) < RDMA.chunked_prefill_tokens_per_s(8192) < RDMA.prefill_tokens_per_s
