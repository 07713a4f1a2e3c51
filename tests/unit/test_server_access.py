"""Who may call a gRPC server: bearer tokens, TLS and client certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published
from grpc_reflection.v1alpha import reflection_pb2_grpc  # type: ignore[import-untyped]  # no types published

from kvc.errors import Unauthenticated, Unavailable
from kvc.runtime.config import ConfigError
from kvc.runtime.metrics import process_registry
from kvc.runtime.server import Server, ServerConfig, channel
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2_grpc
from tests.support.certificates import Certificates, make_certificates
from tests.support.mesh_calls import CALLS, REQUEST, TIMEOUT_S, failure, stub_of, unary_call
from tests.support.mesh_server import Scripted, no_reason, serving

if TYPE_CHECKING:
    import io
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.support.mesh_calls import Call


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
