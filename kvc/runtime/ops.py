"""The operations port of a service: /metrics, /health and /ready over plain HTTP."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from kvc.runtime.config import ConfigError
from kvc.runtime.logs import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)


class OpsServer:
    """Serves what orchestrators and Prometheus ask for."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        """Use `start`."""
        self._runner = runner
        self.port = port

    @classmethod
    async def start(cls, host: str, port: int, registry: CollectorRegistry, ready: Callable[[], str | None]) -> OpsServer:
        """Binds and serves.

        Args:
            host: address to bind.
            port: port to bind; 0 = any free one, see `.port`.
            registry: metrics.
            ready: why the service cannot work now, or None when it can.

        Raises:
            ConfigError: the address cannot be bound.
        """

        async def metrics(request: web.Request) -> web.Response:
            body, content_type = exposition(registry, request.headers.get("Accept", ""))
            return web.Response(body=body, headers={"Content-Type": content_type})

        async def health(_request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        async def readiness(_request: web.Request) -> web.Response:
            reason = _reason(ready)
            if reason is None:
                return web.json_response({"ready": True})
            return web.json_response({"ready": False, "reason": reason}, status=503)

        app = web.Application()
        app.add_routes([web.get("/metrics", metrics), web.get("/health", health), web.get("/ready", readiness)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"server.ops_port: cannot listen on {host}:{port}: {error.strerror or error}") from None
        return cls(runner, runner.addresses[0][1])

    async def stop(self) -> None:
        """Closes the port and its connections."""
        await self._runner.cleanup()


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The metrics in the form that an Accept header asks for, and the content type of that form."""
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # the library stumbles over versions that are none
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


def _reason(ready: Callable[[], str | None]) -> str | None:
    try:
        return ready()
    except Exception as error:  # noqa: BLE001 - a service that cannot tell is not ready
        event(logger, "readiness_failed", level=logging.ERROR, error=error)
        return "the readiness check failed; the log has the reason"
