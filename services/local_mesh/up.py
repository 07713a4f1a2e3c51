"""`kvc up`: a whole mesh on this machine until Ctrl-C, with a live table of its workers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from rich.live import Live

from kvc.errors import KvcError, Unavailable
from kvc.v1 import router_pb2
from services.local_mesh import foreground
from services.local_mesh.client import RouterClient
from services.local_mesh.mesh import KV_TOKENS, LocalMesh, MeshConfig
from services.local_mesh.options import DEFAULT_HTTP_PORT, DEFAULT_PORT, Parser, add_mesh_arguments, whole
from services.local_mesh.views import workers_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from services.local_mesh.processes import Child

REFRESH_S = 0.5
RESTART_PAUSE_S = 1.0
READY_TIMEOUT_S = 30.0


def main(argv: Sequence[str]) -> int:
    """`kvc up`."""
    parser = Parser(
        prog="kvc up",
        description="Starts engines, admission agents and a router on 127.0.0.1 until Ctrl-C; a terminal shows a live table of workers.",
    )
    add_mesh_arguments(parser, kv_tokens=KV_TOKENS, time_scale=1.0)
    parser.add_argument(
        "--port", type=whole(0, 65535), default=DEFAULT_PORT, metavar="N", help=f"gRPC port of the router (default {DEFAULT_PORT}; 0 = any)"
    )
    parser.add_argument(
        "--http-port",
        type=whole(0, 65535),
        default=DEFAULT_HTTP_PORT,
        metavar="N",
        help=f"HTTP port of the router (default {DEFAULT_HTTP_PORT}; 0 = any)",
    )
    parser.add_argument("--telemetry-endpoint", default="", metavar="HOST:PORT", help="OTLP collector that gets every span")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="of all processes (default info)"
    )
    parser.add_argument("--dir", type=Path, default=None, help="keep logs and sockets there (default: a temporary folder)")
    parser.add_argument("--no-restart", action="store_true", help="leave a worker that died dead")
    arguments = parser.parse_args(argv)
    config = MeshConfig.asked(
        arguments,
        router_port=arguments.port,
        http_port=arguments.http_port,
        telemetry_endpoint=arguments.telemetry_endpoint,
        log_level=arguments.log_level,
        directory=arguments.dir,
    )
    console = foreground.output()

    def command() -> int:
        try:
            foreground.run(_up(config, console, restart=not arguments.no_restart))
        except foreground.Interrupted:
            console.print("stopped")
        return 0

    return foreground.guarded("kvc up", command)


async def _up(config: MeshConfig, console: Console, *, restart: bool) -> None:
    """Runs the mesh until it is cancelled.

    Raises:
        Unavailable: something did not come up, or the router ended.
    """
    console.print(f"starting {config.topology} ...")
    async with LocalMesh(config) as mesh:
        await mesh.ready(READY_TIMEOUT_S)
        _say(console, f"OpenAI base URL {mesh.http_url}/v1, Anthropic base URL {mesh.http_url}, page {mesh.http_url}/")
        _say(console, f"router on {mesh.target}, metrics on http://127.0.0.1:{mesh.router_ops_port}/metrics")
        _say(console, "agents: " + ", ".join(f"{worker.name} on {worker.agent_target}" for worker in mesh.workers.values()))
        _say(console, f"logs in {mesh.directory}; Ctrl-C stops")
        async with asyncio.TaskGroup() as group:
            group.create_task(_show(mesh, console))
            if mesh.router is not None:
                group.create_task(_watch(mesh.router))
            if restart:
                for name in mesh.workers:
                    group.create_task(_keep_alive(mesh, name, console))


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)


async def _show(mesh: LocalMesh, console: Console) -> None:
    """The live table; without a terminal, nothing."""
    if not console.is_terminal:
        return
    async with RouterClient(mesh.target) as client:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    listed = await client.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=REFRESH_S)
                    title = f"{mesh.config.topology} on {mesh.target}"
                    live.update(workers_table(listed, title, width=console.width), refresh=True)
                await asyncio.sleep(REFRESH_S)


async def _watch(router: Child) -> None:
    """Ends the mesh when the router does: what it knew is gone, and nobody would notice."""
    status = await router.ended()
    raise Unavailable(f"the router ended with status {status}: {router.tail()}")


async def _keep_alive(mesh: LocalMesh, name: str, console: Console) -> None:
    """Restarts a worker whose engine or agent ended, under its old address, as often as it takes."""
    while True:
        worker = mesh.workers[name]
        ends = [asyncio.ensure_future(worker.engine.ended()), asyncio.ensure_future(worker.agent.ended())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        _say(console, f"{name} ended, starting it again")
        await mesh.kill_worker(name)
        await asyncio.sleep(RESTART_PAUSE_S)
        try:
            await mesh.start_worker(name)
        except KvcError as error:
            _say(console, f"{name} did not start: {error}")
