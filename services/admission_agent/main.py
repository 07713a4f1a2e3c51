"""Runs the agent: as a process (`kvc agent`), as a coroutine, or inside a test."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from kvc.errors import Unavailable
from kvc.runtime import logs, service
from kvc.runtime.config import load
from kvc.runtime.metrics import process_registry
from kvc.runtime.server import Server
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2
from kvc.v1.admission_pb2_grpc import add_AdmissionServiceServicer_to_server
from services.admission_agent.adapters.engine_link import SocketConnector
from services.admission_agent.agent import AdmissionAgent
from services.admission_agent.config import AgentConfig
from services.admission_agent.connection import EngineConnection
from services.admission_agent.metrics import AdmitMetrics, MeteredConnector, StateCollector
from services.admission_agent.observed import ObservedAdmitter
from services.admission_agent.residency import Residency
from services.admission_agent.servicer import AdmissionServicer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from services.admission_agent.ports import EngineConnector

logger = logging.getLogger(__name__)

SERVICE = admission_pb2.DESCRIPTOR.services_by_name["AdmissionService"].full_name
PROG = "kvc agent"


class RunningAgent:
    """An agent that serves.

    Attributes:
        agent: answers for the engine.
        connection: the engine.
        residency: what is resident there.
        target: host:port of the gRPC service.
        ops_port: port of /metrics, /health and /ready.
    """

    def __init__(self, config: AgentConfig, connector: EngineConnector | None = None, telemetry: Telemetry | None = None) -> None:
        """Wires everything; `running_agent` starts it."""
        self._config = config
        self._registry = process_registry()
        metrics = AdmitMetrics(self._registry)
        self._owns_telemetry = telemetry is None
        self._telemetry = telemetry or _telemetry(config)
        self.residency = Residency(config.residency)
        socket = connector or SocketConnector(config.engine.socket, config.engine.connect_timeout_s)
        self.connection = EngineConnection(MeteredConnector(socket, metrics), config, self.residency, self._on_change)
        self.agent = AdmissionAgent(self.connection, config.admit.max_inflight)
        self._servicer = AdmissionServicer(self.agent, ObservedAdmitter(self.agent, metrics, self._telemetry), self.residency, config)
        self._registry.register(StateCollector(self.agent, self.connection, self.residency))
        self._server: Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.target = ""
        self.ops_port = 0

    async def start(self) -> None:
        """Binds the ports and starts to look for the engine.

        Raises:
            ConfigError: a port cannot be bound.
        """
        server = self._server = await Server.start(
            self._config.server,
            lambda server: add_AdmissionServiceServicer_to_server(self._servicer, server),
            [SERVICE],
            self._telemetry,
            self._registry,
            self.agent.why_not,
        )
        self.target, self.ops_port = f"{self._config.server.host}:{server.port}", server.ops_port
        self._task = asyncio.create_task(self.connection.run(), name="engine-connection")

    async def run_until(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set; raises what ended the connection to the engine, if that ever ends by itself."""
        assert self._task is not None, "started"
        waiter = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({waiter, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self._task.done():
            self._task.result()

    async def wait_ready(self, timeout_s: float = 10.0) -> None:
        """Waits until turns can be admitted.

        Raises:
            Unavailable: not within `timeout_s` seconds; says why.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.agent.why_not() is not None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(f"not ready after {timeout_s} s: {self.agent.why_not()}") from None

    async def stop(self) -> None:
        """Refuses turns as DRAINING, lets calls in flight end for at most `grace_s` seconds, then closes everything. Idempotent."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._config.grace_s
        self.agent.drain()
        self._on_change(serving=False)
        if not await self.agent.wait_idle(self._config.grace_s):
            logs.event(logger, "grace_over", level=logging.WARNING, inflight=self.agent.inflight)
        self._servicer.close_streams()
        self.residency.end(Unavailable("the agent is stopping", reason="SHUTTING_DOWN"))
        if self._server is not None:
            await self._server.stop(max(0.0, ends_s - loop.time()))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._owns_telemetry:
            await asyncio.to_thread(self._telemetry.shutdown)

    def _on_change(self, serving: bool) -> None:  # noqa: FBT001 - the noun is in the name
        if self._server is not None:
            self._server.set_serving(serving and not self.agent.draining)
        self._changed.set()


def _telemetry(config: AgentConfig) -> Telemetry:
    one = config.telemetry
    return Telemetry.start("kvc-agent", one.endpoint, insecure=one.insecure, sample_ratio=one.sample_ratio)


@contextlib.asynccontextmanager
async def running_agent(
    config: AgentConfig, connector: EngineConnector | None = None, telemetry: Telemetry | None = None
) -> AsyncIterator[RunningAgent]:
    """An agent that serves for as long as the block lasts.

    Args:
        config: all settings.
        connector: where the engine is; None: the unix socket of `config`.
        telemetry: traces; stays the caller's. None: that of `config`.

    Raises:
        ConfigError: a port cannot be bound.
    """
    agent = RunningAgent(config, connector, telemetry)
    try:
        await agent.start()
        yield agent
    finally:
        await agent.stop()


async def serve(config: AgentConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains and returns.

    Raises:
        ConfigError: a port cannot be bound.
    """
    async with running_agent(config) as agent:
        await agent.run_until(stop)


def main(argv: Sequence[str]) -> int:
    """`kvc agent`: the exit code.

    Raises:
        SystemExit: a setting is wrong, or --help or --print-config was asked for.
    """
    config = load(AgentConfig, argv, prog=PROG).config
    logs.configure(config.log_level, "admission_agent")
    return service.run(lambda stop: serve(config, stop))
