"""The memory of one request or ticket: a locked prefix in the tree, a promise, and pages being written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    from kvc.engine.reference.node import Node
    from kvc.engine.reference.pool import KvPool


class Lease:
    """Pages locked, promised and owned for one holder. Every method mutates the pool; `give_back` undoes all of it.

    Attributes:
        node: end of the locked prefix.
        locked_pages: its length.
        owned_pages: pages written beyond it.
    """

    __slots__ = ("_open", "_pool", "_promised_pages", "_reserved", "locked_pages", "node", "owned_pages")

    def __init__(self, pool: KvPool, node: Node, locked_pages: int, total_pages: int, *, reserved: bool) -> None:
        """Locks a prefix and promises the rest; the caller has checked that there is room.

        Args:
            pool: the pool.
            node: where the prefix ends.
            locked_pages: length of the prefix.
            total_pages: pages of the whole request, prefix included.
            reserved: the promise belongs to a ticket; such a lease is never written to.
        """
        self._pool = pool
        self._reserved = reserved
        self._open = True
        pool.leases += 1
        self.node = pool.tree.lock(node, locked_pages)
        self.locked_pages = locked_pages
        self.owned_pages = 0
        self._promised_pages = 0
        self._promise(total_pages - locked_pages)

    def write(self, pages: int) -> None:
        """Makes the request's first `pages` pages writable, evicting what is short. No effect when they are already."""
        more = pages - self.locked_pages - self.owned_pages
        if more > 0:
            self._pool.write(more)
            self._promised_pages -= more
            self.owned_pages += more

    def publish(self, tokens: bytes, pages: int, values: array[int]) -> None:
        """Puts written pages into the tree and locks them there; pages that someone else published meanwhile are freed.

        Args:
            tokens: packed tokens of the request, at least `pages` long.
            pages: full pages written.
            values: their stored values, from the locked prefix on.
        """
        if pages <= self.locked_pages:
            return
        tree = self._pool.tree
        node, _ = tree.insert(tokens, pages, self.locked_pages, values)
        self._pool.owned_pages -= pages - self.locked_pages
        self.owned_pages -= pages - self.locked_pages
        before, self.node = self.node, tree.lock(node, pages)
        tree.unlock(before)
        self.locked_pages = pages

    def give_back(self) -> None:
        """Unlocks, frees and un-promises everything. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._pool.leases -= 1
        self._pool.owned_pages -= self.owned_pages
        self.owned_pages = 0
        self._promise(-self._promised_pages)
        self._pool.tree.unlock(self.node)

    def _promise(self, pages: int) -> None:
        self._promised_pages += pages
        if self._reserved:
            self._pool.reserved_pages += pages
        else:
            self._pool.growth_pages += pages
        self._pool.note_use()
