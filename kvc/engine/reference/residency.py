"""What is resident, told in two tongues: engine pages for the engine link, mesh blocks for Admit (R17, R18).

The tree notes every change; `sync` carries the notes over to the re-blocked view and to the next delta. Sequence numbers count deltas
from the engine's start, whether or not anybody listens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc.core.blocks import resident_blocks
from kvc.core.reblock import Reblocker
from kvc.engine import link
from kvc.engine.reference.node import Removed, Stored

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from kvc.engine.reference.node import Change, Node
    from kvc.engine.reference.radix import RadixTree

SNAPSHOT_PART_BYTES = 8 * 1024 * 1024


class Residency:
    """Follows one tree. Single-threaded."""

    def __init__(self, tree: RadixTree, block_tokens: int, seed: int) -> None:
        """Starts in step with an empty tree.

        Args:
            tree: the tree.
            block_tokens: the mesh's block size.
            seed: chain seed of the model (kvc.core.blocks.chain_seed).
        """
        self.sequence = 0
        self._tree = tree
        self._blocks = Reblocker(block_tokens, seed)
        self.block_tokens = block_tokens
        self.seed = seed
        self._outbox: list[link.Change] = []

    def match(self, chain: array[int], limit_tokens: int) -> tuple[Node, int]:
        """Resident prefix of a prompt known by its block hashes, in whole pages.

        Args:
            chain: block hashes of the prompt.
            limit_tokens: tokens of the prompt that may match.

        Returns:
            The node that holds the last matched page, and the pages matched.
        """
        self.sync()
        blocks = resident_blocks(chain, self._blocks)
        pages = min(blocks * self.block_tokens, limit_tokens) // self._tree.page_tokens
        if not pages:
            return self._tree.match(b"", 0)
        return self._tree.locate(self._blocks.page_of(chain[blocks - 1]), pages), pages

    def sync(self) -> None:
        """Takes over what the tree noted. Mutates."""
        changes, self._tree.changes = self._tree.changes, []
        for change in changes:
            self._take(change)

    def delta(self) -> link.Delta | None:
        """What changed since the last call; None when nothing did. Mutates."""
        self.sync()
        if not self._outbox:
            return None
        self.sequence += 1
        changes, self._outbox = self._outbox, []
        return link.Delta(self.sequence, changes)

    def snapshot(self) -> Iterator[link.Snapshot]:
        """Everything resident, in parts of bounded size, as of the last delta. Does not mutate."""
        part: list[link.PageStored] = []
        size = 0
        for node in self._tree.nodes():
            if size >= SNAPSHOT_PART_BYTES:
                yield link.Snapshot(self.sequence, part, last=False)
                part, size = [], 0
            part.append(link.PageStored(node.hashes.tolist(), self._tree.parent_hash(node), bytes(node.key)))
            size += len(node.key) + 9 * len(node.hashes)
        yield link.Snapshot(self.sequence, part)

    def _take(self, change: Change) -> None:
        if isinstance(change, Stored):
            hashes = change.hashes.tolist()
            self._blocks.stored(hashes, change.parent, change.tokens)
            self._outbox.append(link.PageStored(hashes, change.parent, change.tokens))
        elif isinstance(change, Removed):
            hashes = change.hashes.tolist()
            self._blocks.removed(hashes)
            last = self._outbox[-1] if self._outbox else None
            if isinstance(last, link.PageRemoved):
                last.page_hashes.extend(hashes)
            else:
                self._outbox.append(link.PageRemoved(hashes))
        else:
            self._blocks.cleared()
            self._outbox.append(link.AllCleared())
