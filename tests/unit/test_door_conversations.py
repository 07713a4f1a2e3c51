"""Conversations: the chain is always that of the whole prompt, whatever a client does with its history; and whose turn it is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.errors import InvalidField
from services.router.door.conversations import MAX_MESSAGES, Conversations, Prompt
from services.router.door.payload import Payload
from services.router.door.request import CHAT, COMPLETIONS, GENERATE, MESSAGES, HttpRequest, payload_of, prompt_of
from services.router.door.tokenizers import ReferenceTokenizer

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection

    import msgspec

BLOCK = 4
SEED = 77
TOKENIZER = ReferenceTokenizer()
Message = tuple[str, str]


def encoded(messages: Collection[Message], spaces: str = "") -> bytes:
    """The messages as JSON; `spaces` between them only, as the bytes of a message itself are its identity."""
    each = [json.dumps({"role": role, "content": content}) for role, content in messages]
    return f"[{spaces}{f'{spaces},{spaces}'.join(each)}{spaces}]".encode()


def whole_prompt(messages: Collection[Message]) -> bytes:
    """Packed tokens, tokenized at once."""
    each = [TOKENIZER.message(json.dumps({"role": role, "content": content}).encode()) for role, content in messages]
    return b"".join(each) + TOKENIZER.generation_prompt()


def check(prompt: Prompt, packed: bytes) -> None:
    """The chain and the length are those of the whole prompt."""
    assert prompt.input_tokens == len(packed) // 4
    assert prompt.chain == hash_chain(packed, BLOCK, SEED)


@dataclass
class Model:
    """Conversations beside the slow truth: whole tokenization, and an index of whole histories."""

    real: Conversations
    index: dict[Any, str] = field(default_factory=dict)
    place: dict[str, Any] = field(default_factory=dict)
    seen: list[tuple[array[int], array[int]]] = field(default_factory=list)

    def chat(self, messages: list[Message], spaces: str, preamble: bytes, name: str | None, group: bytes, busy: Collection[str]) -> str:
        prompt = prompt_of(*self.asked(encoded(messages, spaces), preamble, name, group), self.real, busy)
        check(prompt, whole_prompt(messages))
        where = [(preamble, group, "chat", tuple(messages[:count])) for count in range(1, len(messages) + 1)]
        return self._settle(prompt, where, name, busy)

    def asked(self, messages: bytes, preamble: bytes, name: str | None, group: bytes) -> tuple[HttpRequest, Payload]:
        body = b'{"messages":%b,"tools":"%b","prompt_cache_key":"%b"}' % (messages, preamble or b"none", group or b"nobody")
        headers = [(b"x-session-id", name.encode())] if name is not None else []
        made = HttpRequest(b"POST", CHAT, CHAT, headers, body, keep_alive=True, http10=False)
        return made, payload_of(made, self.real)

    def tokens(self, ids: list[int], name: str | None, group: bytes, busy: Collection[str]) -> str:
        packed = pack_tokens(ids)
        prompt = self.real.tokens(packed, b"", name, group, busy)
        check(prompt, packed)
        where = [(b"", group, "tokens", tuple(ids[: count * BLOCK])) for count in range(1, len(ids) // BLOCK + 1)]
        return self._settle(prompt, where, name, busy)

    def _settle(self, prompt: Prompt, where: list[Any], name: str | None, busy: Collection[str]) -> str:
        """Who it should have been; and what is known of it from now on."""
        session_id = prompt.session_id
        if name is not None:
            assert session_id == name
        else:
            known = [self.index[key] for key in reversed(where) if key in self.index and self.index[key] not in busy]
            assert session_id == known[0] if known else session_id not in self.place
        old = self.place.pop(session_id, None)
        if self.index.get(old) == session_id:
            del self.index[old]
        if where:
            self.index[where[-1]] = session_id
            self.place[session_id] = where[-1]
        else:
            self.place[session_id] = None
        self.seen.append((prompt.chain, prompt.chain[:]))
        assert all(chain == then for chain, then in self.seen), "a chain that a turn in flight holds has changed"
        self.books()
        return session_id

    def books(self) -> None:
        """Nothing is left in the index, and every byte is counted."""
        live = self.real._by_session
        assert self.real.held_bytes == sum(known.held_bytes for known in live.values())
        for known in live.values():
            assert known.tail_bytes == sum(map(len, known.tails))
            assert len(known.keys) == len(known.tails) - 1 == len(known.tokens_before) - 1 >= known.messages
        for key, session_id in self.real._by_key.items():
            assert live[session_id].index_key == key


WORDS = st.sampled_from(["", "a", "b", "ab", "a longer word than a block", "\u00e9\U0001f600"])
MESSAGE = st.tuples(st.sampled_from(["user", "assistant", "tool"]), WORDS)
HISTORY = st.lists(MESSAGE, min_size=1, max_size=4)
SPACES = st.sampled_from(["", "", " ", "\n  "])
IDS = st.lists(st.integers(0, 2), max_size=3 * BLOCK)


@pytest.mark.timeout(1200)  # for the nightly profile
@given(st.data())
def test_the_chain_is_that_of_the_whole_prompt_and_the_session_the_longest_known(data: st.DataObject) -> None:
    """Appends, forks, rewrites, compaction, other tools, groups, busy sessions, names, messages that are refused, token prompts."""
    model = Model(Conversations(TOKENIZER, BLOCK, SEED))
    histories: list[list[Message]] = [[]]
    sessions: list[str] = ["s1"]
    for _ in range(data.draw(st.integers(1, 8))):
        history = list(data.draw(st.sampled_from(histories)))
        doing = data.draw(st.sampled_from(["append", "append", "append", "again", "fork", "rewrite", "compact", "refused", "tokens"]))
        preamble = data.draw(st.sampled_from([b"", b"", b"tools"]))
        group = data.draw(st.sampled_from([b"", b"", b"team"]))
        busy = set(data.draw(st.lists(st.sampled_from(sessions), max_size=2)))
        name = data.draw(st.none() | st.sampled_from(["s1", "s2"]))
        if doing == "tokens":
            sessions.append(model.tokens(data.draw(IDS), name, group, busy))
            continue
        if doing == "refused":
            bad = encoded([*history, ("user", "fine")])[:-1] + b',{"role":1}]'
            with pytest.raises(InvalidField):
                prompt_of(*model.asked(bad, preamble, name, group), model.real, busy)
            model.books()
            continue
        if doing == "fork":
            del history[data.draw(st.integers(0, len(history))) :]
        elif doing == "rewrite" and history:
            history[data.draw(st.integers(0, len(history) - 1))] = data.draw(MESSAGE)
        elif doing == "compact":
            history = [("user", "summary"), *history[len(history) // 2 :]]
        if doing != "again" or not history:
            history += data.draw(HISTORY)
        sessions.append(model.chat(history, data.draw(SPACES), preamble, name, group, busy))
        histories.append(history)


@pytest.mark.timeout(1200)  # for the nightly profile
@given(st.data())
def test_what_is_forgotten_is_only_slower(data: st.DataObject) -> None:
    """The caps hold, by count and by bytes, and the chain is right with whatever is left."""
    most, most_bytes = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 3000, 1 << 20]))
    real = Conversations(TOKENIZER, BLOCK, SEED, most, most_bytes)
    model = Model(real)
    histories: list[list[Message]] = [[]]
    for _ in range(6):
        history = data.draw(st.sampled_from(histories)) + data.draw(HISTORY)
        prompt = real.chat(encoded(history), b"", data.draw(st.none() | st.sampled_from(["s1", "s2"])), b"", ())
        check(prompt, whole_prompt(history))
        model.books()
        assert len(real) <= most
        assert real.held_bytes <= most_bytes or len(real) == 1
        histories.append(history)


def test_a_turn_costs_what_it_appends() -> None:
    """Old messages of a named session are not even parsed: one digest says that they are the same."""
    tokenized: list[bytes] = []

    class Counting(ReferenceTokenizer):
        def message(self, raw: bytes) -> bytes:
            tokenized.append(raw)
            return super().message(raw)

    for name in ("s", None):
        real = Conversations(Counting(), BLOCK, SEED)
        history = [("user", f"message {index}") for index in range(50)]
        real.chat(encoded(history), b"", name, b"", ())
        tokenized.clear()
        history.append(("user", "one more"))
        check(real.chat(encoded(history), b"", name, b"", ()), whole_prompt(history))
        assert len(tokenized) == 1


def test_the_way_back_and_forth_costs_nothing() -> None:
    """A client that goes back some turns, and says the same again, is not tokenized again."""
    tokenized: list[bytes] = []

    class Counting(ReferenceTokenizer):
        def message(self, raw: bytes | msgspec.Raw) -> bytes:
            tokenized.append(bytes(raw))
            return super().message(raw)

    model = Model(Conversations(Counting(), BLOCK, SEED))
    history: list[Message] = [("user", f"message {index}") for index in range(9)]
    for count in (3, 6, 9, 2, 4, 4, 9, 1, 9):
        model.chat(history[:count], "", b"", "s", b"", ())
    assert len(tokenized) == len(history)
    model.chat([*history[:3], ("user", "another way")], "", b"", "s", b"", ())
    model.chat(history[:5], "", b"", "s", b"", ())
    assert len(tokenized) == len(history) + 1 + 2


def test_the_same_request_again_reads_nothing_again() -> None:
    real = Conversations(TOKENIZER, BLOCK, SEED)
    model = Model(real)
    model.chat([("user", "hello")], "", b"", "s", b"", ())
    written = real.written("s")
    assert written is not None
    model.chat([("user", "hello")], "", b"", "s", b"", ())
    assert real.written("s") is written


def test_a_message_that_is_refused_changes_nothing() -> None:
    """The next turn of a session whose messages could not be tokenized half-way still gets the chain of its whole prompt."""
    real = Conversations(TOKENIZER, BLOCK, SEED)
    history = [("user", "hello"), ("assistant", "hello to you")]
    real.chat(encoded(history), b"", "s", b"", ())
    rewritten = encoded([("user", "other")])[:-1] + b',{"role":"user","content":[7]}]'
    for bad in (encoded(history)[:-1] + b',{"role":"user","content":"fine"},{"role":7}]', rewritten):
        with pytest.raises(InvalidField):
            real.chat(bad, b"", "s", b"", ())
        for more in ([], [("user", "next")]):
            check(real.chat(encoded(history + more), b"", "s", b"", ()), whole_prompt(history + more))


def test_messages_after_tokens_under_one_name() -> None:
    """A session may be asked for over several paths; nothing of one prompt is taken for the other."""
    real = Conversations(TOKENIZER, BLOCK, SEED)
    ids = list(range(3 * BLOCK))
    history = [("user", "hello there")]
    for _ in range(2):
        check(real.tokens(pack_tokens(ids), b"", "s", b"", ()), pack_tokens(ids))
        check(real.chat(encoded(history), b"", "s", b"", ()), whole_prompt(history))
        check(real.text("hello there", b"", "s", b"", ()), TOKENIZER.text("hello there"))


def test_names_that_change_their_tools_leave_nothing_behind() -> None:
    real = Conversations(TOKENIZER, BLOCK, SEED)
    for index in range(100):
        real.chat(encoded([("user", "x")]), b"%d" % index, "s", b"", ())
        real.chat(encoded([("user", "x")]), b"", "s", b"%d" % index, ())
    assert len(real) == len(real._by_key) == 1


NO_CONVERSATIONS = {
    "an object": b"{}",
    "a number": b"1",
    "null": b"null",
    "a string": b'"a"',
    "numbers": b"[1]",
    "nulls": b"[null]",
    "arrays": b"[[]]",
    "no role": b"[{}]",
    "a role that is no string": b'[{"role":1}]',
    "content that is no text": b'[{"role":"user","content":1}]',
    "bad UTF-8": b'[{"role":"user","content":"\xff"}]',
    "a number out of range": b'[{"role":"user","content":"a","n":1e999}]',
    "an integer out of range": b'[{"role":"user","content":"a","n":%b}]' % (b"9" * 9999),
    "the same in a tool call": b'[{"role":"user","tool_calls":[1e999]}]',
    "deep": b'[{"role":"user","content":"a","n":%b%b}]' % (b"[" * 999, b"]" * 999),
    "too many": b"[%b{}]" % (b"{}," * MAX_MESSAGES),
}


@pytest.mark.parametrize("messages", NO_CONVERSATIONS.values(), ids=NO_CONVERSATIONS)
def test_what_is_no_conversation_is_refused(messages: bytes) -> None:
    real = Conversations(TOKENIZER, BLOCK, SEED)
    with pytest.raises(InvalidField) as refused:
        real.chat(messages, b"", None, b"", ())
    assert refused.value.field.startswith("messages")
    assert len(real) == 0


# ---- whose turn it is, in the documented order ----


def request(path: bytes = CHAT, body: dict[str, Any] | None = None, *names: str) -> tuple[HttpRequest, Payload]:
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}]} if body is None else body).encode()
    headers = [(b"x-session-id", name.encode("latin-1")) for name in names]
    return HttpRequest(b"POST", path, path, headers, raw, keep_alive=True, http10=False), Payload(raw)


MESSAGE_HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, MESSAGE_HI),
        (MESSAGES, MESSAGE_HI),
        (GENERATE, {"text": "hi"}),
        (GENERATE, {"input_ids": [1]}),
        (COMPLETIONS, {"prompt": "hi"}),
    ],
)
def test_the_header_names_the_session_before_the_body_does(path: bytes, body: dict[str, Any]) -> None:
    real = Conversations(TOKENIZER, BLOCK, SEED)
    named = body | {"session_id": "in the body", "prompt_cache_key": "g", "metadata": {"user_id": "g"}}
    assert prompt_of(*request(path, named, "in the header"), real, ()).session_id == "in the header"
    assert prompt_of(*request(path, named), real, ()).session_id == "in the body"
    assert prompt_of(*request(path, named | {"session_id": None}), real, {"in the header", "in the body"}).session_id not in {
        "in the header",
        "in the body",
    }


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_group_is_compared_inside_only(path: bytes) -> None:
    real = Conversations(TOKENIZER, BLOCK, SEED)

    def ask(group: str | None, *texts: str) -> str:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text} for text in texts]}
        if group is not None:
            body |= {"prompt_cache_key": group} if path == CHAT else {"metadata": {"user_id": group}}
        return prompt_of(*request(path, body), real, ()).session_id

    first = {group: ask(group, "hi") for group in (None, "a", "b", "a" * 512)}
    assert len(set(first.values())) == 4
    for group, session_id in first.items():
        assert ask(group, "hi", "more") == session_id
    assert ask("a", "else") != first["a"]


def test_long_groups_are_told_apart() -> None:
    """Only Anthropic's may be long; both ends of it count."""
    real = Conversations(TOKENIZER, BLOCK, SEED)
    users = ["u" * 600 + end for end in "ab"]
    sessions = [prompt_of(*request(MESSAGES, MESSAGE_HI | {"metadata": {"user_id": user}}), real, ()).session_id for user in users]
    assert len(set(sessions)) == 2


