"""What the router counts, and its one log line a dispatch. An Observer of the router: it sees everything and changes nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvc.core import events as ev
from kvc.core.types import Decision, GaveUp, Mode, Reason
from kvc.errors import KvcError
from kvc.runtime.logs import event
from kvc.runtime.metrics import LATENCY_BUCKETS_S, bound
from services.router.ports import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from services.router.janitor import Janitor
    from services.router.ports import EngineError, Request, Result
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
        ttft = Histogram("kvc_router_ttft_seconds", "Receipt to first chunk", ["mode"], buckets=LATENCY_BUCKETS_S, registry=registry)
        self._ttft = bound(ttft, _MODES)
        latency = Histogram("kvc_router_latency_seconds", "Receipt to last chunk", ["mode"], buckets=LATENCY_BUCKETS_S, registry=registry)
        self._latency = bound(latency, _MODES)
        self._decide = Histogram("kvc_router_decide_seconds", "Time to a decision", buckets=LATENCY_BUCKETS_S, registry=registry)
        self._queued = Histogram(
            "kvc_router_queued_seconds", "Wait for room of turns that waited", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self._mesh = Histogram("kvc_router_mesh_seconds", "Own time before the first chunk", buckets=LATENCY_BUCKETS_S, registry=registry)
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

    def retried(self, request: Request, decision: Decision, error: EngineError) -> None:
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

    def ended(self, request: Request, decision: Decision | None, end: ev.End, result: Result | None, error: BaseException | None) -> None:
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
            event(logger, "dispatch", level=level, **_line(request, end, reason, problem), **_turn(decision), **_numbers(result))

    def _observe(self, result: Result) -> None:
        mode = result.decision.mode.value
        self._ttft[mode].observe(result.ttft_s)
        self._latency[mode].observe(result.latency_s)
        self._mesh.observe(result.mesh_s)
        self._cached.inc(result.last.cached_tokens)
        self._prompt.inc(result.last.prompt_tokens)


def _line(request: Request, end: ev.End, reason: str, problem: str | None) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "session_id": request.session_id,
        "end": end.value,
        "reason": reason or None,
        "problem": problem,
        "input_tokens": request.input_tokens,
    }


def _turn(decision: Decision | None) -> dict[str, Any]:
    if decision is None:
        return {}
    return {
        "mode": decision.mode.value,
        "executor": decision.executor.value,
        "decode": decision.decode.worker_id,
        "prefill": decision.prefill.worker_id if decision.prefill else None,
        "probes": _probes(decision),
        "overlap_blocks": decision.overlap_blocks,
        "queued_s": round(decision.queued_s, 4),
    }


def _numbers(result: Result | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {
        "finish_reason": result.last.finish_reason,
        "cached_tokens": result.last.cached_tokens,
        "completion_tokens": result.last.completion_tokens,
        "ttft_s": round(result.ttft_s, 4),
        "latency_s": round(result.latency_s, 4),
    }


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
