"""What is resident on the engine, and who follows it.

The engine reports pages; `Reblocker` makes blocks of them (R17); changes are folded and go to every follower as deltas. Numbering:
the agent counts its own messages. Within an epoch the sequence grows by one with each delta and with each snapshot that replaces
what was known; a snapshot taken for one follower carries the sequence of the last delta. A restarted agent counts from 1 again,
which no follower can confuse: its stream ended with the agent, and a new stream starts with a snapshot.

Not thread-safe. One writer (the connection's reader); every method but the properties mutates.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import Counter
from typing import TYPE_CHECKING

from kvc.core.blocks import TOKEN_BYTES, pack_hashes
from kvc.core.reblock import Reblocker
from kvc.engine.link import AllCleared, Delta, PageRemoved, PageStored, Snapshot
from kvc.errors import Exhausted
from kvc.v1 import admission_pb2, types_pb2
from services.admission_agent.fold import ChangeFold
from services.admission_agent.follower import Follower, View

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvc.core.types import WorkerRef
    from kvc.engine.link import Change, EventBody
    from kvc.errors import KvcError
    from services.admission_agent.config import ResidencyConfig

STEP_PAGES = 4096


class Gap(Exception):  # noqa: N818 - it asks for a new subscription, it reports no failure to a caller
    """The engine's events cannot be followed from here on: a hole in the sequence, or an event that makes no sense."""


