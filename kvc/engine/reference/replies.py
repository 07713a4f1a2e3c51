"""What the HTTP doors answer with: outputs as they become visible, usage, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from kvc.engine.reference.request import Phase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvc.engine.reference.request import Request
    from kvc.errors import KvcError


class Piece(NamedTuple):
    """Output that became visible: new token ids, and whether it is the last."""

    token_ids: list[int]
    last: bool


class Shape(Protocol):
    """How an endpoint words its answers.

    Attributes:
        done: what a stream ends with.
    """

    done: ClassVar[bytes]

    def chunks(self, request: Request, piece: Piece, completed: int) -> list[Any]:
        """What a stream says about one piece of output."""
        ...

    def whole(self, request: Request) -> Any:
        """The answer without streaming."""
        ...

    def framed(self, chunk: Any) -> bytes:
        """One server-sent event."""
        ...

    def failure(self, error: KvcError) -> Any:
        """What a stream that has begun says about an error."""
        ...


class DataEvents:
    """Streams of OpenAI's and SGLang's endpoints: nameless events, and a last one that says so."""

    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    def framed(self, chunk: Any) -> bytes:
        """One server-sent event."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def failure(self, error: KvcError) -> Any:
        """What a stream that has begun says about an error."""
        return error_body(error)


async def pieces(request: Request) -> AsyncIterator[Piece]:
    """A request's output as it comes; the last piece may be empty.

    Raises:
        KvcError: the request failed.
    """
    sent = 0
    while True:
        await request.output_ready.wait()
        request.output_ready.clear()
        if request.error is not None:
            raise request.error
        last = request.phase is Phase.DONE
        new, sent = request.output[sent : request.visible], max(sent, request.visible)
        if new or last:
            yield Piece(new, last)
        if last:
            return


def meta_info(request: Request, completion_tokens: int, worker_id: str, *, last: bool) -> dict[str, Any]:
    """SGLang's meta_info, and the modelled times of the request, in seconds before time scaling."""
    times = request.times
    return {
        "id": request.rid,
        "finish_reason": finish_reason(request) if last else None,
        "prompt_tokens": request.input_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": request.cached_tokens,
        "kvc_worker": worker_id,
        "kvc_resident_tokens": request.resident_tokens,
        "kvc_prefill_tokens": request.prefill_tokens,
        "kvc_queue_s": round(times.queue_s, 9),
        "kvc_transfer_s": round(times.transfer_s, 9),
        "kvc_ttft_s": round(times.ttft_s, 9),
        "kvc_latency_s": round(max(times.latency_s, times.ttft_s), 9),
    }


def finish_reason(request: Request) -> dict[str, Any]:
    """Why a request ended, in SGLang's shape."""
    if request.aborted:
        return {"type": "abort", "message": request.aborted}
    return {"type": "length", "length": len(request.output)}


def error_body(error: KvcError) -> dict[str, Any]:
    """OpenAI's error object; `type` is the reason in lower case with hyphens, as in `ticket-expired`."""
    kind = error.reason.lower().replace("_", "-")
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": error.http_status}}


def usage(request: Request, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": request.input_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": request.input_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": request.cached_tokens},
    }
