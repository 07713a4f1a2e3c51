"""The replay: closed loop, real replies in the next prompt, every reply checked, nothing lost when something fails."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvc.errors import DeadlineExceeded, Exhausted
from kvc.evaluation.generator import Limits, generate
from kvc.evaluation.ports import TurnResult
from kvc.evaluation.records import RunFiles
from kvc.evaluation.replay import Progress, replay
from kvc.evaluation.trace_files import load_trace
from kvc.evaluation.verify import KvValueVerifier
from kvc.evaluation.workload import ReplayOptions
from tests.support.fake_mesh import FakeMesh
from tests.support.traces import real_trace, request, trace_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvc.evaluation.records import Record
    from kvc.evaluation.traces import Trace

FAST = ReplayOptions(time_scale=1e6)


def chat(name: str, turns: int, *, think_s: float = 0.0, at_s: float = 0.0) -> Trace:
    """A session that grows by 50 tokens a turn, 10 of them the reply."""
    base = sum(name.encode()) * 1000
    return trace_of(
        *(
            request(name, k, 100 + 50 * k, (base, (100 + 50 * k) // 24), at_s=at_s + k * (think_s + 1), think_s=think_s)
            for k in range(turns)
        )
    )


def merged(*traces: Trace) -> Trace:
    return trace_of(*(one for trace in traces for one in trace.requests))


async def test_appends_carry_the_replies_and_everything_is_right() -> None:
    mesh = FakeMesh()
    trace = generate("claude-code", seed=1, sessions=5, limits=Limits(max_turns=12, max_input_tokens=40_000))
    run = await replay(trace, mesh, FAST, verifier=KvValueVerifier("m"))
    summary = run.summary()
    assert (summary.requests, summary.failed, summary.wrong) == (len(trace.requests), 0, 0)
    assert summary.by_mode["direct"].requests > 0.7 * summary.requests
    direct = [record for record in run.records if record.mode == "direct"]
    assert all(record.cached_tokens == record.input_tokens - record.append_tokens for record in direct)
    assert {one.session_id for one in mesh.asked if one.last} == set(trace.sessions())


async def test_a_wrong_reply_is_seen_and_the_session_goes_on() -> None:
    mesh = FakeMesh()
    trace = chat("a", 5)
    first = await replay(trace, mesh, FAST, verifier=KvValueVerifier("m"))
    assert first.summary().wrong == 0
    second = FakeMesh()
    second.answers["a.2"] = mesh.wrong(mesh.asked[2].prompt, 10)
    run = await replay(trace, second, FAST, verifier=KvValueVerifier("m"))
    assert [record.wrong for record in run.records] == [False, False, True, False, False]
    assert run.summary().wrong == 1


@pytest.mark.parametrize("change", ["short", "long", "empty"])
async def test_a_reply_of_the_wrong_length_is_wrong(change: str) -> None:
    mesh = FakeMesh()
    await replay(chat("a", 1), mesh, FAST)
    right = mesh.right(mesh.asked[0].prompt, 10)
    output = {"short": right[:-4], "long": right + right[:4], "empty": b""}[change]
    run = await replay(
        chat("a", 1), FakeMesh(answers={"a.0": TurnResult(ok=True, mode="seed", output=output)}), FAST, verifier=KvValueVerifier("m")
    )
    assert run.summary().wrong == 1


async def test_a_prompt_cut_by_the_engine_is_wrong() -> None:
    mesh = FakeMesh()
    await replay(chat("a", 1), mesh, FAST)
    cut = TurnResult(ok=True, mode="seed", output=mesh.right(mesh.asked[0].prompt, 10), prompt_tokens=99)
    for tokens, wrong in ((99, 1), (100, 0), (0, 0)):
        answers: dict[str, TurnResult | BaseException] = {"a.0": replace(cut, prompt_tokens=tokens)}
        run = await replay(chat("a", 1), FakeMesh(answers=answers), FAST, verifier=KvValueVerifier("m"))
        assert run.summary().wrong == wrong


async def test_failed_turns_are_counted_and_the_session_goes_on() -> None:
    failed: dict[str, TurnResult | BaseException] = {
        "a.1": Exhausted("no room", retry_after_s=2.0),
        "a.2": TurnResult(ok=False, error="UNAVAILABLE: d0 died", mode="direct"),
        "a.4": DeadlineExceeded("late"),
    }
    mesh = FakeMesh(answers=failed)
    run = await replay(chat("a", 6), mesh, FAST, verifier=KvValueVerifier("m"))
    assert [record.ok for record in run.records] == [True, False, False, True, False, True]
    assert run.records[1].error == "EXHAUSTED: no room"
    assert run.records[2].error == "UNAVAILABLE: d0 died"
    summary = run.summary()
    assert (summary.failed, summary.wrong) == (3, 0)
    # A turn after a failed one repeats the failed prompt and goes on without a reply.
    assert mesh.asked[2].prompt.startswith(mesh.asked[1].prompt)


async def test_sessions_are_live_n_at_a_time() -> None:
    trace = merged(*(chat(f"s{k}", 3, at_s=k) for k in range(7)))
    mesh = FakeMesh(delay_s=0.002)
    run = await replay(trace, mesh, ReplayOptions(live_sessions=3, time_scale=1e6))
    assert mesh.most_live == 3
    assert len(run.records) == 21
    order = [one.session_id for one in mesh.asked]
    for name in {one.session_id for one in mesh.asked}:
        turns = [one.request_id for one in mesh.asked if one.session_id == name]
        assert turns == [f"{name}.{k}" for k in range(3)]
    assert order[:3] == ["s0", "s1", "s2"]


async def test_sessions_start_at_their_timestamps_without_a_cap() -> None:
    trace = merged(chat("a", 1, at_s=50.0), chat("b", 1, at_s=90.0))
    mesh = FakeMesh()
    began = asyncio.get_running_loop().time()
    await replay(trace, mesh, ReplayOptions(time_scale=1000.0))
    assert [one.session_id for one in mesh.asked] == ["a", "b"]
    assert mesh.asked[1].at_s - began >= 0.04 - 1e-3


async def test_pauses_follow_the_reply_at_the_time_scale() -> None:
    mesh = FakeMesh()
    run = await replay(chat("a", 3, think_s=30.0), mesh, ReplayOptions(time_scale=1000.0))
    gaps = [after.at_s - before.at_s for before, after in zip(mesh.asked, mesh.asked[1:], strict=False)]
    assert min(gaps) >= 0.03 - 1e-3
    assert [record.think_s for record in run.records] == [0.0, 30.0, 30.0]


async def test_ttft_is_engine_plus_mesh_plus_scaled_queueing() -> None:
    answer = TurnResult(ok=True, mode="seed", ttft_s=1.0, latency_s=3.0, mesh_s=0.25, queued_s=0.5, output=b"")
    (record,) = (await replay(chat("a", 1), FakeMesh(answers={"a.0": answer}), ReplayOptions(time_scale=20.0))).records
    assert record.ttft_s == pytest.approx(1.0 + 0.25 + 0.5 * 20)
    assert record.latency_s == pytest.approx(3.0 + 0.25 + 0.5 * 20)
    assert (record.engine_ttft_s, record.mesh_s, record.queued_s) == (1.0, 0.25, 0.5)


async def test_progress_is_told() -> None:
    seen: list[tuple[int, int, int, int]] = []

    def watch(progress: Progress) -> None:
        seen.append((progress.done, progress.total, progress.failed, progress.ended))

    mesh = FakeMesh(answers={"a.1": Exhausted("no")})
    await replay(chat("a", 3), mesh, FAST, on_progress=watch)
    assert seen == [(0, 3, 0, 0), (1, 3, 0, 0), (2, 3, 1, 0), (3, 3, 1, 0), (3, 3, 1, 1)]


async def test_a_bug_in_the_client_ends_the_replay() -> None:
    """Only errors of the mesh count as failed turns; anything else must not be mistaken for one."""
    mesh = FakeMesh(answers={"a.1": ZeroDivisionError("bug")}, delay_s=0.001)
    with pytest.RaisesGroup(ZeroDivisionError):
        await replay(merged(chat("a", 3), chat("b", 500)), mesh, FAST)
    assert mesh.live == 0


async def test_a_cancelled_replay_leaves_no_turn_behind() -> None:
    mesh = FakeMesh(delay_s=30.0)
    task = asyncio.create_task(replay(merged(chat("a", 3), chat("b", 3)), mesh, FAST))
    while mesh.live < 2:  # noqa: ASYNC110 - the fake has no event to wait for
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mesh.live == 0


async def test_the_files_of_a_run(tmp_path: Path) -> None:
    trace = chat("a", 3)
    options = ReplayOptions(time_scale=1e6, limit=2)
    folder = tmp_path / "runs" / "one"
    with RunFiles(folder, trace, options, policy="kvc") as files:
        run = await replay(trace, FakeMesh(), options, verifier=KvValueVerifier("m"), on_record=files.record)
        files.finish(run.summary(), run.workload)
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["trace_sha256"], meta["policy"], meta["options"]["limit"]) == (trace.sha256, "kvc", 2)
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["a.0", "a.1"]
    assert lines[1] | {"wall_s": 0, "started_s": 0} == {
        "request_id": "a.1",
        "session_id": "a",
        "turn": 1,
        "request_type": "",
        "input_tokens": 150,
        "append_tokens": 40,
        "asked_tokens": 10,
        "received_tokens": 10,
        "ok": True,
        "wrong": False,
        "error": "",
        "finish_reason": "length",
        "mode": "direct",
        "worker": "d0",
        "executor": "local",
        "cached_tokens": 110,
        "engine_ttft_s": 0.05,
        "mesh_s": 0.001,
        "queued_s": 0.0,
        "ttft_s": 0.051,
        "engine_latency_s": 0.5,
        "latency_s": 0.501,
        "probes": 1,
        "think_s": 0.0,
        "started_s": 0,
        "wall_s": 0,
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["requests"], summary["sessions"]) == (2, 1)
    assert summary["left_out"] == {"too_long": 0, "beyond_limit": 1, "shortened": 0}


async def test_a_run_that_breaks_off_leaves_its_requests_but_no_summary(tmp_path: Path) -> None:
    trace = chat("a", 3)
    (tmp_path / "summary.json").write_text("of an earlier run")
    seen: list[Record] = []
    mesh = FakeMesh(answers={"a.2": ZeroDivisionError("bug")})
    with pytest.RaisesGroup(ZeroDivisionError), RunFiles(tmp_path, trace, FAST) as files:

        def keep(record: Record) -> None:
            files.record(record)
            seen.append(record)

        await replay(trace, mesh, FAST, on_record=keep)
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == len(seen) == 2
    assert not (tmp_path / "summary.json").exists()


async def test_a_real_trace_replays_right() -> None:
    trace = load_trace(real_trace("weka_sharedtools12439.kvt.jsonl.gz"))
    options = ReplayOptions(limit=200, live_sessions=8, time_scale=1e6, max_output_tokens=200)
    summary = (await replay(trace, FakeMesh(), options, verifier=KvValueVerifier("m"))).summary()
    assert (summary.requests, summary.failed, summary.wrong) == (200, 0, 0)
    assert summary.direct_share > 0.7
