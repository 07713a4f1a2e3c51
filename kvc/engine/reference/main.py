"""The engine process: `kvc engine`; and an engine inside another process, for tests and the local mesh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvc.engine.link_io import LinkError
from kvc.engine.link_serve import LinkServer
from kvc.engine.reference.config import EngineConfig, effective_params
from kvc.engine.reference.engine import Engine, Observer
from kvc.engine.reference.http_api import HttpApi, serve
from kvc.engine.reference.link_server import LinkDesk
from kvc.engine.reference.metrics import EngineMetrics
from kvc.runtime.config import ConfigError, load
from kvc.runtime.logs import configure, event
from kvc.runtime.metrics import process_registry
from kvc.runtime.ops import OpsServer
from kvc.runtime.service import run as run_service
from kvc.runtime.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from kvc.core.params import Params

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that serves.

    Attributes:
        engine: its inside.
        url: its HTTP address.
        ops_url: address of /metrics, /health and /ready.
        loop: the task that drives it; ends only by a fault.
    """

    engine: Engine
    url: str
    ops_url: str
    loop: asyncio.Task[None]

    @property
    def bootstrap_port(self) -> int:
        """Port of KV transfers; 0 unless it is a prefill engine."""
        return self.engine.bootstrap.port


@contextlib.asynccontextmanager
async def running_engine(config: EngineConfig, params: Params | None = None) -> AsyncIterator[RunningEngine]:
    """An engine for the time of a `with` block.

    Args:
        config: settings.
        params: rulings in force for Admit; None: `config.params`.

    Raises:
        ConfigError: an address cannot be bound.
    """
    engine = Engine(config, params)
    telemetry = Telemetry.start(
        "kvc-engine", config.telemetry.endpoint, insecure=config.telemetry.insecure, sample_ratio=config.telemetry.sample_ratio
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(telemetry.shutdown)
        if config.role == "prefill":
            await _bound("bootstrap_port", engine.bootstrap.start(config.host, config.bootstrap_port))
        stack.push_async_callback(engine.stop)
        runner, port = await _bound("port", serve(HttpApi(engine, telemetry).application(), config.host, config.port))
        stack.push_async_callback(runner.cleanup)
        url = f"http://{config.public_host}:{port}"
        link_server = LinkServer(LinkDesk(engine, url, telemetry))
        if config.link_path is not None:
            await _bound("link_path", link_server.start(config.link_path))
        stack.push_async_callback(link_server.stop)
        registry = process_registry()
        engine.observers.append(Observer(EngineMetrics(registry, engine).ended, link_server.publish))
        ops = await OpsServer.start(config.ops_host, config.ops_port, registry, lambda: "stopping" if engine.stopping else None)
        stack.push_async_callback(ops.stop)
        loop = asyncio.create_task(engine.run(), name="engine-loop")
        stack.push_async_callback(_end, loop)
        ops_url = f"http://{config.ops_host}:{ops.port}"
        event(logger, "engine_ready", worker_id=config.worker_id, role=config.role, url=url, ops_url=ops_url, link=config.link_path)
        yield RunningEngine(engine, url, ops_url, loop)


async def main(config: EngineConfig, stop: asyncio.Event, params: Params | None = None) -> None:
    """Serves until `stop` is set, or until the engine's loop fails.

    Raises:
        Exception: what the loop failed of.
    """
    async with running_engine(config, params) as running:
        stopped = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait([stopped, running.loop], return_when=asyncio.FIRST_COMPLETED)
        await _end(stopped)
        if running.loop.done():
            await running.loop


def run(argv: Sequence[str]) -> int:
    """`kvc engine`: settings from flags, environment and file; returns the exit code."""
    loaded = load(EngineConfig, argv, prog="kvc engine")
    config = loaded.config
    params = effective_params(config, loaded.given("params"))
    configure(config.log_level, f"engine {config.worker_id}")
    return run_service(lambda stop: main(config, stop, params))


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _bound(setting: str, listening: Awaitable[T]) -> T:
    """Listens, or says which setting cannot be had.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    try:
        return await listening
    except (OSError, LinkError) as error:
        raise ConfigError(f"{setting}: {error}") from None


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
