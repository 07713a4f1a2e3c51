"""`python -m bench [NAME ...] [--json]`: runs benchmarks and prints one table; exits with 1 when a bar is missed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from bench import admit, admit_stream, blocks, grpc_path, memory, route, turn
from bench.report import as_json, machine, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.report import Row

BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    module.NAME: module.measure for module in (route, turn, blocks, admit, grpc_path, admit_stream, memory)
}


def main(argv: Sequence[str] | None = None, benchmarks: Mapping[str, Callable[[], list[Row]]] = BENCHMARKS) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="What the parts on the path of a turn cost.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(benchmarks)}; none = all")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in benchmarks]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)} (there are {', '.join(benchmarks)})")
    where = machine()
    start_s = time.perf_counter()
    rows: list[Row] = []
    for name in arguments.names or benchmarks:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += benchmarks[name]()
    seconds = time.perf_counter() - start_s
    missed = [row for row in rows if row.verdict == "MISS"]
    if arguments.json:
        print(json.dumps({"machine": where, "seconds": seconds, "passed": not missed, "rows": [as_json(row) for row in rows]}))
    else:
        print(table(rows))
        print(f"\n{', '.join(f'{key} {value}' for key, value in where.items())}; {seconds:.0f} s")
        judged = [row for row in rows if row.bar is not None]
        print(
            f"{len(judged) - len(missed)} of {len(judged)} bars met" + "".join(f"\nmissed: {row.benchmark}, {row.what}" for row in missed)
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
