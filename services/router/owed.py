"""Turns without a token, and the workers that owe them one.

An engine that hangs keeps its connections open: nothing about a connection says that no token will come. What says so is its agent,
which gets no answer from it, or that nobody hears the agent. Turns that wait for a first token from a worker that has been away for
`lost_s` are told, so that they can run elsewhere. Turns that had a token go on: their engine may be well, and only its agent away.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvc.core.types import WorkerRef


@dataclass(slots=True, eq=False)
class Debt:
    """A turn without a token. `limit` ends its wait; `lost` is the worker because of which that happened before its time."""

    workers: tuple[WorkerRef, ...]
    limit: asyncio.Timeout | None = None
    lost: WorkerRef | None = None


class Owed:
    """All such turns. Lives on one event loop; methods mutate."""

    def __init__(self, lost_s: float) -> None:
        """Nobody owes anything. `lost_s`: how long a worker may be away."""
        self._lost_s = lost_s
        self._debts: set[Debt] = set()
        self._lost: set[WorkerRef] = set()
        self._away: dict[WorkerRef, asyncio.TimerHandle] = {}

    @contextmanager
    def by(self, *workers: WorkerRef) -> Iterator[Debt]:
        """A turn waits for its first token for as long as the block lasts."""
        debt = Debt(workers)
        self._debts.add(debt)
        try:
            yield debt
        finally:
            self._debts.discard(debt)

    def away(self, ref: WorkerRef) -> None:
        """The worker, or its agent, is not heard."""
        if ref not in self._away:
            self._away[ref] = asyncio.get_running_loop().call_later(self._lost_s, self._still_away, ref)

    def back(self, ref: WorkerRef) -> None:
        """The worker is heard again; earlier lives of it are over."""
        self.over(ref.worker_id, but=ref)
        self._lost.discard(ref)
        timer = self._away.pop(ref, None)
        if timer is not None:
            timer.cancel()

    def over(self, worker_id: str, but: WorkerRef | None = None) -> None:
        """No life of the worker owes anything any more, `but` one."""
        for ref in [ref for ref in self._away if ref.worker_id == worker_id and ref != but]:
            self._away.pop(ref).cancel()
            self._lost.discard(ref)
            self._tell(ref)

    def is_lost(self, ref: WorkerRef) -> bool:
        """True while the worker has been away for too long, for those who look by themselves. Does not mutate."""
        return ref in self._lost

    def close(self) -> None:
        """Waits for nobody any more."""
        for timer in self._away.values():
            timer.cancel()
        self._away.clear()

    def _still_away(self, ref: WorkerRef) -> None:
        self._lost.add(ref)
        self._tell(ref)
        self._away[ref] = asyncio.get_running_loop().call_later(self._lost_s, self._still_away, ref)  # for turns that came since

    def _tell(self, ref: WorkerRef) -> None:
        now_s = asyncio.get_running_loop().time()
        for debt in self._debts:
            if ref in debt.workers and debt.lost is None and debt.limit is not None:
                debt.lost = ref
                debt.limit.reschedule(now_s)
