"""Answers in OpenAI's shapes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvc.engine.reference.replies import DataEvents, meta_info, usage
from kvc.engine.tokens import decode_tokens

if TYPE_CHECKING:
    from kvc.engine.reference.config import EngineConfig
    from kvc.engine.reference.replies import Piece
    from kvc.engine.reference.request import Request
    from kvc.engine.reference.schema import Chat, Completion, OpenAi


class _OpenAiShape(DataEvents):
    """What the two endpoints share."""

    _whole_object = ""
    _chunk_object = ""

    def __init__(self, body: OpenAi, config: EngineConfig) -> None:
        """Words answers to `body`."""
        self._model = body.model or config.model
        self._worker_id = config.worker_id
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._created = int(time.time())
        self._begun = False

    def _whole_choice(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def chunks(self, request: Request, piece: Piece, completed: int) -> list[Any]:
        """What a stream says about one piece of output."""
        head = {"id": request.rid, "object": self._chunk_object, "created": self._created, "model": self._model}
        choices = self._chunk_choices(piece)
        answers: list[dict[str, Any]] = [head | {"choices": [{"index": 0, "finish_reason": None} | choice]} for choice in choices]
        if piece.last:
            answers[-1]["choices"][0]["finish_reason"] = _reason(request)
            answers[-1]["meta_info"] = meta_info(request, completed, self._worker_id, last=True)
            if self._include_usage:
                answers.append(head | {"choices": [], "usage": usage(request, completed)})
        return answers

    def whole(self, request: Request) -> Any:
        """The answer without streaming."""
        completed = len(request.output)
        return {
            "id": request.rid,
            "object": self._whole_object,
            "created": self._created,
            "model": self._model,
            "choices": [{"index": 0, "finish_reason": _reason(request)} | self._whole_choice(request)],
            "usage": usage(request, completed),
            "meta_info": meta_info(request, completed, self._worker_id, last=True),
        }


class ChatShape(_OpenAiShape):
    """Answers of /v1/chat/completions."""

    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, body: Chat, config: EngineConfig) -> None:
        """Words answers to `body`."""
        super().__init__(body, config)

    def _whole_choice(self, request: Request) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": decode_tokens(request.output)}}

    def _chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            choices.append({"delta": {"role": "assistant", "content": ""}})
        choices.append({"delta": {"content": decode_tokens(piece.token_ids)}})
        return choices


class CompletionShape(_OpenAiShape):
    """Answers of /v1/completions."""

    _whole_object = "text_completion"
    _chunk_object = "text_completion"

    def __init__(self, body: Completion, config: EngineConfig) -> None:
        """Words answers to `body`."""
        super().__init__(body, config)

    def _whole_choice(self, request: Request) -> dict[str, Any]:
        return {"text": decode_tokens(request.output), "token_ids": request.output}

    def _chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        return [{"text": decode_tokens(piece.token_ids), "token_ids": piece.token_ids}]


def _reason(request: Request) -> str:
    return "abort" if request.aborted else "length"
