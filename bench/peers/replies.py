"""What the mock engine answers: SGLang's and OpenAI's shapes, made once, so that an answer costs the engine one write."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING, Final

from bench.peers.framing import framed

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL: Final = "mock"
CHAT: Final = b"/v1/chat/completions"
COMPLETIONS: Final = b"/v1/completions"
GENERATE: Final = b"/generate"

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END: Final = framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def whole(document: object) -> bytes:
    """A reply with a length."""
    return whole_bytes(json.dumps(document).encode())


def whole_bytes(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A reply with a length, of bytes."""
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def event(document: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def chat_event(text: str) -> dict[str, object]:
    """One token of a chat reply."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": None}
    return {"id": "cmpl-mock", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice], "usage": None}


def generate_event(text: str) -> dict[str, object]:
    """One token of SGLang's own endpoint."""
    meta = {
        "id": "mock",
        "finish_reason": None,
        "prompt_tokens": 16,
        "completion_tokens": 1,
        "cached_tokens": 0,
        "weight_version": "default",
    }
    return {"text": text, "output_ids": [7], "meta_info": meta}


_USAGE: Final = {"prompt_tokens": 16, "completion_tokens": 1, "total_tokens": 17}
_GENERATED: Final = {
    "id": "mock",
    "finish_reason": {"type": "stop"},
    "prompt_tokens": 16,
    "completion_tokens": 1,
    "cached_tokens": 0,
}
_REMOTE: Final = {
    "do_remote_prefill": True,
    "remote_engine_id": "mock",
    "remote_block_ids": [0],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


def _openai(kind: str, choice: Mapping[str, object], **more: object) -> bytes:
    choices = [{"index": 0, **choice, "finish_reason": "stop"}]
    return whole({"id": "cmpl-mock", "object": kind, "created": 1, "model": MODEL, "usage": _USAGE, "choices": choices, **more})


CHUNKS: Final[Mapping[bytes, bytes]] = {
    CHAT: framed(event(chat_event(" token"))),
    COMPLETIONS: framed(event(chat_event(" token"))),
    GENERATE: framed(event(generate_event(" token"))),
}
"""One token of a stream, by path."""

WHOLES: Final[Mapping[bytes, bytes]] = {
    CHAT: _openai("chat.completion", {"message": {"role": "assistant", "content": "token"}}),
    COMPLETIONS: _openai("text_completion", {"text": "token"}, kv_transfer_params=_REMOTE),
    GENERATE: whole({"text": "token", "output_ids": [7], "meta_info": _GENERATED}),
}
"""A reply in one piece, by path."""

_INFO: Final = {
    "model_path": MODEL,
    "tokenizer_path": MODEL,
    "served_model_name": MODEL,
    "is_generation": True,
    "preferred_sampling_params": None,
    "model_type": "llama",
    "max_total_num_tokens": 1_000_000,
    "tp_size": 1,
    "dp_size": 1,
    "max_model_len": 200_000,
    "version": "0.5.23",
    "disaggregation_mode": "null",
}
_CARD: Final = {"id": MODEL, "object": "model", "created": 1, "owned_by": "mock", "root": MODEL, "max_model_len": 200_000}
_DOCUMENTS: Final[Mapping[bytes, object]] = {
    b"/health": {},
    b"/health_generate": {},
    b"/get_model_info": _INFO,
    b"/model_info": _INFO,
    b"/get_server_info": _INFO,
    b"/server_info": _INFO,
    b"/version": {"version": "0.5.23"},
    b"/v1/models": {"object": "list", "data": [_CARD]},
    b"/get_load": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
    b"/v1/loads": {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]},
}
STATIC: Final[Mapping[bytes, bytes]] = {path: whole(document) for path, document in _DOCUMENTS.items()}
"""What routers ask about a worker, by path."""

# An event that looks like the end of a chunked body, and one that has nothing but a comment.
_DECEPTIVE: Final = (b"data: 1\n0\r\n\r\n", b": ping\n\n", b"event: note\r\ndata: 0\r\n\r\n")
_LETTERS: Final = 'ab \u00e9\u4e16\U0001f600"\\\n'


def varied(seed: int, path: bytes, *, stream: bool) -> list[bytes]:
    """A reply in which no two parts are alike, as the pieces in which it leaves: a function of its arguments.

    Sizes and contents of events, their division into chunks, how chunk sizes are written, extensions, trailers and the cuts between
    pieces all vary, within what HTTP/1.1 allows.

    Args:
        seed: which reply.
        path: whose shape it has.
        stream: server-sent events in chunks; otherwise a document, which has a length or comes in chunks.
    """
    rng = random.Random(f"{seed} {path!r} {stream}")
    make = generate_event if path == GENERATE else chat_event
    if stream:
        texts = [f"{seed}.{number} {_text(rng, 60)}" for number in range(rng.randint(1, 40))]
        events = [rng.choice(_DECEPTIVE) if rng.random() < 0.1 else event(make(text)) for text in texts]
        reply = STREAM_HEAD + _chunked(rng, b"".join(events) + b"data: [DONE]\n\n")
    else:
        text = f"{seed} {_text(rng, rng.choice((0, 10, 1_000, 30_000)))}"
        body = json.dumps(make(text), ensure_ascii=rng.random() < 0.5).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        reply = head + _chunked(rng, body) if rng.random() < 0.5 else whole_bytes(body)
    return _cut(rng, reply, rng.randint(0, 12))


def _text(rng: random.Random, most: int) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(0, most)))


def _chunked(rng: random.Random, body: bytes) -> bytes:
    out = []
    for piece in _cut(rng, body, rng.randint(0, 12)):
        size = f"{len(piece):x}"
        size = rng.choice((size, size.upper(), size.zfill(6)))
        out.append(size.encode() + rng.choice((b"", b"", b"; id=7", b';a;b="c d"')) + b"\r\n" + piece + b"\r\n")
    out.append(b"0\r\n" + rng.choice((b"", b"", b"x-checksum: 17\r\nx-more: \r\n")) + b"\r\n")
    return b"".join(out)


def _cut(rng: random.Random, data: bytes, cuts: int) -> list[bytes]:
    """`data` in non-empty pieces."""
    places = sorted({0, len(data), *(rng.randint(0, len(data)) for _ in range(cuts))})
    return [data[start:end] for start, end in itertools.pairwise(places)]
