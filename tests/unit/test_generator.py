"""Generated traces: the same everywhere for a seed, with the shape of the sessions they were fitted to."""

from __future__ import annotations

import statistics
from itertools import pairwise
from math import log
from typing import TYPE_CHECKING, Any

import pytest

from kvc.evaluation.generator import PRESETS, Limits, generate
from kvc.evaluation.trace_files import load_trace, save_trace
from kvc.evaluation.traces import block_count, common_blocks, full_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from kvc.evaluation.traces import Trace, TraceRequest

SMALL: dict[str, Any] = {"preset": "claude-code", "seed": 1, "sessions": 2}


def pairs(trace: Trace) -> list[tuple[TraceRequest, TraceRequest]]:
    """Consecutive turns."""
    return [pair for turns in trace.sessions().values() for pair in pairwise(turns)]


def kept_blocks(before: TraceRequest, after: TraceRequest) -> int:
    return common_blocks(before.blocks, after.blocks)


@pytest.mark.parametrize(
    ("preset", "digest"),
    [
        ("claude-code", "53ab595757fce57c13b6cdba18bf3063cfb50ba4bec9647be2f23a70d0614167"),
        ("mini-swe", "275fc8e4afab03f8f3aa9fec23f1f0015e7ef125d31738cb553a055b403c8a19"),
    ],
)
def test_a_seed_gives_one_trace(preset: str, digest: str) -> None:
    """A changed digest means that every published number about generated traces is about another trace."""
    trace = generate(preset, seed=7, sessions=5)
    assert trace.sha256 == digest
    assert generate(preset, seed=8, sessions=5).sha256 != digest


def test_more_sessions_leave_the_earlier_ones() -> None:
    few = generate("claude-code", seed=3, sessions=4).sessions()
    many = generate("claude-code", seed=3, sessions=9).sessions()
    assert {name: many[name] for name in few} == few


@pytest.mark.parametrize("preset", PRESETS)
def test_it_reads_back_from_a_file(tmp_path: Path, preset: str) -> None:
    trace = generate(preset, seed=1, sessions=6, limits=Limits(max_turns=8))
    save_trace(trace, tmp_path / "g.kvt.jsonl.gz")
    again = load_trace(tmp_path / "g.kvt.jsonl.gz")
    assert (again.requests, again.sha256, again.block_tokens) == (trace.requests, trace.sha256, 24)
    assert again.meta == trace.meta
    assert again.meta["max_turns"] == 8


@pytest.mark.parametrize("preset", PRESETS)
def test_blocks_cover_the_prompt(preset: str) -> None:
    for one in generate(preset, seed=2, sessions=20).requests:
        assert block_count(one.blocks) == full_blocks(one, 24) == one.input_tokens // 24
        assert one.output_tokens >= 1


def test_claude_code_has_the_fitted_shape() -> None:
    """Medians within 10 % and shares near those of the real sessions: 97.1 % appends, 1.3 % rewrites, 12.6 % user turns."""
    trace = generate("claude-code", seed=11, sessions=400)
    sessions = trace.sessions()
    assert 40 < statistics.median(len(turns) for turns in sessions.values()) < 70
    firsts = [turns[0].input_tokens - 12_432 for turns in sessions.values()]
    assert abs(statistics.median(map(log, firsts)) - 8.217) < 0.2
    steps = pairs(trace)
    pure = [(a, b) for a, b in steps if kept_blocks(a, b) == full_blocks(a, 24)]
    assert 0.965 < len(pure) / len(steps) < 0.99
    assert abs(statistics.median(b.input_tokens - a.input_tokens for a, b in pure if b.request_type == "tool") / 767 - 1) < 0.1
    users = [b for _, b in steps if b.request_type == "user"]
    assert 0.115 < len(users) / len(steps) < 0.137
    assert abs(statistics.median(one.think_s or 0 for one in users) / 119.7 - 1) < 0.15
    assert abs(statistics.median(one.output_tokens for one in trace.requests) / 255.7 - 1) < 0.05
    assert max(one.input_tokens for one in trace.requests) <= 155_000
    direct = sum(b.input_tokens - 24 * kept_blocks(a, b) <= 8192 for a, b in steps)
    assert 0.92 < direct / len(steps) < 0.96  # 94 % of the real turns


def test_sessions_share_the_boilerplate_only() -> None:
    turns = [one[0] for one in generate("claude-code", seed=5, sessions=10).sessions().values()]
    assert {kept_blocks(turns[0], other) for other in turns[1:]} == {12_432 // 24}


def test_mini_swe_has_periods_instead_of_pauses() -> None:
    trace = generate("mini-swe", seed=4, sessions=100)
    assert all(one.think_s is None for one in trace.requests)
    gaps = [b.timestamp_s - a.timestamp_s for a, b in pairs(trace)]
    assert abs(statistics.median(gaps) / 4.98 - 1) < 0.1
    assert all(kept_blocks(a, b) == full_blocks(a, 24) for a, b in pairs(trace))


def test_limits_hold() -> None:
    limits = Limits(max_input_tokens=40_000, max_output_tokens=300, min_turns=10, max_turns=15, max_think_s=20.0)
    trace = generate("claude-code", seed=6, sessions=60, limits=limits)
    assert max(one.input_tokens for one in trace.requests) <= 40_000
    assert max(one.output_tokens for one in trace.requests) == 300
    assert max(one.think_s or 0 for one in trace.requests) == 20.0
    assert {len(turns) for turns in trace.sessions().values()} <= set(range(10, 16))
    compacted = [b for a, b in pairs(trace) if b.input_tokens < a.input_tokens]
    assert compacted
    assert all(one.input_tokens > 12_432 for one in compacted)


def test_a_cap_below_the_boilerplate_still_gives_prompts() -> None:
    trace = generate("claude-code", seed=6, sessions=3, limits=Limits(max_input_tokens=1000, max_turns=4))
    assert {one.input_tokens for one in trace.requests} == {1000}
    trace = generate("mini-swe", seed=6, sessions=20, limits=Limits(max_input_tokens=3000))
    assert max(one.input_tokens for one in trace.requests) <= 3000


def test_live_sessions_follow_one_another() -> None:
    trace = generate("claude-code", seed=9, sessions=6, live=2, limits=Limits(max_turns=5))
    turns = list(trace.sessions().values())
    spans = sorted((one[0].timestamp_s, one[-1].timestamp_s) for one in turns)
    for start, _ in spans[2:]:
        assert sum(other < start <= end for other, end in spans) <= 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"preset": "gpt"}, "preset: 'gpt'"),
        ({"sessions": 0}, "sessions: 0"),
        ({"sessions": 10**9}, "sessions: 1000000000"),
        ({"live": 0}, "live: 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        generate(**(SMALL | arguments))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"max_turns": 0}, "max_turns: 0"),
        ({"max_think_s": float("nan")}, "max_think_s: nan"),
        ({"max_think_s": float("inf")}, "max_think_s: inf"),
        ({"max_input_tokens": -5}, "max_input_tokens: -5"),
        ({"min_turns": 9, "max_turns": 3}, "min_turns: 9"),
    ],
)
def test_limits_are_checked(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Limits(**arguments)
