"""`kvc replay TRACE`: a trace on a local mesh, closed loop, every reply checked."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvc.errors import KvcError
from kvc.evaluation.render import facts, mode_table
from kvc.evaluation.trace_files import load_trace
from kvc.evaluation.trace_rows import TraceError
from kvc.evaluation.workload import ReplayOptions
from services.local_mesh.mesh import MeshConfig
from services.local_mesh.options import EXIT_FAILED, EXIT_USAGE, Parser, add_mesh_arguments, real, whole
from services.local_mesh.playing import play

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvc.evaluation.workload import Workload

REPLAY_KV_TOKENS = 400_000
REPLAY_TIME_SCALE = 20.0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = Parser(prog="kvc replay", description="Replays a trace on a local mesh and checks every reply.")
    made.add_argument("trace", type=Path, help="KVT, Mooncake or Bailian file, plain or gzip")
    made.add_argument("--policy", choices=("kvc", "sticky", "round_robin"), default="kvc")
    made.add_argument("--limit", type=whole(1, 10_000_000), default=None, help="at most this many requests")
    made.add_argument("--sessions", type=whole(1, 100_000), default=None, help="live at a time: the next starts when one ends")
    made.add_argument("--max-input-len", type=whole(1, 10_000_000), default=None, help="leave out longer prompts, alike for all policies")
    made.add_argument("--max-think", type=real(0.0, 1e6), default=None, metavar="S", help="longest client pause, trace seconds")
    made.add_argument("--out", type=Path, default=None, metavar="DIR", help="write requests.jsonl, summary.json and meta.json")
    made.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    add_mesh_arguments(made, kv_tokens=REPLAY_KV_TOKENS, time_scale=REPLAY_TIME_SCALE)
    return made


def main(argv: Sequence[str]) -> int:
    """`kvc replay`."""
    arguments = parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        trace = load_trace(arguments.trace)
        options = ReplayOptions(
            limit=arguments.limit,
            live_sessions=arguments.sessions,
            max_input_tokens=arguments.max_input_len,
            max_think_s=arguments.max_think,
            time_scale=arguments.time_scale,
        )
        config = MeshConfig(
            topology=arguments.topology,
            kv_tokens=arguments.kv_tokens,
            prefill_kv_tokens=max(REPLAY_KV_TOKENS, arguments.kv_tokens),
            page_tokens=arguments.page_tokens,
            preset=arguments.preset,
            time_scale=arguments.time_scale,
            policy=arguments.policy,
            profile=arguments.profile,
        )
        played = asyncio.run(play(trace, options, config, console, arguments.policy, arguments.out))
    except (TraceError, OSError, ValueError) as error:
        sys.stderr.write(f"kvc replay: {error}\n")
        return EXIT_USAGE
    except KvcError as error:
        sys.stderr.write(f"kvc replay: {error}\n")
        return EXIT_FAILED
    summary = played.summary
    if arguments.json:
        command = shlex.join(["kvc", "replay", *argv])
        sys.stdout.write(json.dumps(summary.to_json() | _left_out(played.run.workload) | {"command": command}, indent=2) + "\n")
    else:
        out = Console()
        out.print(mode_table(summary, name=arguments.policy))
        for line in facts(summary):
            out.print(line, soft_wrap=True)
    return 0 if summary.failed == 0 and summary.wrong == 0 else EXIT_FAILED


def _left_out(workload: Workload) -> dict[str, object]:
    """What the workload does not ask of the trace, counted (alike for every policy)."""
    return {
        "sessions": len(workload.sessions),
        "left_out": {"too_long": workload.too_long, "beyond_limit": workload.beyond_limit, "shortened": workload.shortened},
    }
