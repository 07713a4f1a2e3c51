"""What callers of a gRPC server are told of errors, of malformed messages and of sizes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvc.errors import Exhausted, Internal, InvalidField, NotFound, Precondition, TooLarge, from_rpc_error
from kvc.runtime import interceptors
from kvc.runtime.server import ServerConfig
from kvc.v1 import admission_pb2, types_pb2
from tests.support.mesh_calls import CALLS, TIMEOUT_S, failing, failure, raw_call, stub_of, unary_call
from tests.support.mesh_server import SERVICE, Scripted, serving

if TYPE_CHECKING:
    import io
    from collections.abc import AsyncGenerator

    from tests.support.mesh_calls import Call


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


def reading(method: str) -> Scripted:
    """A servicer that answers every element of an AdmitStream."""
    servicer = Scripted()

    async def many(requests: Any, _context: Any) -> AsyncGenerator[Any]:
        if method == "AdmitStream":
            async for _ in requests:
                yield admission_pb2.AdmitStreamResponse()

    servicer.many = many
    return servicer


@pytest.mark.parametrize("method", ["Admit", "WatchResidency", "AdmitStream"])
@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b'{"turn": null}', b"\x0a\xff\xff\xff\xff\x0f"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(method: str, body: bytes, logged: io.StringIO) -> None:
    """F76: malformed requests, truncated ones and strings that are no UTF-8 get INVALID_ARGUMENT on every kind of call."""
    servicer = reading(method)
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
    servicer = reading(method)
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


async def test_a_piece_of_a_stream_that_is_too_large_ends_the_call_and_the_handler() -> None:
    servicer = Scripted()
    ended = asyncio.Event()

    async def many(_request: Any, _context: Any) -> AsyncGenerator[Any]:
        try:
            yield admission_pb2.WatchResidencyResponse(snapshot=admission_pb2.ResidencySnapshot(block_hashes=bytes(70000)))
            await asyncio.Event().wait()
        finally:
            ended.set()

    servicer.many = many
    async with serving(servicer, ServerConfig(max_message_bytes=65536)) as server, stub_of(server) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchResidency(admission_pb2.WatchResidencyRequest(), timeout=TIMEOUT_S).read()
        assert type(from_rpc_error(caught.value)) is TooLarge
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)


class LateNews:
    """The context of a call whose caller has gone: the write fails, and only later does gRPC cancel the call's task."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()

    async def write(self, _response: Any) -> None:
        self.failed.set()
        raise grpc.aio.InternalError


@pytest.mark.parametrize("told", [True, False])
async def test_a_write_that_fails_before_its_caller_is_known_to_be_gone(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a parameter
    """F58: a caller that went away, when gRPC says so; else the failure itself."""
    monkeypatch.setattr(interceptors, "CALLER_GONE_S", TIMEOUT_S if told else 0.01)

    async def endless(_request: Any, _context: Any) -> AsyncGenerator[Any]:
        while True:
            yield b""

    async def find(_details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(endless)

    details: Any = SimpleNamespace(method="m")
    handler: Any = await interceptors.ErrorBoundary().intercept_service(find, details)
    context: Any = LateNews()
    call = asyncio.create_task(interceptors.behaviour_of(handler)(object(), context))
    await context.failed.wait()
    if told:
        call.cancel()
    with pytest.raises(asyncio.CancelledError if told else grpc.aio.InternalError):
        await call


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


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(Scripted(), ServerConfig(auth_token="t")) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(server, "NoSuchMethod", b"")
    assert type(from_rpc_error(caught.value)) is Precondition
