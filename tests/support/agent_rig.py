"""A running admission agent on real sockets, an engine that does what the test says, and a client."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published
from prometheus_client.parser import text_string_to_metric_families

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.errors import KvcError, from_rpc_error
from kvc.runtime.channel import channel
from kvc.runtime.server import ServerConfig
from kvc.v1 import admission_pb2, admission_pb2_grpc, types_pb2
from services.admission_agent.config import AdmitConfig, AgentConfig, EngineConfig, ResidencyConfig
from services.admission_agent.main import SERVICE, RunningAgent, running_agent
from tests.support.fake_engine import SEED, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

    Stub = admission_pb2_grpc.AdmissionServiceAsyncStub

PROMPT = list(range(1, 241))
WAIT_S = 5.0
HERE = types_pb2.WorkerRef(worker_id="d0", epoch=1)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Rig:
    """A running agent, its engine and a stub."""

    def __init__(self, engine: FakeEngine, agent: RunningAgent, stub: Stub) -> None:
        self.engine = engine
        self.agent = agent
        self.stub = stub

    async def ready(self) -> Rig:
        await self.agent.wait_ready(WAIT_S)
        return self

    async def health(self) -> int:
        async with channel(self.agent.target) as one:
            stub = health_pb2_grpc.HealthStub(one)
            response = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_S)
            return int(response.status)

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.agent.ops_port}{path}") as response:
            return response.status, await response.text()

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Samples by name and label values."""
        _, text = await self.get("/metrics")
        families = text_string_to_metric_families(text)
        return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@contextlib.asynccontextmanager
async def rig_of(
    engine: FakeEngine | None = None,
    admit: AdmitConfig | None = None,
    residency: ResidencyConfig | None = None,
    server: ServerConfig | None = None,
    token: str | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    engine = engine or FakeEngine()
    values: dict[str, Any] = {"backoff_base_s": 0.001, "backoff_cap_s": 0.004} | settings
    grace_s = values.pop("grace_s", 5.0)
    config = AgentConfig(
        engine=EngineConfig(socket=cast("Path", "unused.sock"), **values),
        admit=admit or AdmitConfig(),
        residency=residency or ResidencyConfig(load_interval_s=0.02, coalesce_s=0.0),
        server=server or ServerConfig(),
        grace_s=grace_s,
    )
    async with running_agent(config, engine) as agent, channel(agent.target, token=token) as one:
        yield Rig(engine, agent, admission_pb2_grpc.AdmissionServiceStub(one))


def admit_request(request_id: str = "r1", **fields: Any) -> admission_pb2.AdmitRequest:
    values: dict[str, Any] = {
        "attempt": types_pb2.Attempt(request_id=request_id, attempt_number=1),
        "worker": HERE,
        "turn": types_pb2.Turn(
            session_id="s", turn_index=1, input_tokens=240, block_hashes=hash_chain(pack_tokens(PROMPT), 24, SEED).tobytes()
        ),
    } | fields
    return admission_pb2.AdmitRequest(**values)


async def error_of(call: Awaitable[Any]) -> KvcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def read_one(call: grpc.aio.UnaryStreamCall[Any, Any]) -> admission_pb2.WatchResidencyResponse:
    message = await asyncio.wait_for(call.read(), WAIT_S)
    assert isinstance(message, admission_pb2.WatchResidencyResponse), "the stream has ended"
    return message


async def read_all(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Reads until the stream fails."""
    while True:
        await read_one(call)


class Stream:
    """An open AdmitStream: results by request id."""

    def __init__(self, stub: Stub) -> None:
        self.call = stub.AdmitStream()
        self.results: dict[str, admission_pb2.AdmitStreamResult] = {}

    async def send(self, *requests: admission_pb2.AdmitRequest, tickets: tuple[str, ...] = ()) -> None:
        releases = [admission_pb2.ReleaseRequest(worker=HERE, ticket=ticket) for ticket in tickets]
        await self.call.write(admission_pb2.AdmitStreamRequest(admits=requests, releases=releases))

    async def read(self) -> None:
        response = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert isinstance(response, admission_pb2.AdmitStreamResponse), "the stream has ended"
        self.results.update({result.attempt.request_id: result for result in response.results})

    async def read_until(self, *names: str) -> None:
        while not self.results.keys() >= set(names):
            await self.read()

    async def code(self) -> grpc.StatusCode:
        """The status after the last answer."""
        while await asyncio.wait_for(self.call.read(), WAIT_S) is not grpc.aio.EOF:
            pass
        return await self.call.code()
