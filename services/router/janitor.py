"""Gives tickets back in the background: an owned task, so that no request waits for it and nothing is left running on exit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc.core.types import Attempt, WorkerRef
    from services.router.ports import AdmissionPort

MAX_PENDING = 10_000
WORKERS = 4


class Janitor:
    """A bounded queue of releases and the tasks that work it off. Beyond the bound tickets expire by their TTL."""

    def __init__(self, admission: AdmissionPort) -> None:
        """Starts idle; `run` does the work."""
        self._admission = admission
        self._queue: asyncio.Queue[tuple[Attempt, WorkerRef, str]] = asyncio.Queue(MAX_PENDING)

    def release(self, attempt: Attempt, ref: WorkerRef, ticket: str) -> None:
        """Gives a ticket back soon."""
        if not self._queue.full():
            self._queue.put_nowait((attempt, ref, ticket))

    async def run(self) -> None:
        """Works until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            attempt, ref, ticket = await self._queue.get()
            await self._admission.release(attempt, ref, ticket)
            self._queue.task_done()

    async def drained(self) -> None:
        """Waits until everything asked for so far was tried."""
        await self._queue.join()
