"""One AdmitStream call: batches in, answers out in the order in which they become known.

An element costs no task: it is asked for with a callback, and its answer is written into the message that leaves next. Answers that are
ready together, or while a message is being sent, travel together; a slow element delays nobody. What is in flight belongs to the stream:
when that ends, for whatever reason, it is cancelled. Elements beyond the agent's bound of calls in flight are answered with
RESOURCE_EXHAUSTED at once; a client that does not read its answers is not read from any more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvc.errors import Internal, InvalidField, KvcError
from kvc.runtime.logs import event
from kvc.v1 import admission_pb2
from kvc.wire import stream_error_to_pb
from services.admission_agent.translation import answer_into

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Callable

    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    from kvc.runtime.asking import Pending
    from kvc.v1 import types_pb2
    from services.admission_agent.translation import Answer

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")

MAX_BATCH = 1024
MAX_UNREAD = 4096


class AdmitStream:
    """The state of one call."""

    def __init__(
        self,
        admit: Callable[[admission_pb2.AdmitRequest, Callable[[Answer | KvcError], None]], Pending | None],
        release: Callable[[admission_pb2.ReleaseRequest, Callable[[bool | KvcError], None]], Pending | None],
        max_inflight: int,
    ) -> None:
        """Starts with `serve`.

        Args:
            admit: asks for one element, as Admitter.ask; raises KvcError for one that cannot be asked.
            release: gives one ticket back, likewise.
            max_inflight: elements that `admit` and `release` let wait at once; more than `MAX_UNREAD` others are answers nobody reads.
        """
        self._admit = admit
        self._release = release
        self._max_outstanding = max_inflight + MAX_UNREAD
        self._open: set[_Element] = set()
        self._responses: deque[admission_pb2.AdmitStreamResponse] = deque()
        self._unsent = 0
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
                if self._responses:
                    yield self._take()
                    continue
                if reader.done():
                    if not (self._closing and reader.cancelled()):
                        reader.result()
                    if not self._open:
                        return
                await self._news.wait()
        finally:
            reader.cancel()
            for element in self._open:
                element.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, batches: AsyncIterable[admission_pb2.AdmitStreamRequest]) -> None:
        async for batch in batches:
            _check_size(batch)
            for index, request in enumerate(batch.admits):
                admission = _Admission(self, request.attempt, index)
                self._begin(admission, self._admit, request, admission.answered)
            for index, given in enumerate(batch.releases):
                release = _Release(self, given.attempt, index)
                self._begin(release, self._release, given, release.answered)
            while self._outstanding >= self._max_outstanding:
                self._read_on.clear()
                await self._read_on.wait()

    @property
    def _outstanding(self) -> int:
        """Elements without an answer and answers that are not sent."""
        return len(self._open) + self._unsent

    def _make_room(self) -> None:
        """Lets the reader go on when there is room again. Mutates."""
        if self._outstanding < self._max_outstanding:
            self._read_on.set()

    def _begin(
        self,
        element: _Element,
        ask: Callable[[Request, Callable[[Result | KvcError], None]], Pending | None],
        request: Request,
        answered: Callable[[Result | KvcError], None],
    ) -> None:
        self._open.add(element)
        try:
            element.pending = ask(request, answered)
        except Exception as error:  # noqa: BLE001 - the boundary of one element: its failure is its answer
            self.fail(element, error)

    def answer(self, element: _Element, answer: Answer) -> None:
        """One element is decided. Mutates."""
        results = self._room()
        try:
            pb, asked = results.add(), element.attempt
            pb.attempt.request_id, pb.attempt.attempt_number = asked.request_id, asked.attempt_number
            answer_into(pb.response, asked, answer)
        except Exception as error:  # noqa: BLE001 - the boundary of one element: its failure is its answer
            del results[-1]
            self._unsent -= 1
            self.fail(element, error)
        else:
            self.over(element)

    def fail(self, element: _Element, error: Exception) -> None:
        """One element failed. Mutates."""
        if not isinstance(error, KvcError):
            incident = secrets.token_hex(6)
            event(logger, "internal_error", level=logging.ERROR, error=error, incident=incident, method="AdmitStream")
            error = Internal(f"internal error, incident {incident}")
        elif error.field:
            error = type(error)(error.message, field=f"{element.path}.{error.field}", reason=error.reason)
        self._room().add(attempt=element.attempt, error=stream_error_to_pb(error))
        self.over(element)

    def over(self, element: _Element) -> None:
        """One element needs nothing more. Mutates."""
        self._open.discard(element)
        self._news.set()
        if not self._unsent:  # nothing leaves on its account: it makes room at once
            self._make_room()

    def _room(self) -> RepeatedCompositeFieldContainer[admission_pb2.AdmitStreamResult]:
        """Where the next answer goes: the message that leaves next, or one behind it. Mutates."""
        responses = self._responses
        if not responses or len(responses[-1].results) >= MAX_BATCH:
            responses.append(admission_pb2.AdmitStreamResponse())
        self._unsent += 1
        return responses[-1].results

    def _take(self) -> admission_pb2.AdmitStreamResponse:
        """The answers that are ready, a batch at most. Mutates."""
        response = self._responses.popleft()
        self._unsent -= len(response.results)
        self._make_room()
        return response


class _Element:
    """One element of a batch, until it is answered."""

    __slots__ = ("_index", "_stream", "attempt", "pending")
    FIELD: ClassVar[str]

    def __init__(self, stream: AdmitStream, attempt: types_pb2.Attempt, index: int) -> None:
        self._stream = stream
        self._index = index
        self.attempt = attempt
        self.pending: Pending | None = None

    @property
    def path(self) -> str:
        """Where it is in its batch."""
        return f"{self.FIELD}[{self._index}]"

    def cancel(self) -> None:
        """Nobody waits any more."""
        if self.pending is not None:
            self.pending.cancel()


class _Admission(_Element):
    __slots__ = ()
    FIELD = "admits"

    def answered(self, result: Answer | KvcError) -> None:
        """Passes the answer on."""
        if isinstance(result, KvcError):
            self._stream.fail(self, result)
        else:
            self._stream.answer(self, result)


class _Release(_Element):
    __slots__ = ()
    FIELD = "releases"

    def answered(self, result: bool | KvcError) -> None:  # noqa: FBT001 - the answer
        """Only a failure is told."""
        if isinstance(result, KvcError):
            self._stream.fail(self, result)
        else:
            self._stream.over(self)


def _check_size(batch: admission_pb2.AdmitStreamRequest) -> None:
    for field, count in (("admits", len(batch.admits)), ("releases", len(batch.releases))):
        if count > MAX_BATCH:
            raise InvalidField(f"holds {count} elements, at most {MAX_BATCH} are allowed in one batch", field=field)
