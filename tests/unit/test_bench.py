"""Each benchmark runs in a tiny configuration and returns numbers that make sense. Its speed is not tested here."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from typing import TYPE_CHECKING

import pytest

from bench import admit, admit_stream, blocks, grpc_path, memory, route, timing, turn
from bench.__main__ import BENCHMARKS, main
from bench.report import Row, as_json, machine, table
from bench.world import Mesh, MeshSize

if TYPE_CHECKING:
    from collections.abc import Callable

TINY = MeshSize(decoders=2, capacity_tokens=4_800, prefix_blocks=60, shared_blocks=10, append_blocks=5)
TINY_RUNS: dict[str, Callable[[], list[Row]]] = {
    "route": lambda: route.measure(route.Size(mesh=TINY, decoders=(2, 8), calls=5, rounds=2, oracle_calls=2)),
    "turn": lambda: turn.measure(turn.Size(mesh=TINY, prompt_tokens=1_300, append_tokens=130, calls=4, rounds=2)),
    "blocks": lambda: blocks.measure(blocks.Size(prompt_tokens=2_400, append_tokens=240, resident_blocks=100, calls=2, rounds=2)),
    "admit": lambda: admit.measure(admit.Size(prompt_tokens=2_400, append_tokens=240, capacity_tokens=9_600, calls=2, rounds=2)),
    "grpc": lambda: grpc_path.measure(grpc_path.Size(prefix_blocks=(0, 20), capacity_tokens=9_600, calls=3, rounds=2)),
    "stream": lambda: admit_stream.measure(
        admit_stream.Size(agents=1, inflight=2, questions=20, rounds=1, work_us=10.0, engine_s=0.001, idle_s=0.6)
    ),
    "memory": lambda: memory.measure(
        memory.Size(
            sessions=(1_000, 2_000),
            blocks=1_000,
            shared_blocks=100,
            turns=2,
            entries=20_000,
            decoders=2,
            capacity_tokens=48_000,
            served=20,
            prompts=6,
        )
    ),
}


@cache
def tiny_run(name: str) -> list[Row]:
    return TINY_RUNS[name]()


def test_every_benchmark_has_a_tiny_run() -> None:
    assert TINY_RUNS.keys() == BENCHMARKS.keys()


@pytest.mark.parametrize("name", TINY_RUNS)
def test_a_benchmark_returns_numbers_that_make_sense(name: str) -> None:
    rows = tiny_run(name)
    assert rows
    assert len({row.what for row in rows}) == len(rows)
    for row in rows:
        assert row.benchmark == name
        assert math.isfinite(row.value)
        assert row.value > 0 or row.bar == 0
        assert row.unit
        if row.baseline is not None:
            assert row.baseline > 0
            assert row.baseline_name
        json.dumps(as_json(row), allow_nan=False)
    assert any(row.baseline is not None for row in rows)


def test_route_is_judged_at_8_and_64_workers() -> None:
    rows = tiny_run("route")
    judged = [row.what for row in rows if row.bar is not None]
    assert judged == ["|D| = 8, returning, p99", "|D| = 8, scattered, p99"]
    assert route.BARS_US == {8: 100.0, 64: 300.0}


def test_memory_is_judged_by_what_does_not_depend_on_size() -> None:
    rows = {row.what.strip(): row for row in tiny_run("memory")}
    assert rows["of those held, not the most recently updated"].verdict == "pass"
    bounds = [row for what, row in rows.items() if what.startswith("most resident")]
    assert [row.verdict for row in bounds] == ["pass", "pass"]
    plain = rows["2,000 sessions of 1,000 blocks, none shared"]
    assert 7 < plain.value < 16


def test_a_memory_case_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"memory case forest .* exited with 1: [^$]*unexpected keyword argument 'bogus'"):
        memory.case("forest", bogus=1)


def test_the_pools_of_the_measured_mesh_are_full() -> None:
    mesh = Mesh(TINY, random.Random(1))
    mesh.add_sessions()
    mesh.fill()
    assert [len(worker.resident) for worker in mesh.sigma.decode_workers()] == [TINY.pool_blocks] * TINY.decoders
    mesh.sigma.check_integrity()


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (timing.percentile(values, 50), timing.percentile(values, 99), timing.percentile([3.0], 99)) == (50.0, 99.0, 3.0)


def test_calls_are_prepared_one_by_one_and_batches_divided() -> None:
    prepared: list[int] = []
    done: list[int] = []

    def prepare(index: int) -> Callable[[], object]:
        prepared.append(index)
        return lambda: done.append(index)

    result = timing.time_calls(prepare, calls=3, rounds=2)
    assert prepared[:3] == [0, 1, 2]  # to warm up
    assert list(dict.fromkeys(prepared[3:])) == [0, 1, 2, 3, 4, 5]  # one comes twice after a sleep
    assert done == prepared
    assert 0 < result.p50_us <= result.p99_us
    counted: list[None] = []
    timing.time_calls(timing.always(timing.repeated(lambda: counted.append(None), 10)), calls=1, rounds=1, batch=10)
    assert len(counted) >= 20
    assert len(counted) % 10 == 0


def row(**fields: object) -> Row:
    values: dict[str, object] = {"benchmark": "b", "what": "w", "value": 2.0, "unit": "µs"} | fields
    return Row(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (row(), ""),
        (row(bar=2.0), "pass"),
        (row(bar=1.9), "MISS"),
        (row(bar=1.9, cpu=1.9), "pass (cpu)"),
        (row(bar=1.9, cpu=2.0), "MISS"),
        (row(value=0.0, bar=0.0), "pass"),
    ],
)
def test_a_bar_is_the_most_that_passes(one: Row, verdict: str) -> None:
    assert one.verdict == verdict


def test_the_table_shows_ratio_and_verdict() -> None:
    text = table([row(bar=3.0, baseline=400.0, baseline_name="slow way"), row(what="other", value=1234.5)])
    head, first, second = text.splitlines()
    assert head.split() == ["benchmark", "what", "measured", "bar", "verdict", "ratio", "to", "remarks"]
    assert first.split() == ["b", "w", "2", "µs", "3", "µs", "pass", "1/200", "slow", "way", "(400", "µs)"]
    assert second.split() == ["other", "1,234", "µs"]


def test_a_missed_bar_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["good"], {"good": lambda: [row(bar=3.0)], "bad": lambda: [row(what="slow", bar=1.0)]}) == 0
    assert "1 of 1 bars met" in capsys.readouterr().out
    assert main([], {"good": lambda: [row(bar=3.0)], "bad": lambda: [row(what="slow", bar=1.0)]}) == 1
    out = capsys.readouterr().out
    assert "1 of 2 bars met" in out
    assert "missed: b, slow" in out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"], {"good": lambda: [row(bar=3.0, baseline=4.0, baseline_name="x")]}) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["passed"] is True
    assert printed["rows"][0]["ratio"] == 0.5
    assert printed["rows"][0]["verdict"] == "pass"
    assert printed["machine"].keys() == machine().keys()


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["nonsense"])
    assert stop.value.code == 2
    assert "no such benchmark: nonsense (there are route, turn, blocks, admit, grpc, stream, memory)" in capsys.readouterr().err
