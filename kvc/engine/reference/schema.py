"""HTTP bodies in SGLang's, OpenAI's and Anthropic's shapes, checked field by field and turned into requests.

Fields that change nothing here (top_p, stop, seed ...) are accepted and ignored. Every other wrong field is an `InvalidField` that
names it.
"""

from __future__ import annotations

import math
import re
import uuid
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from kvc.core.blocks import pack_tokens
from kvc.engine.kvvalue import IDS_VOCAB, TEXT_VOCAB
from kvc.engine.reference.request import Bootstrap, Request
from kvc.engine.tokens import VOCAB_SIZE, ChatError, encode_chat, encode_one, encode_text
from kvc.errors import InvalidField

if TYPE_CHECKING:
    from kvc.engine.kvvalue import Vocab

MAX_ID_BYTES = 256
MAX_HOST_BYTES = 255
MAX_TOKENS = 2**31 - 1
MAX_ROOM = 2**63 - 1
MAX_PORT = 65_535

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")

T = TypeVar("T")


class Sampling(msgspec.Struct):
    """SGLang's sampling_params."""

    max_new_tokens: int | None = None
    temperature: float | None = None


class Common(msgspec.Struct, kw_only=True):
    """What every generating endpoint takes besides its prompt."""

    stream: bool | None = False
    rid: str | None = None
    session_id: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=VOCAB_SIZE)]


class Generate(Common, kw_only=True):
    """POST /generate."""

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: Sampling | None = None


class StreamOptions(msgspec.Struct):
    """OpenAI's stream_options."""

    include_usage: bool = False


class OpenAi(Common, kw_only=True):
    """What OpenAI's two endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None


class Chat(OpenAi, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


class Messages(Common, kw_only=True):
    """POST /v1/messages, as Anthropic's clients send it."""

    model: str
    max_tokens: int
    messages: list[dict[str, Any]]
    system: str | list[Any] | None = None
    temperature: float | None = None


class Completion(OpenAi, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]


class Abort(msgspec.Struct):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class Corrupt(msgspec.Struct):
    """POST /debug/corrupt: which page of which session's committed tokens."""

    session_id: str
    page: int = 0


def decode(body: bytes, kind: type[T]) -> T:
    """A body of a kind.

    Raises:
        InvalidField: it is not JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error))
        field = (found.group(1) if found else "") or "body"
        missing = re.search(r"missing required field `([^`]*)`", str(error))
        if missing:
            field = missing.group(1)
        raise InvalidField(_PATH.sub("", str(error)), field=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"not JSON: {error}", field="body") from None


def generate_request(body: Generate, default_tokens: int) -> Request:
    """The request of a /generate body.

    Raises:
        InvalidField: a field is out of range.
    """
    if (body.text is None) == (body.input_ids is None):
        raise InvalidField("exactly one of text and input_ids is needed", field="input_ids" if body.text is not None else "text")
    sampling = body.sampling_params or Sampling()
    _check_temperature(sampling.temperature, "sampling_params.temperature")
    count = _count(sampling.max_new_tokens, default_tokens, "sampling_params.max_new_tokens")
    if body.input_ids is not None:
        return _request(body, pack_tokens(body.input_ids), count, IDS_VOCAB, "input_ids")
    return _request(body, _encode(body.text or "", "text"), count, TEXT_VOCAB, "text")


def chat_request(body: Chat, default_tokens: int) -> Request:
    """The request of a chat completion.

    Raises:
        InvalidField: a field is out of range.
    """
    _check_openai(body)
    prompt = _encode_chat(body.messages)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return _request(body, prompt, _count(getattr(body, name), default_tokens, name), TEXT_VOCAB, "messages")


def messages_request(body: Messages) -> Request:
    """The request of Anthropic's Messages API. The system prompt is the conversation's first message.

    Raises:
        InvalidField: a field is out of range.
    """
    _check_temperature(body.temperature, "temperature")
    for index, message in enumerate(body.messages):
        if message.get("role") not in {"user", "assistant"}:
            raise InvalidField("must be user or assistant", field=f"messages[{index}].role")
    count = _count(body.max_tokens, body.max_tokens, "max_tokens")
    return _request(body, _encode_chat(body.messages, body.system), count, TEXT_VOCAB, "messages")


def completion_request(body: Completion, default_tokens: int) -> Request:
    """The request of a completion.

    Raises:
        InvalidField: a field is out of range.
    """
    _check_openai(body)
    count = _count(body.max_tokens, default_tokens, "max_tokens")
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _request(body, _encode(prompt, "prompt"), count, TEXT_VOCAB, "prompt")
    if not all(type(token) is int and 0 <= token < VOCAB_SIZE for token in prompt):
        raise InvalidField(f"one text or one list of token ids (0 to {VOCAB_SIZE - 1}) is needed", field="prompt")
    return _request(body, pack_tokens(prompt), count, IDS_VOCAB, "prompt")


def _encode_chat(messages: list[dict[str, Any]], system: str | list[Any] | None = None) -> bytes:
    if not messages:
        raise InvalidField("at least one message is needed", field="messages")
    try:
        before = encode_one({"role": "system", "content": system}, "system") if system is not None else b""
        return before + encode_chat(messages)
    except ChatError as error:
        raise InvalidField(str(error), field=error.field) from None


def _request(body: Common, prompt: bytes, count: int, vocab: Vocab, field: str) -> Request:
    if not prompt:
        raise InvalidField("the prompt is empty", field=field)
    rid = uuid.uuid4().hex if body.rid is None else _name(body.rid, "rid", MAX_ID_BYTES)
    session_id = _name(body.session_id, "session_id", MAX_ID_BYTES) if body.session_id else ""
    return Request(rid, prompt, count, vocab, session_id, _bootstrap(body))


def _bootstrap(body: Common) -> Bootstrap | None:
    fields = {name: getattr(body, name) for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
    missing = [name for name, value in fields.items() if value is None]
    if len(missing) == len(fields):
        return None
    if body.bootstrap_host is None or body.bootstrap_port is None or body.bootstrap_room is None:
        raise InvalidField("bootstrap_host, bootstrap_port and bootstrap_room belong together", field=missing[0])
    if not 1 <= body.bootstrap_port <= MAX_PORT:
        raise InvalidField(f"must be 1 to {MAX_PORT}", field="bootstrap_port")
    if not 0 <= body.bootstrap_room <= MAX_ROOM:
        raise InvalidField(f"must be 0 to {MAX_ROOM}", field="bootstrap_room")
    return Bootstrap(_name(body.bootstrap_host, "bootstrap_host", MAX_HOST_BYTES), body.bootstrap_port, body.bootstrap_room)


def _check_openai(body: OpenAi) -> None:
    _check_temperature(body.temperature, "temperature")
    if body.n not in {None, 1}:
        raise InvalidField("only one choice is generated", field="n")


def _check_temperature(value: float | None, field: str) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise InvalidField("must be finite and at least 0", field=field)


def _count(value: int | None, default: int, field: str) -> int:
    if value is None:
        return default
    if not 1 <= value <= MAX_TOKENS:
        raise InvalidField(f"must be 1 to {MAX_TOKENS}", field=field)
    return value


def _name(value: str, field: str, most: int) -> str:
    if not 0 < len(value.encode(errors="replace")) <= most:
        raise InvalidField(f"must have 1 to {most} bytes", field=field)
    return value


def _encode(text: str, field: str) -> bytes:
    try:
        return encode_text(text)
    except UnicodeEncodeError:
        raise InvalidField("not encodable as UTF-8", field=field) from None
