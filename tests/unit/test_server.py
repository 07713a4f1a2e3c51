from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]  # no types published
from prometheus_client import CollectorRegistry, Counter

from kvc.errors import (
    Exhausted,
    Internal,
    InvalidField,
    KvcError,
    NotFound,
    Precondition,
    TooLarge,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from kvc.runtime.config import ConfigError
from kvc.runtime.logs import configure
from kvc.runtime.metrics import bound, process_registry
from kvc.runtime.server import Server, ServerConfig, channel
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2, admission_pb2_grpc, types_pb2
from tests.support.certificates import Certificates, make_certificates
from tests.support.mesh_server import SERVICE, Scripted, no_reason, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
    from pathlib import Path

    Call = Callable[[Any], Any]

TIMEOUT_S = 10.0
REQUEST = admission_pb2.GetWorkerRequest()


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("info", "test", stream)
    yield stream
    root.handlers[:], root.level = handlers, level


@asynccontextmanager
async def stub_of(server: Server, **options: Any) -> AsyncIterator[Any]:
    async with channel(f"127.0.0.1:{server.port}", **options) as open_channel:
        yield admission_pb2_grpc.AdmissionServiceStub(open_channel)


async def admits(*requests: admission_pb2.AdmitStreamRequest) -> AsyncIterator[admission_pb2.AdmitStreamRequest]:
    for request in requests:
        yield request


async def unary_call(stub: Any) -> Any:
    return await stub.GetWorker(REQUEST, timeout=TIMEOUT_S)


async def response_stream_call(stub: Any) -> Any:
    return [one async for one in stub.WatchResidency(admission_pb2.WatchResidencyRequest(), timeout=TIMEOUT_S)]


async def both_stream_call(stub: Any) -> Any:
    return [one async for one in stub.AdmitStream(admits(admission_pb2.AdmitStreamRequest()), timeout=TIMEOUT_S)]


CALLS = pytest.mark.parametrize("call", [unary_call, response_stream_call, both_stream_call])


async def failure(call: Call, stub: Any) -> KvcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(stub)
    return from_rpc_error(caught.value)


def failing(error: BaseException) -> Scripted:
    servicer = Scripted()

    async def unary(_request: Any, _context: Any) -> Any:
        raise error

    async def many(_request: Any, _context: Any) -> AsyncGenerator[Any]:
        raise error
        yield  # makes this an async generator

    servicer.unary, servicer.many = unary, many
    return servicer


@CALLS
async def test_typed_errors_reach_the_caller_of_every_kind_of_call(call: Call) -> None:
    async with serving(failing(Exhausted("queue is full", retry_after_s=0.5, reason="QUEUE_FULL"))) as server, stub_of(server) as stub:
        error = await failure(call, stub)
    assert (type(error), error.message, error.retry_after_s, error.reason) == (Exhausted, "queue is full", 0.5, "QUEUE_FULL")


@CALLS
async def test_typed_errors_inside_exception_groups_reach_the_caller(call: Call) -> None:
    group = ExceptionGroup("tasks", [ValueError("x"), InvalidField("must be 1", field="turn.input_tokens")])
    async with serving(failing(group)) as server, stub_of(server) as stub:
        error = await failure(call, stub)
    assert (type(error), error.field) == (InvalidField, "turn.input_tokens")


@CALLS
async def test_other_errors_become_an_incident_without_traceback(call: Call, logged: io.StringIO) -> None:
    async with serving(failing(ValueError("secret detail"))) as server, stub_of(server) as stub:
        error = await failure(call, stub)
    assert type(error) is Internal
    assert "secret detail" not in error.message
    incident = error.message.removeprefix("internal error, incident ")
    (line,) = [json.loads(line) for line in logged.getvalue().splitlines() if incident in line]
    assert "secret detail" in line["exception"]
    assert line["method"].startswith(f"/{SERVICE}/")


@CALLS
async def test_a_cancellation_from_inside_is_an_answer_not_silence(call: Call, logged: io.StringIO) -> None:
    """A handler that ends with CancelledError makes gRPC send nothing; a task that was cancelled elsewhere must not hang the caller."""
    async with serving(failing(asyncio.CancelledError())) as server, stub_of(server) as stub:
        error = await failure(call, stub)
    assert type(error) is Internal
    assert "internal_error" in logged.getvalue()


async def test_a_servicers_own_abort_passes(logged: io.StringIO) -> None:
    servicer = Scripted()

    async def unary(_request: Any, context: Any) -> Any:
        async with asyncio.TaskGroup():
            await context.abort(grpc.StatusCode.NOT_FOUND, "own words")

    servicer.unary = unary
    async with serving(servicer) as server, stub_of(server) as stub:
        error = await failure(unary_call, stub)
    assert (type(error), error.message) == (NotFound, "own words")
    assert "internal_error" not in logged.getvalue()
    assert '"level":"error"' not in logged.getvalue()


async def test_a_long_message_still_arrives() -> None:
    async with serving(failing(InvalidField("\U0001f600" * 5000, field="x" * 5000))) as server, stub_of(server) as stub:
        error = await failure(unary_call, stub)
    assert type(error) is InvalidField
    assert error.message.startswith("\U0001f600")


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


async def raw_call(server: Server, method: str, *bodies: bytes) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as plain:
        if method == "AdmitStream":
            call: Any = plain.stream_stream(f"/{SERVICE}/{method}")

            async def requests() -> AsyncIterator[bytes]:
                for body in bodies:
                    yield body

            return [one async for one in call(requests(), timeout=TIMEOUT_S)]
        if method == "WatchResidency":
            call = plain.unary_stream(f"/{SERVICE}/{method}")
            return [one async for one in call(bodies[0], timeout=TIMEOUT_S)]
        call = plain.unary_unary(f"/{SERVICE}/{method}")
        return await call(bodies[0], timeout=TIMEOUT_S)


@pytest.mark.parametrize("method", ["Admit", "WatchResidency", "AdmitStream"])
@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b'{"turn": null}', b"\x0a\xff\xff\xff\xff\x0f"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(method: str, body: bytes, logged: io.StringIO) -> None:
    """F76: malformed requests, truncated ones and strings that are no UTF-8 get INVALID_ARGUMENT on every kind of call."""
    servicer = Scripted()

    async def many(requests: Any, _context: Any) -> AsyncGenerator[Any]:
        if method == "AdmitStream":
            async for _ in requests:
                yield admission_pb2.AdmitStreamResponse()

    servicer.many = many
    if method == "Admit" and body == b"\x0a\x02\xff\xfe":
        body = b"\x32\x02\xff\xfe"  # field 6 of AdmitRequest is a string, field 1 is a message
    if method == "AdmitStream" and body == b"\x0a\x02\xff\xfe":
        body = b"\x0a\x04\x32\x02\xff\xfe"
    async with serving(servicer) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(server, method, body)
        assert await raw_call(server, "GetWorker", b"") == b""
    error = from_rpc_error(caught.value)
    assert (type(error), error.field) == (InvalidField, "request")
    assert '"level":"error"' not in logged.getvalue()


@pytest.mark.parametrize("method", ["Admit", "WatchResidency", "AdmitStream"])
async def test_a_message_at_the_limit_works_and_one_byte_more_is_one_clear_error(method: str, logged: io.StringIO) -> None:
    """F78: the error is not retryable, and the server goes on."""
    servicer = Scripted()

    async def many(requests: Any, _context: Any) -> AsyncGenerator[Any]:
        if method == "AdmitStream":
            async for _ in requests:
                yield admission_pb2.AdmitStreamResponse()

    servicer.many = many
    limit = 65536
    # Field 15 (unknown to every request type), length-delimited: tag 1 byte, length 3 bytes.
    size = limit - 4
    length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    filler = b"\x7a" + length + b"x" * size
    assert len(filler) == limit
    async with serving(servicer, ServerConfig(max_message_bytes=limit)) as server:
        await raw_call(server, method, filler)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(server, method, filler + b"x")
        assert await raw_call(server, "GetWorker", b"") == b""
    error = from_rpc_error(caught.value)
    assert type(error) is TooLarge, error
    assert "65537" in error.message


async def test_a_response_that_is_too_large_is_one_clear_error() -> None:
    servicer = Scripted()

    async def unary(_request: Any, _context: Any) -> Any:
        return admission_pb2.GetWorkerResponse(info=types_pb2.WorkerInfo(model="m" * 70000))

    servicer.unary = unary
    async with serving(servicer, ServerConfig(max_message_bytes=65536)) as server, stub_of(server) as stub:
        assert type(await failure(unary_call, stub)) is TooLarge


async def test_eight_megabytes_of_hashes_pass_by_default() -> None:
    """F78: a request with 1 million block hashes works."""
    servicer = Scripted()
    received: list[int] = []

    async def unary(request: Any, _context: Any) -> Any:
        received.append(len(request.turn.block_hashes))
        return admission_pb2.AdmitResponse()

    servicer.unary = unary
    async with serving(servicer) as server, stub_of(server) as stub:
        await stub.Admit(admission_pb2.AdmitRequest(turn=types_pb2.Turn(block_hashes=bytes(8_000_000))), timeout=TIMEOUT_S)
    assert received == [8_000_000]


@CALLS
async def test_callers_without_the_token_are_refused(call: Call) -> None:
    reached: list[Any] = []
    servicer = Scripted()
    ordinary = servicer.unary

    async def unary(request: Any, context: Any) -> Any:
        reached.append(request)
        return await ordinary(request, context)

    async def many(request: Any, _context: Any) -> AsyncGenerator[Any]:
        reached.append(request)
        return
        yield  # makes this an async generator

    servicer.unary, servicer.many = unary, many
    async with serving(servicer, ServerConfig(auth_token="correct horse")) as server:
        for token in (None, "wrong", "correct hors", "correct horse!", "Correct horse"):
            async with stub_of(server, token=token) as stub:
                error = await failure(call, stub)
            assert (type(error), error.field) == (Unauthenticated, "authorization")
            assert "horse" not in error.message
        assert reached == []
        async with stub_of(server, token="correct horse") as stub:
            await call(stub)
        assert len(reached) == 1


async def test_other_schemes_and_repeated_headers_are_refused_and_health_needs_no_token() -> None:
    async with serving(Scripted(), ServerConfig(auth_token="t0k")) as server, channel(f"127.0.0.1:{server.port}") as plain:
        stub: Any = admission_pb2_grpc.AdmissionServiceStub(plain)
        for metadata in (
            (("authorization", "Basic t0k"),),
            (("authorization", "t0k"),),
            (("authorization", "Bearer t0k"), ("authorization", "Bearer t0k")),
            (("authorization-bin", b"Bearer t0k"),),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetWorker(REQUEST, timeout=TIMEOUT_S, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.GetWorker(REQUEST, timeout=TIMEOUT_S, metadata=(("authorization", "Bearer t0k"),))
        health = health_pb2_grpc.HealthStub(plain)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)).status == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(reflection_pb2_grpc.ServerReflectionStub(plain).ServerReflectionInfo(iter([]), timeout=TIMEOUT_S)))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(Scripted(), ServerConfig(auth_token="t")) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(server, "NoSuchMethod", b"")
    assert type(from_rpc_error(caught.value)) is Precondition


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


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


