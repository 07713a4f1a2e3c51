"""Prometheus metrics of the agent: what is counted as it happens, and what is read when it is scraped."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvc.core.types import Mode, Reason
from kvc.runtime.metrics import Count, CountCollector, LatencyCollector

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from kvc.engine.link import EventBody, ReplyBody, RequestBody, Welcome
    from kvc.errors import KvcError
    from kvc.runtime.asking import Pending
    from kvc.v1 import types_pb2
    from services.admission_agent.agent import AdmissionAgent
    from services.admission_agent.connection import EngineConnection
    from services.admission_agent.ports import EngineConnector, EngineLink
    from services.admission_agent.residency import Residency

# Admit takes about a millisecond: finer than the mesh's common buckets at that end.
BUCKETS_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.5, 5.0)
CALLS = ("Admit", "Release", "Load", "ListSessions", "Drain")
# Gauge -> (WorkerLoad.facts field, help).
FACTS = {
    "capacity_tokens": "KV pool (K)",
    "held_tokens": "KV that cannot be evicted now",
    "reserved_tokens": "KV promised to open tickets beyond what they lock",
    "evictable_tokens": "cached KV that may be evicted",
    "queued_tokens": "tokens wanted by requests queued without memory",
    "running": "requests decoding",
    "pending_transfers": "KV transfers admitted and not finished",
    "prefill_backlog_s": "prefill work queued",
}
LOADS = {
    "sessions": "sessions the engine has KV of",
    "open_tickets": "tickets not used, released or expired",
    "peak_use": "highest share of the pool in use so far, 0 to 1",
}


class AdmitMetrics:
    """Counters and histograms of what is asked and answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers them."""
        rows = [("admitted", mode.value) for mode in Mode if mode is not Mode.FALLBACK] + [("refused", reason.value) for reason in Reason]
        text = "Admit answers, by outcome and by mode or reason"
        self._admits = CountCollector("kvc_agent_admits", text, registry, ("outcome", "reason"), rows).children
        self.admitted = {mode: count for (outcome, mode), count in self._admits.items() if outcome == "admitted"}
        self.refused = {reason: count for (outcome, reason), count in self._admits.items() if outcome == "refused"}
        text = "From receipt of an Admit to its answer"
        self.seconds = LatencyCollector("kvc_agent_admit_seconds", text, registry, buckets_s=BUCKETS_S).children[""]
        text = "Round trip to the engine, by call"
        self.calls = LatencyCollector("kvc_agent_link_call_seconds", text, registry, "call", CALLS, BUCKETS_S).children

    def failed(self, reason: str) -> None:
        """Counts an Admit without a decision."""
        self._admits.setdefault(("error", reason), Count()).inc()


class MeteredLink:
    """An engine link whose calls are timed."""

    def __init__(self, link: EngineLink, metrics: AdmitMetrics) -> None:
        """Wraps `link`."""
        self._link = link
        self._calls = metrics.calls

    @property
    def welcome(self) -> Welcome:
        """As the wrapped link."""
        return self._link.welcome

    def ask(self, body: RequestBody, answered: Callable[[ReplyBody | KvcError], None], timeout_s: float) -> Pending | None:
        """As the wrapped link; times what was answered or refused, and what was waited for in vain."""
        call, started_s = self._calls[type(body).__name__], time.perf_counter()

        def timed(reply: ReplyBody | KvcError) -> None:
            call.observe(time.perf_counter() - started_s)
            answered(reply)

        return self._link.ask(body, timed, timeout_s)

    async def call(self, body: RequestBody, timeout_s: float) -> ReplyBody:
        """As the wrapped link; times what was answered or refused, and what was waited for in vain."""
        started_s = time.perf_counter()
        try:
            return await self._link.call(body, timeout_s)
        finally:
            self._calls[type(body).__name__].observe(time.perf_counter() - started_s)

    def events(self, timeout_s: float) -> AsyncGenerator[EventBody, None]:
        """As the wrapped link."""
        return self._link.events(timeout_s)

    async def close(self) -> None:
        """As the wrapped link."""
        await self._link.close()


class MeteredConnector:
    """A connector whose links are metered."""

    def __init__(self, connector: EngineConnector, metrics: AdmitMetrics) -> None:
        """Wraps `connector`."""
        self._connector = connector
        self._metrics = metrics

    async def connect(self) -> MeteredLink:
        """As the wrapped connector."""
        return MeteredLink(await self._connector.connect(), self._metrics)


class StateCollector(Collector):
    """Reads the agent's state when it is scraped, so that nothing has to be kept in step."""

    def __init__(self, agent: AdmissionAgent, connection: EngineConnection, residency: Residency) -> None:
        """Reads from these."""
        self._agent = agent
        self._connection = connection
        self._residency = residency

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked by a trial run."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        yield _gauge("engine_connected", "1 while an engine is connected and accepted", self._connection.life is not None)
        yield _gauge("inflight_calls", "calls that wait for the engine", self._agent.inflight)
        yield _gauge("draining", "1 while the agent refuses turns because it stops", self._agent.draining)
        yield _gauge("followers", "open WatchResidency streams", self._residency.followers)
        yield _gauge("resident_blocks", "blocks resident on the engine", self._residency.resident_blocks)
        yield _count("engine_lives", "engine connections that were accepted", self._connection.lives)
        yield _count("engine_failures", "engine connections that failed, were lost or were refused", self._connection.failures)
        yield _counts("residency_events", "events taken from the engine, by kind", "kind", self._residency.events)
        yield _counts("resyncs", "snapshots sent anew, by cause", "cause", self._residency.resyncs)
        load = self._residency.load
        if load is not None:
            yield from _load(load)


def _load(load: types_pb2.WorkerLoad) -> Iterator[Metric]:
    for name, text in FACTS.items():
        yield _gauge(re.sub("_s$", "_seconds", name), text, getattr(load.facts, name))
    for name, text in LOADS.items():
        yield _gauge(name, text, getattr(load, name))
    yield _count("evicted_tokens", "tokens evicted since the engine started", load.evicted_tokens)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvc_agent_{name}", text, value=float(value))


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvc_agent_{name}", text, value=float(value))


def _counts(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvc_agent_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
