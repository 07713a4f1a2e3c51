"""Small traces for tests, and where the real ones are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvc.evaluation.traces import Trace, TraceRequest

META = {"kvt": 1, "block_size": 24, "source": "test"}


def request(
    session: str, turn: int, input_tokens: int, *runs: tuple[int, int], output: int = 10, at_s: float = 0.0, **fields: Any
) -> TraceRequest:
    """A request called `session.turn`."""
    return TraceRequest(f"{session}.{turn}", session, turn, at_s, input_tokens, output, runs, **fields)


def trace_of(*requests: TraceRequest, block_tokens: int = 24) -> Trace:
    """A trace of these requests."""
    return Trace("test", block_tokens, tuple(sorted(requests, key=lambda one: one.timestamp_s)), "0" * 64)


def kvt_line(**changes: Any) -> dict[str, Any]:
    """A well-formed KVT request with fields replaced; a field set to `...` is left out."""
    line: dict[str, Any] = {
        "request_id": "a.0",
        "session_id": "a",
        "chat_id": 0,
        "parent_chat_id": -1,
        "timestamp_s": 1.5,
        "input_length": 100,
        "output_length": 7,
        "request_type": "user",
        "turn_id": 0,
        "h": [[0, 4]],
    }
    return {key: value for key, value in (line | changes).items() if value is not ...}


def write_lines(path: Path, *lines: Any) -> Path:
    """A JSONL file; strings and bytes are written as they are."""
    raw = [line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def real_trace(name: str) -> Path:
    """A real trace, from $KVC_TRACES or the folder `shared/traces` beside the repository; skips the test when it is not there."""
    folder = Path(os.environ.get("KVC_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
    path = folder / name
    if not path.is_file():
        pytest.skip(f"no {name}: set KVC_TRACES to the folder of real traces")
    return path
