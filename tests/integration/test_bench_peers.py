"""The benchmark beside peer routers as its users run it, cut short: rows, byte identity, the page, and nothing left running."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.peers import page
from bench.peers.rig import Row
from tests.support.commands import ENVIRONMENT, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "KVC_TEST_RUN"
SCENARIOS = ("hot", "short", "paced", "latency")
COMMAND = [sys.executable, "-m", "bench.peers", "--rounds", "1", "--at-most", "0.3", "--peers", "none", "--only", "direct|kvc off"]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """An environment by which all processes of a run are known; none may be left."""
    run = uuid.uuid4().hex
    yield ENVIRONMENT | {MARK: run}
    assert not _marked(run)


def _marked(run: str) -> list[str]:
    """Command lines of the processes that have the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={run}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended meanwhile, or is somebody else's
    return found


def test_a_short_run_has_rows_and_the_engines_bytes(environment: dict[str, str], tmp_path: Path) -> None:
    file, out = tmp_path / "page.md", tmp_path / "rows.jsonl"
    file.write_text(f"# Page\n\n{page.BEGIN}\n{page.END}\n")
    argv = [*COMMAND, "--scenario", *SCENARIOS, "--report-only", "--store", str(file), "--out", str(out)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=90)
    assert done.returncode == 0, done.stderr
    rows = [msgspec.json.decode(line, type=Row) for line in out.read_text().splitlines()]
    assert sorted((row.scenario, row.system) for row in rows) == sorted((s, n) for s in SCENARIOS for n in ("direct", "kvc off"))
    for row in rows:
        assert not row.seen.errors
        assert row.seen.requests > 0
        assert row.seen.chunks >= row.seen.requests
        assert 0 < row.seen.first_us.p10 <= row.seen.end_us.p99
        assert row.engine_cpu_s > 0
        assert (row.cpu_s > 0) == (row.resident_mib > 0) == (row.system == "kvc off")
    paced = next(row for row in rows if row.scenario == "paced" and row.system == "kvc off")
    assert paced.seen.chunks == 30 * paced.seen.requests == 30 * 48
    assert "| kvc off | 144 | 1," in done.stdout
    assert "| none |" in done.stdout
    assert done.stdout.strip() in file.read_text()
    assert "wrong:" not in done.stderr
    assert "missed: kvc off, CPU µs/request: not measured" in done.stderr  # no peer, no ratio


def test_a_run_that_is_stopped_leaves_nothing(environment: dict[str, str]) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if line.startswith(("comparing", "bench.peers")))
            assert said == "comparing replies: kvc off ...\n"
            assert any("services.cli router" in line for line in _marked(environment[MARK]))
        finally:
            process.terminate()
        assert process.wait(30) == 143


def test_a_system_that_does_not_start_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench.peers.mesh", "--port", "0", "--engines", "1", "--", "--no-such-flag"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert "no-such-flag" in done.stderr
