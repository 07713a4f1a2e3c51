"""Without a tokenizer: what is compared, what is estimated, what the engine's counts correct; and keys that come twice in a message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.errors import InvalidField
from services.router.door.conversations import FIRST_TOKENS_A_BYTE, MOST_TOKENS_A_BYTE, Conversations, Prompt
from services.router.door.tokenizers import ByteTokenizer, ReferenceTokenizer, decoded, tokenizer_of

BLOCK, SEED = 4, 77
BLOCK_BYTES = BLOCK * 4


def said(*contents: Any, role: str = "user") -> bytes:
    return json.dumps([{"role": role, "content": content} for content in contents]).encode()


def made() -> Conversations:
    return Conversations(ByteTokenizer(), BLOCK, SEED)


def ask(real: Conversations, *contents: Any, name: str | None = "s") -> Prompt:
    return real.chat(said(*contents), b"", name, b"", ())


def common(one: Prompt, other: Prompt) -> int:
    return sum(1 for _ in iter_same(one, other))


def iter_same(one: Prompt, other: Prompt) -> Any:
    for left, right in zip(one.chain, other.chain, strict=False):
        if left != right:
            return
        yield left


def test_the_setting_names_the_tokenizer() -> None:
    assert not tokenizer_of("reference").estimates
    assert tokenizer_of("none").estimates


def test_the_first_length_is_a_share_of_the_bytes() -> None:
    prompt = ask(made(), "x" * 4000)
    assert prompt.estimated_bytes >= 4000
    assert prompt.input_tokens == round(prompt.estimated_bytes * FIRST_TOKENS_A_BYTE)
    assert len(prompt.chain) == prompt.estimated_bytes // BLOCK_BYTES


def test_engines_counts_correct_the_session_at_once_and_the_model_slowly() -> None:
    real = made()
    first = ask(real, "x" * 4000)
    real.confirm(first, 3 * first.estimated_bytes // 4, 40)
    second = ask(real, "x" * 4000, "y" * 1000)
    assert second.input_tokens == pytest.approx(0.75 * second.estimated_bytes, rel=0.01)
    other = ask(real, "z" * 4000, name="t")
    assert FIRST_TOKENS_A_BYTE < other.input_tokens / other.estimated_bytes < 0.4
    for _ in range(60):
        real.confirm(other, 3 * other.estimated_bytes // 4, 1)
    third = ask(real, "new", name="u")
    assert third.input_tokens == pytest.approx(0.75 * third.estimated_bytes, abs=2)


def test_a_next_turn_is_no_shorter_than_what_it_contains() -> None:
    """Prompt and reply of the last turn are counted: a reply that is short in bytes may be many tokens."""
    real = made()
    first = ask(real, "x" * 400)
    real.confirm(first, 100, 5000)
    assert ask(real, "x" * 400, "ok").input_tokens == 5100
    assert ask(real, "x" * 400, "ok").input_tokens < 200, "it does not contain itself"
    real.confirm(first, 100, 5000)
    assert ask(real, "y" * 400, "ok").input_tokens < 200, "a rewritten history contains nothing"


@pytest.mark.parametrize("prompt_tokens", [0, 1, 10**9])
def test_counts_that_cannot_be_do_no_harm(prompt_tokens: int) -> None:
    real = made()
    for _ in range(200):
        real.confirm(ask(real, "x" * 100), prompt_tokens, 0)
    again = ask(real, "x" * 100)
    assert 1 <= again.input_tokens <= MOST_TOKENS_A_BYTE * again.estimated_bytes


def test_a_rewrite_keeps_what_is_before_it() -> None:
    real = made()
    first = ask(real, "a" * 200, "b" * 200, "c" * 200)
    rewritten = ask(real, "a" * 200, "B" * 200, "c" * 200)
    assert 200 // BLOCK_BYTES <= common(first, rewritten) < 400 // BLOCK_BYTES
    inside = ask(real, "a" * 200, "B" * 150 + "d" * 50, "c" * 200)
    assert common(rewritten, inside) >= 350 // BLOCK_BYTES
    assert common(ask(real, "summary", "c" * 200), inside) <= 2


def test_no_worker_can_hold_a_block_of_bytes() -> None:
    """Hashes of bytes are a space of their own, also for a prompt whose bytes are the tokens of another one."""
    text = "word" * 40
    prompt = made().text(text, b"", "s", b"", ())
    assert prompt.estimated_bytes == len(text)
    assert not set(prompt.chain) & set(hash_chain(text.encode(), BLOCK, SEED))


def test_token_ids_are_counted_and_hashed_as_ever() -> None:
    packed = pack_tokens(list(range(3 * BLOCK + 1)))
    prompt = made().tokens(packed, b"", "s", b"", ())
    assert (prompt.chain, prompt.input_tokens, prompt.estimated_bytes) == (hash_chain(packed, BLOCK, SEED), 3 * BLOCK + 1, 0)


def test_a_longer_text_begins_with_the_blocks_of_the_shorter() -> None:
    real = made()
    for length in range(1, 3 * BLOCK_BYTES):
        short, long = (real.text("t" * size, b"", f"s{size}", b"", ()) for size in (length, length + 40))
        assert short.chain == long.chain[: len(short.chain)]
        assert short.input_tokens >= 1


MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hi", [{"type": "text", "text": "hi"}]),
        ("hi", [{"type": "text", "text": "hi"} | MARK]),
        (
            [{"type": "text", "text": "a"}, {"type": "image", "source": "x"}],
            [{"text": "a", "type": "text"}, {"type": "image", "source": "x"} | MARK],
        ),
    ],
)
def test_what_a_message_says_counts_not_how_it_is_written(one: Any, other: Any) -> None:
    real = made()
    first = ask(real, "before", one, name=None)
    assert ask(real, "before", other, "after", name=None).session_id == first.session_id


@pytest.mark.parametrize(
    "messages", [b"[1]", b"[null]", b"[{}]", b'[{"role":1}]', b'[{"role":""}]', b'[{"role":"u","content":"\xff"}]', b"{}"]
)
def test_what_is_no_message_is_refused(messages: bytes) -> None:
    with pytest.raises(InvalidField) as refused:
        made().chat(messages, b"", None, b"", ())
    assert refused.value.field.startswith("messages")


TWICE = {
    "role": b'{"role":"user","role":"system","content":"a"}',
    "content": b'{"role":"user","content":"a","content":"a"}',
    "type": b'{"role":"user","content":[{"type":"text","text":"a","type":"text"}]}',
    "name": b'{"role":"user","tool_calls":[{"function":{"name":"f","arguments":{},"name":"g"}}]}',
    "x": b'{"role":"user","content":"a","n":[[[{"x":1,"y":2,"x":3}]]]}',
    "r\u00f6le": '{"role":"user","r\u00f6le":1,"r\\u00f6le":2}'.encode(),
    'a"b': b'{"role":"user","a\\"b":1,"a\\u0022b":2}',
    "\\": b'{"role":"user","content":"\\"\\"","\\\\":"\\\\","\\\\":"\\""}',
}


@pytest.mark.parametrize(("key", "message"), TWICE.items(), ids=TWICE)
@pytest.mark.parametrize("tokenizer", [ReferenceTokenizer(), ByteTokenizer()], ids=["reference", "none"])
def test_a_key_twice_inside_a_message_is_refused(tokenizer: Any, key: str, message: bytes) -> None:
    """At any depth: the router would hash one value, the engine's template may read the other."""
    real = Conversations(tokenizer, BLOCK, SEED)
    for messages in (b"[%b]" % message, b'[{"role":"user","content":"fine"},%b]' % message):
        with pytest.raises(InvalidField, match="twice") as refused:
            real.chat(messages, b"", "s", b"", ())
        assert refused.value.field == f"messages.{key}"
    assert len(real) == 0


