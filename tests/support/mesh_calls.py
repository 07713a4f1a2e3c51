"""Calls of every kind to a scripted servicer, well-formed or raw, and the error that their caller gets."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvc.errors import KvcError, from_rpc_error
from kvc.runtime.server import Server, channel
from kvc.v1 import admission_pb2, admission_pb2_grpc
from tests.support.mesh_server import SERVICE, Scripted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    Call = Callable[[Any], Any]

TIMEOUT_S = 10.0
REQUEST = admission_pb2.GetWorkerRequest()


@asynccontextmanager
async def stub_of(server: Server, **options: Any) -> AsyncIterator[Any]:
    """A client of the server; options as for `channel`."""
    async with channel(f"127.0.0.1:{server.port}", **options) as open_channel:
        yield admission_pb2_grpc.AdmissionServiceStub(open_channel)


async def admits(*requests: admission_pb2.AdmitStreamRequest) -> AsyncIterator[admission_pb2.AdmitStreamRequest]:
    """Elements of an AdmitStream."""
    for request in requests:
        yield request


async def unary_call(stub: Any) -> Any:
    """A request, a response."""
    return await stub.GetWorker(REQUEST, timeout=TIMEOUT_S)


async def response_stream_call(stub: Any) -> Any:
    """A request, a stream of responses."""
    return [one async for one in stub.WatchResidency(admission_pb2.WatchResidencyRequest(), timeout=TIMEOUT_S)]


async def both_stream_call(stub: Any) -> Any:
    """Two streams."""
    return [one async for one in stub.AdmitStream(admits(admission_pb2.AdmitStreamRequest()), timeout=TIMEOUT_S)]


CALLS = pytest.mark.parametrize("call", [unary_call, response_stream_call, both_stream_call])


async def failure(call: Call, stub: Any) -> KvcError:
    """The error that a call must end with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(stub)
    return from_rpc_error(caught.value)


def failing(error: BaseException) -> Scripted:
    """A servicer whose every method raises the error."""
    servicer = Scripted()

    async def unary(_request: Any, _context: Any) -> Any:
        raise error

    async def many(_request: Any, _context: Any) -> AsyncGenerator[Any]:
        raise error
        yield  # makes this an async generator

    servicer.unary, servicer.many = unary, many
    return servicer


async def raw_call(server: Server, method: str, *bodies: bytes) -> Any:
    """Sends bytes as they are, and returns bytes."""
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
