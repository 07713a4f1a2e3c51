"""What is kept of every replayed request, and the files of a run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

    from kvc.evaluation.stats import Summary
    from kvc.evaluation.traces import Trace
    from kvc.evaluation.workload import ReplayOptions, Workload


@dataclass(frozen=True, slots=True)
class Record:
    """One replayed request. Engine seconds are modelled, mesh and wall seconds measured.

    Attributes:
        request_id: as in the trace.
        session_id: as in the trace.
        turn: place among the session's replayed turns, from 0.
        request_type: as in the trace.
        input_tokens: prompt.
        append_tokens: prompt tokens that neither the previous prompt nor its reply contained.
        asked_tokens: reply length asked for.
        received_tokens: reply length received.
        ok: a complete reply came.
        wrong: it is not what the prompt calls for.
        error: why not ok.
        finish_reason: as the engine gave it.
        mode: how the turn ran; empty when no decision was had.
        worker: decode worker.
        executor: who prefilled.
        cached_tokens: prompt tokens whose KV was reused.
        engine_ttft_s: modelled.
        mesh_s: measured, unscaled.
        queued_s: waited for capacity, measured.
        ttft_s: engine_ttft_s + mesh_s + queued_s x time scale.
        engine_latency_s: modelled.
        latency_s: engine_latency_s + mesh_s + queued_s x time scale.
        probes: Admit questions asked.
        think_s: client pause before the request, in trace seconds.
        started_s: wall seconds from the start of the run.
        wall_s: wall seconds from request to end.
    """

    request_id: str
    session_id: str
    turn: int
    request_type: str
    input_tokens: int
    append_tokens: int
    asked_tokens: int
    received_tokens: int
    ok: bool
    wrong: bool
    error: str
    finish_reason: str
    mode: str
    worker: str
    executor: str
    cached_tokens: int
    engine_ttft_s: float
    mesh_s: float
    queued_s: float
    ttft_s: float
    engine_latency_s: float
    latency_s: float
    probes: int
    think_s: float
    started_s: float
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        """Times rounded to microseconds; what is not finite is null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


class RunFiles:
    """`meta.json` at the start of a run, `requests.jsonl` while it goes, `summary.json` at its end; in one folder."""

    def __init__(self, folder: Path | str, trace: Trace, options: ReplayOptions, **about: Any) -> None:
        """Creates the folder and writes `meta.json`.

        Args:
            folder: made when absent; files of an earlier run in it are replaced.
            trace: named with its sha256.
            options: how it is replayed.
            **about: further JSON values for `meta.json`: policy, topology, command ...

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "summary.json").unlink(missing_ok=True)
        meta = {
            "trace": trace.source,
            "trace_sha256": trace.sha256,
            "trace_requests": len(trace.requests),
            "trace_meta": dict(trace.meta),
            "options": asdict(options),
            **about,
        }
        self._write("meta.json", meta)
        self._lines: IO[str] = (self._folder / "requests.jsonl").open("w", encoding="utf-8")

    def record(self, record: Record) -> None:
        """Appends one request."""
        self._lines.write(json.dumps(record.to_json(), allow_nan=False, separators=(",", ":")) + "\n")

    def finish(self, summary: Summary, workload: Workload) -> None:
        """Writes `summary.json`: the summary and what the workload left out."""
        left_out = {"too_long": workload.too_long, "beyond_limit": workload.beyond_limit, "shortened": workload.shortened}
        self._write("summary.json", summary.to_json() | {"sessions": len(workload.sessions), "left_out": left_out})

    def close(self) -> None:
        """Closes `requests.jsonl`; calling it again is fine."""
        self._lines.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the files, whatever happened."""
        self.close()

    def _write(self, name: str, value: dict[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
