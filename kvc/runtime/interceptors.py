"""Server interceptors: who may call, and what a failed call looks like from outside. Both cover all four kinds of calls.

Order: [tracing, ErrorBoundary, BearerToken]. The boundary turns exceptions into a status inside the span, so that failed spans look
failed; the token check raises inside the boundary. Streaming servicer methods are async generators that iterate over their requests.
The boundary runs them in the call's own task and closes them there when the caller goes away, so what a handler holds is given back
before the call is over (F58); gRPC alone would leave that to the garbage collector.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvc.errors import Internal, InvalidField, KvcError, Unauthenticated, leaf, to_status
from kvc.runtime.logs import event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]
    Behaviour = Callable[[Any, Context], Any]

logger = logging.getLogger(__name__)

HEALTH_PREFIX = "/grpc.health.v1.Health/"
CALLER_GONE_S = 5.0
"""Longest time between a write that failed and the word that its caller has gone."""
_MALFORMED = object()


class ErrorBoundary(grpc.aio.ServerInterceptor):
    """Turns what escapes a handler into a status.

    A `KvcError`, also one inside an exception group, becomes its own status with google.rpc details. A request that is no message
    becomes INVALID_ARGUMENT. Aborts and the caller's cancellation pass. Everything else becomes INTERNAL with an incident id under
    which the log has the traceback; the caller never sees the traceback.
    """

    async def intercept_service(self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Wraps the handler; an unknown method stays unknown."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        behaviour, method = behaviour_of(handler), handler_call_details.method
        many = bool(handler.request_streaming)

        async def unary(request: Any, context: Context) -> Any:
            try:
                return await behaviour(_Requests(context) if many else _wellformed(request), context)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the boundary
                await _abort(error, context, method)

        async def stream(request: Any, context: Context) -> None:
            try:
                requests = _Requests(context) if many else _wellformed(request)
                async with aclosing(behaviour(requests, context)) as responses:
                    async for response in responses:
                        await context.write(response)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the boundary
                await _abort(error, context, method)

        return same_kind(handler, unary, stream, _guarded(handler.request_deserializer))


class BearerToken(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer TOKEN`; health checks are exempt. Constant-time comparison."""

    def __init__(self, token: str) -> None:
        """Accepts exactly `token`."""
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Passes the handler, or one of the same kind that refuses without parsing the request."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
        if len(given) == 1 and hmac.compare_digest(_octets(given[0]), self._expected):
            return handler
        refusal = "a bearer token is required" if not given else "the bearer token is wrong"

        async def unary(_request: Any, _context: Context) -> Any:
            raise Unauthenticated(refusal, field="authorization")

        async def stream(_request: Any, _context: Context) -> AsyncIterator[Any]:
            raise Unauthenticated(refusal, field="authorization")
            yield  # makes this an async generator

        return same_kind(handler, unary, stream, None)


def behaviour_of(handler: Handler) -> Behaviour:
    """The function of a handler, whatever its kind."""
    found: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    behaviour: Behaviour = found
    return behaviour


def same_kind(handler: Handler, unary: Behaviour, stream: Behaviour, deserializer: Callable[[bytes], Any] | None) -> Handler:
    """A handler of the same kind around another function.

    Args:
        handler: the handler that is replaced.
        unary: what answers when there is one response.
        stream: what answers when there are many.
        deserializer: parses requests; None hands over their bytes.
    """
    makers: dict[tuple[bool, bool], Any] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    made: Handler = makers[bool(handler.request_streaming), bool(handler.response_streaming)](
        stream if handler.response_streaming else unary,
        request_deserializer=deserializer,
        response_serializer=handler.response_serializer,
    )
    return made


def _octets(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


def _guarded(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that marks what it cannot parse: gRPC would answer an exception with UNKNOWN and its text (F76)."""
    if parse is None:
        return None

    def guarded(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            return _MALFORMED

    return guarded


def _wellformed(request: Any) -> Any:
    """The request.

    Raises:
        InvalidField: it could not be parsed.
    """
    if request is _MALFORMED:
        raise InvalidField("is no valid message of its type", field="request")
    return request


class _Requests:
    """Iterates over requests; raises `InvalidField` at one that could not be parsed.

    Reads from the context: gRPC's own iterator is an async generator that stays behind when a handler stops reading early.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return _wellformed(request)


async def _abort(error: BaseException, context: Context, method: str) -> None:
    """Ends the call with the status of `error`. Always raises."""
    cause = leaf(error)
    if isinstance(cause, grpc.aio.AbortError):
        raise cause  # a servicer's own abort; its status is sent
    if isinstance(cause, asyncio.CancelledError) and _is_cancelled():
        raise cause  # the caller went away
    if isinstance(cause, grpc.aio.BaseError) and not isinstance(cause, grpc.aio.UsageError):
        # The call ended under our hands. When the caller has gone, gRPC cancels this task, but on a busy machine the failed write is
        # told first; gRPC would take that for a fault of its own.
        await asyncio.sleep(CALLER_GONE_S)
        raise cause
    if not isinstance(cause, KvcError):
        incident = secrets.token_hex(6)
        event(logger, "internal_error", level=logging.ERROR, error=error, incident=incident, method=method)
        cause = Internal(f"internal error, incident {incident}")
    code, details, trailing = to_status(cause)
    await context.abort(code, details, tuple(trailing))


def _is_cancelled() -> bool:
    """True when this task was cancelled, False when something it awaited was: gRPC would leave that caller without an answer."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
