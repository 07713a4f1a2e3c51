"""One HTTP request as the door sees it, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import xxhash

from kvc import checks
from kvc.core.blocks import pack_tokens
from kvc.errors import InvalidField
from services.router.door.payload import Payload
from services.router.prompts import MAX_NEW_TOKENS, MAX_TOKEN_ID, ids_in_range

if TYPE_CHECKING:
    from collections.abc import Container

    from services.router.door.conversations import Conversations, Prompt
    from services.router.door.upstream import Pool

CHAT: Final = b"/v1/chat/completions"
COMPLETIONS: Final = b"/v1/completions"
GENERATE: Final = b"/generate"
MESSAGES: Final = b"/v1/messages"
ROUTED: Final = frozenset({CHAT, COMPLETIONS, GENERATE, MESSAGES})
MAX_GROUP_BYTES = 512
_CHATS: Final = frozenset({CHAT, MESSAGES})
_SESSION: Final = b"x-session-id"

# Not passed on to engines: what concerns only this connection, and what the door writes itself.
DROPPED: Final = frozenset(
    {
        b"host",
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"expect",
        b"traceparent",
        b"accept-encoding",
        b"x-session-id",
    }
)


@dataclass(slots=True)
class HttpRequest:
    """A complete request.

    Attributes:
        method: as sent.
        path: path without its query.
        target: path with its query.
        headers: lower-case name and value, in order.
        body: without transfer encoding.
        keep_alive: the connection stays open after the reply.
        http10: the client speaks HTTP/1.0.
    """

    method: bytes
    path: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    keep_alive: bool
    http10: bool

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def payload_of(request: HttpRequest, conversations: Conversations) -> Payload:
    """The request's body, checked. Of a session that the head names, only what its last body did not have is read.

    Raises:
        InvalidField: it is no JSON object, or has a key that is refused.
    """
    name = request.header(_SESSION) if request.path in _CHATS else None
    return Payload(request.body, conversations.written(name.decode(errors="replace")) if name is not None else None)


def session_named(request: HttpRequest, payload: Payload) -> str | None:
    """The session's name, when the client gives one: the header `x-session-id`, else SGLang's `session_id`.

    Raises:
        InvalidField: it is no valid name, or given twice.
    """
    given = None
    for key, value in request.headers:
        if key == _SESSION:
            if given is not None:
                raise InvalidField("given more than once", field="x-session-id")
            given = value
    if given is not None:
        try:
            return checks.session_id(given.decode(), "x-session-id")
        except UnicodeDecodeError:
            raise InvalidField("not UTF-8", field="x-session-id") from None
    if "session_id" in payload.fields:
        named = payload.text("session_id", checks.MAX_SESSION_ID_BYTES)
        return checks.session_id(named) if named is not None else None
    return None


def group_of(request: HttpRequest, payload: Payload) -> bytes:
    """What identity is compared inside: OpenAI's prompt_cache_key, or Anthropic's metadata.user_id."""
    if request.path == MESSAGES:
        user = payload.inner("metadata").get("user_id") if "metadata" in payload.fields else None
        if user is not None and not isinstance(user, str):
            raise InvalidField("must be a string", field="metadata.user_id")
        group = (user or "").encode("utf-8", "surrogatepass")
        return group if len(group) <= MAX_GROUP_BYTES else xxhash.xxh3_128_digest(group)
    if "prompt_cache_key" in payload.fields:
        return (payload.text("prompt_cache_key", MAX_GROUP_BYTES) or "").encode("utf-8", "surrogatepass")
    return b""


def prompt_of(request: HttpRequest, payload: Payload, conversations: Conversations, busy: Container[str]) -> Prompt:
    """Session, block hashes and length of a request's prompt.

    Raises:
        InvalidField: there is no prompt, or it is malformed.
    """
    fields = payload.fields
    session_id, group = session_named(request, payload), group_of(request, payload)
    if request.path in _CHATS:
        if "messages" not in fields:
            raise InvalidField("is required", field="messages")
        return _chat_prompt(request, payload, conversations, busy, session_id, group)
    name = "text" if request.path == GENERATE and "text" in fields else "prompt" if request.path == COMPLETIONS else "input_ids"
    value = payload.value(name)
    if isinstance(value, str) and value and name != "input_ids":
        return conversations.text(value, b"", session_id, group, busy)
    if isinstance(value, list) and value and name != "text":
        return conversations.tokens(_packed(value, bytes(fields[name]), name), b"", session_id, group, busy)
    raise InvalidField("one prompt is needed: a text, or an array of token ids", field=name)


def _chat_prompt(
    request: HttpRequest, payload: Payload, conversations: Conversations, busy: Container[str], session_id: str | None, group: bytes
) -> Prompt:
    preamble, lead, known = _preamble(payload), b"", payload.known
    if request.path == MESSAGES and "system" in payload.fields and bytes(payload.fields["system"]) != b"null":
        lead = b'{"role":"system","content":%b}' % bytes(payload.fields["system"])
    follows = known is not None and session_id is not None and conversations.follows(known, session_id, preamble, group, lead)
    if not follows:
        payload.read_all()
    prompt = conversations.chat(payload.fields["messages"], preamble, session_id, group, busy, lead=lead, follows=follows)
    if session_id is not None:
        conversations.wrote(session_id, payload.written())
    return prompt


def _preamble(payload: Payload) -> bytes:
    """What else shapes a chat prompt: a conversation with other tools is another one."""
    tools = payload.fields.get("tools")
    template = payload.fields.get("chat_template_kwargs")
    if tools is None and template is None:
        return b""
    return xxhash.xxh3_128_digest(b"\0".join(bytes(raw) if raw is not None else b"" for raw in (tools, template)))


def _packed(ids: list[object], raw: bytes, name: str) -> bytes:
    refused = InvalidField(f"token ids must be integers from 0 to {MAX_TOKEN_ID}", field=name)
    try:
        data = pack_tokens(cast("list[int]", ids))
    except (TypeError, OverflowError):
        raise refused from None
    if not ids_in_range(data) or b"e" in raw:  # of true or false, which Python takes for numbers; integers have none
        raise refused
    return data


def output_tokens_of(request: HttpRequest, payload: Payload, default: int) -> int:
    """Tokens to reserve for the reply.

    Raises:
        InvalidField: the limit is no integer in range.
    """
    if request.path == GENERATE:
        wanted = payload.inner("sampling_params").get("max_new_tokens") if "sampling_params" in payload.fields else None
        if wanted is None:
            return default
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= MAX_NEW_TOKENS:
            raise InvalidField(f"must be an integer from 0 to {MAX_NEW_TOKENS}", field="sampling_params.max_new_tokens")
        return wanted
    for name in ("max_completion_tokens", "max_tokens"):
        if name in payload.fields:
            wanted = payload.count(name, 0, MAX_NEW_TOKENS)
            if wanted is not None:
                return wanted
    return default


def message_for(pool: Pool, request: HttpRequest, body: tuple[memoryview, bytes], traceparent: bytes) -> bytes:
    """The request as an engine gets it, with another body, given in parts."""
    lines = [b"POST %b%b HTTP/1.1\r\nhost: %b\r\n" % (pool.prefix, request.target, pool.host_header)]
    lines += [b"%b: %b\r\n" % header for header in request.headers if header[0] not in DROPPED]
    lines.append(b"content-length: %d\r\ntraceparent: %b\r\n\r\n" % (len(body[0]) + len(body[1]), traceparent))
    return b"".join((*lines, *body))
