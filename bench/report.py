"""What benchmarks hand over, and how it is printed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """One number.

    Attributes:
        benchmark: the benchmark that measured it.
        what: what was measured.
        value: the number.
        unit: of `value`, `bar`, `baseline` and `cpu`.
        bar: most that passes; None: the number is stated, not judged.
        baseline: measured in the same run, for the ratio; None without one.
        baseline_name: what the baseline is.
        cpu: the same number in CPU time of the thread: what it is without the time that other processes took.
        detail: what else to know.
    """

    benchmark: str
    what: str
    value: float
    unit: str
    bar: float | None = None
    baseline: float | None = None
    baseline_name: str = ""
    cpu: float | None = None
    detail: str = ""

    @property
    def ratio(self) -> float | None:
        """Value over baseline."""
        return self.value / self.baseline if self.baseline else None

    @property
    def verdict(self) -> str:
        """Empty without a bar; `pass (cpu)`: only the wait for a busy machine's CPU lifts the value above the bar."""
        if self.bar is None:
            return ""
        if self.value <= self.bar:
            return "pass"
        return "pass (cpu)" if self.cpu is not None and self.cpu <= self.bar else "MISS"


def as_json(row: Row) -> dict[str, object]:
    """A row as one JSON object."""
    return {
        "benchmark": row.benchmark,
        "what": row.what,
        "value": row.value,
        "unit": row.unit,
        "cpu": row.cpu,
        "bar": row.bar,
        "verdict": row.verdict,
        "baseline": row.baseline,
        "baseline_name": row.baseline_name,
        "ratio": row.ratio,
        "detail": row.detail,
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text, one line each under a head."""
    lines = [("benchmark", "what", "measured", "bar", "verdict", "ratio", "to", "remarks")]
    before = ""
    for row in rows:
        lines.append(
            (
                row.benchmark if row.benchmark != before else "",
                row.what,
                f"{_number(row.value)} {row.unit}",
                f"{_number(row.bar)} {row.unit}" if row.bar is not None else "",
                row.verdict,
                _ratio(row.ratio),
                f"{row.baseline_name} ({_number(row.baseline)} {row.unit})" if row.baseline is not None else "",
                row.detail,
            )
        )
        before = row.benchmark
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    numbers = (2, 3, 5)
    cells = (
        cell.rjust(width) if column in numbers else cell.ljust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"1/{1 / ratio:.0f}"
