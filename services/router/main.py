"""Puts the router together and runs it: `kvc router --agent HOST:PORT ...`."""

from __future__ import annotations

import asyncio
import logging
import resource
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvc.core.params import params_for
from kvc.runtime import logs, service
from kvc.runtime.clock import SystemClock
from kvc.runtime.config import ConfigError, load
from kvc.runtime.logs import event
from kvc.runtime.metrics import process_registry
from kvc.runtime.server import Server
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import router_pb2, router_pb2_grpc
from services.router.adapters.admit_stream import StreamAdmission
from services.router.adapters.agents import Agents, GrpcAdmission
from services.router.adapters.engine_http import HttpEngines
from services.router.config import RouterConfig
from services.router.door.admission import LocalAdmission, TaskAdmission
from services.router.door.door import Door, tls_context
from services.router.door.observer import DoorObserver
from services.router.door.spans import Tracing
from services.router.door.tokenizers import tokenizer_of
from services.router.follower import Follower
from services.router.janitor import Janitor
from services.router.metrics import RouterMetrics, SigmaCollector
from services.router.router import Router
from services.router.servicer import RouterServicer
from services.router.tracing import TracedDispatches, TracedEngines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvc.runtime.config import Loaded
    from services.router.door.admission import Asking
    from services.router.ports import EnginePort, Observer

logger = logging.getLogger(__name__)

