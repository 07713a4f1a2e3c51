"""Trace files: KVT (plain or gzip), Mooncake and Bailian in; KVT out.

* KVT: line 1 describes the trace (`kvt`, `block_size`, `source` ...), every other line is a request with `h`, run-length coded ids.
* Mooncake: every line is a request `{timestamp (ms), input_length, output_length, hash_ids}` with ceil(input / 512) ids and no session:
  a request continues the latest one whose full blocks it begins with, when those are at least two.
* Bailian: every line is `{chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn (from 1), hash_ids}` with
  ceil(input / 16) ids; a session is a chat and all that descends from it.

Siblings (two requests that continue the same one) stay in one session, in the order of their timestamps.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc.evaluation.trace_rows import MAX_TOKENS, TraceError, read_rows
from kvc.evaluation.traces import Trace, TraceRequest, block_count, compress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvc.evaluation.trace_rows import Row
    from kvc.evaluation.traces import Runs

KVT_VERSION = 1
MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 2**16
_MAX_ID = 2**64 - 1
_MAX_TURN = 2**31 - 1
_MIN_LINK_BLOCKS = 2  # one shared block is a system prompt, not a conversation


def load_trace(path: Path | str) -> Trace:
    """Reads a trace in any of the three formats; the first line tells which.

    Raises:
        TraceError: names file, line and field of what is wrong.
    """
    path = Path(path)
    digest = hashlib.sha256()
    rows = read_rows(path, digest)
    first = next(rows, None)
    if first is None:
        raise TraceError(path, 0, "", "is empty")
    if "kvt" in first.values:
        reader: _Kvt | _Mooncake | _Bailian = _Kvt(first)
    elif "hash_ids" in first.values:
        reader = _Bailian() if "chat_id" in first.values else _Mooncake()
    else:
        raise TraceError(path, first.line, "", "is neither KVT metadata (kvt) nor a Mooncake or Bailian request (hash_ids)")
    requests: list[TraceRequest] = [] if isinstance(reader, _Kvt) else [reader.request(first)]
    requests += (reader.request(row) for row in rows)
    if not requests:
        raise TraceError(path, 0, "", "has no requests")
    requests.sort(key=lambda request: request.timestamp_s)
    return Trace(path.name, reader.block_tokens, tuple(requests), digest.hexdigest(), reader.meta)


def save_trace(trace: Trace, path: Path | str) -> None:
    """Writes KVT, gzip when the name ends in .gz. The same trace gives the same bytes.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    text = "".join(f"{line}\n" for line in kvt_lines(trace.block_tokens, trace.meta, trace.requests)).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def kvt_lines(block_tokens: int, meta: Any, requests: Sequence[TraceRequest]) -> Iterator[str]:
    """The lines of a KVT file without line ends."""
    yield _json({**meta, "kvt": KVT_VERSION, "block_size": block_tokens})
    last: dict[str, int] = {}
    for chat_id, request in enumerate(requests):
        line: dict[str, Any] = {
            "request_id": request.request_id,
            "session_id": request.session_id,
            "chat_id": chat_id,
            "parent_chat_id": last.get(request.session_id, -1),
            "timestamp_s": request.timestamp_s,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "turn_id": request.turn_index,
            "h": request.blocks,
        }
        line |= {"request_type": request.request_type} if request.request_type else {}
        line |= {"think_s": request.think_s} if request.think_s is not None else {}
        line |= {"api_s": request.api_s} if request.api_s is not None else {}
        last[request.session_id] = chat_id
        yield _json(line)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class _Kvt:
    """KVT requests; the metadata line is read on construction."""

    def __init__(self, row: Row) -> None:
        row.integer("kvt", KVT_VERSION, KVT_VERSION)
        self.block_tokens = row.integer("block_size", 0, MAX_BLOCK_TOKENS)
        if self.block_tokens == 1:
            row.fail("block_size", "1 is neither 0 (no ids) nor at least 2")
        self.meta = {key: value for key, value in row.values.items() if key not in ("kvt", "block_size")}
        self._seen: set[str] = set()

    def request(self, row: Row) -> TraceRequest:
        input_tokens = row.integer("input_length", 1, MAX_TOKENS)
        request_id = row.text("request_id")
        _unique(row, "request_id", request_id, self._seen)
        return TraceRequest(
            request_id=request_id,
            session_id=row.text("session_id"),
            turn_index=row.integer("turn_id", 0, _MAX_TURN),
            timestamp_s=row.seconds("timestamp_s"),
            input_tokens=input_tokens,
            output_tokens=row.integer("output_length", 0, MAX_TOKENS),
            blocks=self._runs(row, input_tokens),
            think_s=row.optional_seconds("think_s"),
            api_s=row.optional_seconds("api_s"),
            request_type=row.text("request_type") if row.has("request_type") else "",
        )

    def _runs(self, row: Row, input_tokens: int) -> Runs:
        if not self.block_tokens:
            return ()
        runs = tuple(_run(row, item) for item in row.items("h"))
        _fits(row, "h", block_count(runs), input_tokens, self.block_tokens)
        return runs


