"""Net change: what many residency changes in a row come to, as one delta applied in the order cleared, removed, stored."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core.blocks import HASH_BYTES, pack_hashes
from kvc.v1 import admission_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class ChangeFold:
    """Changes since the last `take`. A block that came and went is in neither list, one that went and came back neither.

    Attributes:
        added: blocks that are resident now and were not, parents first.
        gone: blocks that were resident and are not.
        cleared: everything from before is gone; `gone` is empty then.
    """

    added: dict[int, None] = field(default_factory=dict)
    gone: dict[int, None] = field(default_factory=dict)
    cleared: bool = False

    def stored(self, blocks: Iterable[int]) -> None:
        """Blocks became resident. Mutates."""
        for block in blocks:
            if block in self.gone:
                del self.gone[block]
            else:
                self.added[block] = None

    def removed(self, blocks: Iterable[int]) -> None:
        """Blocks are no longer resident. Mutates."""
        for block in blocks:
            if block in self.added:
                del self.added[block]
            else:
                self.gone[block] = None

    def clear(self) -> None:
        """Everything is gone. Mutates."""
        self.added, self.gone, self.cleared = {}, {}, True

    def __bool__(self) -> bool:
        """True when anything changed."""
        return bool(self.cleared or self.added or self.gone)

    @property
    def size_bytes(self) -> int:
        """Bytes of block hashes in the delta."""
        return HASH_BYTES * (len(self.added) + len(self.gone))

    def reset(self) -> None:
        """Forgets the changes. Mutates."""
        self.added, self.gone, self.cleared = {}, {}, False

    def take(self) -> admission_pb2.ResidencyDelta:
        """The delta; starts anew. Mutates."""
        delta = admission_pb2.ResidencyDelta(
            stored=pack_hashes(array("Q", self.added)),
            removed=pack_hashes(array("Q", self.gone)),
            cleared=self.cleared,
        )
        self.reset()
        return delta