ACCOUNT_S = 3.0
HEALTH_S = 0.1
FORGET_S = 1.0
FORGET_AT_MOST = 100
SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router that serves."""

    router: Router
    server: Server
    followers: tuple[Follower, ...]
    http_port: int

    @property
    def target(self) -> str:
        """host:port of the gRPC server."""
        return f"{self.router.config.server.host}:{self.server.port}"

    @property
    def ops_port(self) -> int:
        """Port of /metrics, /health and /ready."""
        return self.server.ops_port

    def not_ready(self) -> str | None:
        """Why the router cannot serve now; None when at least one decode worker is eligible."""
        workers = self.router.sigma.decode_workers()
        if any(not worker.why_not for worker in workers):
            return None
        problems = "; ".join(f"{follower.target}: {follower.why_not}" for follower in self.followers if follower.why_not)
        return f"no decode worker is eligible ({problems or 'no agents configured'})"

    async def followed(self, timeout_s: float) -> None:
        """Waits until every agent is followed.

        Raises:
            TimeoutError: some agent is not.
        """
        async with asyncio.timeout(timeout_s):
            for follower in self.followers:
                await follower.followed.wait()


@asynccontextmanager
async def running_router(config: RouterConfig) -> AsyncIterator[RunningRouter]:
    """A router on its ports, for as long as the context lasts; on exit turns in flight get `grace_s`."""
    clock = SystemClock()
    registry = process_registry()
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start(
            "kvc-router", config.telemetry.endpoint, insecure=config.telemetry.insecure, sample_ratio=config.telemetry.sample_ratio
        )
        stack.callback(telemetry.shutdown)
        agents = await stack.enter_async_context(Agents(config.agents, telemetry))
        engines: EnginePort = await stack.enter_async_context(HttpEngines(config.engines))
        metrics = RouterMetrics(registry)
        observer: Observer = metrics
        if telemetry.enabled:
            engines, observer = TracedEngines(engines, telemetry.tracer), TracedDispatches(observer)
        admission = GrpcAdmission(agents, config.agents.hedge_after_s, clock)
        janitor = Janitor(admission, clock)
        router = Router(config, admission, engines, clock, janitor, observer)
        registry.register(SigmaCollector(router, janitor))
        stack.callback(router.room.close)
        stack.callback(router.owed.close)
        followers = tuple(
            Follower(target, agents, config.agents, config.params.block_tokens, router.apply, router.loads.__setitem__)
            for target in config.agents.targets
        )

        def problems() -> dict[str, str]:
            return {follower.worker_id: follower.why_not for follower in followers if follower.worker_id and follower.why_not}

        def not_ready() -> str | None:
            return running.not_ready() if running is not None else "starting"

        servicer = RouterServicer(router, clock, problems)
        running: RunningRouter | None = None
        server = await Server.start(
            config.server,
            lambda grpc_server: router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, grpc_server),
            [SERVICE],
            telemetry,
            registry,
            not_ready,
        )
        unary = TaskAdmission(admission, config.agents.admit_timeout_s)
        stack.callback(unary.close)
        asking = _asking(config, agents, unary, router)
        told = DoorObserver(metrics, clock.now_s())
        tracing = Tracing(telemetry.log) if telemetry.log is not None else None
        door = Door(config.http, router, asking, tokenizer_of(config.http.tokenizer), told, registry, not_ready, tracing)
        try:
            tls = tls_context(config.server.tls_cert, config.server.tls_key, config.server.tls_client_ca)
            http_port = await door.start(config.http.host, config.http.port, tls)
        except BaseException:
            await server.stop(0.0)
            raise
        running = RunningRouter(router, server, followers, http_port)
        event(logger, "router_ready", port=server.port, ops_port=server.ops_port, http_port=http_port)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follower.run()) for follower in followers]
            tasks.append(group.create_task(janitor.run()))
            tasks.append(group.create_task(door.sweep()))
            if isinstance(asking, StreamAdmission):
                tasks.append(group.create_task(asking.run(config.agents.targets)))
            health = group.create_task(_watch_health(running))
            tasks.append(group.create_task(_forget_idle(router)))
            try:
                yield running
            finally:
                health.cancel()
                await asyncio.gather(server.stop(config.grace_s), door.stop(config.grace_s))
                await _accounted(router, janitor)
                for task in tasks:
                    task.cancel()


def _asking(config: RouterConfig, agents: Agents, unary: TaskAdmission, router: Router) -> Asking:
    """How the front door asks for admission."""
    if config.http.admission == "off":
        return LocalAdmission(router.sigma)
    return unary if config.http.admission == "unary" else StreamAdmission(agents, unary, config.agents.admit_timeout_s)


async def _accounted(router: Router, janitor: Janitor) -> None:
    """Waits for the turns that the end of the grace cut off to give back what they held."""
    try:
        async with asyncio.timeout(ACCOUNT_S):
            await router.claims.none()
            await janitor.drained()
    except TimeoutError:
        event(logger, "stopped_early", level=logging.WARNING, requests=len(router.claims), releases=janitor.pending)


async def _watch_health(running: RunningRouter) -> None:
    """GRPC health follows readiness."""
    serving: bool | None = None
    while True:
        ready = running.not_ready() is None
        if ready is not serving:
            running.server.set_serving(ready)
            serving = ready
        await asyncio.sleep(HEALTH_S)


async def _forget_idle(router: Router) -> None:
    """Closes idle sessions also when no turns come."""
    while True:
        await asyncio.sleep(FORGET_S)
        router.forget_idle(at_most=FORGET_AT_MOST)


def _take_all_files() -> None:
    """Every turn in flight holds one or two connections: the usual soft limit of 1024 files is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def with_profile(loaded: Loaded[RouterConfig]) -> RouterConfig:
    """The settings with `params` derived from its profile: what was set by name wins over the profile's value.

    Raises:
        ConfigError: a value does not go with the profile.
    """
    given = loaded.given("params")
    profile = given.pop("profile", "default")
    try:
        return replace(loaded.config, params=params_for(profile, **given))
    except ValueError as error:
        raise ConfigError(f"params: {error}") from None


def main(argv: Sequence[str]) -> int:
    """`kvc router`."""
    config = with_profile(load(RouterConfig, argv, prog="kvc router"))
    logs.configure(config.log_level, "router")
    _take_all_files()

    async def serve(stop: asyncio.Event) -> None:
        async with running_router(config):
            await stop.wait()

    return service.run(serve)
