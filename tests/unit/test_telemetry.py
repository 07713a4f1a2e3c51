from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from kvc.errors import Exhausted, InvalidField
from kvc.runtime.config import ConfigError
from kvc.runtime.metrics import process_registry
from kvc.runtime.server import Server, ServerConfig, channel
from kvc.runtime.telemetry import Telemetry, context_from, traceparent
from kvc.v1 import admission_pb2, admission_pb2_grpc
from tests.support.mesh_server import SERVICE, Scripted, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from opentelemetry.sdk.trace import ReadableSpan

TIMEOUT_S = 10.0


class Recorder:
    """Telemetry whose spans a test can read."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(provider)

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def one(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> ReadableSpan:
        (span,) = [span for span in self.spans() if span.name == name and span.kind is kind]
        return span


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    own: int = span.context.span_id
    return own


async def test_one_trace_from_client_through_router_and_agent_to_the_engine() -> None:
    """Every hop is in one trace with the right parent: gRPC metadata between services, a traceparent string to the engine."""
    recorder = Recorder()
    telemetry = recorder.telemetry
    link: list[str] = []
    agent, router = Scripted(), Scripted()

    async def decide(_request: Any, _context: Any) -> Any:
        link.append(traceparent())
        return admission_pb2.AdmitResponse()

    agent.unary = decide
    async with (
        serving(agent, telemetry=telemetry) as agent_server,
        channel(f"127.0.0.1:{agent_server.port}", telemetry=telemetry) as to_agent,
    ):
        stub = admission_pb2_grpc.AdmissionServiceStub(to_agent)

        async def dispatch(_request: Any, _context: Any) -> Any:
            with telemetry.tracer.start_as_current_span("dispatch"):
                await stub.Admit(admission_pb2.AdmitRequest(), timeout=TIMEOUT_S)
            return admission_pb2.GetWorkerResponse()

        router.unary = dispatch
        async with (
            serving(router, telemetry=telemetry) as router_server,
            channel(f"127.0.0.1:{router_server.port}", telemetry=telemetry) as to_router,
        ):
            with telemetry.tracer.start_as_current_span("client"):
                await admission_pb2_grpc.AdmissionServiceStub(to_router).GetWorker(admission_pb2.GetWorkerRequest(), timeout=TIMEOUT_S)
    with telemetry.tracer.start_as_current_span("engine", context=context_from(link[0])):
        pass
    worker, admit = f"{SERVICE}/GetWorker", f"{SERVICE}/Admit"
    path = [
        recorder.one("client"),
        recorder.one(worker, SpanKind.CLIENT),
        recorder.one(worker, SpanKind.SERVER),
        recorder.one("dispatch"),
        recorder.one(admit, SpanKind.CLIENT),
        recorder.one(admit, SpanKind.SERVER),
        recorder.one("engine"),
    ]
    assert len(recorder.spans()) == len(path)
    assert len({span.context.trace_id for span in path if span.context is not None}) == 1
    assert [parent_id(span) for span in path] == [None, *(span_id(span) for span in path[:-1])]
    assert all(span.status.status_code is not StatusCode.ERROR for span in path)
    assert path[2].attributes is not None
    assert dict(path[2].attributes) == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "GetWorker",
        "rpc.grpc.status_code": 0,
    }


@pytest.mark.parametrize(
    ("error", "code", "server_failed"),
    [
        (ValueError("fault"), grpc.StatusCode.INTERNAL, True),
        (InvalidField("is wrong", field="turn"), grpc.StatusCode.INVALID_ARGUMENT, False),
        (Exhausted("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, False),
    ],
)
async def test_a_failed_call_is_a_failed_span(error: Exception, code: grpc.StatusCode, *, server_failed: bool) -> None:
    """For the caller every failure is one; for the server only its own faults, as OpenTelemetry's conventions have it."""
    recorder = Recorder()
    servicer = Scripted()

    async def fail(_request: Any, _context: Any) -> Any:
        raise error

    servicer.unary = fail
    async with (
        serving(servicer, telemetry=recorder.telemetry) as server,
        channel(f"127.0.0.1:{server.port}", telemetry=recorder.telemetry) as open_channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await admission_pb2_grpc.AdmissionServiceStub(open_channel).Admit(admission_pb2.AdmitRequest(), timeout=TIMEOUT_S)
    client, served = recorder.one(f"{SERVICE}/Admit", SpanKind.CLIENT), recorder.one(f"{SERVICE}/Admit", SpanKind.SERVER)
    assert client.status.status_code is StatusCode.ERROR
    assert (served.status.status_code is StatusCode.ERROR) is server_failed
    for span in (client, served):
        assert span.attributes is not None
        assert span.attributes["rpc.grpc.status_code"] == code.value[0]


async def test_an_unreachable_server_is_a_failed_client_span() -> None:
    recorder = Recorder()
    async with channel("127.0.0.1:1", telemetry=recorder.telemetry) as open_channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await admission_pb2_grpc.AdmissionServiceStub(open_channel).Admit(admission_pb2.AdmitRequest(), timeout=TIMEOUT_S)
    assert recorder.one(f"{SERVICE}/Admit", SpanKind.CLIENT).status.status_code is StatusCode.ERROR


async def stream_service(recorder: Recorder) -> Server:
    """A server with a generic streaming method that is traced, unlike the long-lived ones of kvc.v1."""

    async def endless(_request: Any, _context: Any) -> AsyncGenerator[bytes]:
        while True:
            yield b"x" * 65536

    def register(server: grpc.aio.Server) -> None:
        handlers: Any = {"Endless": grpc.unary_stream_rpc_method_handler(endless)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Streams", handlers),))

    return await Server.start(ServerConfig(), register, [], recorder.telemetry, process_registry(), lambda: None)


async def test_spans_of_cancelled_streams_end_and_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    server = await stream_service(recorder)
    async with channel(f"127.0.0.1:{server.port}", telemetry=recorder.telemetry) as open_channel:
        method: Any = open_channel.unary_stream("/test.Streams/Endless")
        for _ in range(5):
            call = method(b"", timeout=TIMEOUT_S)
            async for _ in call:
                break
            call.cancel()
        await until(lambda: len(recorder.spans()) == 10)
    await server.stop(0)
    assert [span.kind for span in recorder.spans()].count(SpanKind.CLIENT) == 5
    assert all(span.status.status_code is not StatusCode.ERROR for span in recorder.spans())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_long_lived_streams_and_probes_make_no_spans() -> None:
    recorder = Recorder()
    async with (
        serving(Scripted(), telemetry=recorder.telemetry) as server,
        channel(f"127.0.0.1:{server.port}", telemetry=recorder.telemetry) as open_channel,
    ):
        stub = admission_pb2_grpc.AdmissionServiceStub(open_channel)
        call = stub.WatchResidency(admission_pb2.WatchResidencyRequest(), timeout=TIMEOUT_S)
        assert [one async for one in call] == []
        probe: Any = open_channel.unary_unary("/grpc.health.v1.Health/Check")
        await probe(b"", timeout=TIMEOUT_S)
    assert recorder.spans() == []


async def test_without_an_endpoint_nothing_is_recorded_or_wrapped() -> None:
    telemetry = Telemetry.start("router", None)
    assert not telemetry.enabled
    assert telemetry.server_interceptors() == []
    assert telemetry.client_hooks() == []
    with telemetry.tracer.start_as_current_span("x"):
        assert traceparent() == ""
    telemetry.shutdown()


def test_traceparent_round_trip_and_sampling() -> None:
    recorder = Recorder()
    assert traceparent() == ""
    with recorder.telemetry.tracer.start_as_current_span("a") as span:
        parent = traceparent()
        context = span.get_span_context()
    assert parent == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    with recorder.telemetry.tracer.start_as_current_span("b", context=context_from(parent)) as child:
        assert child.get_span_context().trace_id == context.trace_id
    unsampled = Recorder(ratio=0.0)
    with unsampled.telemetry.tracer.start_as_current_span("c"):
        assert traceparent() == ""
    with unsampled.telemetry.tracer.start_as_current_span("d", context=context_from(parent)):
        assert traceparent() != ""  # the caller's decision is followed
    assert [span.name for span in unsampled.spans()] == ["d"]


@pytest.mark.parametrize(
    "text", ["", "x", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00", "00-" + "g" * 32, "é" * 55, "a" * 10_000]
)
def test_a_malformed_traceparent_starts_a_new_trace(text: str) -> None:
    recorder = Recorder()
    with recorder.telemetry.tracer.start_as_current_span("outer"):
        recorder.telemetry.tracer.start_span("x", context=context_from(text)).end()
    assert recorder.one("x").parent is None


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps the names of spans."""

    def __init__(self) -> None:
        self.services: list[str] = []
        self.names: list[str] = []

    async def Export(self, request: Any, _context: Any) -> Any:
        for resource in request.resource_spans:
            self.services += [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_an_otlp_collector() -> None:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    telemetry = Telemetry.start("router", f"127.0.0.1:{port}")
    with telemetry.tracer.start_as_current_span("hello"):
        pass
    await asyncio.to_thread(telemetry.shutdown)
    await server.stop(0)
    assert (collector.services, collector.names) == (["router"], ["hello"])


async def test_a_collector_that_is_down_costs_spans_and_nothing_else() -> None:
    telemetry = Telemetry.start("router", "127.0.0.1:1")
    async with (
        serving(Scripted(), telemetry=telemetry) as server,
        channel(f"127.0.0.1:{server.port}", telemetry=telemetry) as open_channel,
    ):
        stub = admission_pb2_grpc.AdmissionServiceStub(open_channel)
        for _ in range(700):  # more than one export batch
            await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=TIMEOUT_S)
    began = time.monotonic()
    await asyncio.to_thread(telemetry.shutdown)
    assert time.monotonic() - began < 8.0
    telemetry.shutdown()


@pytest.mark.parametrize("endpoint", ["no port", "http://", "host:port:more", "host", "ftp://h:1", "host:99999"])
def test_an_endpoint_that_is_none_is_a_clear_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.endpoint"):
        Telemetry.start("router", endpoint)
