"""The agent as a service: health, readiness, stopping, metrics, reflection, tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # no types published
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]  # no types published

from kvc.engine import link
from kvc.errors import Unauthenticated, Unavailable
from kvc.runtime.channel import channel
from kvc.runtime.server import ServerConfig
from kvc.v1 import admission_pb2, admission_pb2_grpc, types_pb2
from services.admission_agent.config import AdmitConfig
from services.admission_agent.main import SERVICE
from tests.support.agent_rig import PROMPT, WAIT_S, Rig, Stream, admit_request, error_of, read_all, read_one, rig_of
from tests.support.fake_engine import FakeEngine, facts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rig_of() as one:
        yield await one.ready()


async def test_out_of_service_while_the_engine_is_away() -> None:
    engine = FakeEngine()
    engine.up = False
    async with rig_of(engine) as rig:
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        status, body = await rig.get("/ready")
        assert status == 503
        assert "ENGINE_AWAY" in body
        assert (await rig.get("/health"))[0] == 200
        calls: list[Awaitable[Any]] = [
            rig.stub.Admit(admit_request(), timeout=WAIT_S),
            rig.stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=WAIT_S),
            rig.stub.ListSessions(admission_pb2.ListSessionsRequest(), timeout=WAIT_S),
            rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(), timeout=WAIT_S).read(),
        ]
        for call in calls:
            error = await error_of(call)
            assert isinstance(error, Unavailable)
            assert error.reason == "ENGINE_AWAY"
        engine.up = True
        await rig.ready()
        assert await rig.health() == health_pb2.HealthCheckResponse.SERVING
        assert (await rig.get("/ready"))[0] == 200
        engine.die()
        await until(lambda: rig.agent.connection.life is None, WAIT_S, "no life")
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_f73_a_capability_that_is_missing_keeps_it_out_of_service() -> None:
    """F73: an engine without residency events: NOT_SERVING, /ready says why, and every call says why."""
    async with rig_of(FakeEngine(capabilities=["admit"])) as rig:
        await until(lambda: "CAPABILITY" in (rig.agent.agent.why_not() or ""), WAIT_S, "refused")
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        status, body = await rig.get("/ready")
        assert status == 503
        assert "ENGINE_CAPABILITY_MISSING" in body
        assert "residency" in body
        error = await error_of(rig.stub.Admit(admit_request(), timeout=WAIT_S))
        assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_CAPABILITY_MISSING")


async def test_stopping_refuses_turns_answers_what_waits_and_ends_the_streams() -> None:
    gate = asyncio.Event()
    engine = FakeEngine()

    async def slow(body: link.Admit) -> link.ReplyBody:
        if body.request_id.startswith("slow"):
            await gate.wait()
        return await engine._admit(body)

    engine.on_admit = slow
    async with rig_of(engine) as rig:
        await rig.ready()
        stream, watch = Stream(rig.stub), rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest())
        await read_one(watch)
        await stream.send(admit_request("slow-1"))
        await until(lambda: rig.agent.agent.inflight == 1, WAIT_S, "one in flight")
        stopping = asyncio.ensure_future(rig.agent.stop())
        await until(lambda: rig.agent.agent.draining, WAIT_S, "draining")
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        response = await rig.stub.Admit(admit_request("late"), timeout=WAIT_S)
        assert response.rejection.reason == types_pb2.REASON_DRAINING
        worker = await rig.stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=WAIT_S)
        assert worker.info.draining
        assert not stopping.done()
        gate.set()
        await stream.read_until("slow-1")
        assert stream.results["slow-1"].HasField("response")
        assert await stream.code() is grpc.StatusCode.OK
        assert (await error_of(read_all(watch))).reason == "SHUTTING_DOWN"
        await asyncio.wait_for(stopping, WAIT_S)


async def test_the_grace_is_bounded() -> None:
    engine = FakeEngine()

    async def never(_: link.Admit) -> link.ReplyBody:
        await asyncio.Event().wait()
        raise AssertionError

    engine.on_admit = never
    async with rig_of(engine, admit=AdmitConfig(timeout_s=60.0), grace_s=0.2) as rig:
        await rig.ready()
        call = asyncio.ensure_future(error_of(rig.stub.Admit(admit_request())))
        await until(lambda: rig.agent.agent.inflight == 1, WAIT_S, "one in flight")
        started_s = asyncio.get_running_loop().time()
        await rig.agent.stop()
        assert asyncio.get_running_loop().time() - started_s < 2.0
        assert (await call).code in {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}
        assert engine.pending == 0


async def test_metrics(rig: Rig) -> None:
    outcomes: Iterator[link.ReplyBody] = iter(
        [
            link.Admitted("direct", "local", "t", 5.0, 1, 1, facts()),
            link.Refused("no-d-capacity", 0.0, terminal=False, facts=facts()),
            link.Failed("INTERNAL", "broken"),
        ]
    )

    async def next_one(_: link.Admit) -> link.ReplyBody:
        return next(outcomes)

    rig.engine.on_admit = next_one
    rig.engine.store(PROMPT)
    await until(lambda: rig.agent.residency.resident_blocks == 10 and rig.agent.residency.load is not None, WAIT_S, "events and load")
    await rig.stub.Admit(admit_request(), timeout=WAIT_S)
    await rig.stub.Admit(admit_request(), timeout=WAIT_S)
    await rig.stub.Admit(admit_request(worker=types_pb2.WorkerRef(worker_id="d0", epoch=5)), timeout=WAIT_S)
    await error_of(rig.stub.Admit(admit_request(), timeout=WAIT_S))
    values = await rig.metrics()
    assert values["kvc_agent_admits_total", "admitted", "direct"] == 1
    assert values["kvc_agent_admits_total", "refused", "no-d-capacity"] == 1
    assert values["kvc_agent_admits_total", "refused", "stale-epoch"] == 1
    assert values["kvc_agent_admits_total", "error", "INTERNAL"] == 1
    assert values["kvc_agent_admits_total", "admitted", "seed"] == 0
    assert values["kvc_agent_admit_seconds_count",] == 4
    assert values["kvc_agent_link_call_seconds_count", "Admit"] == 3
    assert values["kvc_agent_link_call_seconds_count", "Load"] >= 1
    expected = {
        "engine_connected": 1,
        "inflight_calls": 0,
        "draining": 0,
        "followers": 0,
        "resident_blocks": 10,
        "engine_lives_total": 1,
        "engine_failures_total": 0,
        "capacity_tokens": 100_000,
        "held_tokens": 20_000,
        "reserved_tokens": 0,
        "evictable_tokens": 30_000,
        "open_tickets": 0,
        "evicted_tokens_total": 9,
        "peak_use": 0.5,
    }
    assert {name: values[f"kvc_agent_{name}",] for name in expected} == expected
    assert values["kvc_agent_residency_events_total", "snapshot"] == 1
    assert values["kvc_agent_residency_events_total", "delta"] == 1
    rig.engine.die()
    await until(lambda: rig.agent.connection.life is None, WAIT_S, "no life")
    values = await rig.metrics()
    assert values["kvc_agent_engine_connected",] == 0
    assert values["kvc_agent_engine_failures_total",] >= 1
    assert ("kvc_agent_held_tokens",) not in values, "no life, no numbers of it"


async def test_reflection_describes_the_service(rig: Rig) -> None:
    async with channel(rig.agent.target) as one:
        stub = reflection_pb2_grpc.ServerReflectionStub(one)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        responses = [response async for response in stub.ServerReflectionInfo(requests, timeout=WAIT_S)]
    names = {service.name for service in responses[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_the_token_is_asked_for() -> None:
    async with rig_of(server=ServerConfig(auth_token="s3cret"), token="s3cret") as rig:
        await rig.ready()
        assert (await rig.stub.Admit(admit_request(), timeout=WAIT_S)).HasField("admission")
        async with channel(rig.agent.target) as one:
            stub = admission_pb2_grpc.AdmissionServiceStub(one)
            assert isinstance(await error_of(stub.Admit(admit_request(), timeout=WAIT_S)), Unauthenticated)
            assert isinstance(await error_of(stub.WatchResidency(admission_pb2.WatchResidencyRequest()).read()), Unauthenticated)
            assert isinstance(await error_of(stub.AdmitStream(iter([admission_pb2.AdmitStreamRequest()])).read()), Unauthenticated)