@dataclass(slots=True)
class _Mooncake:
    """Mooncake requests; sessions are inferred."""

    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    meta: dict[str, Any] = field(default_factory=lambda: {"source": "mooncake"})
    _by_last_block: dict[int, TraceRequest] = field(default_factory=dict)
    _count: int = 0

    def request(self, row: Row) -> TraceRequest:
        input_tokens = row.integer("input_length", 1, MAX_TOKENS)
        ids = _ids(row, input_tokens, self.block_tokens)
        full = ids[: input_tokens // self.block_tokens]
        parent = self._parent(full)
        request = TraceRequest(
            request_id=f"m{self._count}",
            session_id=parent.session_id if parent else f"s{self._count}",
            turn_index=parent.turn_index + 1 if parent else 0,
            timestamp_s=row.seconds("timestamp", scale=1000.0),
            input_tokens=input_tokens,
            output_tokens=row.integer("output_length", 0, MAX_TOKENS),
            blocks=compress(ids),
            request_type="chat",
        )
        self._count += 1
        if len(full) >= _MIN_LINK_BLOCKS:
            self._by_last_block[full[-1]] = request
        return request

    def _parent(self, full: list[int]) -> TraceRequest | None:
        for length in range(len(full), _MIN_LINK_BLOCKS - 1, -1):
            found = self._by_last_block.get(full[length - 1])
            if found is not None:
                return found
        return None


@dataclass(slots=True)
class _Bailian:
    """Bailian requests; sessions follow parent_chat_id. A parent outside the file begins a session."""

    block_tokens: int = BAILIAN_BLOCK_TOKENS
    meta: dict[str, Any] = field(default_factory=lambda: {"source": "bailian"})
    _root: dict[int, str] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def request(self, row: Row) -> TraceRequest:
        chat = row.integer("chat_id", 0, _MAX_ID)
        parent = row.integer("parent_chat_id", -1, _MAX_ID)
        input_tokens = row.integer("input_length", 1, MAX_TOKENS)
        _unique(row, "chat_id", f"b{chat}", self._seen)
        self._root[chat] = self._root.get(parent, f"b{chat}")
        return TraceRequest(
            request_id=f"b{chat}",
            session_id=self._root[chat],
            turn_index=row.integer("turn", 1, _MAX_TURN) - 1,
            timestamp_s=row.seconds("timestamp"),
            input_tokens=input_tokens,
            output_tokens=row.integer("output_length", 0, MAX_TOKENS),
            blocks=compress(_ids(row, input_tokens, self.block_tokens)),
            request_type=row.text("type") if row.has("type") else "",
        )


def _unique(row: Row, field_name: str, value: str, seen: set[str]) -> None:
    if value in seen:
        row.fail(field_name, f"{value[:40]!r} was used on an earlier line")
    seen.add(value)


def _run(row: Row, item: Any) -> tuple[int, int]:
    if not (isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item)):  # noqa: PLR2004 - a pair
        row.fail("h", "an entry is no pair [first id, count]")
    first, count = item
    if first < 0 or count < 1 or first + count - 1 > _MAX_ID:
        row.fail("h", "an entry is outside first >= 0, count >= 1, ids below 2^64")
    return first, count


def _ids(row: Row, input_tokens: int, block_tokens: int) -> list[int]:
    ids = row.items("hash_ids")
    if not all(type(number) is int and 0 <= number <= _MAX_ID for number in ids):
        row.fail("hash_ids", "an id is no integer in 0..2^64-1")
    _fits(row, "hash_ids", len(ids), input_tokens, block_tokens)
    return ids


def _fits(row: Row, field_name: str, ids: int, input_tokens: int, block_tokens: int) -> None:
    most = -(-input_tokens // block_tokens)
    if ids > most:
        row.fail(field_name, f"more ids ({min(ids, 10**12)}) than the {most} blocks of input_length {input_tokens}")
