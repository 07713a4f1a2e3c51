"""One AdmitStream call: batches in, answers out in the order in which they become known.

Each element runs in a task of its own, so a slow one delays nobody. Answers that are ready together travel together. The tasks
belong to the stream: when it ends, for whatever reason, they are cancelled and waited for. Elements beyond the agent's bound of calls
in flight are answered with RESOURCE_EXHAUSTED at once; a client that does not read its answers is not read from any more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from typing import TYPE_CHECKING

from kvc.errors import Internal, InvalidField, KvcError
from kvc.runtime.logs import event
from kvc.v1 import admission_pb2
from kvc.wire import stream_error_to_pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine

    from kvc.v1 import types_pb2

logger = logging.getLogger(__name__)

MAX_BATCH = 1024
MAX_UNREAD = 4096


class AdmitStream:
    """The state of one call."""

    def __init__(
        self,
        admit: Callable[[admission_pb2.AdmitRequest], Awaitable[admission_pb2.AdmitResponse]],
        release: Callable[[admission_pb2.ReleaseRequest], Awaitable[object]],
        max_inflight: int,
    ) -> None:
        """Starts with `serve`.

        Args:
            admit: answers one element; raises KvcError for one without a decision.
            release: gives one ticket back, likewise.
            max_inflight: elements that `admit` and `release` let wait at once; more than `MAX_UNREAD` others are answers nobody reads.
        """
        self._admit = admit
        self._release = release
        self._max_outstanding = max_inflight + MAX_UNREAD
        self._tasks: set[asyncio.Task[None]] = set()
        self._results: deque[admission_pb2.AdmitStreamResult] = deque()
        self._news = asyncio.Event()
        self._read_on = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._closing = False

    def close(self) -> None:
        """Reads no further batch; the stream ends once everything read is answered. Mutates."""
        self._closing = True
        if self._reader is not None:
            self._reader.cancel()

    async def serve(
        self, batches: AsyncIterable[admission_pb2.AdmitStreamRequest]
    ) -> AsyncGenerator[admission_pb2.AdmitStreamResponse, None]:
        """Answers until the client has closed its side and has all answers, or `close` was called.

        Raises:
            InvalidField: a batch is larger than allowed; what was in flight on this stream is given up.
        """
        reader = self._reader = asyncio.create_task(self._read(batches), name="admit-stream-reader")
        reader.add_done_callback(lambda _: self._news.set())
        if self._closing:
            reader.cancel()
        try:
            while True:
                self._news.clear()
                if self._results:
                    yield self._take()
                    continue
                if reader.done():
                    if not (self._closing and reader.cancelled()):
                        reader.result()
                    if not self._tasks:
                        return
                await self._news.wait()
        finally:
            reader.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(reader, *self._tasks, return_exceptions=True)

    async def _read(self, batches: AsyncIterable[admission_pb2.AdmitStreamRequest]) -> None:
        async for batch in batches:
            _check_size(batch)
            for index, request in enumerate(batch.admits):
                self._start(self._answer(request, index))
            for index, release in enumerate(batch.releases):
                self._start(self._give_back(release, index))
            while self._outstanding >= self._max_outstanding:
                self._read_on.clear()
                await self._read_on.wait()

    @property
    def _outstanding(self) -> int:
        """Elements without an answer and answers that are not sent."""
        return len(self._tasks) + len(self._results)

    def _make_room(self) -> None:
        """Lets the reader go on when there is room again. Mutates."""
        if self._outstanding < self._max_outstanding:
            self._read_on.set()

    def _start(self, element: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(element, name="admit-stream-element")
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._news.set()
        self._make_room()

    def _take(self) -> admission_pb2.AdmitStreamResponse:
        """The answers that are ready, a batch at most. Mutates."""
        count = min(len(self._results), MAX_BATCH)
        results = [self._results.popleft() for _ in range(count)]
        self._make_room()
        return admission_pb2.AdmitStreamResponse(results=results)

    async def _answer(self, request: admission_pb2.AdmitRequest, index: int) -> None:
        try:
            response = await self._admit(request)
        except Exception as error:  # noqa: BLE001 - the boundary of one element: its failure is its answer
            self._fail(request.attempt, error, f"admits[{index}]")
        else:
            self._results.append(admission_pb2.AdmitStreamResult(attempt=request.attempt, response=response))

    async def _give_back(self, request: admission_pb2.ReleaseRequest, index: int) -> None:
        try:
            await self._release(request)
        except Exception as error:  # noqa: BLE001 - the boundary of one element: its failure is its answer
            self._fail(request.attempt, error, f"releases[{index}]")

    def _fail(self, attempt: types_pb2.Attempt, error: Exception, element: str) -> None:
        if not isinstance(error, KvcError):
            incident = secrets.token_hex(6)
            event(logger, "internal_error", level=logging.ERROR, error=error, incident=incident, method="AdmitStream")
            error = Internal(f"internal error, incident {incident}")
        elif error.field:
            error = type(error)(error.message, field=f"{element}.{error.field}", reason=error.reason)
        self._results.append(admission_pb2.AdmitStreamResult(attempt=attempt, error=stream_error_to_pb(error)))


def _check_size(batch: admission_pb2.AdmitStreamRequest) -> None:
    for field, count in (("admits", len(batch.admits)), ("releases", len(batch.releases))):
        if count > MAX_BATCH:
            raise InvalidField(f"holds {count} elements, at most {MAX_BATCH} are allowed in one batch", field=field)
