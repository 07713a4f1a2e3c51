"""Requests in flight by id, and what is remembered of ids that were in flight before."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvc.errors import AlreadyExists, Exhausted

if TYPE_CHECKING:
    from collections.abc import Iterator

ATTEMPTS_KEPT = 16_384


class Claims:
    """One request an id at a time: attempts, tickets and places in the queue go by it (F8). Bounded."""

    def __init__(self, limit: int, attempts_kept: int = ATTEMPTS_KEPT) -> None:
        """Takes at most `limit` requests at a time, and remembers the attempts of `attempts_kept` ids."""
        self._limit = limit
        self._kept = attempts_kept
        self._held: set[str] = set()
        self._none = asyncio.Event()
        self._none.set()
        self._next: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        """Requests in flight, waiting ones included."""
        return len(self._held)

    @contextmanager
    def hold(self, request_id: str) -> Iterator[None]:
        """Claims an id for the time of a `with` block.

        Raises:
            AlreadyExists: a request with this id is in flight.
            Exhausted: too many requests are.
        """
        if request_id in self._held:
            raise AlreadyExists("a request with this id is in flight", field="request_id", reason="REQUEST_IN_FLIGHT")
        if len(self._held) >= self._limit:
            raise Exhausted(f"{self._limit} requests are in flight", reason="TOO_MANY_TURNS", retry_after_s=1.0)
        self._held.add(request_id)
        self._none.clear()
        try:
            yield
        finally:
            self._held.discard(request_id)
            if not self._held:
                self._none.set()

    async def none(self) -> None:
        """Waits until no request is in flight."""
        await self._none.wait()

    def next_attempt(self, request_id: str) -> int:
        """Number of the next attempt: a request that is repeated under its id counts on, so that workers do not take it for an old try."""
        return self._next.get(request_id, 0)

    def count(self, request_id: str, next_attempt: int) -> None:
        """Remembers the number. Mutates."""
        self._next[request_id] = next_attempt
        self._next.move_to_end(request_id)
        if len(self._next) > self._kept:
            self._next.popitem(last=False)
