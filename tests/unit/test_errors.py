from __future__ import annotations

import json
import math
import subprocess
import sys

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvc import errors
from kvc.errors import (
    Exhausted,
    Internal,
    InvalidField,
    KvcError,
    NotFound,
    Precondition,
    TooLarge,
    Unauthenticated,
    Unavailable,
    error_for,
    from_rpc_error,
    http_body,
    leaf,
    to_status,
)

KINDS = sorted(KvcError.__subclasses__(), key=lambda kind: kind.__name__)


def as_seen_by_a_caller(error: KvcError) -> grpc.aio.AioRpcError:
    code, details, trailing = to_status(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_the_way_through_a_status(kind: type[KvcError]) -> None:
    error = kind("went wrong", field="turn.session_id", retry_after_s=1.5, reason="OWN_REASON")
    back = from_rpc_error(as_seen_by_a_caller(error))
    assert type(back) is kind
    assert (back.message, back.field, back.retry_after_s, back.reason) == ("went wrong", "turn.session_id", 1.5, "OWN_REASON")
    assert str(back) == "turn.session_id: went wrong"


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    for kind in KINDS:
        line = next(line for line in (errors.__doc__ or "").splitlines() if f"+-- {kind.__name__} " in line)
        assert kind.code in line.split()
        assert str(kind.http_status) in line.split()


def test_status_carries_google_rpc_details() -> None:
    code, details, trailing = to_status(InvalidField("must be 1 to 5", field="turn.input_tokens"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    status = status_pb2.Status.FromString(dict(trailing)["grpc-status-details-bin"])
    assert (status.code, status.message) == (code.value[0], details)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INVALID_FIELD", "kvc.v1", {"field": "turn.input_tokens"})
    assert status.details[1].Unpack(bad)
    assert [(one.field, one.description) for one in bad.field_violations] == [("turn.input_tokens", "must be 1 to 5")]


def test_exhausted_carries_the_pause_hint() -> None:
    status = status_pb2.Status.FromString(dict(to_status(Exhausted("full", retry_after_s=0.25))[2])["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize("hint", [0.0, -1.0, math.nan, math.inf])
def test_a_hint_that_is_no_time_is_no_hint(hint: float) -> None:
    assert Exhausted("full", retry_after_s=hint).retry_after_s == 0.0


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        ("PERMISSION_DENIED", Unauthenticated, "PERMISSION_DENIED"),
        ("UNIMPLEMENTED", Precondition, "UNIMPLEMENTED"),
        ("CANCELLED", Unavailable, "CANCELLED"),
        ("UNKNOWN", Internal, "UNKNOWN"),
        ("NO_SUCH_CODE", Internal, "NO_SUCH_CODE"),
        ("NOT_FOUND", NotFound, "NOT_FOUND"),
    ],
)
def test_codes_of_others_become_the_nearest_kind_and_keep_their_name(code: str, kind: type[KvcError], reason: str) -> None:
    error = error_for(code, "text")
    assert type(error) is kind
    assert error.reason == reason


def test_a_size_refusal_of_grpc_is_not_retryable() -> None:
    """F78: a message that is too large is one clear error, not something to try again."""
    refusal = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "SERVER: Received message larger than max (9 vs. 8)"
    )
    assert type(from_rpc_error(refusal)) is TooLarge


@given(st.binary(max_size=200), st.sampled_from(grpc.StatusCode), st.none() | st.text(max_size=50))
def test_any_trailer_of_a_foreign_server_gives_an_error(trailer: bytes, code: grpc.StatusCode, details: str | None) -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", trailer))
    assert isinstance(from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)), KvcError)


@given(st.text(max_size=2000), st.text(max_size=400))
def test_any_message_fits_into_one_line_and_into_trailers(message: str, field: str) -> None:
    error = InvalidField(message, field=field)
    assert str(error).isprintable()
    _, details, trailing = to_status(error)
    # gRPC refuses metadata beyond 8 KiB; details travel percent-encoded, trailers base64-encoded.
    assert 3 * len(details.encode()) + sum(len(value) * 4 // 3 for _, value in trailing) < 7 * 1024


def test_http_body_is_what_openai_clients_read() -> None:
    status, body = http_body(Exhausted("full", retry_after_s=2.0))
    assert status == 429
    assert json.loads(body) == {"error": {"message": "full", "type": "EXHAUSTED", "param": None, "code": 429, "retry_after_s": 2.0}}
    assert json.loads(http_body(InvalidField("is missing", field="model"))[1])["error"]["param"] == "model"


def test_leaf_prefers_typed_errors_inside_groups() -> None:
    typed = NotFound("no such room")
    group = BaseExceptionGroup("", [OSError("x"), ExceptionGroup("", [ValueError("y"), typed])])
    assert leaf(group) is typed
    plain = ValueError("z")
    assert leaf(ExceptionGroup("", [plain])) is plain
    assert leaf(plain) is plain


def test_the_tree_can_be_used_without_grpc() -> None:
    """An engine process need not have gRPC: raising and encoding errors imports neither it nor protobuf."""
    code = (
        "import sys; from kvc.errors import *; from kvc.engine import convert; from kvc import errors;"
        "errors.http_body(errors.NotFound('x')); convert.error_to_link(errors.NotFound('x'));"
        "print([name for name in sys.modules if name.split('.')[0] in ('grpc', 'google')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout
