"""One router's place in the residency stream: a snapshot, then deltas, then another snapshot when it cannot keep up.

Theory of operation. A follower is in one of these states; `take` moves it on:

    restarting   the next message is the first part of a snapshot of that very moment; deltas are not kept
    parts        the rest of that snapshot goes out; deltas from after it wait in the buffer
    deltas       the buffer goes out in order, one sequence number after the other; then the latest load
    ended        the life of the engine is over: `take` raises the reason

A buffer that would grow past its bound is dropped and the follower restarts, so memory per follower is bounded by one snapshot
and one buffer, and no follower ever sees a hole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvc.core.blocks import HASH_BYTES
from kvc.v1 import admission_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.errors import KvcError
    from kvc.v1 import types_pb2

DELTA_OVERHEAD_BYTES = 128


@dataclass(frozen=True, slots=True)
class View:
    """Everything resident at one moment: packed hashes, parents first."""

    worker: types_pb2.WorkerRef
    sequence: int
    hashes: bytes


class Follower:
    """One open WatchResidency call."""

    def __init__(self, view: Callable[[], View | None], *, part_bytes: int, buffer_bytes: int) -> None:
        """Begins in the state "restarting".

        Args:
            view: the moment's view; None while there is none yet.
            part_bytes: most hash bytes a snapshot message carries.
            buffer_bytes: most bytes of deltas that wait.
        """
        self._view = view
        self._part_bytes = max(HASH_BYTES, part_bytes - part_bytes % HASH_BYTES)
        self._buffer_bytes = buffer_bytes
        self._restarting = True
        self._parts: deque[admission_pb2.WatchResidencyResponse] = deque()
        self._deltas: deque[tuple[admission_pb2.WatchResidencyResponse, int]] = deque()
        self._held_bytes = 0
        self._load: types_pb2.WorkerLoad | None = None
        self._last: View | None = None
        self._sequence = 0
        self._error: KvcError | None = None
        self._news = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Bytes of deltas that wait."""
        return self._held_bytes

    def restart(self) -> None:
        """What comes next is a snapshot; waiting deltas are dropped. Mutates."""
        self._restarting = True
        self._deltas.clear()
        self._held_bytes = 0
        self._news.set()

    def offer(self, message: admission_pb2.WatchResidencyResponse) -> bool:
        """Queues a delta. Mutates.

        Returns:
            False when it did not fit and the follower restarts.
        """
        if self._restarting:
            return True  # the coming snapshot includes it
        cost = len(message.delta.stored) + len(message.delta.removed) + DELTA_OVERHEAD_BYTES
        if self._held_bytes + cost > self._buffer_bytes:
            self.restart()
            return False
        self._deltas.append((message, cost))
        self._held_bytes += cost
        self._news.set()
        return True

    def offer_load(self, load: types_pb2.WorkerLoad) -> None:
        """Replaces the load report that waits. Mutates."""
        self._load = load
        self._news.set()

    def wake(self) -> None:
        """There may be a view now."""
        self._news.set()

    def end(self, error: KvcError) -> None:
        """The stream is over: the next `take` raises `error`. Mutates."""
        self._error = error
        self._news.set()

    def take(self) -> admission_pb2.WatchResidencyResponse | None:
        """The next message, None when there is none now. Mutates.

        Raises:
            KvcError: the stream has ended.
        """
        if self._error is not None:
            raise self._error
        if self._parts:
            return self._parts.popleft()
        if self._restarting:
            return self._begin()
        if self._deltas:
            message, cost = self._deltas.popleft()
            self._held_bytes -= cost
            self._sequence = message.sequence
            return message
        if self._load is not None and self._last is not None:
            load, self._load = self._load, None
            return admission_pb2.WatchResidencyResponse(worker=self._last.worker, sequence=self._sequence, load=load)
        return None

    def __aiter__(self) -> Self:
        """Messages as they come, until the life of the engine is over."""
        return self

    async def __anext__(self) -> admission_pb2.WatchResidencyResponse:
        """The next message; waits for it. Mutates.

        Raises:
            KvcError: why there are no more.
        """
        while True:
            self._news.clear()
            message = self.take()
            if message is not None:
                return message
            await self._news.wait()

    def _begin(self) -> admission_pb2.WatchResidencyResponse | None:
        """Takes a view and cuts it into parts; the first of them."""
        view = self._view()
        if view is None:
            return None
        self._restarting = False
        self._last, self._sequence = view, view.sequence
        size = self._part_bytes
        cuts = range(0, max(1, len(view.hashes)), size)
        self._parts.extend(
            admission_pb2.WatchResidencyResponse(
                worker=view.worker,
                sequence=view.sequence,
                snapshot=admission_pb2.ResidencySnapshot(
                    block_hashes=view.hashes[start : start + size], more=start + size < len(view.hashes)
                ),
            )
            for start in cuts
        )
        return self._parts.popleft()
