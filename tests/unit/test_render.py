"""What a person sees: a bar on a terminal, plain lines elsewhere, one table by mode."""

from __future__ import annotations

import io
import math
from collections import Counter
from dataclasses import replace

from rich.console import Console

from kvc.evaluation.render import ProgressView, facts, mode_table
from kvc.evaluation.replay import Progress
from kvc.evaluation.stats import PoolUse, summarise
from tests.support.records import FAILED, RECORD


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140, color_system=None)


def test_plain_progress_is_a_line_at_each_tenth() -> None:
    out = console(terminal=False)
    with ProgressView(out, "kvc") as view:
        for done in range(101):
            view(Progress(total=100, sessions=4, done=done, modes=Counter(direct=done), live=2, elapsed_s=done / 2))
    lines = shown(out).splitlines()
    assert len(lines) == 11
    assert lines[0] == "kvc: 0/100 requests, 0 s, 2 sessions live"
    assert lines[5] == "kvc: 50/100 requests, 25 s, direct 50, 2 sessions live"
    assert not any("\x1b" in line for line in lines)


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = console(terminal=True)
    with ProgressView(out, "kvc") as view:
        view(Progress(total=100, sessions=4, done=40, failed=1, wrong=2, modes=Counter(direct=39)))
    assert "40/100" in shown(out)
    assert "failed 1, wrong 2" in shown(out)


def test_the_table_has_modes_and_the_baseline() -> None:
    pools = [PoolUse("d0", 92_104, 90_000, 4_000), PoolUse("d1", 92_104, 50_000, 0)]
    summary = summarise([RECORD] * 9 + [replace(RECORD, mode="seed", ttft_s=1.25, cached_tokens=0)], wall_s=61.2, pools=pools)
    baseline = summarise([replace(RECORD, mode="fallback", ttft_s=1.5)] * 9 + [FAILED], wall_s=70.0)
    out = console(terminal=False)
    out.print(mode_table(summary, baseline))
    out.print(*facts(summary), sep="\n")
    text = shown(out)
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "90.0%" in rows["direct"]
    assert "0.042 s" in rows["direct"]
    assert "1.250 s" in rows["seed"]
    assert "-" in rows["reseed"]
    assert "81.0%" in rows["all, kvc"]
    assert "1.500 s" in rows["all, round robin"]
    assert "never" in rows["all, round robin"]
    assert "K_d 92,104 tokens on each of 2 decode workers; peak KV use 90,000 (97.7%); evicted 4,000 tokens" in text
    assert "failed 0, wrong 0; probes 10; 61 s" in text


def test_an_empty_run_renders() -> None:
    out = console(terminal=False)
    summary = summarise([], wall_s=0.0)
    out.print(mode_table(summary))
    assert math.isnan(summary.ttft_s.p50)
    assert "kvc: 0 requests" in shown(out)
    assert len(facts(summary)) == 2
