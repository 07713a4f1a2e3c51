"""Runs of pages in the radix tree, and the notes it takes of what came and went."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from array import array

ROOT_HASH = 0


class Stored(NamedTuple):
    """A run of pages became resident below the page `parent` (0: the root)."""

    parent: int
    hashes: array[int]
    tokens: bytes


class Removed(NamedTuple):
    """Pages are gone; none of them has a resident descendant."""

    hashes: array[int]


class Cleared(NamedTuple):
    """Everything is gone."""


Change = Stored | Removed | Cleared


class Node:
    """A run of pages. Owned by its tree: others only hold references, which stay valid while they hold a lock."""

    __slots__ = ("children", "hashes", "key", "locks", "parent", "queued", "start", "used", "values")

    def __init__(self, parent: Node | None, start: int, key: bytearray, hashes: array[int], values: array[int]) -> None:
        """A run whose first page is page number `start` of its prefix."""
        self.parent = parent
        self.start = start
        self.key = key
        self.hashes = hashes
        self.values = values
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0
        self.queued = False

    @property
    def end(self) -> int:
        """Pages from the root to the end of the run."""
        return self.start + len(self.hashes)

    @property
    def last_hash(self) -> int:
        """Hash of the run's last page; 0 for the root."""
        return self.hashes[-1] if self.hashes else ROOT_HASH
