"""Which requests are replayed: the same for every policy, every cut counted."""

from __future__ import annotations

from typing import Any

import pytest

from kvc.evaluation.demo import demo_workload
from kvc.evaluation.trace_files import load_trace
from kvc.evaluation.workload import ReplayOptions, select, think_s
from tests.support.traces import real_trace, request, trace_of


def test_everything_by_default() -> None:
    trace = trace_of(request("a", 0, 100, at_s=5.0), request("b", 0, 50, at_s=7.0), request("a", 1, 120, at_s=9.0))
    work = select(trace, ReplayOptions())
    assert [(plan.session_id, plan.start_s, len(plan.turns)) for plan in work.sessions] == [("a", 0.0, 2), ("b", 2.0, 1)]
    assert (work.requests, work.too_long, work.beyond_limit, work.shortened, work.longest_tokens) == (3, 0, 0, 0, 130)


def test_long_prompts_are_left_out_and_counted() -> None:
    trace = trace_of(*(request("a", k, n, at_s=k) for k, n in enumerate((100, 900, 300))), request("b", 0, 1000, at_s=4))
    work = select(trace, ReplayOptions(max_input_tokens=300))
    assert [turn.request_id for plan in work.sessions for turn in plan.turns] == ["a.0", "a.2"]
    assert work.too_long == 2
    with pytest.raises(ValueError, match="max_input_tokens: no request"):
        select(trace, ReplayOptions(max_input_tokens=99))


def test_replies_are_shortened_and_never_empty() -> None:
    trace = trace_of(request("a", 0, 100, output=0), request("a", 1, 200, output=70, at_s=1), request("a", 2, 300, output=50, at_s=2))
    work = select(trace, ReplayOptions(max_output_tokens=50))
    assert [turn.output_tokens for turn in work.sessions[0].turns] == [1, 50, 50]
    assert work.shortened == 1
    assert work.longest_tokens == 350


def session(name: str, turns: int, period_s: float, start_s: float) -> list[Any]:
    return [request(name, k, 100 + k, at_s=start_s + k * period_s) for k in range(turns)]


def test_a_limit_takes_the_first_requests_by_time() -> None:
    trace = trace_of(*session("a", 10, 1.0, 0.0), *session("b", 10, 3.0, 0.5), *session("c", 10, 1.0, 100.0))
    work = select(trace, ReplayOptions(limit=8))
    assert {plan.session_id: len(plan.turns) for plan in work.sessions} == {"a": 6, "b": 2}
    assert work.beyond_limit == 22


def test_a_limit_with_live_sessions_follows_their_pace() -> None:
    """Two live: c starts when the short a ends, though its own timestamp is far away."""
    trace = trace_of(*session("a", 3, 1.0, 0.0), *session("b", 50, 2.0, 0.5), *session("c", 10, 1.0, 100.0))
    work = select(trace, ReplayOptions(limit=9, live_sessions=2))
    assert {plan.session_id: len(plan.turns) for plan in work.sessions} == {"a": 3, "b": 3, "c": 3}


def test_a_limit_beyond_the_trace_is_no_limit() -> None:
    trace = trace_of(*session("a", 3, 1.0, 0.0))
    assert select(trace, ReplayOptions(limit=99, live_sessions=5)).requests == 3


def test_pauses_are_measured_or_what_timestamps_leave() -> None:
    options = ReplayOptions()
    before = request("a", 0, 100, at_s=10.0)
    measured = request("a", 1, 200, at_s=99.0, think_s=4.0)
    derived = request("a", 1, 200, at_s=18.0)
    assert think_s(None, measured, 0.0, options) == 0.0
    assert think_s(before, measured, 3.0, options) == 4.0
    assert think_s(before, derived, 3.0, options) == 5.0
    assert think_s(before, derived, 30.0, options) == 0.0
    assert think_s(before, measured, 3.0, ReplayOptions(max_think_s=1.5)) == 1.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", 0),
        ("live_sessions", -1),
        ("max_input_tokens", 0),
        ("max_output_tokens", 0),
        ("time_scale", 0.0),
        ("time_scale", float("nan")),
        ("time_scale", float("inf")),
        ("max_think_s", -1.0),
        ("max_think_s", float("nan")),
        ("outputs", "both"),
    ],
)
def test_options_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        ReplayOptions(**{name: value})


def test_the_demonstration_is_what_it_says() -> None:
    demo = demo_workload()
    work = select(demo.trace, demo.options)
    assert (len(work.sessions), work.requests, work.too_long) == (18, 334, 0)
    assert max(turn.input_tokens for plan in work.sessions for turn in plan.turns) <= 80_000
    assert work.longest_tokens <= 0.95 * demo.capacity_tokens
    assert demo.options.time_scale <= 20
    # More history than three pools hold: something has to be evicted.
    assert sum(max(turn.input_tokens for turn in plan.turns) for plan in work.sessions) > 1.5 * 3 * demo.capacity_tokens


def test_a_limited_real_replay_keeps_its_sessions_live() -> None:
    trace = load_trace(real_trace("weka_sharedtools12439.kvt.jsonl.gz"))
    work = select(trace, ReplayOptions(limit=400, live_sessions=8))
    assert work.requests == 400
    assert len(work.sessions) >= 8
