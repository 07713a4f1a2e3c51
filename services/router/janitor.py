"""Gives tickets back in the background: owned tasks, so that no request waits for it and nothing is left running on exit."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from kvc.core.dispatch import Admitted
from kvc.runtime.logs import event

if TYPE_CHECKING:
    from kvc.core.dispatch import Ask, Refused, Unreachable
    from kvc.core.types import Admission, Attempt, WorkerRef
    from kvc.runtime.clock import Clock
    from services.router.ports import AdmissionPort

logger = logging.getLogger(__name__)

MAX_PENDING = 10_000
WORKERS = 4


class _Release(NamedTuple):
    attempt: Attempt
    ref: WorkerRef
    ticket: str
    expires_s: float


class Janitor:
    """A bounded queue of releases and the tasks that work it off. Beyond the bound tickets expire by their TTL (R8)."""

    def __init__(self, admission: AdmissionPort, clock: Clock, max_pending: int = MAX_PENDING) -> None:
        """Starts idle; `run` does the work.

        Args:
            admission: gives tickets back.
            clock: says which tickets are over anyway.
            max_pending: most releases, and most late answers, that wait.
        """
        self.dropped = 0
        self._admission = admission
        self._clock = clock
        self._max_pending = max_pending
        self._queue: asyncio.Queue[_Release] = asyncio.Queue(max_pending)
        self._late: set[asyncio.Future[Admitted | Refused | Unreachable]] = set()

    def release(self, attempt: Attempt, ref: WorkerRef, admission: Admission) -> None:
        """Gives an admission's ticket back soon; one without a ticket holds nothing."""
        if not admission.ticket:
            return
        if self._queue.full():
            self.dropped += 1
            return
        self._queue.put_nowait(_Release(attempt, ref, admission.ticket, self._clock.now_s() + admission.ttl_s))

    def settle(self, ask: Ask, answer: asyncio.Future[Admitted | Refused | Unreachable]) -> None:
        """Takes over an answer that nobody waits for any more: a ticket in it is given back when it comes."""
        if len(self._late) >= self._max_pending:
            self.dropped += 1
            answer.cancel()
            return

        def settled(done: asyncio.Future[Admitted | Refused | Unreachable]) -> None:
            self._late.discard(done)
            if done.cancelled():
                return
            error = done.exception()
            if error is not None:
                event(logger, "late_answer_failed", level=logging.ERROR, error=error)
            elif isinstance(reply := done.result(), Admitted):
                self.release(ask.attempt, ask.worker, reply.admission)

        self._late.add(answer)
        answer.add_done_callback(settled)

    async def run(self) -> None:
        """Works until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._work())
        finally:
            late = list(self._late)
            for answer in late:
                answer.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            release = await self._queue.get()
            try:
                # Behind an agent that does not answer, releases of others grow old; after its TTL a ticket needs none.
                if self._clock.now_s() < release.expires_s:
                    await self._admission.release(release.attempt, release.ref, release.ticket)
            except Exception as error:  # noqa: BLE001 - one release that fails must not end all others
                event(logger, "release_failed", level=logging.ERROR, error=error)
            finally:
                self._queue.task_done()

    @property
    def pending(self) -> int:
        """Releases and late answers that wait."""
        return self._queue.qsize() + len(self._late)

    async def drained(self) -> None:
        """Waits until everything asked for so far was tried."""
        if self._late:
            await asyncio.wait(set(self._late))
            await asyncio.sleep(0)  # lets the callbacks queue their releases
        await self._queue.join()
