"""HTTP bodies: whatever comes in is a request or a typed error that names the field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.engine.kvvalue import IDS_VOCAB, TEXT_VOCAB
from kvc.engine.reference import schema
from kvc.engine.tokens import encode_text
from kvc.errors import InvalidField

if TYPE_CHECKING:
    from kvc.engine.reference.request import Request


def generate(body: Any) -> Request:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return schema.generate_request(schema.decode(data, schema.Generate), 128)


def test_generate_by_text_and_by_ids() -> None:
    text = generate({"text": "ab", "rid": "r", "session_id": "s", "sampling_params": {"max_new_tokens": 7, "top_p": 0.5}, "stop": "x"})
    assert (text.prompt, text.max_new_tokens, text.vocab, text.rid, text.session_id) == (encode_text("ab"), 7, TEXT_VOCAB, "r", "s")
    ids = generate({"input_ids": [0, 2**31 - 2]})
    assert (ids.input_tokens, ids.max_new_tokens, ids.vocab, ids.session_id, ids.bootstrap) == (2, 128, IDS_VOCAB, "", None)
    assert ids.rid != generate({"input_ids": [1]}).rid
    room = generate({"text": "a", "bootstrap_host": "h", "bootstrap_port": 5, "bootstrap_room": 2**63 - 1})
    assert room.bootstrap == ("h", 5, 2**63 - 1)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"[1,2]", "body"),
        (b"null", "body"),
        (b'{"text": "a"', "body"),
        (b'{"text": "\xff\xfe"}', "body"),
        (b'{"text": "a", "sampling_params": {"temperature": NaN}}', "body"),
        (b"[" * 100_000, "body"),
        (b'{"text": "a", "sampling_params": {"temperature": 1e400}}', "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": -0.1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**30}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": [1]}, "sampling_params"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": "x" * 257}, "rid"),
        ({"text": "a", "session_id": "x" * 257}, "session_id"),
        ({"text": ["a", "b"]}, "text"),
        ({"text": ""}, "text"),
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1]]}, "input_ids[0]"),
        ({"input_ids": [1, "a"]}, "input_ids[1]"),
        ({"input_ids": [1, -1]}, "input_ids[1]"),
        ({"input_ids": [2**31 - 1]}, "input_ids[0]"),
        ({"input_ids": [2**80]}, "input_ids[0]"),
        ({"text": "a", "bootstrap_room": 1}, "bootstrap_host"),
        ({"text": "a", "bootstrap_host": "h", "bootstrap_port": 0, "bootstrap_room": 1}, "bootstrap_port"),
        ({"text": "a", "bootstrap_host": "h", "bootstrap_port": 70_000, "bootstrap_room": 1}, "bootstrap_port"),
        ({"text": "a", "bootstrap_host": "h", "bootstrap_port": 5, "bootstrap_room": -1}, "bootstrap_room"),
        ({"text": "a", "bootstrap_host": "", "bootstrap_port": 5, "bootstrap_room": 1}, "bootstrap_host"),
    ],
)
def test_wrong_fields_are_named(body: Any, field: str) -> None:
    """F76."""
    with pytest.raises(InvalidField) as caught:
        generate(body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "stream_options": 5}, "stream_options"),
    ],
)
def test_wrong_chat_fields_are_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        schema.chat_request(schema.decode(json.dumps(body).encode(), schema.Chat), 128)
    assert caught.value.field == field


@pytest.mark.parametrize("prompt", [["a", "b"], [1, "a"], [[1]], [True], [1.5], "", [], [-1]])
def test_wrong_completion_prompts_are_named(prompt: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        schema.completion_request(schema.decode(json.dumps({"prompt": prompt}).encode(), schema.Completion), 128)
    assert caught.value.field == "prompt"


def test_completion_prompts() -> None:
    def prompt(value: Any) -> Request:
        return schema.completion_request(schema.decode(json.dumps({"prompt": value}).encode(), schema.Completion), 128)

    assert prompt("ab").prompt == prompt(["ab"]).prompt == encode_text("ab")
    assert prompt([5, 6]).vocab == IDS_VOCAB


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(
    ["text", "input_ids", "sampling_params", "stream", "rid", "session_id", "bootstrap_host", "bootstrap_room", "messages"]
)


def field_at_fault(data: bytes, *, chat: bool) -> str | None:
    """The field that is wrong in a body; None when the body is a request."""
    try:
        if chat:
            request = schema.chat_request(schema.decode(data, schema.Chat), 128)
        else:
            request = schema.generate_request(schema.decode(data, schema.Generate), 128)
    except InvalidField as error:
        return error.field
    assert request.input_tokens > 0
    return None


@given(body=st.dictionaries(names, json_values, max_size=5), chat=st.booleans())
def test_any_json_is_a_request_or_a_typed_error(*, body: dict[str, Any], chat: bool) -> None:
    """F76: nothing else comes out, whatever goes in."""
    assert field_at_fault(json.dumps(body).encode(), chat=chat) != ""


@given(data=st.binary(max_size=200), chat=st.booleans())
def test_any_bytes_are_a_typed_error(*, data: bytes, chat: bool) -> None:
    assert field_at_fault(data, chat=chat)
