"""Answers in the shapes of Anthropic's Messages API.

A stream names its events: message_start, content_block_start, content_block_delta ..., content_block_stop, message_delta, message_stop.
Usage counts a prompt token once: as read from the cache, or as input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from kvc.engine.tokens import decode_tokens
from kvc.errors import messages_body

if TYPE_CHECKING:
    from kvc.engine.reference.replies import Piece
    from kvc.engine.reference.request import Request
    from kvc.engine.reference.schema import Messages
    from kvc.errors import KvcError

MESSAGES_PATH = "/v1/messages"


class MessagesShape:
    """Answers of /v1/messages."""

    done: ClassVar[bytes] = b""

    def __init__(self, body: Messages) -> None:
        """Words answers to `body`."""
        self._model = body.model
        self._begun = False

    def chunks(self, request: Request, piece: Piece, completed: int) -> list[Any]:
        """What a stream says about one piece of output."""
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            events.append({"type": "message_start", "message": self._message(request, [], None, 0)})
            events.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        if piece.token_ids:
            delta = {"type": "text_delta", "text": decode_tokens(piece.token_ids)}
            events.append({"type": "content_block_delta", "index": 0, "delta": delta})
        if piece.last:
            stopped = {"stop_reason": _stop_reason(request), "stop_sequence": None}
            events.append({"type": "content_block_stop", "index": 0})
            events.append({"type": "message_delta", "delta": stopped, "usage": _usage(request, completed)})
            events.append({"type": "message_stop"})
        return events

    def whole(self, request: Request) -> Any:
        """The answer without streaming."""
        content = [{"type": "text", "text": decode_tokens(request.output)}]
        return self._message(request, content, _stop_reason(request), len(request.output))

    def framed(self, chunk: Any) -> bytes:
        """One server-sent event."""
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), msgspec.json.encode(chunk))

    def failure(self, error: KvcError) -> Any:
        """What a stream that has begun says about an error."""
        return msgspec.json.decode(messages_body(error))

    def _message(self, request: Request, content: list[Any], stop_reason: str | None, completed: int) -> dict[str, Any]:
        return {
            "id": request.rid,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": _usage(request, completed),
        }


def _usage(request: Request, completed: int) -> dict[str, int]:
    return {
        "input_tokens": request.input_tokens - request.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": request.cached_tokens,
        "output_tokens": completed,
    }


def _stop_reason(request: Request) -> str | None:
    """The reference engine stops only at the limit; a reply that was aborted has no reason that the API knows."""
    return None if request.aborted else "max_tokens"
