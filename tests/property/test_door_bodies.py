"""What a body says does not depend on what was read before: each is taken, or refused, as by a router that reads all of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.core.blocks import TOKEN_BYTES, hash_chain
from kvc.engine.tokens import encode_chat
from kvc.errors import InvalidField
from services.router.door.conversations import Conversations
from services.router.door.payload import Payload
from services.router.door.request import CHAT, MESSAGES, HttpRequest, output_tokens_of, payload_of, prompt_of
from services.router.door.tokenizers import ReferenceTokenizer

if TYPE_CHECKING:
    from services.router.door.conversations import Prompt

BLOCK, SEED = 4, 5
ADDED = b'"rid":"ours"'
SAYING = st.sampled_from(
    ["", "a", "b", "hello there", "hello where", 'a "quoted" one', "\u00e9\U0001f600", "]}", '{"messages":[0', "x" * 40]
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": SAYING})
GOOD = st.sampled_from(
    [
        ("max_tokens", 3),
        ("max_tokens", 4),
        ("stream", True),
        ("tools", [{"messages": [1]}]),
        ("x", {"messages": [{"role": "user", "content": "a"}]}),
        ("y", '"messages": ['),
        ("rid", "theirs"),
        ("session_id", "s"),
        ("session_id", "other"),
        ("system", "be brief"),
        ("system", "be quick"),
        ("system", [{"type": "text", "text": "be brief"}]),
    ]
)
BAD = st.sampled_from([("bootstrap_room", 1), ("messages", []), ("messages", [{"role": "user", "content": "a"}]), ("max_tokens", True)])
WRITERS = st.sampled_from([(", ", ": ", ""), (",", ":", ""), (" ,\n", " : ", "\n")])
DAMAGES = st.sampled_from([",]", "]]", "0]", " ]", ',{"role":1}]', ',{"role":"user","content":[7]}]', ',{"role":"user"', "}"])


def written(head: list[Any], messages: list[Any], tail: list[Any], style: tuple[str, str, str], damage: str) -> bytes:
    """A body as a client writes it; keys may come twice, and the end of the messages may be damaged."""
    comma, colon, blank = style

    def value(one: Any) -> str:
        return json.dumps(one, separators=(comma, colon))

    said = f"[{blank}{comma.join(map(value, messages))}{damage or blank + ']'}"
    entries = [f"{json.dumps(key)}{colon}{value(one)}" for key, one in head]
    entries.append(f'"messages"{colon}{said}')
    entries += [f"{json.dumps(key)}{colon}{value(one)}" for key, one in tail]
    return f"{{{blank}{comma.join(entries)}{blank}}}{blank}".encode()


def ask(path: bytes, body: bytes, name: str | None, conversations: Conversations, *, remembering: bool) -> tuple[Prompt, bytes, int]:
    headers = [(b"x-session-id", name.encode())] if name is not None else []
    request = HttpRequest(b"POST", path, path, headers, body, keep_alive=True, http10=False)
    payload = payload_of(request, conversations) if remembering else Payload(body)
    reserve = output_tokens_of(request, payload, 9)
    prompt = prompt_of(request, payload, conversations, ())
    payload.name_session(name or "anonymous")
    return prompt, payload.with_fields(ADDED), reserve


def tried(
    path: bytes, body: bytes, name: str | None, conversations: Conversations, *, remembering: bool
) -> tuple[Prompt, bytes, int] | str:
    """As `ask`; what was said of a body that is refused."""
    try:
        return ask(path, body, name, conversations, remembering=remembering)
    except InvalidField as error:
        return f"{error.field}: {error}"


def pairs_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def whole_prompt(path: bytes, body: bytes) -> bytes:
    """The packed prompt by the standard library's JSON and tokens of everything."""
    said = json.loads(body)
    system = said.get("system") if path == MESSAGES else None
    return encode_chat(([{"role": "system", "content": system}] if system is not None else []) + said["messages"])


@pytest.mark.timeout(1200)  # for the nightly profile
@given(st.data())
def test_what_was_read_before_makes_no_difference(data: st.DataObject) -> None:
    remembering = Conversations(ReferenceTokenizer(), BLOCK, SEED)
    style, path = data.draw(WRITERS), data.draw(st.sampled_from([CHAT, MESSAGES]))
    fields = data.draw(st.lists(GOOD, max_size=3, unique_by=lambda one: one[0]))
    heads = data.draw(st.integers(0, len(fields)))
    history: list[Any] = [data.draw(MESSAGE)]
    for _ in range(8):
        doing = data.draw(st.sampled_from(["append"] * 6 + ["again", "back", "rewrite", "field", "spoil", "damage"]))
        head, tail, damage = fields[:heads], fields[heads:], ""
        if doing == "back":
            del history[data.draw(st.integers(1, len(history))) :]
        elif doing == "rewrite":
            history[data.draw(st.integers(0, len(history) - 1))] = data.draw(MESSAGE)
        elif doing == "field":
            new = data.draw(GOOD)
            fields = [*(one for one in fields if one[0] != new[0]), new]
        elif doing == "spoil":
            (head if data.draw(st.booleans()) else tail).append(data.draw(BAD))
        elif doing == "damage":
            damage = data.draw(DAMAGES)
        if doing in {"append", "spoil", "damage"}:
            history = history + data.draw(st.lists(MESSAGE, min_size=1, max_size=2))
        name = data.draw(st.sampled_from(["s", "s", "s", "s", None]))
        body = written(head, history, tail, style, damage)
        slow = tried(path, body, name, Conversations(ReferenceTokenizer(), BLOCK, SEED), remembering=False)
        fast = tried(path, body, name, remembering, remembering=True)
        if isinstance(slow, str) or isinstance(fast, str):
            assert fast == slow
            continue
        packed = whole_prompt(path, body)
        assert fast[0].chain == slow[0].chain == hash_chain(packed, BLOCK, SEED)
        assert fast[0].input_tokens == slow[0].input_tokens == len(packed) // TOKEN_BYTES
        assert name is None or fast[0].session_id == name
        assert fast[1:] == slow[1:]
        assert json.loads(body, object_pairs_hook=pairs_once) is not None


def test_a_turn_reads_what_the_last_one_did_not_say() -> None:
    """The old messages' bytes are compared, not parsed."""
    real = Conversations(ReferenceTokenizer(), BLOCK, SEED)
    history: list[Any] = []
    for turn in range(6):
        history = [*history, {"role": "user", "content": f"turn {turn}"}]
        body = written([("model", "m")], history, [("stream", True)], (", ", ": ", ""), "")
        payload = Payload(body, real.written("s"))
        assert (payload.known is not None) == (turn > 0)
        assert bytes(payload.fields["messages"]).count(b"turn") == 1
        ask(CHAT, body, "s", real, remembering=True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"a"},]}',
        b'{"messages":[{"role":"user","content":"a"}}',
        b'{"messages":[{"role":"user","content":"a"}],"messages":[]}',
        b'{"messages":[{"role":"user","content":"a"}]}]}',
        b'{"messages":[{"role":"user","content":"a"}{"role":"user","content":"a"}]}',
        b'{"messages":[{"role":"user","content":"a"}',
    ],
)
def test_what_follows_a_known_beginning_must_follow_it(body: bytes) -> None:
    real = Conversations(ReferenceTokenizer(), BLOCK, SEED)
    ask(CHAT, b'{"messages":[{"role":"user","content":"a"}]}', "s", real, remembering=True)
    assert real.written("s") is not None
    with pytest.raises(InvalidField):
        ask(CHAT, body, "s", real, remembering=True)
