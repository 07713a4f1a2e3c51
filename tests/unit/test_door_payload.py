"""Request bodies: nothing that two readers could understand differently is passed on, nothing else is changed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.errors import InvalidField
from services.router.door.payload import MAX_FIELDS, MAX_KEY_CHARS, Payload

REFUSED = {
    "empty": b"",
    "null": b"null",
    "an array": b"[1,2]",
    "a string": b'"a"',
    "a number": b"1",
    "truncated": b'{"a":',
    "truncated string": b'{"a":"b',
    "two values": b'{"a":1}{"b":2}',
    "something after it": b'{"a":1}x',
    "NUL after it": b'{"a":1}\x00',
    "byte order mark": b'\xef\xbb\xbf{"a":1}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "trailing comma": b'{"a":1,}',
    "single quotes": b"{'a':1}",
    "NaN": b'{"a":NaN}',
    "infinity": b'{"a":-Infinity}',
    "leading zero": b'{"a":01}',
    "hexadecimal": b'{"a":0x1}',
    "control character": b'{"a":"\n"}',
    "bad escape": b'{"a":"\\x"}',
    "lone surrogate": b'{"a":"\\ud800"}',
    "lone surrogate in a key": b'{"\\udc00":1}',
    "bad UTF-8 in a key": b'{"\xff":1}',
    "overlong UTF-8 in a key": b'{"\xc0\xaf":1}',
    "deep array": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "unclosed depth": b'{"a":' + b"[" * 1_000_000,
    "too many keys": b"{" + b",".join(b'"%d":1' % index for index in range(MAX_FIELDS + 1)) + b"}",
    "a long key": b'{"%b":1}' % (b"k" * (MAX_KEY_CHARS + 1)),
    "a long key with an escape": b'{"\\u0061%b":1}' % (b"k" * 10_000_000),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """F76. And at once: nobody else is kept waiting."""
    before_s = time.process_time()
    with pytest.raises(InvalidField) as refused:
        Payload(body)
    assert refused.value.field == "body"
    assert time.process_time() - before_s < 1.0


TWICE = {
    "the same value": (b'{"a":1,"a":1}', "a"),
    "another value": (b'{"a":1,"a":2}', "a"),
    "a longer value": (b'{"a":1,"a":12}', "a"),
    "a shorter value": (b'{"a":12,"a":1}', "a"),
    "nulls": (b'{"a":null,"a":null}', "a"),
    "objects": (b'{"a":{"b":1},"a":{"b":1}}', "a"),
    "apart": (b'{"a":1,"b":2,"a":1}', "a"),
    "everything": (b'{"a":1,"b":2,"a":1,"b":2}', "a"),
    "with spaces": (b'{ "a" : 1 ,\n"a"\t:\r1 }', "a"),
    "escaped first": (b'{"\\u0061":1,"a":1}', "a"),
    "escaped last": (b'{"a":1,"\\u0061":1}', "a"),
    "escaped both": (b'{"\\u0061":1,"\\u0061":2}', "a"),
    "escaped slash": (b'{"a/":1,"a\\/":2}', "a/"),
    "escaped quote": (b'{"a\\"":1,"a\\u0022":1}', 'a"'),
    "not ASCII": (b'{"\xc3\xa9":1,"\\u00e9":2}', "\u00e9"),
    "surrogate pair": ('{"\U0001f600":1,'.encode() + b'"\\ud83d\\ude00":1}', "\U0001f600"),
    "the empty key": (b'{"":1,"":1}', ""),
    "the mesh's own": (b'{"rid":"a","rid":"b"}', "rid"),
    "a value that looks like a key": (b'{"a":"\\"a\\":1","b":{"a":1},"b":2}', "b"),
}


@pytest.mark.parametrize(("body", "key"), TWICE.values(), ids=TWICE)
def test_a_key_twice_is_refused(body: bytes, key: str) -> None:
    with pytest.raises(InvalidField, match="twice") as refused:
        Payload(body)
    assert refused.value.field == key


@pytest.mark.parametrize(
    "body", [b'{"a":{"a":1}}', b'{"a":"\\"a\\":1,\\"a\\":1"}', b'{"a":1,"A":1}', b'{"a":1," a":1}', b'{"a":1,"a\\u0000":2}']
)
def test_keys_that_only_look_alike_are_taken(body: bytes) -> None:
    assert Payload(body).raw == body


@pytest.mark.parametrize("key", ["bootstrap_room", "bootstrap_host", "bootstrap_port", "bootstrap_anything", "bootstrap\\u005froom"])
def test_only_the_mesh_sets_where_kv_comes_from(key: str) -> None:
    with pytest.raises(InvalidField, match="only the mesh") as refused:
        Payload(b'{"a":1,"%b":1}' % key.encode())
    assert refused.value.field.startswith("bootstrap_")


@pytest.mark.parametrize("body", [b'{"rid":"x","a":[1, 2]}', b'{"a":[1, 2],"rid":["x"]}', b'{"a":[1, 2] , "\\u0072id" : {}}'])
def test_a_rid_of_the_client_is_replaced(body: bytes) -> None:
    made = Payload(body)
    assert made.raw == b'{"a":[1, 2]}'
    assert json.loads(made.with_fields(b'"rid":"ours"')) == {"a": [1, 2], "rid": "ours"}


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (b"{}", b'{"x":1}'),
        (b" {\n} ", b' {\n"x":1} '),
        (b'{"rid":1}', b'{"x":1}'),
        (b'{"a":"}"}', b'{"a":"}","x":1}'),
        (b'{"a":1e400 }\r\n', b'{"a":1e400 ,"x":1}\r\n'),
    ],
)
def test_fields_are_appended_to_the_bytes(body: bytes, whole: bytes) -> None:
    assert Payload(body).with_fields(b'"x":1') == whole


def test_a_session_named_otherwise_is_replaced() -> None:
    made = Payload(b'{"session_id":"theirs","a":1}')
    made.name_session("theirs")
    assert made.raw == b'{"session_id":"theirs","a":1}'
    made.name_session("ours")
    assert made.raw == b'{"a":1}'
    assert "session_id" not in made.fields
    absent = Payload(b'{"session_id":null}')
    absent.name_session("ours")
    assert absent.with_fields(b'"session_id":"ours"') == b'{"session_id":"ours"}'


def test_values_are_decoded_when_they_are_asked_for() -> None:
    made = Payload(b'{"far":1e400,"long":%b,"text":"\xff"}' % (b"9" * 5000))
    for name in ("far", "long", "text"):
        with pytest.raises(InvalidField) as refused:
            made.value(name)
        assert refused.value.field == name
    assert made.value("absent") is None


@pytest.mark.parametrize("raw", [b"1.0", b"1e0", b"-1", b"11", b"true", b'"1"', b"[]", b"9" * 40, b"1e999"])
def test_counts_are_integers_in_range(raw: bytes) -> None:
    with pytest.raises(InvalidField) as refused:
        Payload(b'{"n":%b}' % raw).count("n", 0, 10)
    assert refused.value.field == "n"


def test_counts_and_texts() -> None:
    made = Payload(b'{"n":10,"none":null,"t":"\xc3\xa9","escaped":"\\u00e9"}')
    assert (made.count("n", 0, 10), made.count("none", 0, 10), made.count("absent", 0, 10)) == (10, None, None)
    assert (made.text("t", 2), made.text("escaped", 2), made.text("none", 2), made.text("absent", 2)) == ("\u00e9", "\u00e9", None, None)


@pytest.mark.parametrize("raw", [b'""', b'"abc"', b'"\xc3\xa9\xc3\xa9"', b"1", b"[]", b'"\xff"'])
def test_texts_have_a_length(raw: bytes) -> None:
    with pytest.raises(InvalidField) as refused:
        Payload(b'{"t":%b}' % raw).text("t", 2)
    assert refused.value.field == "t"


def test_what_is_read_inside_of_an_object_may_occur_only_once_too() -> None:
    """The router would reserve for one limit, the engine run to the other."""
    with pytest.raises(InvalidField, match="twice") as refused:
        Payload(b'{"sampling_params":{"max_new_tokens":1,"max_new_tokens":9}}').inner("sampling_params")
    assert refused.value.field == "max_new_tokens"
    made = Payload(b'{"p":{"a":1},"none":null,"list":[]}')
    assert (made.inner("p"), made.inner("none"), made.inner("absent")) == ({"a": 1}, {}, {})
    with pytest.raises(InvalidField):
        made.inner("list")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text(max_size=6) | st.sampled_from(["rid", "model", "messages", "session_id", "a\\b", 'a"b', "}", "{", ","])
SPACES = st.text(" \t\r\n", max_size=3)


@st.composite
def written(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """An object's keys, in the order they are written, and its text: any spaces, any escapes, keys that may occur twice."""
    parts, keys = [], []
    for _ in range(draw(st.integers(0, 5))):
        key = draw(KEYS)
        keys.append(key)
        name = json.dumps(key, ensure_ascii=draw(st.booleans()))
        if key.isascii() and key.isalpha() and draw(st.booleans()):
            name = '"' + "".join(f"\\u{ord(letter):04x}" for letter in key) + '"'
        value = json.dumps(draw(VALUES), ensure_ascii=draw(st.booleans()))
        parts.append(draw(SPACES) + name + draw(SPACES) + ":" + draw(SPACES) + value + draw(SPACES))
    return keys, (draw(SPACES) + "{" + (",".join(parts) or draw(SPACES)) + "}" + draw(SPACES)).encode("utf-8", "surrogatepass")


@pytest.mark.timeout(1200)  # for the nightly profile
@given(written())
def test_an_object_is_taken_as_it_is_or_not_at_all(case: tuple[list[str], bytes]) -> None:
    keys, body = case
    surrogates = any("\ud800" <= letter <= "\udfff" for letter in body.decode("utf-8", "surrogatepass"))
    if len(set(keys)) < len(keys) or any(key.startswith("bootstrap_") for key in keys) or surrogates:
        with pytest.raises(InvalidField):
            Payload(body)
        return
    made = Payload(body)
    expected: dict[str, Any] = json.loads(body)
    assert "rid" in expected or made.raw == body
    expected.pop("rid", None)
    assert json.loads(made.raw) == expected
    assert json.loads(made.with_fields(b'"rid":"r","added":[1]')) == expected | {"rid": "r", "added": [1]}
    assert list(made.fields) == list(expected)
