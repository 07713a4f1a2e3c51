"""Prometheus, used the cheap way: one registry a process, children bound once.

A bound child costs 0.2-0.6 microseconds an update; `metric.labels(...)` on every update costs a lock and a dictionary each. What every
request counts several times goes without the lock, too: Count and Latency belong to one event loop, and a collector reads them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# From a fast hop on one machine to a queued turn with a long prefill.
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

Child_co = TypeVar("Child_co", covariant=True)


class Latency:
    """Counts of one latency histogram: an observation is a bisection and two additions. For one event loop."""

    __slots__ = ("_buckets_s", "counts", "sum_s")

    def __init__(self, buckets_s: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        """Starts at 0; `buckets_s` are upper bounds, the last one implied."""
        self._buckets_s = buckets_s
        self.counts = [0] * (len(buckets_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one observation. Mutates."""
        self.counts[bisect_left(self._buckets_s, seconds)] += 1
        self.sum_s += seconds


class Count:
    """One counter. For one event loop."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        """Starts at 0."""
        self.value = 0

    def inc(self, by: int = 1) -> None:
        """Counts. Mutates."""
        self.value += by


class CountCollector(Collector):
    """Counters by the values of their labels, as Prometheus reads them."""

    def __init__(
        self,
        name: str,
        documentation: str,
        registry: CollectorRegistry,
        labels: tuple[str, ...] = (),
        rows: Iterable[tuple[str, ...]] = ((),),
    ) -> None:
        """Registers them; series exist from the start with 0.

        Args:
            name: without `_total`.
            documentation: one line.
            registry: where they are served from.
            labels: names of the labels.
            rows: every combination of their values.
        """
        self.children = {row: Count() for row in rows}
        self._name = name
        self._documentation = documentation
        self._labels = labels
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One family."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for row, child in self.children.items():
            family.add_metric(row, child.value)
        yield family


class LatencyCollector(Collector):
    """A latency histogram, by the values of at most one label, as Prometheus reads it."""

    def __init__(
        self,
        name: str,
        documentation: str,
        registry: CollectorRegistry,
        label: str = "",
        values: Iterable[str] = ("",),
        buckets_s: tuple[float, ...] = LATENCY_BUCKETS_S,
    ) -> None:
        """Registers it; series exist from the start with 0.

        Args:
            name: ends in `_seconds`.
            documentation: one line.
            registry: where it is served from.
            label: its label; empty: none.
            values: every value of the label.
            buckets_s: upper bounds, ascending.
        """
        self.children = {value: Latency(buckets_s) for value in values}
        self._bounds = (*buckets_s, math.inf)
        self._name = name
        self._documentation = documentation
        self._label = label
        registry.register(self)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """One family."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label] if self._label else [])
        for value, child in self.children.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip(self._bounds, child.counts, strict=True):
                total += count
                buckets.append(("+Inf" if math.isinf(bound) else repr(bound), total))
            family.add_metric([value] if self._label else [], buckets, child.sum_s)
        yield family


class Labelled(Protocol[Child_co]):
    """A metric with labels: Counter, Gauge or Histogram."""

    def labels(self, *values: str) -> Child_co:
        """The child of these label values."""
        ...


def process_registry() -> CollectorRegistry:
    """A registry with the process's own CPU, memory, file and garbage collection metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def bound(metric: Labelled[Child_co], values: Iterable[str], *before: str) -> dict[str, Child_co]:
    """Children of a metric for every value of its last label, bound now, so that each series exists from the start with 0.

    Args:
        metric: the metric.
        values: every value of its last label.
        before: values of the labels before it.
    """
    return {value: metric.labels(*before, value) for value in values}