class Residency:
    """Resident blocks of the engine's current life and the followers of this agent."""

    def __init__(self, config: ResidencyConfig) -> None:
        """Starts without a life: followers wait."""
        self._config = config
        self._ref = types_pb2.WorkerRef()
        self._seed = 0
        self._page_bytes = TOKEN_BYTES
        self._blocks = Reblocker(config.block_tokens, 0)
        self._building: Reblocker | None = None
        self._engine_sequence = 0
        self._expecting_delta = False
        self._fold = ChangeFold()
        self._sequence = 0
        self._installed = asyncio.Event()
        self._packed: View | None = None
        self._followers: set[Follower] = set()
        self._load: types_pb2.WorkerLoad | None = None
        self.events: Counter[str] = Counter()
        self.resyncs: Counter[str] = Counter()

    # ---- the engine's side ----

    def begin(self, ref: WorkerRef, seed: int, page_tokens: int) -> None:
        """A life of the engine begins; what was known is void (R18, F40). A new epoch counts from 1, the same one goes on."""
        if (self._ref.worker_id, self._ref.epoch) != (ref.worker_id, ref.epoch):
            self._sequence = 0
        self._ref = types_pb2.WorkerRef(worker_id=ref.worker_id, epoch=ref.epoch)
        self._seed = seed
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._forget()

    def end(self, error: KvcError) -> None:
        """The life is over: followers end with `error`, nothing is resident."""
        self._forget()
        for follower in self._followers:
            follower.end(error)
        self._followers.clear()

    def expect_snapshot(self) -> None:
        """A subscription was asked for: deltas from before its snapshot are ignored. The old view stays until the new one is whole."""
        self._building = None
        self._expecting_delta = False

    def apply(self, event: EventBody) -> Iterator[None]:
        """Takes one event in, in steps short enough for an event loop; between two steps every view is sound.

        Raises:
            Gap: the engine has to be asked for a new snapshot.
        """
        if isinstance(event, Snapshot):
            self.events["snapshot"] += 1
            yield from self._apply_snapshot(event)
        elif self._expecting_delta:
            self.events["delta"] += 1
            yield from self._apply_delta(event)
        elif self._building is not None:
            raise Gap("a delta between two parts of a snapshot")

    def install_empty(self) -> None:
        """The engine reports no residency: followers get an empty snapshot, then load."""
        self._install(Reblocker(self._config.block_tokens, self._seed))

    def flush(self) -> None:
        """Sends what changed since the last flush to every follower as one delta, or a snapshot when it is too much for a message."""
        if not self._fold:
            return
        self._sequence += 1
        self._packed = None
        if self._fold.size_bytes > self._config.part_bytes:
            self._fold.reset()
            self._restart_all("oversize")
            return
        message = admission_pb2.WatchResidencyResponse(worker=self._ref, sequence=self._sequence, delta=self._fold.take())
        for follower in self._followers:
            if not follower.offer(message):
                self.resyncs["overflow"] += 1

    def report(self, load: types_pb2.WorkerLoad) -> None:
        """Sends a load report to every follower; one that lags sees only the latest."""
        self._load = load
        for follower in self._followers:
            follower.offer_load(load)

    # ---- the followers' side ----

    @contextlib.contextmanager
    def follow(self) -> Iterator[Follower]:
        """A place in the stream for as long as the block lasts.

        Raises:
            Exhausted: too many followers.
        """
        if len(self._followers) >= self._config.max_followers:
            raise Exhausted(f"{len(self._followers)} routers follow already", reason="TOO_MANY_FOLLOWERS", retry_after_s=1.0)
        follower = Follower(self.view, part_bytes=self._config.part_bytes, buffer_bytes=self._config.buffer_bytes)
        if self._load is not None:
            follower.offer_load(self._load)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def view(self) -> View | None:
        """Everything resident now, with the sequence it is current at; None before the first snapshot of a life."""
        if not self._installed.is_set():
            return None
        self.flush()
        if self._packed is None:
            self._packed = View(self._ref, self._sequence, pack_hashes(array("Q", self._blocks.blocks())))
        return self._packed

    @property
    def load(self) -> types_pb2.WorkerLoad | None:
        """The last load report of this life."""
        return self._load

    async def wait_installed(self) -> None:
        """Waits until a whole snapshot of this life is in. Mutates nothing."""
        await self._installed.wait()

    @property
    def followers(self) -> int:
        """Open streams."""
        return len(self._followers)

    @property
    def resident_blocks(self) -> int:
        """Blocks resident now."""
        return len(self._blocks)

    @property
    def has_news(self) -> bool:
        """True when `flush` would send something."""
        return bool(self._fold)

    # ---- inside ----

    def _forget(self) -> None:
        self._blocks = Reblocker(self._config.block_tokens, self._seed)
        self._fold.reset()
        self._installed.clear()
        self._packed = None
        self._load = None
        self.expect_snapshot()

    def _apply_snapshot(self, event: Snapshot) -> Iterator[None]:
        if self._building is None:
            self._expecting_delta = False
            self._building = Reblocker(self._config.block_tokens, self._seed)
        elif event.sequence != self._engine_sequence:
            raise Gap(f"a part of snapshot {event.sequence} inside snapshot {self._engine_sequence}")
        self._engine_sequence = event.sequence
        for run in event.stored:
            for part in self._parts_of(run):
                self._building.stored(part.page_hashes, part.parent, part.token_ids)
                yield
        if event.last:
            self._install(self._building)

    def _install(self, blocks: Reblocker) -> None:
        again = self._installed.is_set()
        self._blocks, self._building = blocks, None
        self._fold.reset()
        self._packed = None
        self._sequence += 1
        self._expecting_delta = True
        self._installed.set()
        if again:
            self._restart_all("snapshot")
        for follower in self._followers:
            follower.wake()

    def _apply_delta(self, event: Delta) -> Iterator[None]:
        expected = self._engine_sequence + 1
        if event.sequence != expected:
            raise Gap(f"delta {event.sequence} instead of {expected}")
        self._engine_sequence = expected
        for change in event.changes:
            yield from self._change(change)

    def _change(self, change: Change) -> Iterator[None]:
        if isinstance(change, PageStored):
            for part in self._parts_of(change):
                self._fold.stored(self._blocks.stored(part.page_hashes, part.parent, part.token_ids))
                yield
        elif isinstance(change, PageRemoved):
            self._fold.removed(self._blocks.removed(change.page_hashes))
            yield
        elif isinstance(change, AllCleared):
            self._blocks.cleared()
            self._fold.clear()

    def _parts_of(self, run: PageStored) -> Iterator[PageStored]:
        """A run in pieces of bounded work.

        Raises:
            Gap: the tokens are not those of whole pages.
        """
        pages, tokens, width = run.page_hashes, run.token_ids, self._page_bytes
        if len(tokens) != len(pages) * width:
            raise Gap(f"{len(pages)} pages of {width // TOKEN_BYTES} tokens come with {len(tokens)} bytes of tokens")
        if len(pages) <= STEP_PAGES:
            yield run
            return
        parent = run.parent
        for start in range(0, len(pages), STEP_PAGES):
            part = pages[start : start + STEP_PAGES]
            yield PageStored(part, parent, tokens[start * width : (start + len(part)) * width])
            parent = part[-1]

    def _restart_all(self, cause: str) -> None:
        for follower in self._followers:
            follower.restart()
        self.resyncs[cause] += len(self._followers)
