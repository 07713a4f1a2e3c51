"""A servicer whose behaviour a test scripts, and servers and clients around it, for tests of what surrounds every service."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvc.runtime.metrics import process_registry
from kvc.runtime.server import Server, ServerConfig
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2, admission_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    import grpc.aio

SERVICE = "kvc.v1.AdmissionService"


class Scripted(admission_pb2_grpc.AdmissionServiceServicer):
    """Each method calls the script with the request (or the iterator over requests) and the context."""

    def __init__(self) -> None:
        self.unary: Callable[[Any, Any], Awaitable[Any]] = self._empty
        self.many: Callable[[Any, Any], AsyncGenerator[Any]] = self._none

    async def _empty(self, _request: Any, _context: Any) -> Any:
        return admission_pb2.GetWorkerResponse()

    async def _none(self, _request: Any, _context: Any) -> AsyncGenerator[Any]:
        return
        yield  # makes this an async generator

    async def GetWorker(self, request: Any, context: Any) -> Any:
        return await self.unary(request, context)

    Admit = Release = GetSessionStatus = ListSessions = GetWorker

    async def WatchResidency(self, request: Any, context: Any) -> Any:
        async with aclosing(self.many(request, context)) as responses:
            async for response in responses:
                yield response

    async def AdmitStream(self, request_iterator: Any, context: Any) -> Any:
        async with aclosing(self.many(request_iterator, context)) as responses:
            async for response in responses:
                yield response


def no_reason() -> str | None:
    """A service that is always ready."""
    return None


@asynccontextmanager
async def serving(
    servicer: Scripted,
    config: ServerConfig | None = None,
    *,
    telemetry: Telemetry | None = None,
    ready: Callable[[], str | None] = no_reason,
) -> AsyncIterator[Server]:
    """A running, serving server."""

    def register(server: grpc.aio.Server) -> None:
        admission_pb2_grpc.add_AdmissionServiceServicer_to_server(servicer, server)

    server = await Server.start(config or ServerConfig(), register, [SERVICE], telemetry or Telemetry(None), process_registry(), ready)
    server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop(0)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for a condition.

    Raises:
        TimeoutError: it did not come true in time.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - whatever the condition reads has no event to wait for
            await asyncio.sleep(0.005)
