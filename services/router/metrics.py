"""What the router counts, and its one log line a dispatch. An Observer of the router: it sees everything and changes nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvc.core import events as ev
from kvc.core.types import Decision, GaveUp, Mode, Reason
from kvc.errors import KvcError
from kvc.runtime.logs import clean_event, event
from kvc.runtime.metrics import LATENCY_BUCKETS_S, LatencyCollector, bound
from services.router.ports import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from services.router.janitor import Janitor
    from services.router.ports import EngineError, Named, Result
    from services.router.router import Router

logger = logging.getLogger(__name__)

_MODES = [mode.value for mode in Mode]
_ENDS = [end.value for end in ev.End]
UNDECIDED = [
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "EXCEEDS_CAPACITY",
    "NO_WORKER",
    "OTHER",
    "QUEUE_FULL",
    "REQUEST_IN_FLIGHT",
    "SESSION_BUSY",
    "TOO_MANY_TURNS",
]


class RouterMetrics(Observer):
    """Prometheus metrics and the canonical log line."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers everything; series exist from the start."""
        turns = Counter("kvc_router_turns", "Turns that were started, by mode and how they ended", ["mode", "end"], registry=registry)
        self._turns = {mode: bound(turns, _ENDS, mode) for mode in _MODES}
        self._ttft = LatencyCollector("kvc_router_ttft_seconds", "Receipt to first chunk", registry, "mode", _MODES).children
        self._latency = LatencyCollector("kvc_router_latency_seconds", "Receipt to last chunk", registry, "mode", _MODES).children
        self._decide = LatencyCollector("kvc_router_decide_seconds", "Time to a decision", registry).children[""]
        self._queued = LatencyCollector("kvc_router_queued_seconds", "Wait for room of turns that waited", registry).children[""]
        self._mesh = LatencyCollector("kvc_router_mesh_seconds", "Own time before the first chunk", registry).children[""]
        refusals = Counter("kvc_router_refusals", "Answers of workers that refused, by reason", ["reason"], registry=registry)
        self._refusals = bound(refusals, [reason.value for reason in Reason])
        self._unanswered = Counter("kvc_router_unanswered", "Admit calls without an answer, by gRPC status", ["status"], registry=registry)
        undecided = Counter(
            "kvc_router_undecided", "Requests that ended without a turn, by ErrorInfo.reason, or CANCELLED", ["reason"], registry=registry
        )
        self._undecided = bound(undecided, UNDECIDED)
        self._retries = Counter("kvc_router_retries", "Engines replaced before the first token", registry=registry)
        self._cached = Counter("kvc_router_cached_tokens", "Prompt tokens whose KV was reused, as engines report", registry=registry)
        self._prompt = Counter("kvc_router_prompt_tokens", "Prompt tokens of completed turns", registry=registry)

    def decided(self, decision: Decision | GaveUp, decide_s: float) -> None:
        """Counts the answers of workers."""
        self._decide.observe(decide_s)
        if decision.queued_s:
            self._queued.observe(decision.queued_s)
        for probe in decision.probes:
            if probe.reason is not None:
                self._refusals[probe.reason.value].inc()
            elif probe.error:
                self._unanswered.labels(probe.error).inc()

    def retried(self, request: Named, decision: Decision, error: EngineError) -> None:
        """Counts and logs the failure that the caller never sees."""
        self._turns[decision.mode.value][ev.End.FAILED.value].inc()
        self._retries.inc()
        event(
            logger,
            "engine_replaced",
            level=logging.WARNING,
            request_id=request.request_id,
            decode=decision.decode.worker_id,
            prefill=decision.prefill.worker_id if decision.prefill else None,
            reason=error.reason,
            problem=error.message,
        )

    def ended(self, request: Named, decision: Decision | None, end: ev.End, result: Result | None, error: BaseException | None) -> None:
        """Counts, and writes the request's one line."""
        reason = error.reason if isinstance(error, KvcError) else "CANCELLED" if end is ev.End.CANCELLED else "INTERNAL" if error else ""
        if decision is not None:
            self._turns[decision.mode.value][end.value].inc()
        else:
            self._undecided[reason if reason in self._undecided else "OTHER"].inc()
        if result is not None:
            self._observe(result)
        level = logging.WARNING if end is ev.End.FAILED else logging.INFO
        if logger.isEnabledFor(level):
            problem = str(error) if isinstance(error, KvcError) else None
            clean_event(logger, "dispatch", level, _line(request, decision, end, result, reason, problem))

    def totals(self) -> dict[str, Any]:
        """Counts since the start, for the page: turns by mode and end, refusals and undecided requests by reason, TTFT by mode."""
        return {
            "turns": {mode: _values(ends) for mode, ends in self._turns.items()},
            "refusals": _values(self._refusals),
            "undecided": _values(self._undecided),
            "ttft": {"bounds_s": LATENCY_BUCKETS_S, "counts": {mode: child.counts for mode, child in self._ttft.items()}},
            "prompt_tokens": _value(self._prompt),
            "cached_tokens": _value(self._cached),
        }

    def _observe(self, result: Result) -> None:
        mode = result.decision.mode.value
        self._ttft[mode].observe(result.ttft_s)
        self._latency[mode].observe(result.latency_s)
        self._mesh.observe(result.mesh_s)
        self._cached.inc(result.last.cached_tokens)
        self._prompt.inc(result.last.prompt_tokens)


