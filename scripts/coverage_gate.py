"""Prints how much of kvc.core the tests reach and fails below the floor, for lines and for branches each.

Reads the data file that `pytest --cov` left. Exit code 1 when a share is below the floor or nothing was measured.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from pathlib import Path

import coverage

FLOOR_PERCENT = 95.0


def shares(totals: dict[str, int]) -> dict[str, float]:
    """Percent reached of lines and of branches, from the totals of coverage's JSON report."""
    return {
        "lines": _percent(totals["covered_lines"], totals["num_statements"]),
        "branches": _percent(totals["covered_branches"], totals["num_branches"]),
    }


def _percent(reached: int, total: int) -> float:
    return 100.0 * reached / total if total else 0.0


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="coverage_gate", description="Fails when the tests reach too little of kvc.core.")
    parser.add_argument("--floor", type=float, default=FLOOR_PERCENT, help="percent of lines, and of branches, that must be reached")
    floor = parser.parse_args().floor
    data = coverage.Coverage()
    data.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        try:
            data.json_report(outfile=str(report))
        except coverage.CoverageException as error:
            sys.stderr.write(f"coverage of kvc.core: {error}\n")
            return 1
        found = shares(json.loads(report.read_text())["totals"])
    missed = io.StringIO()
    data.report(file=missed)
    sys.stdout.write(missed.getvalue())
    for name, percent in found.items():
        sys.stdout.write(f"coverage of kvc.core, {name}: {percent:.1f} % (at least {floor:g} %)\n")
    return 0 if min(found.values()) >= floor else 1


if __name__ == "__main__":
    sys.exit(main())
