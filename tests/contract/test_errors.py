"""An ordinary client, with nothing of this project but the protos, reads our errors with gRPC's own status library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvc.errors import Exhausted, InvalidField, KvcError, to_status
from kvc.v1 import admission_pb2, admission_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from google.rpc import status_pb2

    _Context = grpc.aio.ServicerContext[admission_pb2.GetWorkerRequest, admission_pb2.GetWorkerResponse]
    Fail = Callable[[KvcError], Awaitable[status_pb2.Status]]


@pytest.fixture
async def fail() -> AsyncIterator[Fail]:
    """Has a server abort a call with an error and returns the status that the client reads."""
    raised: list[KvcError] = []

    async def get_worker(_: object, __: admission_pb2.GetWorkerRequest, context: _Context) -> None:
        code, details, trailing = to_status(raised.pop())
        await context.abort(code, details, trailing_metadata=tuple(trailing))

    servicer = type("Failing", (admission_pb2_grpc.AdmissionServiceServicer,), {"GetWorker": get_worker})()
    server = grpc.aio.server()
    admission_pb2_grpc.add_AdmissionServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = admission_pb2_grpc.AdmissionServiceStub(channel)

        async def call(error: KvcError) -> status_pb2.Status:
            raised.append(error)
            one = stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError):
                await one
            status = await rpc_status.aio.from_call(one)
            assert status is not None
            return status

        yield call
    await server.stop(None)


def _detail(
    status: status_pb2.Status, into: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo
) -> bool:
    return any(detail.Unpack(into) for detail in status.details)


async def test_a_bad_field_is_named(fail: Fail) -> None:
    status = await fail(InvalidField("must be at least 1, not 0", field="turn.input_tokens"))
    assert (status.code, status.message) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "turn.input_tokens: must be at least 1, not 0")
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert _detail(status, info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INVALID_FIELD", "kvc.v1", {"field": "turn.input_tokens"})
    assert _detail(status, bad)
    assert [violation.field for violation in bad.field_violations] == ["turn.input_tokens"]


async def test_a_retry_hint_is_a_retry_info(fail: Fail) -> None:
    status = await fail(Exhausted("the queue is full", retry_after_s=1.25))
    retry = error_details_pb2.RetryInfo()
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert _detail(status, retry)
    assert retry.retry_delay.ToNanoseconds() == 1_250_000_000


async def test_without_a_hint_there_is_no_retry_info(fail: Fail) -> None:
    status = await fail(Exhausted("the queue is full"))
    assert not _detail(status, error_details_pb2.RetryInfo())
