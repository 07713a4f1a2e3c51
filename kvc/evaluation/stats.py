"""Numbers of a replay: exact percentiles, shares by mode, one JSON object.

Percentiles are nearest-rank over all requests of the group, exact, without interpolation. A failed request counts as one that never
answers (+infinity), so that failing fast cannot improve a percentile; infinity is `null` in JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvc.evaluation.records import Record

MODES = ("direct", "seed", "reseed", "fallback")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and tail of a group; NaN when it is empty."""

    p50: float
    p90: float
    p99: float

    def to_json(self) -> dict[str, float | None]:
        """Infinity (a failed request) and NaN (no request) are null."""
        return {name: _number(getattr(self, name)) for name in ("p50", "p90", "p99")}


@dataclass(frozen=True, slots=True)
class PoolUse:
    """KV pool of one decode worker over a run, in tokens."""

    worker: str
    capacity_tokens: int
    peak_tokens: int
    evicted_tokens: int


@dataclass(frozen=True, slots=True)
class ModeSummary:
    """One mode. `requests` were decided so, `share` is those answered, of all requests; tokens are sums over the answered."""

    requests: int
    share: float
    ttft_s: Percentiles
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run. TTFT = modelled engine seconds + measured mesh seconds; latency likewise, to the last token.

    Attributes:
        requests: all of them, failed ones included.
        failed: got no complete reply.
        wrong: got a reply that differs from what the prompt calls for.
        by_mode: the four modes.
        ttft_s: time to first token.
        latency_s: time to last token.
        mesh_s: the measured part of ttft_s: never scaled.
        queued_s: time waited for capacity in the router.
        probes: Admit questions asked.
        prompt_tokens: of answered requests.
        cached_tokens: prompt tokens whose KV was reused.
        output_tokens: received.
        pools: decode workers, when the mesh reports them.
        wall_s: length of the run on the wall clock.
    """

    requests: int
    failed: int
    wrong: int
    by_mode: dict[str, ModeSummary]
    ttft_s: Percentiles
    latency_s: Percentiles
    mesh_s: Percentiles
    queued_s: Percentiles
    probes: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    pools: tuple[PoolUse, ...]
    wall_s: float

    @property
    def direct_share(self) -> float:
        """Direct turns of all requests."""
        return self.by_mode["direct"].share

    @property
    def evicted_tokens(self) -> int:
        """Tokens evicted on all decode workers."""
        return sum(pool.evicted_tokens for pool in self.pools)

    @property
    def peak_kv_share(self) -> float:
        """Highest use of any decode worker's pool, of its capacity; 0 when unknown."""
        return max((pool.peak_tokens / pool.capacity_tokens for pool in self.pools if pool.capacity_tokens), default=0.0)

    def to_json(self, baseline: Summary | None = None) -> dict[str, Any]:
        """The object that `--json` prints; `baseline` becomes an object of the same shape inside it."""
        numbers = {
            "requests": self.requests,
            "failed": self.failed,
            "wrong": self.wrong,
            "modes": {mode: self.by_mode[mode].requests for mode in MODES},
            "direct_share": round(self.direct_share, 4),
            "ttft_s": self.ttft_s.to_json(),
            "latency_s": self.latency_s.to_json(),
            "mesh_s": self.mesh_s.to_json(),
            "queued_s": self.queued_s.to_json(),
            "by_mode": {mode: _mode_json(self.by_mode[mode]) for mode in MODES},
            "probes": self.probes,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_share": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else 0.0,
            "output_tokens": self.output_tokens,
            "capacity_tokens": max((pool.capacity_tokens for pool in self.pools), default=0),
            "peak_kv_tokens": max((pool.peak_tokens for pool in self.pools), default=0),
            "peak_kv_share": round(self.peak_kv_share, 4),
            "evicted_tokens": self.evicted_tokens,
            "wall_s": round(self.wall_s, 3),
        }
        return numbers if baseline is None else numbers | {"baseline": baseline.to_json()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank of sorted values: the least value that at least `percent` % of them do not exceed; NaN of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def percentiles(values: Iterable[float]) -> Percentiles:
    """p50, p90 and p99 of values in any order."""
    ordered = sorted(values)
    return Percentiles(*(percentile(ordered, percent) for percent in (50, 90, 99)))


def summarise(records: Sequence[Record], *, wall_s: float, pools: Sequence[PoolUse] = ()) -> Summary:
    """The summary of a run's records."""
    answered = [record for record in records if record.ok]
    return Summary(
        requests=len(records),
        failed=len(records) - len(answered),
        wrong=sum(record.wrong for record in records),
        by_mode={mode: _mode([record for record in records if record.mode == mode], len(records)) for mode in MODES},
        ttft_s=_over(records, lambda record: record.ttft_s),
        latency_s=_over(records, lambda record: record.latency_s),
        mesh_s=_over(records, lambda record: record.mesh_s),
        queued_s=_over(records, lambda record: record.queued_s),
        probes=sum(record.probes for record in records),
        prompt_tokens=sum(record.input_tokens for record in answered),
        cached_tokens=sum(record.cached_tokens for record in answered),
        output_tokens=sum(record.received_tokens for record in answered),
        pools=tuple(pools),
        wall_s=wall_s,
    )


def _over(records: Sequence[Record], value: Callable[[Record], float]) -> Percentiles:
    return percentiles(value(record) if record.ok else math.inf for record in records)


def _mode(records: Sequence[Record], total: int) -> ModeSummary:
    answered = [record for record in records if record.ok]
    return ModeSummary(
        requests=len(records),
        share=len(answered) / total if total else 0.0,
        ttft_s=_over(records, lambda record: record.ttft_s),
        prompt_tokens=sum(record.input_tokens for record in answered),
        cached_tokens=sum(record.cached_tokens for record in answered),
    )


def _mode_json(mode: ModeSummary) -> dict[str, Any]:
    return {
        "requests": mode.requests,
        "share": round(mode.share, 4),
        "ttft_s": mode.ttft_s.to_json(),
        "prompt_tokens": mode.prompt_tokens,
        "cached_tokens": mode.cached_tokens,
    }


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
