"""A mesh of real processes under test: its books, and what can be done to it."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from kvc.core.types import WorkerRef
from kvc.runtime.channel import channel
from kvc.v1 import admission_pb2, admission_pb2_grpc, router_pb2, types_pb2
from services.local_mesh.client import RouterClient
from services.local_mesh.mesh import LocalMesh, MeshConfig
from services.local_mesh.processes import Child
from services.local_mesh.topology import Topology
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

START_S = 60.0
RPC_S = 10.0
SETTLE_S = 20.0
"""Longest wait for a mesh to come to rest: a ticket whose answer got lost lives 5 s, an agent that is lost is found again within 3 s."""
AT_REST = ("held_tokens", "reserved_tokens", "queued_tokens", "tickets", "inflight", "active", "waiting", "rooms")


@dataclass
class LiveMesh:
    """The processes, a client of the router, and a client of every engine's books."""

    mesh: LocalMesh
    client: RouterClient
    http: aiohttp.ClientSession

    # ---- looking ----

    async def pool(self, name: str) -> dict[str, int]:
        """The books of one engine; what is free, evictable and protected is its whole capacity, at any time."""
        async with self.http.get(f"http://127.0.0.1:{self.mesh.workers[name].engine_port}/kv_pool") as response:
            books: dict[str, int] = await response.json()
        assert books["free_tokens"] + books["evictable_tokens"] + books["protected_tokens"] == books["capacity_tokens"], (name, books)
        assert books["held_tokens"] + books["reserved_tokens"] <= books["limit_tokens"], (name, books)
        return books

    async def pools(self) -> dict[str, dict[str, int]]:
        """The books of every engine."""
        names = list(self.mesh.workers)
        return dict(zip(names, await asyncio.gather(*(self.pool(name) for name in names)), strict=True))

    async def workers(self, client: RouterClient | None = None) -> dict[str, router_pb2.WorkerStatus]:
        """The workers as the router sees them."""
        stub = (client or self.client).stub
        listed = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=RPC_S)
        return {status.info.worker.worker_id: status for status in listed.workers}

    async def ref(self, name: str) -> WorkerRef:
        """Name and epoch of a worker, as the router knows it."""
        worker = (await self.workers())[name].info.worker
        return WorkerRef(worker.worker_id, worker.epoch)

    async def session(self, session_id: str) -> router_pb2.RouterServiceGetSessionStatusResponse:
        """What the router knows of a session."""
        request = router_pb2.RouterServiceGetSessionStatusRequest(session_id=session_id)
        return await self.client.stub.GetSessionStatus(request, timeout=RPC_S)

    async def committed(self, name: str, session_id: str) -> admission_pb2.SessionResidency:
        """What an engine has committed of a session, by its agent."""
        async with channel(f"127.0.0.1:{self.mesh.workers[name].agent_port}") as opened:
            stub: admission_pb2_grpc.AdmissionServiceAsyncStub = admission_pb2_grpc.AdmissionServiceStub(opened)
            request = admission_pb2.AdmissionServiceGetSessionStatusRequest(session_id=session_id)
            return (await stub.GetSessionStatus(request, timeout=RPC_S)).session

    async def candidate(self, name: str, session_id: str, prompt: bytes, client: RouterClient | None = None) -> router_pb2.Candidate:
        """A worker's part in the routing of a prompt."""
        request = router_pb2.RouteRequest(session_id=session_id, packed_input_ids=prompt)
        response = await (client or self.client).stub.Route(request, timeout=RPC_S)
        return next(row for row in response.candidates if row.worker.worker_id == name)

    async def metric(self, name: str) -> float:
        """The sum of a metric of the router over its labels."""
        async with self.http.get(f"http://127.0.0.1:{self.mesh.router_ops_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line for line in lines if line.startswith(name) and line[len(name)] in " {"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    async def at_rest(self, timeout_s: float = SETTLE_S) -> dict[str, dict[str, int]]:
        """Waits until nothing is in flight, reserved or held anywhere, and the router may use every worker.

        Returns:
            The books of every engine.
        """

        async def check() -> dict[str, dict[str, int]]:
            workers = await self.workers()
            missing = {name: workers[name].why_not for name in workers if not (workers[name].eligible and workers[name].residency_fresh)}
            assert not missing, f"not in use: {missing}"
            assert set(workers) == set(self.mesh.workers)
            inflight = {name: status.inflight for name, status in workers.items() if status.inflight}
            assert not inflight, f"the router's inflight: {inflight}"
            books = await self.pools()
            busy = {name: {key: pool[key] for key in AT_REST if pool[key]} for name, pool in books.items()}
            assert not any(busy.values()), f"engines: {busy}"
            return books

        return await eventually(check, timeout_s)

    # ---- doing ----

    async def restart_agent(self, name: str) -> None:
        """Starts a worker's agent again under its old address."""
        worker = self.mesh.workers[name]
        argv = self.mesh._agent_argv(name, worker.agent_port)
        worker.agent = Child(f"agent {name}", argv, self.mesh.directory / f"{name}.agent.log")
        await worker.agent.start()
        await worker.agent.listening(START_S)

    async def restart_engine(self, name: str) -> None:
        """Starts a worker's engine again under its old address; its agent is left alone."""
        worker = self.mesh.workers[name]
        argv = self.mesh._engine_argv(name, worker.role, worker.engine_port)
        worker.engine = Child(f"engine {name}", argv, self.mesh.directory / f"{name}.engine.log", "engine_ready")
        await worker.engine.start()
        await worker.engine.listening(START_S)

    async def restart_router(self) -> None:
        """Starts the router again under its old address."""
        self.mesh.config = replace(self.mesh.config, router_port=self.mesh.router_port, http_port=self.mesh.http_port)
        await self.mesh._start_router()

    async def drain(self, name: str, *, drain: bool) -> int:
        """Drains a worker, or takes that back; turns in flight there."""
        request = router_pb2.DrainWorkerRequest(worker_id=name, drain=drain)
        return (await self.client.stub.DrainWorker(request, timeout=RPC_S)).inflight

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of every process."""
        page = os.sysconf("SC_PAGE_SIZE")
        return {name: int((where / "statm").read_text(encoding="ascii").split()[1]) * page for name, where in self._processes().items()}

    def open_files(self) -> dict[str, int]:
        """Open files and sockets of every process."""
        return {name: sum(1 for _ in (where / "fd").iterdir()) for name, where in self._processes().items()}

    def _processes(self) -> dict[str, Path]:
        children = [self.mesh.router, *(child for worker in self.mesh.workers.values() for child in (worker.engine, worker.agent))]
        return {child.name: Path(f"/proc/{child.pid}") for child in children if child is not None and child.pid is not None}


@asynccontextmanager
async def live_mesh(topology: str, **settings: Any) -> AsyncIterator[LiveMesh]:
    """A mesh whose every worker may be routed to.

    Args:
        topology: as in `1P3D`.
        **settings: fields of MeshConfig.
    """
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(LocalMesh(MeshConfig(Topology.parse(topology), **settings)))
        client = await stack.enter_async_context(RouterClient(mesh.target))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await mesh.ready(START_S)
        yield LiveMesh(mesh, client, http)


@asynccontextmanager
async def another_router(live: LiveMesh) -> AsyncIterator[RouterClient]:
    """A client of a second router over the same agents."""
    config = live.mesh.config
    argv = ["router", "--port", "0", "--policy", config.policy, "--params-profile", config.profile, *config.router_args]
    for worker in live.mesh.workers.values():
        argv += ["--agent", f"127.0.0.1:{worker.agent_port}"]
    router = Child("router 2", argv, live.mesh.directory / "router2.log")
    await router.start()
    try:
        listening = await router.listening(START_S)
        async with RouterClient(f"127.0.0.1:{listening['port']}") as client:

            async def check() -> None:
                workers = await live.workers(client)
                assert {name for name, status in workers.items() if status.eligible and status.residency_fresh} == set(live.mesh.workers)

            await eventually(check, START_S)
            yield client
    finally:
        await router.stop(5.0)


def decode_workers(workers: dict[str, router_pb2.WorkerStatus]) -> dict[str, router_pb2.WorkerStatus]:
    """Those that keep sessions."""
    return {name: status for name, status in workers.items() if status.info.role != types_pb2.ROLE_PREFILL}
