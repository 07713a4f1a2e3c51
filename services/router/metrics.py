"""What the router counts, and its one log line a dispatch. An Observer of the router: it sees everything and changes nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvc.core import events as ev
from kvc.core.types import Decision, GaveUp, Mode, Reason
from kvc.errors import KvcError
from kvc.runtime.logs import event
from kvc.runtime.metrics import LATENCY_BUCKETS_S, bound
from services.router.router import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from services.router.ports import EngineError
    from services.router.router import Request, Result, Router

logger = logging.getLogger(__name__)

_MODES = [mode.value for mode in Mode]
_ENDS = [end.value for end in ev.End]


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
        gave_up = Counter("kvc_router_gave_up", "Dispatches without a decision, by reason", ["why"], registry=registry)
        self._gave_up = bound(gave_up, ["exceeds-capacity", "no-worker", "queue-full", "deadline"])
        self._retries = Counter("kvc_router_retries", "Engines replaced before the first token", registry=registry)
        self._cached = Counter("kvc_router_cached_tokens", "Prompt tokens whose KV was reused, as engines report", registry=registry)
        self._prompt = Counter("kvc_router_prompt_tokens", "Prompt tokens of completed turns", registry=registry)

    def decided(self, request: Request, decision: Decision | GaveUp, decide_s: float) -> None:
        """Counts the answers of workers; logs a dispatch that ends here."""
        self._decide.observe(decide_s)
        if decision.queued_s:
            self._queued.observe(decision.queued_s)
        for probe in decision.probes:
            if probe.reason is not None:
                self._refusals[probe.reason.value].inc()
            elif probe.error:
                self._unanswered.labels(probe.error).inc()
        if isinstance(decision, GaveUp):
            self._gave_up[decision.why.value].inc()
            event(
                logger,
                "dispatch",
                level=logging.WARNING,
                request_id=request.request_id,
                session_id=request.session_id,
                end="gave_up",
                why=decision.why.value,
                probes=_probes(decision),
                queued_s=round(decision.queued_s, 4),
            )

    def ended(self, request: Request, decision: Decision, end: ev.End, result: Result | None, error: BaseException | None) -> None:
        """Counts and logs one line."""
        mode = decision.mode.value
        self._turns[mode][end.value].inc()
        if result is not None:
            self._ttft[mode].observe(result.ttft_s)
            self._latency[mode].observe(result.latency_s)
            self._mesh.observe(result.mesh_s)
            self._cached.inc(result.last.cached_tokens)
            self._prompt.inc(result.last.prompt_tokens)
        if not logger.isEnabledFor(logging.INFO):
            return
        event(
            logger,
            "dispatch",
            request_id=request.request_id,
            session_id=request.session_id,
            end=end.value,
            mode=mode,
            executor=decision.executor.value,
            decode=decision.decode.worker_id,
            prefill=decision.prefill.worker_id if decision.prefill else None,
            probes=_probes(decision),
            overlap_blocks=decision.overlap_blocks,
            input_tokens=request.input_tokens,
            cached_tokens=result.last.cached_tokens if result else None,
            completion_tokens=result.last.completion_tokens if result else None,
            ttft_s=round(result.ttft_s, 4) if result else None,
            latency_s=round(result.latency_s, 4) if result else None,
            queued_s=round(decision.queued_s, 4),
            problem=str(error) if error else None,
            reason=error.reason if isinstance(error, KvcError) else getattr(error, "reason", None),
        )

    def retried(self, request: Request, decision: Decision, error: EngineError) -> None:
        """Counts and logs the failure that the caller never sees."""
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


class SigmaCollector(Collector):
    """Σ as gauges, read when Prometheus asks."""

    def __init__(self, router: Router) -> None:
        """Reads `router`'s Σ."""
        self._router = router

    def collect(self) -> Iterator[GaugeMetricFamily]:
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
        yield GaugeMetricFamily("kvc_router_waiting", "Turns waiting for room", value=len(self._router.room))
        yield GaugeMetricFamily("kvc_router_longest_wait_seconds", "Longest wait for room so far", value=self._router.room.longest_wait_s)
        yield GaugeMetricFamily("kvc_router_chain_bytes", "Bytes of session chains", value=self._router.sigma.forest.held_bytes)


def _probes(decision: Decision | GaveUp) -> list[str]:
    """`worker:answer` for each probe."""
    return [f"{p.worker.worker_id}:{'yes' if p.admitted else p.reason.value if p.reason else p.error}" for p in decision.probes]
