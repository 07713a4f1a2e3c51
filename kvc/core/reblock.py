"""From an engine's pages to the mesh's blocks (R17).

Engines report KV in their own pages (1, 16, 24, 64 tokens ...) under their own hashes; the mesh thinks in blocks of `block_tokens`
tokens. A block is resident when every page that holds one of its tokens is. Removing a page removes the blocks that end in it and
all descendants, so the set of resident blocks is always closed under prefixes. Two pages that part in their middle may both end the
same block (24-token blocks in 64-token pages): the block stays until the last of them is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from kvc.core.blocks import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = 0


@dataclass(slots=True)
class _Page:
    """A resident page. `chain` is the hash of the last full block at its end, `tail` the packed tokens after that block."""

    parent: int
    chain: int
    tail: bytes
    blocks: tuple[int, ...]
    children: set[int] = field(default_factory=set)


class Reblocker:
    """Resident blocks of one worker, fed by page events in order. Not thread-safe; every method but the readers mutates."""

    def __init__(self, block_tokens: int, seed: int) -> None:
        """Starts empty.

        Args:
            block_tokens: tokens a block.
            seed: chain seed of the worker's model (kvc.core.blocks.chain_seed).
        """
        self._step = block_tokens * TOKEN_BYTES
        self._seed = seed
        self._pages: dict[int, _Page] = {ROOT: _Page(ROOT, seed, b"", ())}
        self._page_of: dict[int, int] = {}
        self._also_in: dict[int, list[int]] = {}

    def stored(self, page_hashes: Sequence[int], parent: int, token_ids: bytes) -> list[int]:
        """A run of pages became resident.

        Args:
            page_hashes: the engine's hashes, parent first.
            parent: the engine's hash of the page before the run, 0 at the root.
            token_ids: packed tokens of the whole run; every page has the same number.

        Returns:
            Blocks that became resident, parents first. Pages already known, and runs whose parent is unknown, add nothing.
        """
        if not page_hashes or parent not in self._pages:
            return []
        width = len(token_ids) // len(page_hashes)
        added: list[int] = []
        for index, page_hash in enumerate(page_hashes):
            if page_hash not in self._pages:
                added += self._add(page_hash, parent, token_ids[index * width : (index + 1) * width])
            parent = page_hash
        return added

    def removed(self, page_hashes: Sequence[int]) -> list[int]:
        """Pages are gone, their descendants with them; unknown pages are ignored.

        Returns:
            Blocks that are no longer resident.
        """
        gone: list[int] = []
        stack = [page for page in page_hashes if page != ROOT]
        while stack:
            page_hash = stack.pop()
            page = self._pages.pop(page_hash, None)
            if page is None:
                continue
            parent = self._pages.get(page.parent)
            if parent is not None:
                parent.children.discard(page_hash)
            stack.extend(page.children)
            gone += [block for block in page.blocks if self._leave(block, page_hash)]
        return gone

    def cleared(self) -> None:
        """Everything is gone."""
        self._pages = {ROOT: _Page(ROOT, self._seed, b"", ())}
        self._page_of = {}
        self._also_in = {}

    def page_of(self, block: int) -> int:
        """The engine's hash of the page that holds the last token of a resident block.

        Raises:
            KeyError: the block is not resident.
        """
        return self._page_of[block]

    def blocks(self) -> Iterator[int]:
        """Resident blocks, parents before children."""
        return iter(self._page_of)

    def __contains__(self, block: object) -> bool:
        """True when the block is resident."""
        return block in self._page_of

    def __len__(self) -> int:
        """Number of resident blocks."""
        return len(self._page_of)

    def _add(self, page_hash: int, parent: int, tokens: bytes) -> list[int]:
        before = self._pages[parent]
        pending = before.tail + tokens
        chain = before.chain
        blocks: list[int] = []
        start = 0
        while len(pending) - start >= self._step:
            chain = xxhash.xxh3_64_intdigest(pending[start : start + self._step], chain)
            blocks.append(chain)
            start += self._step
        self._pages[page_hash] = _Page(parent, chain, pending[start:], tuple(blocks))
        before.children.add(page_hash)
        added: list[int] = []
        for block in blocks:
            if block in self._page_of:
                self._also_in.setdefault(block, []).append(page_hash)
            else:
                self._page_of[block] = page_hash
                added.append(block)
        return added

    def _leave(self, block: int, page_hash: int) -> bool:
        """Forgets that a block ends in a page; True when no other page holds it."""
        others = self._also_in.get(block)
        if others is None:
            del self._page_of[block]
            return True
        if self._page_of[block] == page_hash:
            self._page_of[block] = others.pop()
        else:
            others.remove(page_hash)
        if not others:
            del self._also_in[block]
        return False
