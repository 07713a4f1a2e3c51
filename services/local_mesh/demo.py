"""`kvc demo`: an agentic workload on kvc and on round-robin P/D disaggregation, on the same engines, side by side."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from kvc.evaluation.demo import demo_workload
from kvc.evaluation.render import facts, mode_table
from services.local_mesh import foreground
from services.local_mesh.mesh import MeshConfig
from services.local_mesh.options import EXIT_FAILED, Parser
from services.local_mesh.playing import play
from services.local_mesh.replay import complaints
from services.local_mesh.topology import Topology
from services.local_mesh.views import fitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvc.evaluation.demo import Demo
    from services.local_mesh.playing import Played

PROG = "kvc demo"


def main(argv: Sequence[str]) -> int:
    """`kvc demo`."""
    parser = Parser(prog=PROG, description="Runs an agentic workload on a 1P3D mesh, then on round-robin P/D disaggregation.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args(argv)

    def command() -> int:
        demo = demo_workload()
        ours, baseline = foreground.run(_both(demo, foreground.output(stderr=True)))
        if arguments.json:
            sys.stdout.write(json.dumps(ours.summary.to_json(baseline.summary), indent=2) + "\n")
        else:
            _show(demo, ours, baseline)
        for line in complaints(ours.run.records + baseline.run.records):
            sys.stderr.write(f"{PROG}: {line}\n")
        good = all(played.summary.failed == 0 and played.summary.wrong == 0 for played in (ours, baseline))
        return 0 if good else EXIT_FAILED

    return foreground.guarded(PROG, command)


async def _both(demo: Demo, console: Console) -> tuple[Played, Played]:
    config = MeshConfig(
        topology=Topology.parse(demo.topology),
        kv_tokens=demo.capacity_tokens,
        prefill_kv_tokens=demo.capacity_tokens,
        time_scale=demo.options.time_scale,
    )
    ours = await play(demo.trace, demo.options, config, console, "kvc")
    baseline = await play(demo.trace, demo.options, replace(config, policy="round_robin"), console, "round robin")
    return ours, baseline


def _show(demo: Demo, ours: Played, baseline: Played) -> None:
    out = foreground.output()
    sessions = len(ours.run.workload.sessions)
    out.print(
        f"{sessions} generated Claude Code sessions, {demo.options.live_sessions} at a time, on {demo.topology}; "
        f"time runs {demo.options.time_scale:g} times faster than modelled",
        soft_wrap=True,
    )
    out.print(fitted(mode_table(ours.summary, baseline.summary), out.width))
    for name, played in (("kvc", ours), ("round robin", baseline)):
        for line in facts(played.summary):
            out.print(f"{name}: {line}", soft_wrap=True, highlight=False)
