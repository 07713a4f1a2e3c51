from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.engine import tokens
from kvc.engine.tokens import MESSAGE_END, MESSAGE_START, ChatError


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text: str) -> None:
    packed = tokens.unpack_tokens(tokens.encode_text(text))
    assert list(packed) == [byte + 3 for byte in text.encode()]
    assert tokens.decode_tokens(packed) == text


def test_specials_and_foreign_ids_have_no_text() -> None:
    assert tokens.decode_tokens([0, 1, 2, 68, 259, 2**31 - 2]) == "A"


def test_chat_template() -> None:
    packed = tokens.unpack_tokens(tokens.encode_chat([{"role": "user", "content": "hi"}]))
    expected = [MESSAGE_START, *(b + 3 for b in b"user\nhi"), MESSAGE_END, MESSAGE_START, *(b + 3 for b in b"assistant\n")]
    assert list(packed) == expected


def test_an_append_to_a_conversation_is_an_append_to_its_tokens() -> None:
    """The answer of a turn, put back as the assistant's message, continues the prompt that produced it."""
    history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    first = tokens.encode_chat(history)
    history += [{"role": "assistant", "content": "yes?"}, {"role": "user", "content": "again"}]
    assert tokens.encode_chat(history).startswith(first + tokens.encode_text("yes?"))


def test_tool_calls_and_text_parts_are_part_of_the_prompt() -> None:
    one = tokens.encode_chat([{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}])
    other = tokens.encode_chat([{"role": "assistant", "content": None, "tool_calls": [{"id": "b"}]}])
    assert one != other
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokens.encode_chat([{"role": "user", "content": parts}]) == tokens.encode_chat([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("text", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "\ud800"}, "messages[0]"),
    ],
)
def test_malformed_messages_are_named(message: Any, field: str) -> None:
    """F76."""
    with pytest.raises(ChatError) as caught:
        tokens.encode_chat([message])
    assert caught.value.field == field