async def test_tls_and_client_certificates(certificates: Certificates) -> None:
    tls = ServerConfig(tls_cert=certificates.certificate, tls_key=certificates.key, auth_token="t")
    async with serving(Scripted(), tls) as server:
        async with stub_of(server, tls_ca=certificates.authority, token="t") as stub:
            await unary_call(stub)
        async with stub_of(server, token="t") as plain:
            assert type(await failure(unary_call, plain)) is Unavailable
    mutual = ServerConfig(tls_cert=certificates.certificate, tls_key=certificates.key, tls_client_ca=certificates.authority)
    async with serving(Scripted(), mutual) as server:
        own = {"tls_cert": certificates.certificate, "tls_key": certificates.key}
        async with stub_of(server, tls_ca=certificates.authority, **own) as stub:
            await unary_call(stub)
        async with stub_of(server, tls_ca=certificates.authority) as anonymous:
            assert type(await failure(unary_call, anonymous)) is Unavailable


async def test_tls_files_that_are_missing_or_empty_or_no_pem_are_clear_errors(certificates: Certificates, tmp_path: Path) -> None:
    missing, empty, odd = tmp_path / "missing.pem", tmp_path / "empty.pem", tmp_path / "odd.pem"
    empty.touch()
    odd.write_text("hello")

    async def start(**paths: Path) -> None:
        config = ServerConfig(**paths)  # type: ignore[arg-type]  # paths only
        await Server.start(config, lambda _: None, [], Telemetry(None), process_registry(), no_reason)

    with pytest.raises(ConfigError, match=r"server\.tls_cert: .*missing\.pem: No such file"):
        await start(tls_cert=missing, tls_key=certificates.key)
    with pytest.raises(ConfigError, match=r"server\.tls_key: .*empty\.pem: is empty"):
        await start(tls_cert=certificates.certificate, tls_key=empty)
    with pytest.raises(ConfigError, match=r"server\.tls_cert.*odd\.pem"):
        await start(tls_cert=odd, tls_key=certificates.key)
    with pytest.raises(ConfigError, match=r"server\.tls_key.*authority\.pem"):
        await start(tls_cert=certificates.certificate, tls_key=certificates.authority)
    with pytest.raises(ConfigError, match=r"server\.tls_key.*mismatch"):
        await start(tls_cert=certificates.authority, tls_key=certificates.key)
    with pytest.raises(ConfigError, match=r"server\.tls_client_ca: .*odd\.pem: is no PEM"):
        await start(tls_cert=certificates.certificate, tls_key=certificates.key, tls_client_ca=odd)
    with pytest.raises(ConfigError, match="belong together"):
        channel("127.0.0.1:1", tls_ca=certificates.authority, tls_cert=certificates.certificate)
    with pytest.raises(ConfigError, match=r"tls_ca: .*missing"):
        channel("127.0.0.1:1", tls_ca=missing)
    with pytest.raises(ValueError, match="tls_cert and tls_key belong together"):
        ServerConfig(tls_cert=certificates.certificate)
    with pytest.raises(ValueError, match="tls_client_ca needs"):
        ServerConfig(tls_client_ca=certificates.authority)


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
async def test_an_open_port_is_one_warning(host: str, logged: io.StringIO, *, warns: bool) -> None:
    async with serving(Scripted(), ServerConfig(host=host)):
        pass
    warnings = [line for line in logged.getvalue().splitlines() if '"level":"warning"' in line]
    assert len(warnings) == int(warns)
    assert all("server.auth_token" in line for line in warnings)
