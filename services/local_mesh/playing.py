"""Replays a workload on a local mesh: what `kvc demo` and `kvc replay` have in common."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc.engine.reference.config import DEFAULT_MODEL
from kvc.evaluation.records import RunFiles
from kvc.evaluation.render import ProgressView
from kvc.evaluation.replay import Run, replay
from kvc.evaluation.stats import PoolUse
from kvc.evaluation.verify import KvValueVerifier
from kvc.v1 import router_pb2, types_pb2
from services.local_mesh.client import RouterClient
from services.local_mesh.mesh import LocalMesh

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from kvc.evaluation.stats import Summary
    from kvc.evaluation.traces import Trace
    from kvc.evaluation.workload import ReplayOptions
    from services.local_mesh.mesh import MeshConfig

FOLLOW_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Played:
    """A run and its numbers."""

    run: Run
    summary: Summary


async def play(trace: Trace, options: ReplayOptions, config: MeshConfig, console: Console, label: str, out: Path | None = None) -> Played:
    """Starts a mesh, replays the trace on it with every reply checked, and stops it.

    Args:
        trace: what to ask.
        options: which part of it, and how.
        config: the mesh.
        console: where progress goes.
        label: name of the run.
        out: folder for the run's files; None: no files.

    Raises:
        Unavailable: the mesh did not come up.
        OSError: `out` cannot be written.
        ValueError: the options leave nothing to replay.
    """
    with ExitStack() as stack:
        about = {"policy": config.policy, "profile": config.profile, "topology": str(config.topology), "kv_tokens": config.kv_tokens}
        files = stack.enter_context(RunFiles(out, trace, options, **about)) if out is not None else None
        async with LocalMesh(config) as mesh, RouterClient(mesh.target) as client:
            await mesh.ready(FOLLOW_TIMEOUT_S)
            progress = stack.enter_context(ProgressView(console, label))
            run = await replay(
                trace,
                client,
                options,
                verifier=KvValueVerifier(DEFAULT_MODEL),
                on_progress=progress,
                on_record=files.record if files is not None else None,
            )
            listed = await client.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=10.0)
            summary = run.summary(_pools(listed))
            if files is not None:
                files.finish(summary, run.workload)
        return Played(run, summary)


def _pools(listed: router_pb2.ListWorkersResponse) -> list[PoolUse]:
    return [
        PoolUse(
            worker=status.info.worker.worker_id,
            capacity_tokens=status.info.capacity_tokens,
            peak_tokens=round(status.load.peak_use * status.info.capacity_tokens),
            evicted_tokens=status.load.evicted_tokens,
        )
        for status in listed.workers
        if status.info.role != types_pb2.ROLE_PREFILL
    ]
