"""What a person sees of a replay: live progress and a table by mode beside a baseline. Plain lines when nobody watches a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from kvc.evaluation.stats import MODES

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from kvc.evaluation.replay import Progress
    from kvc.evaluation.stats import ModeSummary, Percentiles, Summary

_PLAIN_STEPS = 10


class ProgressView:
    """Shows a replay's progress: a bar on a terminal, else a line at each tenth. A context manager; call it with a Progress."""

    def __init__(self, console: Console, label: str) -> None:
        """Shows nothing yet.

        Args:
            console: where to; standard error leaves standard output to results.
            label: what runs.
        """
        self._console = console
        self._label = label
        self._bar: Bar | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}"),
            )
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task(label, total=None, state="")
        self._shown = -1

    def __enter__(self) -> Self:
        """Starts the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Shows a state."""
        if self._bar is not None:
            self._bar.update(self._task, total=progress.total, completed=progress.done, state=_state(progress))
            return
        step = progress.done * _PLAIN_STEPS // max(1, progress.total)
        if step > self._shown:
            self._shown = step
            line = f"{self._label}: {progress.done}/{progress.total} requests, {progress.elapsed_s:.0f} s, {_state(progress)}"
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def mode_table(summary: Summary, baseline: Summary | None = None, *, name: str = "kvc", baseline_name: str = "round robin") -> Table:
    """Modes of a run, one row each, then all of it; the baseline's row last."""
    table = Table(title=f"{name}: {summary.requests} requests", title_justify="left")
    table.add_column("mode")
    for heading in ("requests", "share", "TTFT p50", "p90", "p99", "cached tokens", "of prompts"):
        table.add_column(heading, justify="right")
    for mode in MODES:
        table.add_row(mode, *_mode_cells(summary.by_mode[mode]))
    table.add_section()
    table.add_row(f"all, {name}", *_total_cells(summary))
    if baseline is not None:
        table.add_row(f"all, {baseline_name}", *_total_cells(baseline))
    return table


def facts(summary: Summary) -> list[str]:
    """Lines below the table: what was checked, what the mesh itself cost, how full the pools were."""
    mesh = summary.mesh_s
    lines = [
        f"failed {summary.failed}, wrong {summary.wrong}; probes {summary.probes}; {summary.wall_s:.0f} s on the wall clock",
        f"mesh's own time (measured, in TTFT): p50 {_ms(mesh.p50)}, p90 {_ms(mesh.p90)}, p99 {_ms(mesh.p99)}",
    ]
    if summary.pools:
        capacity = max(pool.capacity_tokens for pool in summary.pools)
        peak = max(pool.peak_tokens for pool in summary.pools)
        use = f"peak KV use {peak:,} ({summary.peak_kv_share:.1%})"
        lines.append(
            f"K_d {capacity:,} tokens on each of {len(summary.pools)} decode workers; {use}; evicted {summary.evicted_tokens:,} tokens"
        )
    return lines


def _state(progress: Progress) -> str:
    parts = [f"{mode} {progress.modes[mode]}" for mode in MODES if progress.modes[mode]]
    parts += [f"{progress.live} sessions live"] if progress.live else []
    parts += [f"failed {progress.failed}"] if progress.failed else []
    parts += [f"wrong {progress.wrong}"] if progress.wrong else []
    return ", ".join(parts) or "starting"


def _mode_cells(mode: ModeSummary) -> tuple[str, ...]:
    return (
        str(mode.requests),
        f"{mode.share:.1%}",
        *_times(mode.ttft_s),
        f"{mode.cached_tokens:,}",
        _part(mode.cached_tokens, mode.prompt_tokens),
    )


def _total_cells(summary: Summary) -> tuple[str, ...]:
    answered = (summary.requests - summary.failed) / summary.requests if summary.requests else 0.0
    cached = (f"{summary.cached_tokens:,}", _part(summary.cached_tokens, summary.prompt_tokens))
    return (str(summary.requests), f"{answered:.1%}", *_times(summary.ttft_s), *cached)


def _times(values: Percentiles) -> tuple[str, str, str]:
    return _seconds(values.p50), _seconds(values.p90), _seconds(values.p99)


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "never" if math.isinf(value) else f"{value:.3f} s"


def _ms(value: float) -> str:
    return f"{value * 1000:.2f} ms" if math.isfinite(value) else _seconds(value)


def _part(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
