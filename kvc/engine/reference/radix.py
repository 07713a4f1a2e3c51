"""The radix tree of the reference engine: which KV pages are on the device, shared by every prompt that begins with them.

An edge is a run of whole pages. A node holds the packed tokens of its run, and for each page a hash that names the prefix up to it
and the stored KV value (kvc.engine.kvvalue). Locks count the users of a path and close it towards the root: a locked page is
protected, every other page is evictable. Eviction takes the least recently used leaf and cuts pages off its tail, as many as are
short and no more.

The tree tells what became resident and what went (`changes`), in order, for residency events.
"""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING

import xxhash

from kvc.core.blocks import TOKEN_BYTES, resident_blocks
from kvc.engine.kvvalue import PRIME
from kvc.engine.reference.node import ROOT_HASH, Cleared, Node, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvc.engine.reference.node import Change


class RadixTree:
    """Resident pages. Single-threaded. Methods mutate unless they say otherwise."""

    def __init__(self, page_tokens: int, seed: int) -> None:
        """Starts empty.

        Args:
            page_tokens: tokens a page.
            seed: start of the page hash chain; engine hashes differ from the mesh's block hashes.
        """
        self.page_tokens = page_tokens
        self.changes: list[Change] = []
        self.protected_pages = 0
        self.evictable_pages = 0
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._seed = seed
        self._root = Node(None, 0, bytearray(), array("Q"), array("Q"))
        self._node_of: dict[int, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self._ticks = 0
        self._offers = 0

    @property
    def total_pages(self) -> int:
        """Resident pages. Does not mutate."""
        return self.protected_pages + self.evictable_pages

    def match(self, tokens: bytes, limit_pages: int) -> tuple[Node, int]:
        """Longest resident prefix of a packed prompt. Does not mutate: neither recency nor structure.

        Returns:
            The node in which the prefix ends, and its length in pages, at most `limit_pages`.
        """
        node, pages = self._root, 0
        while pages < limit_pages:
            at = pages * self._page_bytes
            child = node.children.get(tokens[at : at + self._page_bytes])
            if child is None:
                break
            common = self._common_pages(child.key, tokens[at : min(at + len(child.key), limit_pages * self._page_bytes)])
            node, pages = child, pages + common
            if pages < child.end:
                break
        return node, pages

    def locate(self, page_hash: int, pages: int) -> Node:
        """The node that holds page number `pages - 1` of the prefix named by a resident page at or after it. Does not mutate.

        Raises:
            KeyError: the page is not resident.
        """
        node = self._node_of[page_hash]
        while node.start >= pages and node.parent is not None:
            node = node.parent
        return node

    def locked_pages(self, node: Node, pages: int) -> int:
        """Pages of a prefix that are protected now. Does not mutate."""
        while node.parent is not None and not node.locks:
            node = node.parent
        return min(node.end, pages)

    def lock(self, node: Node, pages: int) -> Node:
        """Protects the first `pages` pages of a path that ends in `node`, and marks them as used now.

        Returns:
            The node to unlock later; the root, for 0 pages.
        """
        if pages <= node.start:
            if pages == 0:
                return self._root
            raise ValueError(f"page {pages} is not in the node of pages {node.start} to {node.end}")
        last = self._split(node, pages - node.start) if pages < node.end else node
        self._ticks += 1
        step: Node | None = last
        while step is not None and step.parent is not None:
            if step.locks == 0:
                self.evictable_pages -= len(step.hashes)
                self.protected_pages += len(step.hashes)
            step.locks += 1
            step.used = self._ticks
            step = step.parent
        return last

    def unlock(self, node: Node) -> None:
        """Gives back one lock of `lock`."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.locks -= 1
            if step.locks == 0:
                self.protected_pages -= len(step.hashes)
                self.evictable_pages += len(step.hashes)
                self._offer(step)
            step = step.parent

    def insert(self, tokens: bytes, pages: int, first: int, values: array[int]) -> tuple[Node, int]:
        """Makes the first `pages` pages of a packed prompt resident; the caller has made room.

        Args:
            tokens: packed prompt, at least `pages` long.
            pages: pages to be resident afterwards.
            first: pages of the prefix whose values are not in `values` because they are resident (the caller's locked prefix).
            values: stored values of the pages from `first` on.

        Returns:
            The node in which the last page is, and how many pages are new.
        """
        node, matched = self.match(tokens, pages)
        assert matched >= first, "the caller's prefix is locked, so it cannot have gone"
        if matched < node.end and matched < pages:
            node = self._split(node, matched - node.start)
        self._touch(node)
        if matched == pages:
            return node, 0
        run = tokens[matched * self._page_bytes : pages * self._page_bytes]
        hashes = self._chain(node.last_hash, run)
        child = Node(node, matched, bytearray(run), hashes, values[matched - first : pages - first])
        assert len(child.values) == len(hashes), "one value a page"
        child.used = self._ticks
        node.children[run[: self._page_bytes]] = child
        self._node_of.update(dict.fromkeys(hashes, child))
        self.evictable_pages += len(hashes)
        self.changes.append(Stored(node.last_hash, hashes[:], run))
        self._offer(child)
        return child, len(hashes)

    def evict(self, pages: int) -> int:
        """Frees pages, least recently used leaf first, from its tail.

        Returns:
            Pages freed: `pages`, or fewer when nothing evictable is left.
        """
        freed = 0
        while freed < pages and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if not self._is_evictable_leaf(node):
                continue
            if node.used != used:
                self._offer(node)
                continue
            count = min(pages - freed, len(node.hashes))
            self._cut(node, count)
            freed += count
        return freed

    def clear(self) -> int:
        """Forgets everything; nothing may be locked.

        Returns:
            Pages freed.
        """
        assert not self.protected_pages, "locked pages are in use"
        freed, self.evictable_pages = self.evictable_pages, 0
        self._root.children.clear()
        self._node_of.clear()
        self._leaves.clear()
        self.changes.append(Cleared())
        return freed

    def state(self, node: Node, pages: int, start: int) -> int:
        """KV state at the end of a prefix, read from the stored value of each of its pages. Does not mutate.

        Args:
            node: where the prefix ends.
            pages: its length.
            start: state of the empty context.
        """
        total = start + sum(node.values[: pages - node.start])
        step = node.parent
        while step is not None:
            total += sum(step.values)
            step = step.parent
        return total % PRIME

    def resident_prefix(self, hashes: array[int]) -> int:
        """Leading pages of a chain of page hashes that are resident. Does not mutate."""
        return resident_blocks(hashes, self._node_of)  # pages are closed under prefixes, as blocks are

    def path_hashes(self, node: Node, pages: int) -> array[int]:
        """Page hashes of a prefix that ends in `node`. Does not mutate."""
        runs: list[array[int]] = [node.hashes[: pages - node.start]]
        step = node.parent
        while step is not None:
            runs.append(step.hashes)
            step = step.parent
        whole = array("Q")
        for run in reversed(runs):
            whole.extend(run)
        return whole

    def path_values(self, node: Node, first: int, last: int) -> array[int]:
        """Stored values of the pages from `first` to `last` (exclusive) of a prefix that ends in `node`. Does not mutate."""
        runs: list[array[int]] = []
        step: Node | None = node
        while step is not None and step.end > first:
            runs.append(step.values[max(0, first - step.start) : last - step.start])
            step = step.parent
        whole = array("Q")
        for run in reversed(runs):
            whole.extend(run)
        return whole

    def nodes(self) -> Iterator[Node]:
        """Every run, parents before children. Does not mutate."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def parent_hash(self, node: Node) -> int:
        """Hash of the page before a run. Does not mutate."""
        return node.parent.last_hash if node.parent is not None else ROOT_HASH

    def corrupt(self, page_hash: int) -> None:
        """Changes the stored value of one resident page, as a stray write would: for tests of what a client then sees.

        Raises:
            KeyError: the page is not resident.
        """
        node = self._node_of[page_hash]
        index = node.hashes.index(page_hash)
        node.values[index] = (node.values[index] + 1) % PRIME

    def check_integrity(self) -> None:
        """Recomputes everything that is kept incrementally. Does not mutate.

        Raises:
            AssertionError: the tree contradicts itself.
        """
        protected = evictable = 0
        seen: dict[int, Node] = {}
        for node in self.nodes():
            parent = node.parent
            assert parent is not None, "only the root has no parent"
            assert node.hashes, "no run is empty"
            assert len(node.values) == len(node.hashes) == len(node.key) // self._page_bytes, "one hash and one value a page"
            assert node.start == parent.end, "runs are contiguous"
            assert node.locks >= sum(child.locks for child in node.children.values()), "locks are closed towards the root"
            assert node.hashes == self._chain(parent.last_hash, bytes(node.key)), "hashes are chained"
            assert parent.children[bytes(node.key[: self._page_bytes])] is node, "children are found by their first page"
            seen.update(dict.fromkeys(node.hashes, node))
            if node.locks:
                protected += len(node.hashes)
            else:
                evictable += len(node.hashes)
            assert node.queued or not self._is_evictable_leaf(node), "every evictable leaf is known"
        assert (protected, evictable) == (self.protected_pages, self.evictable_pages), "counters"
        assert seen == self._node_of, "the index of pages"

    def _common_pages(self, key: bytearray, tokens: bytes) -> int:
        """Whole pages that two runs share at their beginning."""
        size = min(len(key), len(tokens)) // self._page_bytes
        if tokens[: size * self._page_bytes] == key[: size * self._page_bytes]:
            return size
        low, high = 1, size  # children are found by their first page, so that one is equal
        while low < high - 1:
            middle = (low + high) // 2
            if tokens[low * self._page_bytes : middle * self._page_bytes] == key[low * self._page_bytes : middle * self._page_bytes]:
                low = middle
            else:
                high = middle
        return low

    def _chain(self, parent: int, run: bytes) -> array[int]:
        digest, step = xxhash.xxh3_64_intdigest, self._page_bytes
        hashes = array("Q")
        append = hashes.append
        parent = parent or self._seed
        for at in range(0, len(run), step):
            parent = digest(run[at : at + step], parent) or 1
            append(parent)
        return hashes

    def _split(self, node: Node, pages: int) -> Node:
        """Cuts a run in two. The head becomes a new node; `node` stays the tail, so that references to it stay right."""
        parent = node.parent
        assert parent is not None
        assert 0 < pages < len(node.hashes)
        size = pages * self._page_bytes
        head = Node(parent, node.start, node.key[:size], node.hashes[:pages], node.values[:pages])
        head.locks, head.used = node.locks, node.used
        parent.children[bytes(head.key[: self._page_bytes])] = head
        del node.key[:size], node.hashes[:pages], node.values[:pages]
        node.parent, node.start = head, head.end
        head.children[bytes(node.key[: self._page_bytes])] = node
        self._node_of.update(dict.fromkeys(head.hashes, head))
        return head

    def _touch(self, node: Node) -> None:
        self._ticks += 1
        step: Node | None = node
        while step is not None:
            step.used = self._ticks
            step = step.parent

    def _is_evictable_leaf(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Makes a leaf a candidate of eviction."""
        if not node.queued and self._is_evictable_leaf(node):
            node.queued = True
            self._offers += 1
            heapq.heappush(self._leaves, (node.used, self._offers, node))

    def _cut(self, node: Node, pages: int) -> None:
        """Removes the last pages of an evictable leaf, and the leaf with its last page."""
        gone = node.hashes[-pages:]
        for page_hash in gone:
            del self._node_of[page_hash]
        self.changes.append(Removed(gone))
        self.evictable_pages -= pages
        if pages < len(node.hashes):
            del node.key[-pages * self._page_bytes :], node.hashes[-pages:], node.values[-pages:]
            self._offer(node)
            return
        parent = node.parent
        assert parent is not None
        del parent.children[bytes(node.key[: self._page_bytes])]
        node.parent = None
        self._offer(parent)
