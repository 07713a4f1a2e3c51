"""An admission agent on a real port that says what a test tells it to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvc import wire
from kvc.core.blocks import pack_hashes
from kvc.core.types import Facts
from kvc.errors import KvcError
from kvc.runtime.metrics import process_registry
from kvc.runtime.server import Server, ServerConfig
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2, admission_pb2_grpc
from tests.support.builders import worker
from tests.support.mesh_server import SERVICE, Scripted, no_reason

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from kvc.core.types import WorkerInfo, WorkerRef

Say = admission_pb2.WatchResidencyResponse | KvcError | None


def packed(chain: array[int] | None) -> bytes:
    """The wire form of a chain, or nothing."""
    return b"" if chain is None else pack_hashes(chain)


class FakeAgent(Scripted):
    """Tells each follower a snapshot and then what it is given; None ends the stream."""

    def __init__(self, info: WorkerInfo | None = None, chain: array[int] | None = None) -> None:
        super().__init__()
        self.info = info or worker("d0", capabilities=("admit", "residency"))
        self.chain = chain
        self.sequence = 7
        self.followers: list[asyncio.Queue[Say]] = []
        self.greet = True
        self.described = 0
        self.admit: Callable[[admission_pb2.AdmitRequest], Awaitable[admission_pb2.AdmitResponse]] | None = None
        self.asked: list[admission_pb2.AdmitRequest] = []
        self.releases: list[admission_pb2.ReleaseRequest] = []
        self.port = 0
        self._server: Server | None = None

    @property
    def ref(self) -> WorkerRef:
        return self.info.ref

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens, on the same port as before if there was one."""

        def register(server: Any) -> None:
            admission_pb2_grpc.add_AdmissionServiceServicer_to_server(self, server)

        self._server = await Server.start(ServerConfig(port=self.port), register, [SERVICE], Telemetry(None), process_registry(), no_reason)
        self.port = self._server.port

    async def stop(self) -> None:
        """Goes away; followers are cut off."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def restart_as(self, **fields: Any) -> None:
        """Another life, or another worker, answers from now on; followers are cut off."""
        self.info = replace(self.info, **fields)
        self.say(None)

    # ---- what followers are told ----

    def message(self, ref: WorkerRef | None = None, sequence: int | None = None, **event: Any) -> admission_pb2.WatchResidencyResponse:
        number = self.sequence if sequence is None else sequence
        return admission_pb2.WatchResidencyResponse(worker=wire.ref_to_pb(ref or self.ref), sequence=number, **event)

    def say(self, what: Say) -> None:
        for follower in self.followers:
            follower.put_nowait(what)

    def snapshot(self, chain: array[int] | None, *, more: bool = False, sequence: int | None = None) -> None:
        self.say(self.message(sequence=sequence, snapshot=admission_pb2.ResidencySnapshot(block_hashes=packed(chain), more=more)))

    def delta(self, stored: array[int] | None = None, removed: array[int] | None = None, *, cleared: bool = False, skip: int = 0) -> None:
        self.sequence += 1 + skip
        self.say(self.message(delta=admission_pb2.ResidencyDelta(stored=packed(stored), removed=packed(removed), cleared=cleared)))

    def load(self, **fields: Any) -> None:
        self.say(self.message(load=wire.load_to_pb(Facts(1000, **fields), sessions=3, open_tickets=0, evicted_tokens=0, peak_use=0.5)))

    # ---- the service ----

    async def GetWorker(self, request: admission_pb2.GetWorkerRequest, context: Any) -> admission_pb2.GetWorkerResponse:
        self.described += 1
        load = wire.load_to_pb(Facts(self.info.capacity_tokens), sessions=0, open_tickets=0, evicted_tokens=0, peak_use=0.0)
        return admission_pb2.GetWorkerResponse(info=wire.worker_info_to_pb(self.info), load=load)

    async def WatchResidency(
        self, request: admission_pb2.WatchResidencyRequest, context: Any
    ) -> AsyncGenerator[admission_pb2.WatchResidencyResponse, None]:
        told: asyncio.Queue[Say] = asyncio.Queue()
        self.followers.append(told)
        try:
            if self.greet:
                yield self.message(snapshot=admission_pb2.ResidencySnapshot(block_hashes=packed(self.chain)))
            while (what := await told.get()) is not None:
                if isinstance(what, KvcError):
                    raise what
                yield what
        finally:
            self.followers.remove(told)

    async def Admit(self, request: admission_pb2.AdmitRequest, context: Any) -> admission_pb2.AdmitResponse:
        self.asked.append(request)
        assert self.admit is not None, "not expected to be asked"
        return await self.admit(request)

    async def Release(self, request: admission_pb2.ReleaseRequest, context: Any) -> admission_pb2.ReleaseResponse:
        self.releases.append(request)
        return admission_pb2.ReleaseResponse(released=True)


@asynccontextmanager
async def agent(info: WorkerInfo | None = None, chain: array[int] | None = None) -> AsyncIterator[FakeAgent]:
    """An agent that listens for as long as the context lasts."""
    made = FakeAgent(info, chain)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
