"""What the door counts of its connections and replies, requests that were refused before they were routed included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge

from kvc.runtime.metrics import Count, CountCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry


class DoorCounts:
    """Replies by status, and connections."""

    def __init__(self, registry: CollectorRegistry, statuses: Iterable[int], connections: Callable[[], int]) -> None:
        """Registers them.

        Args:
            registry: where they are served from.
            statuses: those that the door itself can give; their series exist from the start.
            connections: how many connections are open.
        """
        rows = [(str(status),) for status in statuses]
        text = "HTTP replies by status, those of engines included"
        self.responses = _ByStatus(CountCollector("kvc_router_http_responses", text, registry, ("status",), rows).children)
        text = "HTTP connections beyond http.max_connections"
        self.turned_away = CountCollector("kvc_router_http_connections_refused", text, registry).children[()]
        Gauge("kvc_router_http_connections", "Open HTTP connections of clients", registry=registry).set_function(connections)


class _ByStatus(dict[int, Count]):
    """Counts by status; one that only an engine gives is counted from its first time on."""

    def __init__(self, children: dict[tuple[str, ...], Count]) -> None:
        super().__init__({int(status): count for (status,), count in children.items()})
        self._children = children

    def __missing__(self, status: int) -> Count:
        count = self[status] = self._children[str(status),] = Count()
        return count
