"""What the commands show and say: tables that fit, errors in one line. The commands themselves: integration/test_cli."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from kvc.errors import Unavailable
from kvc.evaluation.render import mode_table
from kvc.evaluation.stats import summarise
from kvc.v1 import router_pb2, types_pb2
from services.local_mesh import foreground
from services.local_mesh.processes import _readable
from services.local_mesh.replay import complaints
from services.local_mesh.topology import Topology
from services.local_mesh.views import candidates_table, fitted, session_lines, workers_table
from tests.support.records import FAILED, RECORD

AWAY = "unhealthy: engine: cannot connect to /run/d1.sock: connection refused"


def shown(table: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def status(name: str, why_not: str = "", **turns: int) -> router_pb2.WorkerStatus:
    facts = types_pb2.Facts(capacity_tokens=92_096, held_tokens=41_234, reserved_tokens=20_000, evictable_tokens=23_456)
    modes = [router_pb2.ModeCount(mode=types_pb2.Mode.Value(f"MODE_{mode.upper()}"), turns=count) for mode, count in turns.items()]
    return router_pb2.WorkerStatus(
        info=types_pb2.WorkerInfo(worker=types_pb2.WorkerRef(worker_id=name, epoch=1), role=types_pb2.ROLE_DECODE, capacity_tokens=92_096),
        load=types_pb2.WorkerLoad(facts=facts, sessions=12, evicted_tokens=1_234_567),
        eligible=not why_not,
        why_not=why_not,
        inflight=3,
        modes=modes,
    )


LISTED = router_pb2.ListWorkersResponse(workers=[status("d0", direct=88, seed=9, reseed=3), status("d1", AWAY), status("d2", "draining")])


@pytest.mark.parametrize("width", [80, 110, 140])
def test_workers_fit_and_a_reason_stands_below(width: int) -> None:
    lines = shown(workers_table(LISTED, "1P3D on 127.0.0.1:5820", width=width), width)
    assert lines[0].startswith("1P3D on 127.0.0.1:5820")
    assert "…" not in "".join(lines[:5])
    rows = [line.split() for line in lines[2:5]]
    assert [row[:3] for row in rows] == [["d0", "decode", "ready"], ["d1", "decode", "unhealthy"], ["d2", "decode", "draining"]]
    assert all("92%" in row and "1,234,567" in row for row in rows)
    assert " ".join(lines[5:]).startswith(f"d1: {AWAY}")


def test_shares_of_modes() -> None:
    assert shown(workers_table(LISTED, width=140), 140)[1].split()[-4:] == ["88%", "9%", "3%", "0%"]
    narrow = shown(workers_table(LISTED, width=80), 80)
    assert narrow[0] == "modes: direct/seed/reseed/fallback"
    assert [line.split()[-1] for line in narrow[2:5]] == ["88/9/3/0", "-/-/-/-", "-/-/-/-"]


@pytest.mark.parametrize("width", [80, 110])
def test_candidates_fit(width: int) -> None:
    worker = types_pb2.WorkerRef(worker_id="d0", epoch=7)
    chosen = router_pb2.Candidate(
        worker=worker, overlap_blocks=33, resident_blocks=40, sticky=True, assigned=4, score=(34, 1, -0.0013138464, -4)
    )
    excluded = router_pb2.Candidate(worker=types_pb2.WorkerRef(worker_id="d1"), excluded="draining", score=(0, 0, 0, 0))
    response = router_pb2.RouteResponse(worker=worker, candidates=[chosen, excluded], prompt_blocks=120, shared_blocks=3)
    title, _, first, second = shown(candidates_table(response, width=width), width)[:4]
    assert title == "120 blocks in the prompt, 3 of them shared by many sessions"
    assert first.split()[:3] == ["d0", "33", "40"]
    assert first.endswith("(34, 1, -0.00131, -4) chosen")
    assert "drain" in second


@pytest.mark.parametrize("width", [80, 110])
def test_results_fit(width: int) -> None:
    records = [replace(RECORD, cached_tokens=30_000)] * 300
    lines = shown(fitted(mode_table(summarise(records, wall_s=1.0), summarise([RECORD], wall_s=1.0)), width), width)
    assert "…" not in "".join(lines)
    assert any("direct" in line and "9,000,000" in line for line in lines)


def test_a_session_in_words() -> None:
    known = router_pb2.RouterServiceGetSessionStatusResponse(
        known=True,
        pin=types_pb2.WorkerRef(worker_id="d0"),
        turns=3,
        context_tokens=12_345,
        busy=True,
        residency=[router_pb2.SessionOverlap(worker_id="d0", resident_blocks=1_514), router_pb2.SessionOverlap(worker_id="d1")],
        rejects=[router_pb2.SessionRejects(worker_id="d1", rejects=2)],
    )
    assert session_lines("s", known) == [
        "s: pinned to d0; 3 turns, 12,345 tokens, a turn in flight",
        "  d0: 1,514 blocks resident",
        "  d1: 2 refusals since the last success",
    ]
    seen_once = router_pb2.RouterServiceGetSessionStatusResponse(known=True, turns=1, context_tokens=19)
    assert session_lines("s", seen_once) == ["s: pinned to no worker; 1 turn, 19 tokens", "  no whole block is resident anywhere"]
    assert session_lines("s", router_pb2.RouterServiceGetSessionStatusResponse()) == ["s: not known to this router"]


def test_what_went_wrong_is_told_by_kind() -> None:
    failed = [replace(FAILED, error=f"E{index % 7}: no") for index in range(20)]
    lines = complaints([RECORD, replace(RECORD, wrong=True), *failed, *[replace(FAILED, error="E0: no")] * 9])
    assert lines[0] == "12 requests: E0: no"
    assert len(lines) == 6
    assert lines[-1] == "3 more kinds of errors"
    assert complaints([RECORD]) == []
    assert complaints([replace(RECORD, wrong=True)]) == ["1 requests: wrong reply"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"event": "agent_lost", "problem": "x", "ts": "now"}', "agent_lost"),
        ('{"event": "service_failed", "reason": "R", "message": "m"}', "service_failed: R: m"),
        ('{"event": "service_failed", "exception": "Traceback\\n  File\\nTypeError: no"}', "service_failed: TypeError: no"),
        ("kvc router: server.port: taken", "kvc router: server.port: taken"),
        ("[1]", "[1]"),
    ],
)
def test_a_log_line_in_words(line: str, words: str) -> None:
    assert _readable(line) == words


def test_topologies() -> None:
    assert Topology.parse(" 1p3d ") == Topology(1, 3)
    assert str(Topology(0, 4)) == "0P4D"
    assert Topology(1, 2).workers() == [("p0", "prefill"), ("d0", "decode"), ("d1", "decode")]


def test_a_signal_cancels_the_work_and_waits_for_it() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    with pytest.raises(foreground.Interrupted, match="SIGTERM"):
        foreground.run(work())
    assert cleaned == ["yes"]


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (foreground.Interrupted(signal.SIGINT), 130, "kvc x: stopped by SIGINT\n"),
        (KeyboardInterrupt(), 130, "kvc x: stopped\n"),
        (Unavailable("nobody"), 1, "kvc x: nobody\n"),
        (BaseExceptionGroup("several", [ExceptionGroup("inner", [Unavailable("deep")])]), 1, "kvc x: deep\n"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(error: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise error

    assert foreground.guarded("kvc x", command) == status
    assert capsys.readouterr().err == told


def test_a_fault_of_the_program_is_not_hidden() -> None:
    def command() -> int:
        raise ExceptionGroup("several", [ZeroDivisionError()])

    with pytest.raises(ExceptionGroup):
        foreground.guarded("kvc x", command)
