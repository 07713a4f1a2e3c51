"""Prometheus metrics of one engine: events are counted as they happen, states are read when scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvc.runtime.metrics import LATENCY_BUCKETS_S, bound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric

    from kvc.engine.reference.engine import Engine
    from kvc.engine.reference.request import Request


class EngineMetrics:
    """Counts requests and tokens of one engine."""

    def __init__(self, registry: CollectorRegistry, engine: Engine) -> None:
        """Registers everything."""
        requests = Counter("kvc_engine_requests_total", "requests ended, by outcome", ["outcome"], registry=registry)
        self._outcomes = bound(requests, ("completed", "aborted", "failed"))
        tokens = Counter("kvc_engine_tokens_total", "tokens of requests ended, by kind", ["kind"], registry=registry)
        self._tokens = bound(tokens, ("prompt", "cached", "prefilled", "output"))
        buckets = LATENCY_BUCKETS_S
        self._ttft = Histogram("kvc_engine_ttft_seconds", "modelled time to first token", registry=registry, buckets=buckets)
        self._latency = Histogram("kvc_engine_latency_seconds", "modelled time to last token", registry=registry, buckets=buckets)
        registry.register(_States(engine))

    def ended(self, request: Request) -> None:
        """Counts a request that ended. Mutates."""
        outcome = "failed" if request.error is not None else "aborted" if request.aborted else "completed"
        self._outcomes[outcome].inc()
        self._tokens["prompt"].inc(request.input_tokens)
        self._tokens["cached"].inc(request.cached_tokens)
        self._tokens["prefilled"].inc(request.prefill_tokens)
        self._tokens["output"].inc(len(request.output))
        if outcome == "completed":
            self._ttft.observe(request.times.ttft_s)
            self._latency.observe(max(request.times.latency_s, request.times.ttft_s))


class _States(Collector):
    """Reads the engine when scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Today's values."""
        engine, pool, scheduler, page = self._engine, self._engine.pool, self._engine.scheduler, self._engine.config.page_tokens
        kv = GaugeMetricFamily("kvc_engine_kv_tokens", "KV pool by use; growth and reserved are promises", labels=["use"])
        uses = {
            "free": pool.free_pages,
            "evictable": engine.tree.evictable_pages,
            "protected": pool.protected_pages,
            "growth": pool.growth_pages,
            "reserved": pool.reserved_pages,
        }
        for use, pages in uses.items():
            kv.add_metric([use], pages * page)
        yield kv
        yield GaugeMetricFamily("kvc_engine_kv_capacity_tokens", "KV pool", value=pool.capacity_pages * page)
        yield GaugeMetricFamily("kvc_engine_kv_peak_tokens", "most KV held and reserved so far", value=pool.peak_used_pages * page)
        requests = GaugeMetricFamily("kvc_engine_active_requests", "requests in flight by state", labels=["state"])
        states = {
            "waiting": len(scheduler.waiting),
            "pulling": len(scheduler.pulling),
            "prefilling": len(scheduler.prefilling),
            "running": len(scheduler.running),
            "sending": len(scheduler.sending),
        }
        for state, count in states.items():
            requests.add_metric([state], count)
        yield requests
        yield GaugeMetricFamily("kvc_engine_tickets", "open tickets", value=len(engine.desk.tickets))
        yield GaugeMetricFamily("kvc_engine_sessions", "session records", value=len(engine.sessions))
        hops = CounterMetricFamily("kvc_engine_hops", "requests that asked for their own admission, by outcome", labels=["outcome"])
        for outcome, count in engine.desk.hops.items():
            hops.add_metric([outcome], count)
        yield hops
        yield CounterMetricFamily("kvc_engine_evicted_tokens", "KV evicted", value=pool.evicted_pages * page)
