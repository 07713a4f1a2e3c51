"""Re-blocking: blocks follow the engine's pages whatever their size, order of removal and branching (R17, BLOCK-7, BLOCK-8)."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvc.core.blocks import chain_seed, hash_chain, pack_tokens, resident_blocks
from kvc.core.reblock import ROOT, Reblocker

SEED = chain_seed("model")
Path = tuple[int, ...]
FEW = settings(max_examples=120, stateful_step_count=30, deadline=None)


@cache
def page_id(path: Path) -> int:
    """An engine's own hash of the page that ends `path`: anything but the mesh's hash."""
    return ROOT if not path else 1 + hash_chain(pack_tokens([*path, len(path)]), len(path) + 1, 7)[0] // 2


@cache
def blocks_of(path: Path, block_tokens: int) -> frozenset[int]:
    """Hashes of the full blocks of `path`."""
    return frozenset(hash_chain(pack_tokens(list(path)), block_tokens, SEED))


class Pages:
    """The oracle: which token paths have all their pages, as plain sets."""

    def __init__(self, page_tokens: int, block_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.block_tokens = block_tokens
        self.resident: set[Path] = set()

    def store(self, path: Path) -> None:
        for end in range(self.page_tokens, len(path) + 1, self.page_tokens):
            self.resident.add(path[:end])

    def remove(self, path: Path) -> None:
        if path:
            self.resident = {page for page in self.resident if page[: len(path)] != path}

    def blocks(self) -> set[int]:
        return {block for path in self.resident for block in blocks_of(path, self.block_tokens)}


class ReblockMachine(RuleBasedStateMachine):
    """Stores and removals of random branches of a two-letter language against the oracle."""

    PAGE, BLOCK = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(self.PAGE, self.BLOCK)
        self.reblocker = Reblocker(self.BLOCK, SEED)
        self.told: set[int] = set()

    @rule(bits=st.lists(st.integers(0, 1), min_size=2, max_size=12), known=st.integers(0, 6))
    def store(self, bits: list[int], known: int) -> None:
        """A run of pages under the longest resident parent of at most `known` pages."""
        path = tuple(bits[: len(bits) // self.PAGE * self.PAGE])
        start = 0
        while start < known * self.PAGE and path[: start + self.PAGE] in self.pages.resident:
            start += self.PAGE
        run = [page_id(path[:end]) for end in range(start + self.PAGE, len(path) + 1, self.PAGE)]
        added = self.reblocker.stored(run, page_id(path[:start]), pack_tokens(list(path[start:])))
        self.pages.store(path)
        assert not self.told & set(added), "reported twice as new"
        self.told |= set(added)

    @rule(bits=st.lists(st.integers(0, 1), min_size=2, max_size=12))
    def remove(self, bits: list[int]) -> None:
        """A page and its descendants go; an unknown page changes nothing."""
        path = tuple(bits[: len(bits) // self.PAGE * self.PAGE])
        gone = self.reblocker.removed([page_id(path)])
        self.pages.remove(path)
        assert set(gone) <= self.told, "removed what was never reported"
        self.told -= set(gone)

    @rule()
    def clear(self) -> None:
        """F41: the engine cleared everything."""
        self.reblocker.cleared()
        self.pages.resident.clear()
        self.told.clear()

    @invariant()
    def same_blocks(self) -> None:
        """Resident blocks, what was reported, and the oracle agree."""
        expected = self.pages.blocks()
        assert set(self.reblocker.blocks()) == expected
        assert self.told == expected
        assert len(self.reblocker) == len(expected)

    @invariant()
    def pages_exist(self) -> None:
        """Every resident block is found on a page that is resident."""
        ids = {page_id(path) for path in self.pages.resident}
        assert all(self.reblocker.page_of(block) in ids for block in self.reblocker.blocks())


class WidePages(ReblockMachine):
    """Pages wider than blocks: several blocks end in one page."""

    PAGE, BLOCK = 4, 3


class EqualPages(ReblockMachine):
    """One block a page."""

    PAGE, BLOCK = 2, 2


class SinglePages(ReblockMachine):
    """Pages of one token."""

    PAGE, BLOCK = 1, 3


TestReblock = ReblockMachine.TestCase
TestReblock.settings = FEW
TestReblockWide = WidePages.TestCase
TestReblockWide.settings = FEW
TestReblockEqual = EqualPages.TestCase
TestReblockEqual.settings = FEW
TestReblockSingle = SinglePages.TestCase
TestReblockSingle.settings = FEW


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    page=st.integers(1, 8),
    block=st.integers(1, 8),
    cut=st.integers(0, 60),
)
def test_any_page_size_gives_the_same_hashes(tokens: list[int], page: int, block: int, cut: int) -> None:
    """BLOCK-7: blocks and hashes do not depend on the engine's page size nor on how a run was split (F43)."""
    whole = tokens[: len(tokens) // page * page]
    split = min(cut, len(whole)) // page * page
    ids = list(range(1, len(whole) // page + 1))
    reblocker = Reblocker(block, SEED)
    reblocker.stored(ids[: split // page], ROOT, pack_tokens(whole[:split]))
    reblocker.stored(ids[split // page :], ids[split // page - 1] if split else ROOT, pack_tokens(whole[split:]))
    chain = hash_chain(pack_tokens(whole), block, SEED)
    assert list(reblocker.blocks()) == list(chain)
    assert resident_blocks(chain, reblocker) == len(chain)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=4, max_size=60), page=st.integers(1, 8), block=st.integers(1, 8), gone=st.integers(0, 60)
)
def test_a_removed_page_takes_its_descendants(tokens: list[int], page: int, block: int, gone: int) -> None:
    """BLOCK-8: a removed page removes its blocks and all descendants, so the set stays closed under prefixes."""
    count = len(tokens) // page
    reblocker = Reblocker(block, SEED)
    reblocker.stored(list(range(1, count + 1)), ROOT, pack_tokens(tokens[: count * page]))
    chain = hash_chain(pack_tokens(tokens[: count * page]), block, SEED)
    reblocker.removed([gone + 1])
    left = min(gone, count) * page // block
    assert list(reblocker.blocks()) == list(chain[:left])
    assert resident_blocks(chain, reblocker) == left
