"""`kvc replay TRACE`: a trace on a local mesh, closed loop, every reply checked."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvc.evaluation.render import facts, mode_table
from kvc.evaluation.trace_files import load_trace
from kvc.evaluation.trace_rows import TraceError
from kvc.evaluation.workload import ReplayOptions, select
from services.local_mesh import foreground
from services.local_mesh.mesh import MeshConfig
from services.local_mesh.options import EXIT_FAILED, EXIT_USAGE, Parser, add_mesh_arguments, real, whole
from services.local_mesh.playing import play
from services.local_mesh.views import fitted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvc.evaluation.records import Record
    from services.local_mesh.playing import Played

PROG = "kvc replay"
SHOWN_ERRORS = 5
REPLAY_KV_TOKENS = 400_000
REPLAY_TIME_SCALE = 20.0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = Parser(prog=PROG, description="Replays a trace on a local mesh and checks every reply.")
    made.add_argument("trace", type=Path, help="KVT, Mooncake or Bailian file, plain or gzip")
    made.add_argument("--limit", type=whole(1, 10_000_000), default=None, metavar="N", help="at most this many requests")
    made.add_argument(
        "--sessions",
        type=whole(1, 100_000),
        default=None,
        metavar="N",
        help="live at a time, the next starts when one ends (default: sessions start at the trace's own times)",
    )
    made.add_argument(
        "--max-input-len", type=whole(1, 10_000_000), default=None, metavar="N", help="leave out longer prompts, alike for all policies"
    )
    made.add_argument("--max-think", type=real(0.0, 1e6), default=None, metavar="S", help="longest client pause, trace seconds")
    made.add_argument("--out", type=Path, default=None, metavar="DIR", help="write requests.jsonl, summary.json and meta.json")
    made.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    add_mesh_arguments(made, kv_tokens=REPLAY_KV_TOKENS, time_scale=REPLAY_TIME_SCALE)
    return made


def main(argv: Sequence[str]) -> int:
    """`kvc replay`."""
    arguments = parser().parse_args(argv)
    try:
        trace, options = load_trace(arguments.trace), _options(arguments)
        select(trace, options)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
    except (TraceError, OSError, ValueError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return EXIT_USAGE

    def command() -> int:
        console = foreground.output(stderr=True)
        played = foreground.run(play(trace, options, MeshConfig.asked(arguments), console, arguments.policy, arguments.out))
        if arguments.json:
            sys.stdout.write(_json(played, shlex.join(["kvc", "replay", *argv])))
        else:
            _show(played, arguments.policy)
        for line in complaints(played.run.records):
            sys.stderr.write(f"{PROG}: {line}\n")
        return 0 if played.summary.failed == 0 and played.summary.wrong == 0 else EXIT_FAILED

    return foreground.guarded(PROG, command)


def complaints(records: Sequence[Record]) -> list[str]:
    """What went wrong with requests, the most frequent first, one line each."""
    errors = Counter("wrong reply" if record.wrong else record.error or "failed" for record in records if record.wrong or not record.ok)
    lines = [f"{count} requests: {error}" for error, count in errors.most_common(SHOWN_ERRORS)]
    return lines + [f"{len(errors) - SHOWN_ERRORS} more kinds of errors"] * (len(errors) > SHOWN_ERRORS)


def _options(arguments: argparse.Namespace) -> ReplayOptions:
    return ReplayOptions(
        limit=arguments.limit,
        live_sessions=arguments.sessions,
        max_input_tokens=arguments.max_input_len,
        max_think_s=arguments.max_think,
        time_scale=arguments.time_scale,
    )


def _show(played: Played, policy: str) -> None:
    out = foreground.output()
    out.print(fitted(mode_table(played.summary, name=policy), out.width))
    for line in facts(played.summary):
        out.print(line, soft_wrap=True, highlight=False)


def _json(played: Played, command: str) -> str:
    """The summary and what the workload does not ask of the trace, counted (alike for every policy)."""
    workload = played.run.workload
    left_out = {"too_long": workload.too_long, "beyond_limit": workload.beyond_limit, "shortened": workload.shortened}
    about = {"sessions": len(workload.sessions), "left_out": left_out, "command": command}
    return json.dumps(played.summary.to_json() | about, indent=2) + "\n"
