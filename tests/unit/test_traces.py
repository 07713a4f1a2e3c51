"""Trace files: what they mean, and that whatever is wrong with one is named by file, line and field."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvc.evaluation.trace_files import load_trace, save_trace
from kvc.evaluation.trace_rows import MAX_LINE_BYTES, TraceError
from kvc.evaluation.traces import block_count, block_ids, common_blocks, compress, full_blocks
from tests.support.traces import META, kvt_line, real_trace, request, trace_of, write_lines

if TYPE_CHECKING:
    from pathlib import Path


def test_kvt_fields(tmp_path: Path) -> None:
    line = kvt_line(h=[[0, 3], [70, 1]], think_s=2.5, api_s=0.25, turn_id=3)
    trace = load_trace(write_lines(tmp_path / "t.jsonl", META, line))
    (one,) = trace.requests
    assert (one.request_id, one.session_id, one.turn_index, one.timestamp_s) == ("a.0", "a", 3, 1.5)
    assert (one.input_tokens, one.output_tokens, one.blocks) == (100, 7, ((0, 3), (70, 1)))
    assert (one.think_s, one.api_s, one.request_type) == (2.5, 0.25, "user")
    assert (trace.block_tokens, trace.source, trace.meta) == (24, "t.jsonl", {"source": "test"})


def test_optional_fields_and_requests_without_ids(tmp_path: Path) -> None:
    line = kvt_line(h=..., request_type=..., think_s=None)
    trace = load_trace(write_lines(tmp_path / "t.jsonl", META | {"block_size": 0}, line))
    (one,) = trace.requests
    assert (one.blocks, one.think_s, one.api_s, one.request_type) == ((), None, None, "")


def test_requests_come_out_in_the_order_of_their_timestamps(tmp_path: Path) -> None:
    lines = [kvt_line(request_id=f"a.{k}", timestamp_s=at) for k, at in enumerate((3, 1, 2, 1))]
    trace = load_trace(write_lines(tmp_path / "t.jsonl", META, *lines, ""))
    assert [one.request_id for one in trace.requests] == ["a.1", "a.3", "a.2", "a.0"]


def test_gzip_and_plain_have_one_digest(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "t.jsonl", META, kvt_line())
    packed = tmp_path / "t.kvt.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_trace(plain).sha256 == load_trace(packed).sha256
    assert load_trace(plain).requests == load_trace(packed).requests


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_saved_trace_reads_back(tmp_path: Path, name: str) -> None:
    first = request("a", 0, 100, (0, 4), at_s=0.5, think_s=0.0, request_type="user")
    trace = trace_of(first, request("a", 1, 150, (0, 4), (9, 2), at_s=1.25), request("b", 0, 30, (0, 1), at_s=1.0, api_s=3.5))
    save_trace(trace, tmp_path / name)
    again = load_trace(tmp_path / name)
    assert (again.requests, again.block_tokens) == (trace.requests, 24)
    before = (tmp_path / name).read_bytes()
    save_trace(trace, tmp_path / name)
    assert (tmp_path / name).read_bytes() == before


def mooncake(timestamp_ms: float, input_length: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": timestamp_ms, "input_length": input_length, "output_length": 5, "hash_ids": ids}


def test_mooncake_clock_and_sessions(tmp_path: Path) -> None:
    lines = [
        mooncake(0, 1200, [0, 1, 2]),
        mooncake(1000, 1100, [0, 1, 3]),  # the same two full blocks: continues the first
        mooncake(2000, 600, [0, 4]),  # one shared block is a system prompt
        mooncake(3500, 2000, [0, 1, 5, 6]),  # continues the second, the latest that ends in block 1
        mooncake(4000, 3000, [0, 1, 5, 7, 8, 9]),
    ]
    trace = load_trace(write_lines(tmp_path / "m.jsonl", *lines))
    assert trace.block_tokens == 512
    assert [one.timestamp_s for one in trace.requests] == [0.0, 1.0, 2.0, 3.5, 4.0]
    assert [one.session_id for one in trace.requests] == ["s0", "s0", "s2", "s0", "s0"]
    assert [one.turn_index for one in trace.requests] == [0, 1, 0, 2, 3]
    assert trace.requests[4].blocks == ((0, 2), (5, 1), (7, 3))
    assert full_blocks(trace.requests[0], 512) == 2


def bailian(chat: int, parent: int, turn: int, ids: list[int]) -> dict[str, Any]:
    sizes = {"input_length": 16 * len(ids) - 1, "output_length": 3}
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": chat / 10, "type": "text", "turn": turn, "hash_ids": ids} | sizes


def test_bailian_sessions_follow_parents(tmp_path: Path) -> None:
    lines = [
        bailian(7, -1, 1, [1, 2]),
        bailian(8, -1, 1, [1, 3]),
        bailian(9, 7, 2, [1, 2, 4]),
        bailian(10, 9, 3, [1, 2, 4, 5]),
        bailian(11, 5, 4, [9]),
    ]
    trace = load_trace(write_lines(tmp_path / "b.jsonl", *lines))
    assert trace.block_tokens == 16
    assert [one.session_id for one in trace.requests] == ["b7", "b8", "b7", "b7", "b11"]
    assert [one.turn_index for one in trace.requests] == [0, 0, 1, 2, 3]
    assert trace.requests[2].timestamp_s == 0.9


BAD_KVT = [
    ("request_id", ..., "is missing"),
    ("request_id", 7, "no string"),
    ("request_id", "", "0 characters"),
    ("request_id", "x" * 129, "129 characters"),
    ("session_id", "a\nb", "printable"),
    ("session_id", "\ud800", "printable"),
    ("session_id", None, "no string"),
    ("timestamp_s", -0.5, "no time"),
    ("timestamp_s", "1", "no number"),
    ("timestamp_s", True, "no number"),
    ("timestamp_s", 1e300, "no time"),
    ("input_length", 0, "not in 1.."),
    ("input_length", -3, "not in 1.."),
    ("input_length", 12.0, "no integer"),
    ("input_length", True, "no integer"),
    ("input_length", 10**40, "not in 1.."),
    ("output_length", -1, "not in 0.."),
    ("output_length", [1], "no integer"),
    ("turn_id", -1, "not in 0.."),
    ("think_s", -1, "no time"),
    ("think_s", {}, "no number"),
    ("api_s", "2", "no number"),
    ("request_type", 3, "no string"),
    ("h", ..., "is missing"),
    ("h", "0-4", "no list"),
    ("h", [[0, 4, 1]], "no pair"),
    ("h", [4], "no pair"),
    ("h", [[0.0, 4]], "no pair"),
    ("h", [[0, True]], "no pair"),
    ("h", [[-1, 4]], "outside"),
    ("h", [[0, 0]], "outside"),
    ("h", [[2**64 - 1, 2]], "outside"),
    ("h", [[0, 6]], "more ids"),
    ("h", [[0, 10**18]], "more ids"),
]


@pytest.mark.parametrize(("field", "value", "problem"), BAD_KVT)
def test_a_bad_field_is_named(tmp_path: Path, field: str, value: Any, problem: str) -> None:
    """F76 for files: file, line and field are in the message."""
    path = write_lines(tmp_path / "t.jsonl", META, kvt_line(), kvt_line(**({"request_id": "a.1"} | {field: value})))
    with pytest.raises(TraceError, match=problem) as caught:
        load_trace(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 3, field)
    assert str(caught.value).startswith(f"{path}:3: {field}: ")
    assert len(str(caught.value)) < len(str(path)) + 200


BAD_LINES = [
    (b"[1, 2]", "no JSON object"),
    (b"null", "no JSON object"),
    (b'{"request_id": "a', "no JSON"),
    (b'{"input_length": NaN}', "NaN"),
    (b'{"input_length": Infinity}', "Infinity"),
    (b"\xff\xfe{}", "no JSON"),
    (b"[" * 100_000, "no JSON"),
    (b'{"input_length": ' + b"9" * 10_000 + b"}", "no JSON"),
    (b'{"x": "' + b"y" * MAX_LINE_BYTES + b'"}', "longer than"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    """F76 for files: no line crashes the loader or fills memory."""
    path = write_lines(tmp_path / "t.jsonl", META, kvt_line(), line)
    with pytest.raises(TraceError, match=problem) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (3, "")


def test_a_float_that_overflows_is_refused(tmp_path: Path) -> None:
    text = json.dumps(kvt_line()).replace("1.5", "1e400")
    with pytest.raises(TraceError, match="timestamp_s: Infinity is no time"):
        load_trace(write_lines(tmp_path / "t.jsonl", META, text))


def test_a_request_id_is_used_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r":3: request_id: 'a.0' was used"):
        load_trace(write_lines(tmp_path / "t.jsonl", META, kvt_line(), kvt_line()))


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ({"kvt": 2, "block_size": 24}, "kvt: 2 is not in 1..1"),
        ({"kvt": 1}, "block_size: is missing"),
        ({"kvt": 1, "block_size": 1}, "block_size: 1 is neither"),
        ({"kvt": 1, "block_size": 10**6}, "block_size: 1000000 is not in"),
        ({"messages_trace": 1}, "neither KVT metadata"),
        ({"kvt": 1, "block_size": 24}, "has no requests"),
    ],
)
def test_metadata_is_checked(tmp_path: Path, meta: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        load_trace(write_lines(tmp_path / "t.jsonl", meta))


def test_a_cut_or_damaged_gzip_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(
        b"".join(json.dumps(line).encode() + b"\n" for line in (META, *(kvt_line(request_id=f"a.{k}") for k in range(5000))))
    )
    path = tmp_path / "t.gz"
    for damaged in (whole[: len(whole) // 2], whole[:-6], whole[:200] + b"\x00\xff" * 50 + whole[300:], whole[:12]):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"damaged or cut short|no JSON|is no"):
            load_trace(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="absent: cannot be read: No such file"):
        load_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load_trace(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(TraceError, match="is empty"):
        load_trace(tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hash_ids": [1, 2, 3, 4]}, "hash_ids: more ids"),
        ({"hash_ids": [1, -2]}, "hash_ids: an id"),
        ({"hash_ids": [1, "2"]}, "hash_ids: an id"),
        ({"hash_ids": 7}, "hash_ids: 7 is no list"),
        ({"timestamp": -1}, "timestamp: -1 is no time"),
        ({"output_length": 1.5}, "output_length: 1.5 is no integer"),
    ],
)
def test_mooncake_fields_are_checked(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match=f"m:2: {problem}"):
        load_trace(write_lines(tmp_path / "m", mooncake(0, 1200, [0, 1, 2]), mooncake(0, 1200, [0, 1, 2]) | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"turn": 0}, "turn: 0 is not in"),
        ({"parent_chat_id": -2}, "parent_chat_id: -2 is not in"),
        ({"chat_id": 7}, "chat_id: 'b7' was used"),
        ({"type": 5}, "type: 5 is no string"),
    ],
)
def test_bailian_fields_are_checked(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match=f"b:2: {problem}"):
        load_trace(write_lines(tmp_path / "b", bailian(7, -1, 1, [1, 2]), bailian(8, 7, 2, [1, 2]) | changes))


def test_run_length_coding() -> None:
    ids = [4, 5, 6, 2, 3, 9]
    runs = compress(ids)
    assert runs == ((4, 3), (2, 2), (9, 1))
    assert [list(block_ids(runs, start)) for start in range(8)] == [ids[start:] for start in range(8)]
    assert block_count(runs) == 6
    assert common_blocks(runs, ((4, 2), (6, 1), (2, 1), (8, 4))) == 4
    assert common_blocks(runs, runs) == 6
    assert common_blocks(runs, ()) == 0


@pytest.mark.parametrize(
    ("name", "requests", "sessions", "block_tokens"),
    [
        ("weka_fresh52_4449.kvt.jsonl.gz", 4449, 52, 24),
        ("weka_sharedtools12439.kvt.jsonl.gz", 2440, 36, 24),
        ("lmcache_miniswe.kvt.jsonl.gz", 402, 20, 24),
        ("mooncake_conversation_trace.kvt.jsonl.gz", 12_031, 8132, 512),
    ],
)
def test_real_traces_load(name: str, requests: int, sessions: int, block_tokens: int) -> None:
    trace = load_trace(real_trace(name))
    assert (len(trace.requests), len(trace.sessions()), trace.block_tokens) == (requests, sessions, block_tokens)


def test_mooncake_sessions_are_found_again(tmp_path: Path) -> None:
    """The sessions that were inferred for the KVT copy of a Mooncake trace come out of its original form, up to repeated prompts."""
    trace = load_trace(real_trace("mooncake_conversation_trace.kvt.jsonl.gz"))
    lines = [mooncake(round(one.timestamp_s * 1000), one.input_tokens, list(block_ids(one.blocks))) for one in trace.requests]
    again = load_trace(write_lines(tmp_path / "m.jsonl", *lines))
    same = sum(one.session_id == other.session_id for one, other in zip(trace.requests, again.requests, strict=True))
    assert same > 0.98 * len(trace.requests)
