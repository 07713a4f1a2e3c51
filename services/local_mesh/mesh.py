"""A local mesh: for every worker an engine and its admission agent, and one router, each a process of its own.

Ports are chosen by the system on the first start and kept on a restart, so a worker that comes back has its old address and a new
epoch. Everything listens on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from kvc.errors import Unavailable, leaf
from kvc.v1 import router_pb2
from services.local_mesh.client import RouterClient
from services.local_mesh.processes import Child

if TYPE_CHECKING:
    import argparse

    from services.local_mesh.topology import Topology

KV_TOKENS = 92_104
PREFILL_KV_TOKENS = 400_000
START_TIMEOUT_S = 60.0
STOP_GRACE_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """What to start.

    Attributes:
        topology: numbers of workers.
        kv_tokens: K_d of each decode worker.
        prefill_kv_tokens: KV pool of each prefill worker.
        page_tokens: KV page of the engines.
        preset: hardware the engines model.
        time_scale: modelled seconds in one second.
        policy: kvc, sticky or round_robin.
        profile: default or paper.
        router_args: more arguments of `kvc router`.
        agent_args: more arguments of `kvc agent`.
        engine_args: more arguments of `kvc engine`.
        router_port: gRPC port of the router; 0 = any.
        http_port: HTTP port of the router; 0 = any.
        telemetry_endpoint: OTLP collector of all processes; empty = none.
        log_level: least severe level that all processes log.
        directory: where sockets and logs go; None: a temporary one.
    """

    topology: Topology
    kv_tokens: int = KV_TOKENS
    prefill_kv_tokens: int = PREFILL_KV_TOKENS
    page_tokens: int = 16
    preset: str = "h100-rdma"
    time_scale: float = 1.0
    policy: str = "kvc"
    profile: str = "default"
    router_args: tuple[str, ...] = ()
    agent_args: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    router_port: int = 0
    http_port: int = 0
    telemetry_endpoint: str = ""
    log_level: str = "info"
    directory: Path | None = None

    @classmethod
    def asked(cls, arguments: argparse.Namespace, **more: Any) -> Self:
        """The mesh that the arguments of a command ask for (`add_mesh_arguments`), with `more` of these attributes.

        A prefill worker's pool is never smaller than a decode worker's: what one can hold, the other can prefill.
        """
        return cls(
            topology=arguments.topology,
            kv_tokens=arguments.kv_tokens,
            prefill_kv_tokens=max(PREFILL_KV_TOKENS, arguments.kv_tokens),
            page_tokens=arguments.page_tokens,
            preset=arguments.preset,
            time_scale=arguments.time_scale,
            policy=arguments.policy,
            profile=arguments.profile,
            **more,
        )


@dataclass(slots=True)
class LocalWorker:
    """One worker of the mesh: its processes and their ports. The ops ports change with a restart, the others do not."""

    name: str
    role: str
    engine: Child
    agent: Child
    engine_port: int = 0
    agent_port: int = 0
    engine_ops_port: int = 0
    agent_ops_port: int = 0

    @property
    def agent_target(self) -> str:
        """host:port of the admission agent."""
        return f"127.0.0.1:{self.agent_port}"


@dataclass(slots=True)
class LocalMesh:
    """Use as an async context manager: on exit every process is gone."""

    config: MeshConfig
    workers: dict[str, LocalWorker] = field(default_factory=dict)
    router: Child | None = None
    router_port: int = 0
    router_ops_port: int = 0
    http_port: int = 0
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _directory: Path = Path()

    @property
    def target(self) -> str:
        """host:port of the router."""
        return f"127.0.0.1:{self.router_port}"

    @property
    def http_url(self) -> str:
        """Base URL of the router's HTTP front door; OpenAI clients want `/v1` behind it."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def directory(self) -> Path:
        """Sockets and logs."""
        return self._directory

    async def __aenter__(self) -> Self:
        """Starts everything and waits until it listens.

        Raises:
            Unavailable: a process did not come up; the message has its last log lines.
        """
        if self.config.directory is not None:
            self.config.directory.mkdir(parents=True, exist_ok=True)
            self._directory = self.config.directory
        else:
            self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvc-")))
        try:
            async with asyncio.TaskGroup() as group:
                for name, role in self.config.topology.workers():
                    group.create_task(self.start_worker(name, role))
            await self._start_router()
        except BaseExceptionGroup as group:
            await self._stop()
            raise leaf(group) from None
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops everything: the router first, so that it cancels what is in flight."""
        await self._stop()

    async def ready(self, timeout_s: float) -> None:
        """Waits until the router may route to every decode worker and knows every worker.

        Raises:
            Unavailable: it does not in time; the message says what is missing.
        """
        async with RouterClient(self.target) as client:
            deadline_s = time.monotonic() + timeout_s
            while True:
                listed = await client.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=timeout_s)
                ready = {status.info.worker.worker_id for status in listed.workers if status.eligible and status.residency_fresh}
                missing = set(self.workers) - ready
                if not missing:
                    return
                if time.monotonic() > deadline_s:
                    raise Unavailable(f"not ready after {timeout_s} s: {', '.join(sorted(missing))}")
                await asyncio.sleep(_POLL_S)

    async def start_worker(self, name: str, role: str = "decode") -> LocalWorker:
        """Starts a worker, or starts it again under its old address.

        Raises:
            Unavailable: it did not come up.
        """
        known = self.workers.get(name)
        engine_port, agent_port = (known.engine_port, known.agent_port) if known is not None else (0, 0)
        role = known.role if known is not None else role
        worker = LocalWorker(
            name,
            role,
            Child(f"engine {name}", self._engine_argv(name, role, engine_port), self._directory / f"{name}.engine.log", "engine_ready"),
            Child(f"agent {name}", self._agent_argv(name, agent_port), self._directory / f"{name}.agent.log"),
            engine_port,
            agent_port,
        )
        self.workers[name] = worker
        await worker.engine.start()
        await worker.agent.start()
        try:
            engine, agent = await asyncio.gather(worker.engine.listening(START_TIMEOUT_S), worker.agent.listening(START_TIMEOUT_S))
        except Unavailable:
            await self.kill_worker(name)
            raise
        worker.engine_port, worker.agent_port = urlsplit(engine["url"]).port or 0, int(agent["port"])
        worker.engine_ops_port, worker.agent_ops_port = urlsplit(engine["ops_url"]).port or 0, int(agent["ops_port"])
        return worker

    async def kill_worker(self, name: str) -> None:
        """SIGKILL to a worker's engine and agent."""
        worker = self.workers[name]
        worker.engine.kill()
        worker.agent.kill()
        await asyncio.gather(worker.engine.ended(), worker.agent.ended())

    async def _start_router(self) -> None:
        config = self.config
        argv = ["router", "--port", str(config.router_port), "--http-port", str(config.http_port)]
        argv += ["--policy", config.policy, "--params-profile", config.profile]
        for worker in self.workers.values():
            argv += ["--agent", worker.agent_target]
        argv += [*self._common(), *config.router_args]
        self.router = Child("router", argv, self._directory / "router.log", "router_ready")
        await self.router.start()
        ready = await self.router.listening(START_TIMEOUT_S)
        self.router_port, self.router_ops_port, self.http_port = int(ready["port"]), int(ready["ops_port"]), int(ready["http_port"])

    def _engine_argv(self, name: str, role: str, port: int) -> list[str]:
        config = self.config
        kv_tokens = config.prefill_kv_tokens if role == "prefill" else config.kv_tokens
        return [
            "engine",
            *("--role", role),
            *("--worker-id", name),
            *("--link-path", str(self._directory / f"{name}.sock")),
            *("--port", str(port)),
            *("--kv-tokens", str(kv_tokens)),
            *("--page-tokens", str(config.page_tokens)),
            *("--preset", config.preset),
            *("--time-scale", str(config.time_scale)),
            *("--params-profile", config.profile),
            *self._common(),
            *config.engine_args,
        ]

    def _agent_argv(self, name: str, port: int) -> list[str]:
        socket = str(self._directory / f"{name}.sock")
        return ["agent", "--engine-socket", socket, "--port", str(port), *self._common(), *self.config.agent_args]

    def _common(self) -> list[str]:
        endpoint = ["--telemetry-endpoint", self.config.telemetry_endpoint] if self.config.telemetry_endpoint else []
        return ["--log-level", self.config.log_level, *endpoint]

    async def _stop(self) -> None:
        """Stops everything in order; when that is cancelled, kills what is left."""
        workers = self.workers.values()
        try:
            if self.router is not None:
                await self.router.stop(STOP_GRACE_S)
            await asyncio.gather(*(worker.agent.stop(STOP_GRACE_S) for worker in workers))
            await asyncio.gather(*(worker.engine.stop(STOP_GRACE_S) for worker in workers))
        finally:
            for child in (self.router, *(child for worker in workers for child in (worker.agent, worker.engine))):
                if child is not None:
                    child.kill()
            await self._stack.aclose()
