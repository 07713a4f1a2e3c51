"""Server interceptors: who may call, and what a failed call looks like from outside. Both cover all four kinds of calls.

Order: [OpenTelemetry, ErrorBoundary, BearerToken]. The boundary turns exceptions into a status inside the span, so that failed spans
look failed; the token check raises inside the boundary. Streaming handlers are async generators; they are closed in the call's own
task, at once, when the caller goes away, so what a handler holds is given back before the call is over (F58).
"""

from __future__ import annotations

import hmac
import logging
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvc.errors import Internal, KvcError, Unauthenticated, leaf, to_status
from kvc.runtime.logs import event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

HEALTH_PREFIX = "/grpc.health.v1.Health/"


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """Turns what escapes a handler into a status.

    A `KvcError`, also one inside an exception group, becomes its own status with google.rpc details. Aborts and cancellation pass.
    Everything else becomes INTERNAL with an incident id that the log has with the traceback; the caller never sees the traceback.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler; unknown methods stay unknown."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        async def unary(request: Any, context: Context) -> Any:
            try:
                return await _behaviour(handler)(request, context)
            except Exception as error:  # noqa: BLE001 - the boundary
                await _abort(error, context, method)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async with aclosing(_behaviour(handler)(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:  # noqa: BLE001 - the boundary
                await _abort(error, context, method)

        return _same_kind(handler, unary, stream)


class BearerToken(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer TOKEN`; health checks are exempt. Constant-time comparison."""

    def __init__(self, token: str) -> None:
        """Accepts exactly `token`."""
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Passes the handler, or one of the same kind that refuses without reading the request."""
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
        if len(given) == 1 and hmac.compare_digest(_octets(given[0]), self._expected):
            return handler
        refusal = Unauthenticated("authorization: a bearer token is required" if not given else "authorization: the token is wrong")

        async def unary(_request: Any, _context: Context) -> Any:
            raise refusal

        async def stream(_request: Any, _context: Context) -> AsyncIterator[Any]:
            raise refusal
            yield  # makes this an async generator

        return _same_kind(handler, unary, stream, parse=False)


def _octets(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


def _behaviour(handler: Handler) -> Callable[[Any, Any], Any]:
    """The function of a handler, whatever its kind."""
    found: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    behaviour: Callable[[Any, Any], Any] = found
    return behaviour


def _same_kind(handler: Handler | None, unary: Any, stream: Any, *, parse: bool = True) -> Handler:
    """A handler of the same kind around other functions; None, for an unknown method, stays None."""
    if handler is None:
        return handler  # type: ignore[return-value]  # the stubs do not know of unknown methods
    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    maker: Any = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: Handler = maker(
        stream if handler.response_streaming else unary,
        request_deserializer=handler.request_deserializer if parse else None,
        response_serializer=handler.response_serializer,
    )
    return made


async def _abort(error: Exception, context: Context, method: str) -> None:
    """Ends the call with the status of `error`. Always raises."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.BaseError) and context.done():
        raise error  # the caller went away while we answered: no fault of ours, and nobody to tell
    cause = leaf(error)
    if not isinstance(cause, KvcError):
        incident = secrets.token_hex(6)
        event(logger, "internal_error", level=logging.ERROR, error=error, incident=incident, method=method)
        cause = Internal(f"internal error, incident {incident}")
    code, details, trailing = to_status(cause)
    await context.abort(code, details, tuple(trailing))
