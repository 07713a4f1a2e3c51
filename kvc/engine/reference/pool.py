"""The KV pool: every page of the device is free, cached, or owned by a request, and every promise of pages is written down.

    capacity = free + evictable + protected,   protected = locked in the tree + owned by requests
    held     = protected + growth              growth:   pages promised to running requests and not written yet
    used     = held + reserved                 reserved: pages promised to open tickets beyond what they lock (R7, R8)

Promises are made only while used stays within the limit, and evictable pages count as free, so writing a promised page can always
evict for it: nothing that runs is ever retracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc.engine.reference.radix import RadixTree


@dataclass(slots=True)
class KvPool:
    """Page accounting of one device. Single-threaded; methods mutate.

    Attributes:
        tree: the cached pages.
        capacity_pages: K.
        limit_pages: rho K: promises stay within it.
        owned_pages: written or being written by requests, not in the tree.
        growth_pages: promised to requests with memory, not written yet.
        reserved_pages: promised to open tickets, not locked.
        leases: requests and tickets with memory.
        evicted_pages: evicted since the start.
        peak_used_pages: largest `used_pages` since the start.
    """

    tree: RadixTree
    capacity_pages: int
    limit_pages: int
    owned_pages: int = 0
    growth_pages: int = 0
    reserved_pages: int = 0
    leases: int = 0
    evicted_pages: int = 0
    peak_used_pages: int = 0

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing. Does not mutate."""
        return self.capacity_pages - self.tree.total_pages - self.owned_pages

    @property
    def protected_pages(self) -> int:
        """Pages that hold KV in use. Does not mutate."""
        return self.tree.protected_pages + self.owned_pages

    @property
    def held_pages(self) -> int:
        """Pages that cannot be had by evicting, growth included. Does not mutate."""
        return self.protected_pages + self.growth_pages

    @property
    def used_pages(self) -> int:
        """Held and reserved. Does not mutate."""
        return self.held_pages + self.reserved_pages

    @property
    def room_pages(self) -> int:
        """Pages that may still be promised; negative never. Does not mutate."""
        return self.limit_pages - self.used_pages

    def note_use(self) -> None:
        """Records the peak; called after every promise."""
        self.peak_used_pages = max(self.peak_used_pages, self.used_pages)

    def write(self, pages: int) -> None:
        """Turns promised pages into owned ones, evicting exactly the shortage."""
        shortage = pages - self.free_pages
        if shortage > 0:
            freed = self.tree.evict(shortage)
            assert freed == shortage, "promised pages can be had"
            self.evicted_pages += freed
        self.growth_pages -= pages
        self.owned_pages += pages
        assert self.growth_pages >= 0, "nobody writes more than was promised"

    def check(self) -> None:
        """Checks the books. Does not mutate.

        Raises:
            AssertionError: they do not balance.
        """
        self.tree.check_integrity()
        assert min(self.owned_pages, self.growth_pages, self.reserved_pages, self.free_pages) >= 0, "no count is negative"
        assert self.free_pages + self.tree.evictable_pages + self.protected_pages == self.capacity_pages, "pages are neither lost nor made"
        assert self.used_pages <= self.limit_pages <= self.capacity_pages, "promises stay within the limit"