def _value(counter: Counter) -> int:
    return int(counter._value.get())  # noqa: SLF001 - the library offers no reader


def _values(counters: dict[str, Counter]) -> dict[str, int]:
    return {name: _value(counter) for name, counter in counters.items()}


def _line(
    request: Named, decision: Decision | None, end: ev.End, result: Result | None, reason: str, problem: str | None
) -> dict[str, Any]:
    """The fields of the canonical line: ids as they were checked on arrival, names of ours, and numbers."""
    line: dict[str, Any] = {
        "request_id": request.request_id,
        "session_id": request.session_id,
        "end": end.value,
        "reason": reason or None,
        "problem": problem,
        "input_tokens": request.input_tokens,
    }
    if decision is not None:
        line["mode"] = decision.mode.value
        line["executor"] = decision.executor.value
        line["decode"] = decision.decode.worker_id
        line["prefill"] = decision.prefill.worker_id if decision.prefill else None
        line["probes"] = _probes(decision)
        line["overlap_blocks"] = decision.overlap_blocks
        line["queued_s"] = round(decision.queued_s, 4)
    if result is not None:
        last = result.last
        line["finish_reason"] = last.finish_reason
        line["cached_tokens"] = last.cached_tokens
        line["completion_tokens"] = last.completion_tokens
        line["ttft_s"] = round(result.ttft_s, 4)
        line["latency_s"] = round(result.latency_s, 4)
    return line


class SigmaCollector(Collector):
    """Σ as gauges, read when Prometheus asks."""

    def __init__(self, router: Router, janitor: Janitor) -> None:
        """Reads `router`'s Σ."""
        self._router = router
        self._janitor = janitor

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Gauges by worker, and totals."""
        rows = {
            "inflight": "inflight[d]",
            "resident_blocks": "Blocks in resident[d]",
            "placed_tokens": "Tokens of open sessions placed on the worker",
            "eligible": "1 when the worker may be routed to",
            "residency_fresh": "1 when residency comes from the worker's own events and is current",
        }
        families = {name: GaugeMetricFamily(f"kvc_router_{name}", text, labels=["worker", "role"]) for name, text in rows.items()}
        for worker in list(self._router.sigma.workers.values()):
            labels = [worker.ref.worker_id, worker.info.role.value]
            families["inflight"].add_metric(labels, worker.inflight)
            families["resident_blocks"].add_metric(labels, len(worker.resident))
            families["placed_tokens"].add_metric(labels, worker.placed_tokens)
            families["eligible"].add_metric(labels, 0 if worker.why_not else 1)
            families["residency_fresh"].add_metric(labels, 1 if worker.fresh else 0)
        yield from families.values()
        yield GaugeMetricFamily("kvc_router_sessions", "Sessions in sigma", value=len(self._router.sigma.sessions))
        yield GaugeMetricFamily("kvc_router_requests", "Requests in flight, waiting ones included", value=len(self._router.claims))
        yield GaugeMetricFamily("kvc_router_releases", "Tickets to give back, late answers included", value=self._janitor.pending)
        yield CounterMetricFamily("kvc_router_releases_dropped", "Tickets left to expire: too many", value=self._janitor.dropped)
        yield GaugeMetricFamily("kvc_router_waiting", "Turns waiting for room", value=len(self._router.room))
        yield GaugeMetricFamily("kvc_router_longest_wait_seconds", "Longest wait for room so far", value=self._router.room.longest_wait_s)
        yield GaugeMetricFamily("kvc_router_chain_bytes", "Bytes of session chains", value=self._router.sigma.forest.held_bytes)


def _probes(decision: Decision | GaveUp) -> list[str]:
    """`worker:answer` for each probe."""
    return [f"{p.worker.worker_id}:{'yes' if p.admitted else p.reason.value if p.reason else p.error}" for p in decision.probes]
