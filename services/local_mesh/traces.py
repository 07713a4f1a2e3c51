"""`kvc generate-trace PRESET`: writes a synthetic agent trace as KVT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvc.evaluation.generator import MAX_SESSIONS, PRESETS, Limits, generate
from kvc.evaluation.trace_files import save_trace
from services.local_mesh.options import EXIT_USAGE, Parser, real, whole

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """`kvc generate-trace`."""
    parser = Parser(prog="kvc generate-trace", description="Writes a synthetic agent trace, the same for the same arguments everywhere.")
    parser.add_argument("preset", choices=sorted(PRESETS), help="what kind of agent")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="KVT file; .gz compresses")
    parser.add_argument("--sessions", type=whole(1, MAX_SESSIONS), default=52, metavar="N", help="sessions in all (default 52)")
    parser.add_argument(
        "--live", type=whole(1, MAX_SESSIONS), default=32, metavar="N", help="sessions live at a time, for the timestamps (default 32)"
    )
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="another seed, another trace (default 0)")
    parser.add_argument(
        "--max-input-tokens", type=whole(1, 10_000_000), default=None, metavar="N", help="history is cut before a prompt is longer"
    )
    parser.add_argument("--max-turns", type=whole(1, 100_000), default=None, metavar="N", help="longest session, turns")
    parser.add_argument("--max-think", type=real(0.0, 1e6), default=None, metavar="S", help="longest client pause, seconds")
    arguments = parser.parse_args(argv)
    limits = Limits(max_input_tokens=arguments.max_input_tokens, max_turns=arguments.max_turns, max_think_s=arguments.max_think)
    try:
        trace = generate(arguments.preset, seed=arguments.seed, sessions=arguments.sessions, live=arguments.live, limits=limits)
        save_trace(trace, arguments.out)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"kvc generate-trace: {error}\n")
        return EXIT_USAGE
    sys.stdout.write(f"{arguments.out}: {len(trace.requests):,} requests of {arguments.sessions:,} sessions\n")
    return 0
