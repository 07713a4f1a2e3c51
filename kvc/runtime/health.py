"""grpc.health.v1 for asyncio servers.

The servicer that comes with grpcio-health-checking drops all followers of a service when one of them leaves, and its Watch is no
async generator, which tracing interceptors cannot wrap; hence this one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published

from kvc.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """One serving state for the whole server, under its own name ("") and those of its services."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """Starts as not serving."""
        self._names = frozenset({"", *service_names})
        self._serving = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """What is answered now."""
        return self._serving

    def set_serving(self, serving: bool) -> None:  # noqa: FBT001 - the noun is in the name
        """Changes the state and tells all followers. Mutates."""
        if serving != self._serving:
            self._serving = serving
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def Check(self, request: Any, _context: Any) -> Any:  # noqa: N802 - the name of the method
        """The state of one service.

        Raises:
            NotFound: the server has no such service.
        """
        if request.service not in self._names:
            raise NotFound("no such service", field="service")
        return self._state(request.service)

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802 - the name of the method
        """The state of one service now and after every change."""
        while True:
            changed = self._changed
            yield self._state(request.service)
            await changed.wait()

    def _state(self, service: str) -> Any:
        known = SERVING if self._serving else NOT_SERVING
        return health_pb2.HealthCheckResponse(status=known if service in self._names else SERVICE_UNKNOWN)
