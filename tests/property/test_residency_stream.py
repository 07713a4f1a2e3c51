"""Residency reaches every follower whole: no event is lost or duplicated, whatever the engine, the network and the followers do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvc.core.types import WorkerRef
from kvc.engine import link
from kvc.errors import Unavailable
from kvc.v1 import types_pb2
from services.admission_agent import residency as residency_module
from services.admission_agent.config import ResidencyConfig
from services.admission_agent.residency import Gap, Residency
from tests.support.fake_engine import SEED, Pages
from tests.support.follower_model import FollowerModel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from services.admission_agent.follower import Follower

BLOCK_TOKENS = 3
PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=14)


@dataclass(slots=True)
class Watch:
    """One follower: its place in the agent and what it believes."""

    context: AbstractContextManager[Follower]
    follower: Follower
    model: FollowerModel = field(default_factory=FollowerModel)
    ended: bool = False


class ResidencyMachine(RuleBasedStateMachine):
    """A model engine, the agent's residency, and followers that come, lag, leave and are cut off.

    `history` holds what was resident at each sequence number; a follower at that number must believe exactly that.
    """

    PAGE_TOKENS = 2

    def __init__(self) -> None:
        super().__init__()
        config = ResidencyConfig(block_tokens=BLOCK_TOKENS, part_bytes=5 * 8, buffer_bytes=300, max_followers=4)
        self.residency = Residency(config)
        self.watches: list[Watch] = []
        self.history: dict[tuple[int, int], frozenset[int]] = {}
        self.epoch = 0
        self.sequence = 0
        self.pages = Pages(self.PAGE_TOKENS)
        self.live(again=False)

    # ---- the engine ----

    @rule(again=st.booleans())
    def live(self, *, again: bool) -> None:
        """The engine restarts, or (`again`) only the connection to it; every stream ends (F40)."""
        self.residency.end(Unavailable("away"))
        for watch in self.watches:
            with pytest.raises(Unavailable):
                self.take(watch)
            watch.ended = True
        self.watches = []
        if not again or not self.epoch:
            self.epoch += 1
            self.pages = Pages(self.PAGE_TOKENS)
            self.sequence = 0
        self.residency.begin(WorkerRef("d0", self.epoch), SEED, self.PAGE_TOKENS)
        self.snapshot(parts=1)

    def snapshot(self, parts: int) -> None:
        self.residency.expect_snapshot()
        for event in self.pages.snapshot(self.sequence, parts):
            self.feed(event)

    def feed(self, event: link.Snapshot | link.Delta) -> None:
        """Applies an event step by step; at each step some follower takes a message."""
        for step, _ in enumerate(self.residency.apply(event)):
            self.record()
            if self.watches:
                self.take(self.watches[step % len(self.watches)])
        self.record()

    def publish(self, *changes: link.Change) -> None:
        self.sequence += 1
        self.feed(link.Delta(self.sequence, list(changes)))

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3))
    def store(self, prompts: list[list[int]]) -> None:
        self.publish(*[run for run in map(self.pages.store, prompts) if run is not None])

    @rule(prompt=PROMPTS)
    def remove(self, prompt: list[int]) -> None:
        self.publish(self.pages.remove(prompt[: len(prompt) // self.PAGE_TOKENS * self.PAGE_TOKENS]))

    @rule(prompt=PROMPTS)
    def store_and_remove(self, prompt: list[int]) -> None:
        """In one scheduler iteration something comes and goes and comes again."""
        whole = prompt[: len(prompt) // self.PAGE_TOKENS * self.PAGE_TOKENS]
        changes = [self.pages.store(prompt), self.pages.remove(whole), self.pages.store(prompt), self.pages.remove(whole)]
        self.publish(*[change for change in changes if change is not None])

    @rule(prompt=PROMPTS)
    def clear(self, prompt: list[int]) -> None:
        """F41: a clear, with something stored before and after it in the same delta."""
        changes = [self.pages.store(prompt[:4]), self.pages.clear(), self.pages.store(prompt)]
        self.publish(*[change for change in changes if change is not None])

    @rule(prompt=PROMPTS, parts=st.integers(1, 4), repeat=st.booleans())
    def gap(self, prompt: list[int], parts: int, *, repeat: bool) -> None:
        """A delta is lost or comes twice: the agent notices, ignores what comes before the new snapshot, and has everything then."""
        self.pages.store(prompt)
        self.sequence += 1
        wrong = self.sequence - 1 if repeat else self.sequence + 1
        with pytest.raises(Gap):
            self.feed(link.Delta(wrong, []))
        self.residency.expect_snapshot()
        before = self.residency.resident_blocks
        self.feed(link.Delta(self.sequence, [link.AllCleared()]))
        assert self.residency.resident_blocks == before, "a delta from before the snapshot counts"
        self.snapshot(parts)

    # ---- the followers ----

    @precondition(lambda self: len(self.watches) < 4)
    @rule()
    def join(self) -> None:
        context = self.residency.follow()
        self.watches.append(Watch(context, context.__enter__()))

    @precondition(lambda self: self.watches)
    @rule(index=st.integers(0, 3))
    def leave(self, index: int) -> None:
        watch = self.watches.pop(index % len(self.watches))
        watch.context.__exit__(None, None, None)
        assert self.residency.followers == len(self.watches)

    @precondition(lambda self: self.watches)
    @rule(index=st.integers(0, 3), count=st.integers(1, 6))
    def read(self, index: int, count: int) -> None:
        for _ in range(count):
            self.take(self.watches[index % len(self.watches)])

    def take(self, watch: Watch) -> bool:
        """One message, held to the rules of the stream and to history."""
        message = watch.follower.take()
        self.record()
        if message is None:
            return False
        watch.model.apply(message)
        if watch.model.building is None:
            assert watch.model.blocks == self.history[watch.model.epoch, watch.model.sequence]
        return True

    # ---- the agent ----

    @rule()
    def flush(self) -> None:
        self.residency.flush()
        self.record()

    @rule()
    def report(self) -> None:
        self.residency.report(types_pb2.WorkerLoad(sessions=1))

    def record(self) -> None:
        """Remembers what is resident at the sequence that is current, the first time it is seen."""
        key = (self.epoch, self.residency._sequence)
        self.history.setdefault(key, frozenset(self.residency._blocks.blocks()))

    @invariant()
    def bounded(self) -> None:
        """No follower holds more than its buffer, and residency is the engine's."""
        assert all(watch.follower.held_bytes <= 300 for watch in self.watches)
        assert set(self.residency._blocks.blocks()) == self.pages.blocks(BLOCK_TOKENS)

    def teardown(self) -> None:
        """Whoever reads on ends up with exactly what is resident."""
        self.flush()
        expected = self.pages.blocks(BLOCK_TOKENS)
        for watch in self.watches:
            while self.take(watch):
                pass
            assert watch.model.blocks == expected


class SinglePages(ResidencyMachine):
    """Pages of one token, runs cut into steps of two pages."""

    PAGE_TOKENS = 1


class WidePages(ResidencyMachine):
    """Several blocks end in one page."""

    PAGE_TOKENS = 7


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "STEP_PAGES", 2)


RUNS = settings(max_examples=60, stateful_step_count=40)
TestResidency = ResidencyMachine.TestCase
TestResidency.settings = RUNS
TestResidencySingle = SinglePages.TestCase
TestResidencySingle.settings = RUNS
TestResidencyWide = WidePages.TestCase
TestResidencyWide.settings = RUNS
