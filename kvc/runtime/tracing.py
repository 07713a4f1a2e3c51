"""Spans of gRPC calls: server and client interceptors for all four kinds of calls, on the OpenTelemetry API.

OpenTelemetry's own aio interceptors lose client spans of streams that are not read to their end, and log an error for each stream
that a caller cancels. Here a server span lives in the call's own task, and a client span ends when gRPC says that the call is done.
Attributes and statuses follow OpenTelemetry's conventions for RPC: a server span is an error only when the server is at fault.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.context import Context as TraceContext
from opentelemetry.context import attach, create_key, detach, get_value, set_value
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvc.runtime.interceptors import behaviour_of, same_kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvc.runtime.interceptors import Context, Continue, Handler

_W3C = TraceContextTextMapPropagator()
_CARRIED = ("traceparent", "tracestate")
_OWN_SPAN = create_key("kvc-own-span")
# Streams that live as long as their peers, and probes: they are no requests.
UNTRACED = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.",
    "/kvc.v1.AdmissionService/AdmitStream",
    "/kvc.v1.AdmissionService/WatchResidency",
)
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class ServerTracing(grpc.aio.ServerInterceptor):
    """One span a call, child of the caller's. Goes directly outside `ErrorBoundary`, which makes streams coroutines."""

    def __init__(self, tracer: trace.Tracer) -> None:
        """Makes spans with `tracer`."""
        self._tracer = tracer

    async def intercept_service(self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Wraps the handler; unknown methods, probes and long-lived streams pass."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method.startswith(UNTRACED):
            return handler
        behaviour, tracer = behaviour_of(handler), self._tracer

        async def traced(request: Any, context: Context) -> Any:
            parent = _parent(context.invocation_metadata() or ())
            span = tracer.start_span(method[1:], parent, trace.SpanKind.SERVER, rpc_attributes(method))
            token = attach(trace.set_span_in_context(span, parent))
            code = grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                detach(token)
                code = _as_code(context.code()) or code
                _end(span, code, context.details(), failed=code in _SERVER_FAULTS)

        return same_kind(handler, traced, traced, handler.request_deserializer)


class ClientTracing:
    """Hook for `kvc.runtime.channel.interceptors`: one span a call, child of the current one, carried to the server."""

    def __init__(self, tracer: trace.Tracer) -> None:
        """Makes spans with `tracer`."""
        self._tracer = tracer

    async def call(self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        """Starts the call inside a span that ends with it."""
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        if method.startswith(UNTRACED):
            return await continuation(details, request)
        if get_value(_OWN_SPAN):
            return await continuation(_carrying(details, trace.get_current_span()), request)
        span = self._tracer.start_span(method[1:], kind=trace.SpanKind.CLIENT, attributes=rpc_attributes(method))
        try:
            call = await continuation(_carrying(details, span), request)
        except BaseException:
            _end(span, grpc.StatusCode.CANCELLED, "", failed=False)
            raise
        call.add_done_callback(lambda done: _end_client(span, done))
        return call


def with_own_span(context: TraceContext) -> TraceContext:
    """A context for one call whose span is its current one and somebody else's to record: the call carries it and gets no other."""
    return set_value(_OWN_SPAN, True, context)  # noqa: FBT003 - OpenTelemetry's signature


def is_fault(code: str) -> bool:
    """True when a status, by its name, says that the server is at fault: only then is a server span an error."""
    return grpc.StatusCode[code] in _SERVER_FAULTS


def _carrying(details: grpc.aio.ClientCallDetails, span: trace.Span) -> grpc.aio.ClientCallDetails:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span))
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *carrier.items())
    return grpc.aio.ClientCallDetails(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready)


def _end_client(span: trace.Span, call: grpc.aio.Call) -> None:
    code: grpc.StatusCode = _settled(call.code())
    _end(span, code, _settled(call.details()), failed=code not in {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED})


def _settled(coroutine: Any) -> Any:
    """The result of a coroutine that has nothing to wait for: code and details of a call that is done."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value
    raise RuntimeError("a finished call has no status")


def _end(span: trace.Span, code: grpc.StatusCode, details: str | None, *, failed: bool) -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if failed:
        span.set_status(trace.Status(trace.StatusCode.ERROR, f"{code.name}: {details or ''}"))
    span.end()


def _as_code(code: Any) -> grpc.StatusCode | None:
    """What a servicer or the boundary set, None when nobody did."""
    return code if isinstance(code, grpc.StatusCode) else None


def _parent(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    carrier = {key: value for key, value in metadata if key in _CARRIED and isinstance(value, str)}
    return _W3C.extract(carrier, TraceContext())


def rpc_attributes(method: str) -> dict[str, str]:
    """What spans of a call say of its method, given as `/service/method`."""
    service, _, name = method[1:].partition("/")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
