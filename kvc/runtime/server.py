"""The gRPC server that every service runs: health, reflection, error boundary, tokens, TLS, keepalive and an operations port."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - settings are read by their evaluated annotations
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]  # no types published

from kvc.runtime.channel import MAX_MESSAGE_BYTES, channel
from kvc.runtime.config import ConfigError, setting
from kvc.runtime.health import Health
from kvc.runtime.interceptors import BearerToken, ErrorBoundary
from kvc.runtime.logs import event
from kvc.runtime.ops import OpsServer
from kvc.runtime.tls import server_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client import CollectorRegistry

    from kvc.runtime.telemetry import Telemetry

__all__ = ["MAX_MESSAGE_BYTES", "Server", "ServerConfig", "channel"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Listening addresses, TLS, the token and limits of one service."""

    host: str = setting("127.0.0.1", help="address to bind")
    port: int = setting(0, help="gRPC port; 0 = any free one", minimum=0, maximum=65535, flag="--port")
    tls_cert: Path | None = setting(None, help="PEM certificate chain; none = no TLS")
    tls_key: Path | None = setting(None, help="PEM key of the certificate")
    tls_client_ca: Path | None = setting(None, help="PEM authority that callers' certificates must be signed by; none = any caller")
    auth_token: str | None = setting(None, help="bearer token that callers must send; none = any caller", secret=True)
    max_message_bytes: int = setting(MAX_MESSAGE_BYTES, help="largest message either way", minimum=65536, maximum=1 << 30)
    ops_host: str = setting("127.0.0.1", help="address of /metrics, /health and /ready")
    ops_port: int = setting(0, help="port of /metrics, /health and /ready; 0 = any free one", minimum=0, maximum=65535, flag="--ops-port")

    def __post_init__(self) -> None:
        """Checks what concerns several settings.

        Raises:
            ValueError: TLS is half configured.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")


class Server:
    """A running server. `port` and `ops_port` are the bound ports."""

    def __init__(self, server: grpc.aio.Server, health: Health, ops: OpsServer, port: int) -> None:
        """Use `start`."""
        self._server = server
        self._health = health
        self._ops = ops
        self.port = port
        self.ops_port = ops.port

    @classmethod
    async def start(
        cls,
        config: ServerConfig,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        telemetry: Telemetry,
        metrics_registry: CollectorRegistry,
        ready: Callable[[], str | None],
    ) -> Server:
        """Binds both ports and serves; health says NOT_SERVING until `set_serving(True)`.

        Args:
            config: addresses, TLS, token, limits.
            register: adds the servicers; streaming methods must be async generators.
            service_names: full names, for health and reflection.
            telemetry: traces calls.
            metrics_registry: served under /metrics.
            ready: why the service cannot work now, or None when it can; served under /ready.

        Raises:
            ConfigError: a port cannot be bound or a TLS file cannot be used.
        """
        interceptors = [*telemetry.server_interceptors(), ErrorBoundary()]
        if config.auth_token:
            interceptors.append(BearerToken(config.auth_token))
        server = grpc.aio.server(interceptors=interceptors, options=_options(config))
        health = Health(service_names)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        names = [*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        register(server)
        port = _bind(server, config)
        ops = await OpsServer.start(config.ops_host, config.ops_port, metrics_registry, ready)
        await server.start()
        _warn_if_open(config)
        event(logger, "listening", host=config.host, port=port, ops_port=ops.port, tls=config.tls_cert is not None)
        return cls(server, health, ops, port)

    def set_serving(self, serving: bool) -> None:  # noqa: FBT001 - the noun is in the name
        """Changes what gRPC health checks answer."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Health turns to NOT_SERVING, no new calls; calls in flight get `grace_s` seconds, then are cut off. Idempotent."""
        self._health.set_serving(False)
        await self._server.stop(grace_s)
        await self._ops.stop()


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Two services on one port is a mistake, never load balancing.
        ("grpc.so_reuseport", 0),
        # Callers ping every 5 s, also while they have no call open; without these the server answers with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 4000),
        ("grpc.keepalive_permit_without_calls", 1),
        # The other direction: streams of followers that vanished end.
        ("grpc.keepalive_time_ms", 10000),
        ("grpc.keepalive_timeout_ms", 2000),
        ("grpc.http2.ping_timeout_ms", 3000),
    ]


def _bind(server: grpc.aio.Server, config: ServerConfig) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if config.tls_cert is None or config.tls_key is None:
            return server.add_insecure_port(address)
        credentials = server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        what = str(error).partition(";")[0]  # the rest is advice on gRPC's own debugging
        raise ConfigError(f"server.port: cannot listen on {address}, which is taken or not of this machine: {what}") from None


def _warn_if_open(config: ServerConfig) -> None:
    """One warning line when everybody on the network may call."""
    if _is_loopback(config.host) or (config.tls_cert and (config.auth_token or config.tls_client_ca)):
        return
    event(
        logger,
        "open_to_the_network",
        level=logging.WARNING,
        host=config.host,
        message="set server.tls_cert, server.tls_key and server.auth_token (or server.tls_client_ca) to close this port",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
