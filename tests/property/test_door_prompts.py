"""The router's tokens of a chat prompt are the engine's: length and block hashes, however the client writes the same messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from kvc.core.blocks import TOKEN_BYTES, chain_seed, hash_chain
from kvc.engine.reference import schema
from kvc.errors import InvalidField
from services.router.door.conversations import Conversations
from services.router.door.payload import Payload
from services.router.door.request import CHAT, MESSAGES, HttpRequest, prompt_of
from services.router.door.tokenizers import ReferenceTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 4
SEED = chain_seed("m")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
text_part = st.fixed_dictionaries({"type": st.just("text"), "text": texts}, optional={"cache_control": st.just({"type": "ephemeral"})})
tool_use = st.fixed_dictionaries(
    {"type": st.just("tool_use"), "id": texts, "name": texts, "input": st.dictionaries(texts, values, max_size=3)}
)
tool_result = st.fixed_dictionaries(
    {"type": st.just("tool_result"), "tool_use_id": texts},
    optional={"content": texts | st.lists(text_part, max_size=2) | st.none(), "is_error": st.booleans()},
)
anthropic_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": texts | st.lists(text_part | tool_use | tool_result, max_size=3)}
)
system = st.none() | texts | st.lists(text_part, max_size=2)
tool_call = st.fixed_dictionaries(
    {"id": texts, "type": st.just("function"), "function": st.fixed_dictionaries({"name": texts, "arguments": texts})}
)
openai_message = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "developer"]), "content": texts | st.lists(text_part, max_size=2)}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none() | texts}, optional={"tool_calls": st.lists(tool_call, max_size=2)}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": texts, "content": texts | st.lists(text_part, max_size=2)}),
)
writers = st.sampled_from(
    [
        lambda body: json.dumps(body).encode(),
        lambda body: json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
        lambda body: json.dumps(body, indent=2).encode(),
    ]
)


def routed(conversations: Conversations, path: bytes, body: bytes) -> tuple[list[int], int]:
    request = HttpRequest(b"POST", path, path, [], body, keep_alive=True, http10=False)
    prompt = prompt_of(request, Payload(body), conversations, ())
    return list(prompt.chain), prompt.input_tokens


def served(path: bytes, body: bytes) -> tuple[list[int], int]:
    if path == MESSAGES:
        packed = schema.messages_request(schema.decode(body, schema.Messages)).prompt
    else:
        packed = schema.chat_request(schema.decode(body, schema.Chat), 16).prompt
    return list(hash_chain(packed, BLOCK, SEED)), len(packed) // TOKEN_BYTES


def agree(path: bytes, bodies: list[bytes]) -> None:
    """On each body of a growing conversation, by one router that remembers and by one that does not."""
    remembering = Conversations(ReferenceTokenizer(), BLOCK, SEED)
    for body in bodies:
        expected = served(path, body)
        assert routed(remembering, path, body) == expected
        assert routed(Conversations(ReferenceTokenizer(), BLOCK, SEED), path, body) == expected


@given(messages=st.lists(anthropic_message, min_size=1, max_size=6), prompt=system, write=writers, turns=st.integers(1, 3))
def test_messages(messages: list[Any], prompt: Any, write: Any, turns: int) -> None:
    common = {"model": "m", "max_tokens": 8, "system": prompt}
    agree(MESSAGES, [write(common | {"messages": messages[: -turn or None]}) for turn in range(min(turns, len(messages)) - 1, -1, -1)])


@given(messages=st.lists(openai_message, min_size=1, max_size=6), write=writers, turns=st.integers(1, 3))
def test_chat_completions(messages: list[Any], write: Any, turns: int) -> None:
    agree(CHAT, [write({"messages": messages[: -turn or None]}) for turn in range(min(turns, len(messages)) - 1, -1, -1)])


@given(messages=st.lists(anthropic_message, min_size=1, max_size=5), data=st.data())
def test_a_conversation_is_known_however_it_is_written(messages: list[Any], data: st.DataObject) -> None:
    """Marks for caching wander, and a text becomes a list of one part: the next turn is still the same session's."""
    known = Conversations(ReferenceTokenizer(), BLOCK, SEED)

    def session(said: list[Any]) -> str:
        body = data.draw(writers)({"model": "m", "max_tokens": 8, "messages": [rewritten(one) for one in said]})
        request = HttpRequest(b"POST", MESSAGES, MESSAGES, [], body, keep_alive=True, http10=False)
        return prompt_of(request, Payload(body), known, ()).session_id

    def rewritten(message: Any) -> Any:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) and data.draw(st.booleans()) else content
        if isinstance(parts, list) and parts and data.draw(st.booleans()):
            parts = [*parts[:-1], parts[-1] | {"cache_control": {"type": "ephemeral"}}]
        return message | {"content": parts}

    assert len({session(messages[: turn + 1]) for turn in range(len(messages))}) == 1


@given(content=values, call=values, path=st.sampled_from([CHAT, MESSAGES]))
def test_what_one_refuses_the_other_refuses(content: Any, call: Any, path: bytes) -> None:
    """F76: any JSON in a message is a prompt to both, or an error of both that names the field."""
    message = {"role": "user", "content": content, "tool_calls": call}
    body = json.dumps({"model": "m", "max_tokens": 8, "messages": [message]}).encode()
    answers = [answer(lambda: routed(Conversations(ReferenceTokenizer(), BLOCK, SEED), path, body)), answer(lambda: served(path, body))]
    assert answers[0] == answers[1] != "refused without a name"


def answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except InvalidField as error:
        return "refused" if error.field else "refused without a name"
