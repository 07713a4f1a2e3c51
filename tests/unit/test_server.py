"""A gRPC server around its servicers: cancelled calls, health, reflection, the operations port, ports in use, and its end."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]  # no types published
from prometheus_client import CollectorRegistry, Counter

from kvc.errors import Unavailable
from kvc.runtime.config import ConfigError
from kvc.runtime.metrics import bound, process_registry
from kvc.runtime.server import Server, ServerConfig, channel
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2
from tests.support.mesh_calls import REQUEST, TIMEOUT_S, admits, failure, stub_of, unary_call
from tests.support.mesh_server import SERVICE, Scripted, no_reason, serving, until

if TYPE_CHECKING:
    import io
    from collections.abc import AsyncGenerator


ANSWERS = {
    "GetWorker": admission_pb2.GetWorkerResponse(),
    "WatchResidency": admission_pb2.WatchResidencyResponse(snapshot=admission_pb2.ResidencySnapshot(block_hashes=b"x" * 65536)),
    "AdmitStream": admission_pb2.AdmitStreamResponse(results=[admission_pb2.AdmitStreamResult()] * 10_000),
}


class Holding(Scripted):
    """Holds something while a call lives: sends one answer and waits, or sends without end."""

    def __init__(self, method: str, *, sending: bool) -> None:
        super().__init__()
        self.held = 0
        self.ended: list[str] = []
        self._answer, self._sending = ANSWERS[method], sending
        self.unary, self.many = self.hold_one, self.hold_many

    async def hold_one(self, request: Any, context: Any) -> Any:
        async with aclosing(self.hold_many(request, context)) as answers:
            return [answer async for answer in answers]

    async def hold_many(self, _request: Any, _context: Any) -> AsyncGenerator[Any]:
        task = asyncio.current_task()
        self.held += 1
        try:
            yield self._answer
            while self._sending:
                yield self._answer
            await asyncio.Event().wait()
        finally:
            self.held -= 1
            self.ended.append("own" if asyncio.current_task() is task else "foreign")

    def has_ended(self, calls: int) -> bool:
        return len(self.ended) == calls


@pytest.mark.parametrize(
    ("method", "sending"),
    [("GetWorker", False), ("WatchResidency", False), ("WatchResidency", True), ("AdmitStream", False), ("AdmitStream", True)],
)
async def test_a_cancelled_call_gives_back_what_it_holds_at_once_and_is_no_error(
    method: str, logged: io.StringIO, *, sending: bool
) -> None:
    """F58, F5: callers cancel while the handler waits and while it sends; the handler ends in its own task, without an error line."""
    servicer = Holding(method, sending=sending)
    async with serving(servicer) as server, stub_of(server) as stub:
        for calls in range(20):
            if method == "GetWorker":
                call = stub.GetWorker(REQUEST, timeout=TIMEOUT_S)
                await until(lambda: servicer.held == 1)
            elif method == "WatchResidency":
                call = stub.WatchResidency(admission_pb2.WatchResidencyRequest(), timeout=TIMEOUT_S)
                await call.read()
            else:
                call = stub.AdmitStream(admits(admission_pb2.AdmitStreamRequest()), timeout=TIMEOUT_S)
                await call.read()
            call.cancel()
            await until(partial(servicer.has_ended, calls + 1))
    assert (servicer.held, servicer.ended) == (0, ["own"] * 20)
    assert '"level":"error"' not in logged.getvalue()


async def test_health_of_the_server_and_its_services() -> None:
    async with serving(Scripted()) as server, channel(f"127.0.0.1:{server.port}") as plain:
        health = health_pb2_grpc.HealthStub(plain)
        for name in ("", SERVICE):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)).status == 1
            server.set_serving(False)
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)).status == 2
            server.set_serving(True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_one_follower_of_health_that_leaves_does_not_deafen_the_others() -> None:
    async with serving(Scripted()) as server, channel(f"127.0.0.1:{server.port}") as plain:
        health = health_pb2_grpc.HealthStub(plain)
        calls = [health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S) for _ in range(3)]
        assert [(await call.read()).status for call in calls] == [1, 1, 1]
        calls[0].cancel()
        server.set_serving(False)
        assert [(await call.read()).status for call in calls[1:]] == [2, 2]
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=TIMEOUT_S)
        assert (await unknown.read()).status == 3
        for call in (*calls, unknown):
            call.cancel()


async def test_reflection_lists_the_services() -> None:
    async with serving(Scripted()) as server, channel(f"127.0.0.1:{server.port}") as plain:
        stub = reflection_pb2_grpc.ServerReflectionStub(plain)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=TIMEOUT_S)
        names = {service.name for service in (await anext(aiter(call))).list_services_response.service}
        call.cancel()
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def fetch(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as response:
        return response.status, await response.text(), response.headers["Content-Type"]


async def test_operations_port() -> None:
    registry: CollectorRegistry = process_registry()
    counter = Counter("kvc_turns", "Turns.", ["mode"], registry=registry)
    children = bound(counter, ["direct", "seed"])
    children["direct"].inc(3)
    reason: list[str | None] = ["no decode worker is known"]

    def ready() -> str | None:
        if reason == ["broken"]:
            raise RuntimeError("boom")
        return reason[0]

    server = await Server.start(ServerConfig(), lambda _: None, [], Telemetry(None), registry, ready)
    try:
        status, text, kind = await fetch(server.ops_port, "/metrics")
        assert status == 200
        assert kind.startswith("text/plain")
        assert 'kvc_turns_total{mode="direct"} 3.0' in text
        assert 'kvc_turns_total{mode="seed"} 0.0' in text
        assert "process_resident_memory_bytes" in text
        assert (await fetch(server.ops_port, "/metrics", Accept="application/openmetrics-text"))[2].startswith("application/openmetrics")
        assert (await fetch(server.ops_port, "/metrics", Accept="application/openmetrics-text;version=x"))[0] == 200
        assert (await fetch(server.ops_port, "/health"))[0] == 200
        status, text, _ = await fetch(server.ops_port, "/ready")
        assert (status, json.loads(text)) == (503, {"ready": False, "reason": "no decode worker is known"})
        reason[0] = None
        assert (await fetch(server.ops_port, "/ready"))[0] == 200
        reason[0] = "broken"
        status, text, _ = await fetch(server.ops_port, "/ready")
        assert status == 503
        assert "boom" not in text
        assert (await fetch(server.ops_port, "/nothing"))[0] == 404
    finally:
        await server.stop(0)


async def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port: cannot listen on 127.0.0.1:{port}"):
            await Server.start(ServerConfig(port=port), lambda _: None, [], Telemetry(None), process_registry(), no_reason)
        with pytest.raises(ConfigError, match=rf"server\.ops_port: cannot listen on 127.0.0.1:{port}"):
            await Server.start(ServerConfig(ops_port=port), lambda _: None, [], Telemetry(None), process_registry(), no_reason)


async def test_two_services_cannot_share_a_port() -> None:
    async with serving(Scripted()) as server:
        with pytest.raises(ConfigError, match=r"server\.port"):
            await Server.start(ServerConfig(port=server.port), lambda _: None, [], Telemetry(None), process_registry(), no_reason)


async def test_calls_in_flight_finish_within_the_grace_and_new_ones_are_refused() -> None:
    servicer = Scripted()
    started, go = asyncio.Event(), asyncio.Event()

    async def unary(_request: Any, _context: Any) -> Any:
        started.set()
        await go.wait()
        return admission_pb2.GetWorkerResponse()

    servicer.unary = unary
    async with serving(servicer) as server, stub_of(server) as stub, stub_of(server) as other:
        in_flight = asyncio.ensure_future(unary_call(stub))
        await started.wait()
        stopping = asyncio.ensure_future(server.stop(TIMEOUT_S))
        await asyncio.sleep(0)
        error = await failure(unary_call, other)
        assert type(error) is Unavailable
        assert not in_flight.done()
        go.set()
        await in_flight
        await stopping
        await server.stop(0)
