"""The router's service on a real port, over fake agents and engines, and a client of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from kvc.errors import KvcError, from_rpc_error
from kvc.runtime.channel import channel
from kvc.runtime.clock import SystemClock
from kvc.runtime.server import Server, ServerConfig
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import router_pb2, router_pb2_grpc
from services.router.main import SERVICE
from services.router.metrics import RouterMetrics, SigmaCollector
from services.router.servicer import RouterServicer
from tests.support.fake_ports import World, world
from tests.support.mesh_server import no_reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable


@dataclass
class Served:
    """A router that serves."""

    world: World
    channel: grpc.aio.Channel
    stub: router_pb2_grpc.RouterServiceAsyncStub
    registry: CollectorRegistry
    problems: dict[str, str]
    target: str

    async def dispatch(self, timeout_s: float = 20.0, **fields: Any) -> list[router_pb2.DispatchResponse]:
        """A whole Dispatch."""
        call = self.stub.Dispatch(request(**fields), timeout=timeout_s)
        return [response async for response in call]

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value."""
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value


def request(**fields: Any) -> router_pb2.DispatchRequest:
    """A good request with changes; a prompt given by name replaces the usual one."""
    prompts = {"input_ids", "text", "packed_input_ids"}
    values: dict[str, Any] = {"session_id": "s", "max_new_tokens": 4} | fields
    if not prompts & fields.keys():
        values["packed_input_ids"] = bytes(4 * 48)
    return router_pb2.DispatchRequest(**values)


async def rpc_failure(call: Awaitable[object]) -> KvcError:
    """The typed error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


@asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[Served]:
    """A router with one decode worker d0; arguments as for `fake_ports.config`."""
    registry = CollectorRegistry()
    problems: dict[str, str] = {}
    async with world(observer=RouterMetrics(registry), **fields) as made:
        registry.register(SigmaCollector(made.router, made.janitor))
        made.join("d0", capabilities=("admit",))
        servicer = RouterServicer(made.router, SystemClock(), lambda: problems)

        def register(server: grpc.aio.Server) -> None:
            router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)

        server = await Server.start(ServerConfig(), register, [SERVICE], Telemetry(None), registry, no_reason)
        client = channel(f"127.0.0.1:{server.port}", max_message_bytes=64 * 1024 * 1024)
        try:
            yield Served(made, client, router_pb2_grpc.RouterServiceStub(client), registry, problems, f"127.0.0.1:{server.port}")
        finally:
            await client.close()
            await server.stop(0)
