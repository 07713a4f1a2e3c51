"""The error tree and its three wire forms: google.rpc.Status for gRPC, a JSON body for HTTP, a status name for the engine link.

Every error that a caller can act on is one of these; anything else that escapes a handler becomes `Internal` with an incident id.

    KvcError
    +-- InvalidField      INVALID_ARGUMENT     400  a field is missing, malformed or out of range; `field` names it
    +-- Unauthenticated   UNAUTHENTICATED      401  no token, or a wrong one
    +-- NotFound          NOT_FOUND            404  no such session, worker or room
    +-- AlreadyExists     ALREADY_EXISTS       409  the id is taken by something else
    +-- SessionBusy       ABORTED              409  another turn of the session is in flight
    +-- Precondition      FAILED_PRECONDITION  400  the system is not in the state that the call needs
    +-- TooLarge          OUT_OF_RANGE         413  beyond a fixed limit: repeating the call cannot help
    +-- Exhausted         RESOURCE_EXHAUSTED   429  no room now; `retry_after_s` says when to ask again
    +-- Unavailable       UNAVAILABLE          503  a part that is needed cannot be reached
    +-- DeadlineExceeded  DEADLINE_EXCEEDED    504  the caller's time is over
    +-- Internal          INTERNAL             500  a fault of this program

The tree needs no gRPC: an engine process without it can raise and encode these errors. `to_status` and `from_rpc_error` import gRPC
when they are called.
"""

# ruff: noqa: N818 - the errors are named after what happened, as status codes are

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import grpc
    import grpc.aio

DOMAIN = "kvc.v1"
# Message and field travel twice, percent-encoded and in base64; gRPC refuses trailers beyond 8 KiB.
MAX_MESSAGE_BYTES = 512
MAX_FIELD_BYTES = 128
STATUS_DETAILS_KEY = "grpc-status-details-bin"
# gRPC itself refuses oversized messages with RESOURCE_EXHAUSTED and these words; repeating such a call can never help (F78).
_SIZE_REFUSAL = "larger than max"


class KvcError(Exception):
    """Base of all errors with a wire form.

    Attributes:
        code: gRPC status name.
        http_status: HTTP status code.
        reason: ErrorInfo.reason, UPPER_SNAKE; programs compare it.
        message: one line for people; never prompt text or secrets.
        field: dotted name of the field at fault, or empty.
        retry_after_s: seconds before which repeating the call is pointless; 0 = no hint.
    """

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    reason: str = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0, reason: str | None = None) -> None:
        """Keeps one printable line of the message, at most 512 bytes, so that it always fits into gRPC trailers."""
        self.message = _one_line(message, MAX_MESSAGE_BYTES)
        self.field = _one_line(field, MAX_FIELD_BYTES)
        self.retry_after_s = retry_after_s if math.isfinite(retry_after_s) and retry_after_s > 0 else 0.0
        if reason is not None:
            self.reason = reason
        super().__init__(self.message)

    def __str__(self) -> str:
        """The message, led by the field when there is one."""
        if self.field and not self.message.startswith(self.field):
            return f"{self.field}: {self.message}"
        return self.message


class InvalidField(KvcError):
    """A field is missing, malformed or out of range. `field` names it."""

    code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_FIELD"


class Unauthenticated(KvcError):
    """No token, or a wrong one."""

    code = "UNAUTHENTICATED"
    http_status = 401
    reason = "UNAUTHENTICATED"


class NotFound(KvcError):
    """No such session, worker or room."""

    code = "NOT_FOUND"
    http_status = 404
    reason = "NOT_FOUND"


class AlreadyExists(KvcError):
    """The id is taken by something else."""

    code = "ALREADY_EXISTS"
    http_status = 409
    reason = "ALREADY_EXISTS"


class SessionBusy(KvcError):
    """Another turn of the session is in flight."""

    code = "ABORTED"
    http_status = 409
    reason = "SESSION_BUSY"


class Precondition(KvcError):
    """The system is not in the state that the call needs."""

    code = "FAILED_PRECONDITION"
    http_status = 400
    reason = "FAILED_PRECONDITION"


class TooLarge(KvcError):
    """Beyond a fixed limit; repeating the call cannot help."""

    code = "OUT_OF_RANGE"
    http_status = 413
    reason = "TOO_LARGE"


class Exhausted(KvcError):
    """No room now; `retry_after_s` says when to ask again."""

    code = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "EXHAUSTED"


class Unavailable(KvcError):
    """A part that is needed cannot be reached."""

    code = "UNAVAILABLE"
    http_status = 503
    reason = "UNAVAILABLE"