def test_turns_that_diverge_are_different_sessions() -> None:
    """A sub-agent that shares its parent's prefix, and a turn beside one in flight, wait for nobody."""
    real = Conversations(TOKENIZER, BLOCK, SEED)
    history: list[Message] = [("system", "you are"), ("user", "hi")]
    parent = real.chat(encoded(history), b"", None, b"", ()).session_id
    one = real.chat(encoded([*history, ("assistant", "a"), ("user", "one")]), b"", None, b"", ()).session_id
    two = real.chat(encoded([*history, ("assistant", "a"), ("user", "two")]), b"", None, b"", {one}).session_id
    assert one == parent != two
    assert real.chat(encoded([*history, ("assistant", "a"), ("user", "one"), ("user", "on")]), b"", None, b"", ()).session_id == one


@pytest.mark.parametrize("names", [("",), ("a", "a"), ("a", "b"), ("x" * 257,), ("\xff\xfe",)])
def test_names_that_are_none_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidField) as refused:
        prompt_of(*request(CHAT, None, *names), Conversations(TOKENIZER, BLOCK, SEED), ())
    assert refused.value.field == "x-session-id"


@pytest.mark.parametrize("name", ["", "x" * 257, 1, True, ["a"], {}])
def test_names_in_the_body_that_are_none_are_refused(name: object) -> None:
    with pytest.raises(InvalidField) as refused:
        prompt_of(*request(CHAT, MESSAGE_HI | {"session_id": name}), Conversations(TOKENIZER, BLOCK, SEED), ())
    assert refused.value.field == "session_id"


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (MESSAGES, {"messages": [], "system": "s"}, "messages"),
        (MESSAGES, {"messages": "x", "system": "s"}, "messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "metadata": {"user_id": 1}}, "metadata.user_id"),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "metadata": []}, "metadata"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (GENERATE, {}, "input_ids"),
        (GENERATE, {"text": ["a"]}, "text"),
        (GENERATE, {"input_ids": []}, "input_ids"),
        (GENERATE, {"input_ids": "a"}, "input_ids"),
        (GENERATE, {"input_ids": [[1]]}, "input_ids"),
        (GENERATE, {"input_ids": [-1]}, "input_ids"),
        (GENERATE, {"input_ids": [2**31]}, "input_ids"),
        (GENERATE, {"input_ids": [2**32]}, "input_ids"),
        (GENERATE, {"input_ids": [10**30]}, "input_ids"),
        (GENERATE, {"input_ids": [1.5]}, "input_ids"),
        (GENERATE, {"input_ids": [None]}, "input_ids"),
        (GENERATE, {"input_ids": [True]}, "input_ids"),
        (CHAT, MESSAGE_HI | {"prompt_cache_key": 1}, "prompt_cache_key"),
    ],
)
def test_prompts_that_are_none_are_refused(path: bytes, body: dict[str, Any], at: str) -> None:
    with pytest.raises(InvalidField) as refused:
        prompt_of(*request(path, body), Conversations(TOKENIZER, BLOCK, SEED), ())
    assert refused.value.field == at


def test_an_anthropic_system_prompt_is_the_first_message() -> None:
    real = Conversations(TOKENIZER, BLOCK, SEED)
    body = {"system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    check(prompt_of(*request(MESSAGES, body), real, ()), whole_prompt([("system", "be brief"), ("user", "hi")]))
