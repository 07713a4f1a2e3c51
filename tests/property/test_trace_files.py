"""The loader takes any bytes: a trace comes out, or a TraceError that says where."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvc.evaluation.trace_files import load_trace, save_trace
from kvc.evaluation.trace_rows import TraceError
from kvc.evaluation.traces import Trace, TraceRequest, block_count, block_ids, common_blocks, compress
from tests.support.traces import META, kvt_line

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
MOONCAKE = {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}
BAILIAN = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 0.5,
    "input_length": 31,
    "output_length": 3,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2],
}


def load(data: bytes) -> Trace | None:
    """The trace in these bytes, None when they are refused as they should be."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        path.write_bytes(data)
        refusal: TraceError | None = None
        try:
            return load_trace(path)
        except TraceError as error:
            refusal = error
        assert str(refusal).startswith(str(path))
        assert refusal.problem
        return None


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    load(data)
    load(b"\x1f\x8b" + data)


@given(st.sampled_from([META, MOONCAKE, BAILIAN]), st.lists(json_values, max_size=4))
def test_any_json_lines(first: dict[str, Any], lines: list[Any]) -> None:
    load("\n".join(json.dumps(line) for line in (first, *lines)).encode())


@given(st.sampled_from(["kvt", "mooncake", "bailian"]), st.data(), json_values)
def test_any_value_in_any_field(kind: str, data: st.DataObject, value: Any) -> None:
    """F76 for files, one field at a time: what is accepted is a trace within its own bounds."""
    head, line = {"kvt": ([META], kvt_line()), "mooncake": ([], MOONCAKE), "bailian": ([], BAILIAN)}[kind]
    field = data.draw(st.sampled_from(sorted(line)))
    trace = load("\n".join(json.dumps(one) for one in (*head, line | {field: value})).encode())
    if trace is not None:
        (one,) = trace.requests
        assert 0 < one.input_tokens <= 2**24
        assert 0 <= one.output_tokens <= 2**24
        assert 0 <= one.timestamp_s <= 1e10
        assert block_count(one.blocks) <= -(-one.input_tokens // trace.block_tokens)


@given(st.integers(0, 400), st.integers(0, 255))
def test_one_changed_byte_of_a_gzip(at: int, byte: int) -> None:
    data = bytearray(
        gzip.compress("\n".join(json.dumps(one) for one in (META, *(kvt_line(request_id=f"a.{k}") for k in range(30)))).encode(), mtime=0)
    )
    data[at % len(data)] = byte
    load(bytes(data))


names = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=8)
seconds = st.floats(0, 1e6)


@st.composite
def requests(draw: st.DrawFn) -> TraceRequest:
    blocks = draw(st.lists(st.integers(0, 2**64 - 1), max_size=6))
    return TraceRequest(
        request_id=draw(names),
        session_id=draw(names),
        turn_index=draw(st.integers(0, 1000)),
        timestamp_s=draw(seconds),
        input_tokens=max(1, 24 * len(blocks) + draw(st.integers(0, 50))),
        output_tokens=draw(st.integers(0, 10_000)),
        blocks=compress(blocks),
        think_s=draw(st.none() | seconds),
        api_s=draw(st.none() | seconds),
        request_type=draw(st.just("") | names),
    )


@given(st.lists(requests(), min_size=1, max_size=6, unique_by=lambda one: one.request_id), st.sampled_from(["t", "t.gz"]))
def test_what_is_saved_reads_back(drawn: list[TraceRequest], name: str) -> None:
    drawn.sort(key=lambda one: one.timestamp_s)
    with TemporaryDirectory() as folder:
        save_trace(Trace("x", 24, tuple(drawn), "", {"source": "x"}), Path(folder) / name)
        trace = load_trace(Path(folder) / name)
    assert trace.requests == tuple(drawn)
    assert trace.meta == {"source": "x"}


@given(st.lists(st.integers(0, 20), max_size=30), st.lists(st.integers(0, 20), max_size=30), st.integers(0, 40))
def test_run_length_coding_is_the_list_it_codes(one: list[int], other: list[int], start: int) -> None:
    runs = compress(one)
    assert list(block_ids(runs, start)) == one[start:]
    assert block_count(runs) == len(one)
    expected = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_blocks(runs, compress(other)) == expected