class DeadlineExceeded(KvcError):
    """The caller's time is over."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE_EXCEEDED"


class Internal(KvcError):
    """A fault of this program."""


_BY_CODE: dict[str, type[KvcError]] = {
    kind.code: kind
    for kind in (
        InvalidField,
        Unauthenticated,
        NotFound,
        AlreadyExists,
        SessionBusy,
        Precondition,
        TooLarge,
        Exhausted,
        Unavailable,
        DeadlineExceeded,
        Internal,
    )
}
# Codes that only gRPC itself or a foreign server answers with, and the error that asks for the same reaction.
_BY_CODE |= {"PERMISSION_DENIED": Unauthenticated, "UNIMPLEMENTED": Precondition, "CANCELLED": Unavailable}


def error_for(code: str, message: str, *, field: str = "", reason: str = "", retry_after_s: float = 0.0) -> KvcError:
    """The error of a gRPC status name, as the engine link's `Failed` and the stream's `StreamError` carry it.

    Args:
        code: gRPC status name; an unknown one makes an `Internal`.
        message: for people.
        field: the field at fault.
        reason: ErrorInfo.reason; empty: the kind's own, or the code when it is not one of the tree's.
        retry_after_s: pause hint in seconds.
    """
    kind = _BY_CODE.get(code, Internal)
    own = None if kind.code == code else code
    return kind(message, field=field, retry_after_s=retry_after_s, reason=reason or own)


def leaf(error: BaseException) -> BaseException:
    """The error that counts inside nested exception groups: the first `KvcError`, else the first leaf; `error` itself otherwise."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [leaf(one) for one in error.exceptions]
    return next((one for one in leaves if isinstance(one, KvcError)), leaves[0])


def http_body(error: KvcError) -> tuple[int, bytes]:
    """The HTTP status and the JSON body `{"error": {message, type, param, code}}` that OpenAI clients understand.

    `retry_after_s` is added when there is a hint; the caller repeats it in the Retry-After header.
    """
    body: dict[str, object] = {
        "message": str(error),
        "type": error.reason,
        "param": error.field or None,
        "code": error.http_status,
    }
    if error.retry_after_s:
        body["retry_after_s"] = error.retry_after_s
    return error.http_status, json.dumps({"error": body}).encode()


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_body(error: KvcError) -> bytes:
    """The JSON body that clients of Anthropic's Messages API understand, with the reason and the field beside the message."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    body = {"type": kind, "message": str(error), "reason": error.reason, "param": error.field or None}
    return json.dumps({"type": "error", "error": body}).encode()


def to_status(error: KvcError) -> tuple[grpc.StatusCode, str, grpc.aio.Metadata]:
    """What `context.abort` needs: code, details and trailing metadata with google.rpc.Status.

    The details are ErrorInfo{reason, domain, metadata{field}}, BadRequest for an `InvalidField`, and RetryInfo with a pause hint.
    """
    import grpc.aio  # noqa: PLC0415 - engine processes without gRPC import this module
    from google.rpc import error_details_pb2, status_pb2  # noqa: PLC0415

    code = grpc.StatusCode[error.code]
    details = str(error)
    status = status_pb2.Status(code=code.value[0], message=details)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    status.details.add().Pack(info)
    if isinstance(error, InvalidField):
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=error.message)
        status.details.add().Pack(bad)
    if error.retry_after_s:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return code, details, grpc.aio.Metadata((STATUS_DETAILS_KEY, status.SerializeToString()))


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvcError:
    """The typed error behind a failed call, whoever failed it: our servers, gRPC itself, or a foreign server."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - engine processes without gRPC import this module
    from google.rpc import error_details_pb2, status_pb2  # noqa: PLC0415

    code, message = error.code().name, error.details() or error.code().name
    if code == "RESOURCE_EXHAUSTED" and _SIZE_REFUSAL in message:
        return TooLarge(message)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for key, value in error.trailing_metadata() or ():
        if key != STATUS_DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(info)
                detail.Unpack(retry)
        except DecodeError:  # a foreign server's malformed trailer: the code and the message still say what happened
            break
    field = info.metadata.get("field", "")
    plain = message.removeprefix(f"{field}: ") if field else message
    delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return error_for(code, plain, field=field, reason=info.reason, retry_after_s=delay_s)


def _one_line(text: str, limit: int) -> str:
    """`text` with control characters and lone surrogates escaped, cut to `limit` bytes of UTF-8."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    octets = clean.encode()
    return clean if len(octets) <= limit else octets[: limit - 3].decode(errors="ignore") + "..."
