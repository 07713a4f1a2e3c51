"""What the router counts, and its one log line a dispatch. An Observer of the router: it sees everything and changes nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvc.core import events as ev
from kvc.core.types import Decision, GaveUp, Mode, Reason
from kvc.errors import KvcError
from kvc.runtime.logs import clean_event, event
from kvc.runtime.metrics import LATENCY_BUCKETS_S, CountCollector, LatencyCollector
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
        ends = [(mode, end) for mode in _MODES for end in _ENDS]
        text = "Turns that were started, by mode and how they ended"
        self._turns = CountCollector("kvc_router_turns", text, registry, ("mode", "end"), ends).children
        self._ttft = LatencyCollector("kvc_router_ttft_seconds", "Receipt to first chunk", registry, "mode", _MODES).children
        self._latency = LatencyCollector("kvc_router_latency_seconds", "Receipt to last chunk", registry, "mode", _MODES).children
        self._decide = LatencyCollector("kvc_router_decide_seconds", "Time to a decision", registry).children[""]
        self._queued = LatencyCollector("kvc_router_queued_seconds", "Wait for room of turns that waited", registry).children[""]
        self._mesh = LatencyCollector("kvc_router_mesh_seconds", "Own time before the first chunk", registry).children[""]
        text, reasons = "Answers of workers that refused, by reason", [(reason.value,) for reason in Reason]
        self._refusals = CountCollector("kvc_router_refusals", text, registry, ("reason",), reasons).children
        self._unanswered = Counter("kvc_router_unanswered", "Admit calls without an answer, by gRPC status", ["status"], registry=registry)
        text, reasons = "Requests that ended without a turn, by ErrorInfo.reason, or CANCELLED", [(reason,) for reason in UNDECIDED]
        self._undecided = CountCollector("kvc_router_undecided", text, registry, ("reason",), reasons).children
        text = "Decisions, by what overlap was reckoned from: block hashes of tokens, or the router's own estimate"
        sources = [("blocks",), ("estimate",)]
        self._decisions = CountCollector("kvc_router_decisions", text, registry, ("overlap_source",), sources).children
        hops = [("landed",), ("refused",), ("failed",)]
        text = "Turns whose question travelled with the request, by what came of it"
        self._hops = CountCollector("kvc_router_hops", text, registry, ("outcome",), hops).children
        self._retries = CountCollector("kvc_router_retries", "Engines replaced before the first token", registry).children[()]
        text = "Prompt tokens whose KV was reused, as engines report"
        self._cached = CountCollector("kvc_router_cached_tokens", text, registry).children[()]
        self._prompt = CountCollector("kvc_router_prompt_tokens", "Prompt tokens of completed turns", registry).children[()]

    def decided(self, decision: Decision | GaveUp, decide_s: float, *, estimated: bool = False) -> None:
        """Counts the decision and the answers of workers."""
        self._decisions["estimate" if estimated else "blocks",].inc()
        self._decide.observe(decide_s)
        if decision.queued_s:
            self._queued.observe(decision.queued_s)
        for probe in decision.probes:
            if probe.reason is not None:
                self._refusals[probe.reason,].inc()
            elif probe.error:
                self._unanswered.labels(probe.error).inc()

    def hopped(self, outcome: str) -> None:
        """A question that travelled with its request was answered: landed, refused or failed."""
        self._hops[outcome,].inc()

    def retried(self, request: Named, decision: Decision, error: EngineError) -> None:
        """Counts and logs the failure that the caller never sees."""
        self._turns[decision.mode, ev.End.FAILED].inc()
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
            self._turns[decision.mode, end].inc()
        else:
            self._undecided[reason if reason in UNDECIDED else "OTHER",].inc()
        if result is not None:
            mode, last = result.decision.mode, result.last
            self._ttft[mode].observe(result.ttft_s)
            self._latency[mode].observe(result.latency_s)
            self._mesh.observe(result.mesh_s)
            self._cached.inc(last.cached_tokens)
            self._prompt.inc(last.prompt_tokens)
        level = logging.WARNING if end is ev.End.FAILED else logging.INFO
        if logger.isEnabledFor(level):
            problem = str(error) if isinstance(error, KvcError) else None
            clean_event(logger, "dispatch", level, Line.of(request, decision, end, result, reason, problem))

    def totals(self) -> dict[str, Any]:
        """Counts since the start, for the page: turns by mode and end, refusals and undecided requests by reason, TTFT by mode."""
        return {
            "turns": {mode: {end: self._turns[mode, end].value for end in _ENDS} for mode in _MODES},
            "refusals": {reason: count.value for (reason,), count in self._refusals.items()},
            "undecided": {reason: count.value for (reason,), count in self._undecided.items()},
            "ttft": {"bounds_s": LATENCY_BUCKETS_S, "counts": {mode: child.counts for mode, child in self._ttft.items()}},
            "prompt_tokens": self._prompt.value,
            "cached_tokens": self._cached.value,
        }


class Line(msgspec.Struct, frozen=True, gc=False):
    """The fields of the canonical line: ids as they were checked on arrival, names of ours, and numbers."""

    request_id: str
    session_id: str
    end: str
    reason: str | None
    problem: str | None
    input_tokens: int
    mode: str | msgspec.UnsetType = msgspec.UNSET
    executor: str | msgspec.UnsetType = msgspec.UNSET
    decode: str | msgspec.UnsetType = msgspec.UNSET
    prefill: str | msgspec.UnsetType | None = msgspec.UNSET
    probes: list[str] | msgspec.UnsetType = msgspec.UNSET
    overlap_blocks: int | msgspec.UnsetType = msgspec.UNSET
    queued_s: float | msgspec.UnsetType = msgspec.UNSET
    finish_reason: str | msgspec.UnsetType = msgspec.UNSET
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    completion_tokens: int | msgspec.UnsetType = msgspec.UNSET
    ttft_s: float | msgspec.UnsetType = msgspec.UNSET
    latency_s: float | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, request: Named, decision: Decision | None, end: ev.End, result: Result | None, reason: str, problem: str | None) -> Line:
        """The line of a request; by position, because a request has but one of these and many fields."""
        known = (request.request_id, request.session_id, end, reason or None, problem, request.input_tokens)
        if decision is None:
            return cls(*known)
        prefill = decision.prefill.worker_id if decision.prefill else None
        how = (decision.mode, decision.executor, decision.decode.worker_id, prefill, _probes(decision), decision.overlap_blocks)
        queued_s = round(decision.queued_s, 4)
        if result is None:
            return cls(*known, *how, queued_s)
        last = result.last
        done = (last.finish_reason, last.cached_tokens, last.completion_tokens, round(result.ttft_s, 4), round(result.latency_s, 4))
        return cls(*known, *how, queued_s, *done)


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
    return [f"{p.worker.worker_id}:{'yes' if p.admitted else p.reason or p.error}" for p in decision.probes]