@pytest.mark.parametrize(
    "message",
    [
        b'{"role":"user","content":"\\u0022role\\u0022:1,\\"role\\":2"}',
        b'{"role":"user","content":[{"role":1},{"role":1}]}',
        b'{"role":"user","n":[1,1.5e10,null,true,""],"m":{"role":"user","content":""},"content":"\\\\"}',
    ],
)
def test_keys_that_only_look_alike_are_taken(message: bytes) -> None:
    assert decoded(message) == json.loads(message)


def test_a_long_way_down_is_no_way_out() -> None:
    with pytest.raises(InvalidField):
        decoded(b'{"role":"user","n":%b"\\u0022"%b}' % (b"[" * 990, b"]" * 990 + b',"n":1'))


KEYS = st.sampled_from(["a", "b", 'q"', "\\", "\u00e9", ""])
TEXTS = st.sampled_from(["", "x", '"', 'a"b"', "\\u0022", "\\", "\u00e9\U0001f600"])


@st.composite
def objects(draw: st.DrawFn, depth: int = 2) -> tuple[str, bool]:
    """The text of an object, and whether a key comes twice in it or in one inside of it."""
    keys = draw(st.lists(KEYS, max_size=4))
    twice = len(set(keys)) < len(keys)
    entries = []
    for key in keys:
        value = json.dumps(draw(TEXTS), ensure_ascii=draw(st.booleans()))
        if depth and draw(st.booleans()):
            value, inner = draw(objects(depth - 1))
            twice = twice or inner
            value = value if draw(st.booleans()) else f"[{value}]"
        name = json.dumps(key, ensure_ascii=draw(st.booleans()))
        if key == 'q"' and draw(st.booleans()):
            name = '"q\\u0022"'
        entries.append(name + draw(st.sampled_from([":", " : "])) + value)
    return "{" + ",".join(entries) + "}", twice


@pytest.mark.timeout(1200)  # for the nightly profile
@given(objects())
def test_keys_that_come_twice_are_found_and_no_others(case: tuple[str, bool]) -> None:
    text, twice = case
    if twice:
        with pytest.raises(InvalidField):
            decoded(text.encode())
    else:
        assert decoded(text.encode()) == json.loads(text)
