"""Client side of the mesh's gRPC: one way to open a channel, with keepalive that notices a dead peer within 5 s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio

from kvc.runtime.tls import channel_credentials

if TYPE_CHECKING:
    from pathlib import Path

    from kvc.runtime.telemetry import Telemetry

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# keepalive_time and keepalive_timeout alone let an idle stream to a black-holed peer hang for a minute; ping_timeout is what ends it.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
# A peer that comes back is tried again soon; the default lets the pause grow to two minutes.
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def channel(
    target: str,
    *,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    token: str | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    telemetry: Telemetry | None = None,
) -> grpc.aio.Channel:
    """A channel to one server of the mesh; the caller closes it.

    Args:
        target: host:port.
        tls_ca: certificate authority that signed the server's certificate; None = no TLS.
        tls_cert: own certificate, for servers that ask for one.
        tls_key: its key.
        token: bearer token sent with every call.
        max_message_bytes: largest message either way, bytes.
        telemetry: carries the current trace along.

    Raises:
        ConfigError: a TLS file cannot be used.
    """
    options = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.enable_retries", 0),  # retries live in one layer, the dispatch loop
        *KEEPALIVE,
        *RECONNECT,
    ]
    hooks: list[Hook] = [*(telemetry.client_hooks() if telemetry else []), *([_Token(token)] if token else [])]
    around = [one for hook in hooks for one in interceptors(hook)]
    if tls_ca is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=around)
    credentials = channel_credentials(tls_ca, tls_cert, tls_key)
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=around)


class Hook(Protocol):
    """What happens around every call of a channel, whatever its kind."""

    async def call(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        """Returns what `continuation(details, request)` returns; `request` is an iterator when there are many."""
        ...


def interceptors(hook: Hook) -> list[grpc.aio.ClientInterceptor]:
    """One interceptor for each kind of call: gRPC takes each object for one kind only."""
    return [_UnaryUnary(hook), _UnaryStream(hook), _StreamUnary(hook), _StreamStream(hook)]


class _Token:
    """Adds the authorization header. gRPC's own call credentials would refuse to work without TLS."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    async def call(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._header)
        signed = grpc.aio.ClientCallDetails(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready)
        return await continuation(signed, request)


class _Hooked:
    def __init__(self, hook: Hook) -> None:
        self._hook = hook


class _UnaryUnary(_Hooked, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        return await self._hook.call(continuation, client_call_details, request)


class _UnaryStream(_Hooked, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        return await self._hook.call(continuation, client_call_details, request)


class _StreamUnary(_Hooked, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await self._hook.call(continuation, client_call_details, request_iterator)


class _StreamStream(_Hooked, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await self._hook.call(continuation, client_call_details, request_iterator)
