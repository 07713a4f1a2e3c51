"""Numbers of a run: nearest-rank percentiles with failures as infinity, shares, the JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from kvc.evaluation.stats import PoolUse, percentile, percentiles, summarise
from tests.support.records import FAILED, RECORD


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 1), (1, 1), (25, 1), (26, 2), (50, 2), (51, 3), (75, 3), (76, 4), (99, 4), (100, 4)],
)
def test_percentiles_are_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], percent) == expected


def test_percentiles_of_nothing_and_of_one() -> None:
    assert math.isnan(percentile([], 50))
    assert percentiles([]).to_json() == {"p50": None, "p90": None, "p99": None}
    assert percentiles([0.5]).to_json() == {"p50": 0.5, "p90": 0.5, "p99": 0.5}


def test_order_does_not_matter() -> None:
    values = [float(k) for k in range(1, 1001)]
    assert percentiles(reversed(values)) == percentiles(values)
    assert (percentiles(values).p50, percentiles(values).p90, percentiles(values).p99) == (500, 900, 990)


def test_a_failed_request_never_answers() -> None:
    """Failing fast must not improve a percentile: 2 % of failures push p99 to infinity, which is null in JSON."""
    summary = summarise([RECORD] * 98 + [FAILED] * 2, wall_s=1.0)
    assert summary.ttft_s.p90 == 0.042
    assert summary.ttft_s.p99 == math.inf
    assert summary.to_json()["ttft_s"] == {"p50": 0.042, "p90": 0.042, "p99": None}
    assert (summary.failed, summary.direct_share) == (2, 0.98)


def test_a_failed_turn_counts_in_its_mode_but_not_in_its_share() -> None:
    summary = summarise([RECORD, replace(FAILED, mode="direct")], wall_s=1.0)
    assert summary.by_mode["direct"].requests == 2
    assert summary.by_mode["direct"].ttft_s.p99 == math.inf
    assert summary.direct_share == 0.5


def test_the_json_object() -> None:
    seed = replace(RECORD, mode="seed", cached_tokens=0, ttft_s=1.5, append_tokens=1000)
    records = [RECORD, RECORD, replace(RECORD, wrong=True), seed]
    pools = [PoolUse("d0", 1000, 950, 200), PoolUse("d1", 1000, 100, 0)]
    value = json.loads(json.dumps(summarise(records, wall_s=12.3456, pools=pools).to_json(), allow_nan=False))
    assert (value["requests"], value["failed"], value["wrong"], value["direct_share"]) == (4, 0, 1, 0.75)
    assert value["modes"] == {"direct": 3, "seed": 1, "reseed": 0, "fallback": 0}
    assert value["ttft_s"] == {"p50": 0.042, "p90": 1.5, "p99": 1.5}
    assert value["by_mode"]["reseed"] == {
        "requests": 0,
        "share": 0.0,
        "ttft_s": {"p50": None, "p90": None, "p99": None},
        "prompt_tokens": 0,
        "cached_tokens": 0,
    }
    assert (value["prompt_tokens"], value["cached_tokens"], value["cached_share"]) == (4000, 2700, 0.675)
    assert (value["capacity_tokens"], value["peak_kv_tokens"], value["peak_kv_share"], value["evicted_tokens"]) == (1000, 950, 0.95, 200)
    assert (value["probes"], value["output_tokens"], value["wall_s"]) == (4, 40, 12.346)
    assert "baseline" not in value


def test_a_baseline_is_an_object_of_the_same_shape() -> None:
    summary = summarise([RECORD], wall_s=1.0)
    baseline = summarise([replace(RECORD, mode="fallback")], wall_s=2.0)
    value = summary.to_json(baseline)
    assert value["baseline"] == baseline.to_json()
    assert value["baseline"].keys() == summary.to_json().keys()


def test_an_empty_run() -> None:
    value = summarise([], wall_s=0.0).to_json()
    assert (value["requests"], value["direct_share"], value["cached_share"], value["peak_kv_share"]) == (0, 0.0, 0.0, 0.0)
