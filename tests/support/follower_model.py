"""What a follower of WatchResidency believes, and the rules of the stream it holds its messages to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.core.blocks import unpack_hashes

if TYPE_CHECKING:
    from kvc.v1 import admission_pb2


class FollowerModel:
    """Applies messages; asserts that none is missing, twice or out of place."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sequence = 0
        self.blocks: set[int] = set()
        self.building: list[int] | None = None
        self.building_sequence = 0
        self.snapshots = 0
        self.deltas = 0
        self.loads = 0

    def apply(self, message: admission_pb2.WatchResidencyResponse) -> None:
        """Takes one message in."""
        kind = message.WhichOneof("event")
        if kind == "snapshot":
            self._part(message)
            return
        assert self.building is None, "a message between the parts of a snapshot"
        assert self.snapshots, "a snapshot comes first"
        assert message.worker.epoch == self.epoch, "a new epoch starts with a snapshot"
        if kind == "load":
            assert message.sequence == self.sequence
            self.loads += 1
            return
        assert kind == "delta"
        assert message.sequence == self.sequence + 1, "contiguous"
        self.sequence = message.sequence
        self._delta(message.delta)

    def _part(self, message: admission_pb2.WatchResidencyResponse) -> None:
        if self.building is None:
            self.building, self.building_sequence = [], message.sequence
        assert message.sequence == self.building_sequence, "the parts of a snapshot carry one sequence"
        self.building += unpack_hashes(message.snapshot.block_hashes)
        if message.snapshot.more:
            return
        assert len(set(self.building)) == len(self.building), "a block twice in a snapshot"
        if message.worker.epoch == self.epoch:
            assert message.sequence >= self.sequence, "the sequence goes back"
        self.epoch, self.sequence = message.worker.epoch, message.sequence
        self.blocks, self.building = set(self.building), None
        self.snapshots += 1

    def _delta(self, delta: admission_pb2.ResidencyDelta) -> None:
        if delta.cleared:
            assert not delta.removed, "what is cleared need not be removed"
            self.blocks.clear()
        removed, stored = unpack_hashes(delta.removed), unpack_hashes(delta.stored)
        assert self.blocks.issuperset(removed), "removed what was not there"
        self.blocks.difference_update(removed)
        assert self.blocks.isdisjoint(stored), "stored what was there"
        assert len(set(stored)) == len(stored), "stored twice"
        self.blocks.update(stored)
        self.deltas += 1
