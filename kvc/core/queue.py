"""R28: the bounded queue of turns that every decode worker refused; shortest prefill first, aged.

A turn's place is `prefill_tokens + ageing * arrival_s`: waiting does not change the order of two turns, so the key is fixed at
arrival and a heap serves. A turn of T tokens can only be overtaken by turns that arrive within T / ageing seconds after it, which
bounds its wait whatever arrives later.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple


class _Waiting(NamedTuple):
    key: float
    order: int
    name: str


class WaitQueue:
    """Names of waiting turns by aged shortest prefill. Every method but the readers mutates."""

    def __init__(self, limit: int, ageing_tokens_per_s: float) -> None:
        """Starts empty.

        Args:
            limit: most turns waiting; 0 takes none.
            ageing_tokens_per_s: prefill tokens that a second of earlier arrival is worth.
        """
        self.limit = limit
        self._ageing = ageing_tokens_per_s
        self._heap: list[_Waiting] = []
        self._live: dict[str, _Waiting] = {}
        self._order = 0

    def push(self, name: str, prefill_tokens: int, arrival_s: float) -> bool:
        """Adds a turn; one that comes back keeps its place by passing its first arrival.

        Returns:
            False when the queue is full.
        """
        if name not in self._live and len(self._live) >= self.limit:
            return False
        self._order += 1
        waiting = _Waiting(prefill_tokens + self._ageing * arrival_s, self._order, name)
        self._live[name] = waiting
        heapq.heappush(self._heap, waiting)
        return True

    def pop(self) -> str | None:
        """Takes the turn whose place is first; None when nothing waits."""
        while self._heap:
            waiting = heapq.heappop(self._heap)
            if self._live.get(waiting.name) is waiting:
                del self._live[waiting.name]
                return waiting.name
        return None

    def remove(self, name: str) -> bool:
        """Takes one turn out, wherever it stands; False when it does not wait."""
        if self._live.pop(name, None) is None:
            return False
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = sorted(self._live.values())
        return True

    def __len__(self) -> int:
        """Turns waiting."""
        return len(self._live)

    def __contains__(self, name: object) -> bool:
        """True when the turn waits."""
        return name in self._live
