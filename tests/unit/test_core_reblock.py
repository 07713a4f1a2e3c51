"""Re-blocking: runs that arrive out of order, twice, under unknown parents, or branch inside a block."""

from __future__ import annotations

import pytest

from kvc.core.blocks import chain_seed, hash_chain, pack_tokens, resident_blocks
from kvc.core.reblock import ROOT, Reblocker

SEED = chain_seed("m")


def chain_of(tokens: list[int], block_tokens: int = 3) -> list[int]:
    return list(hash_chain(pack_tokens(tokens), block_tokens, SEED))


def test_a_block_held_by_two_branches_outlives_one_of_them() -> None:
    """BLOCK-8: pages 16 wide and blocks of 24: two prompts that branch after the block's end both hold it."""
    shared, left, right = list(range(24)), [1] * 24, [2] * 24
    reblocker = Reblocker(24, SEED)
    reblocker.stored([1], ROOT, pack_tokens(shared[:16]))
    assert reblocker.stored([2, 3], 1, pack_tokens((shared + left)[16:48])) == chain_of(shared + left, 24)
    assert reblocker.stored([4, 5], 1, pack_tokens((shared + right)[16:48])) == chain_of(shared + right, 24)[1:]
    assert reblocker.removed([2]) == chain_of(shared + left, 24)[1:]
    assert list(reblocker.blocks()) == chain_of(shared + right, 24)
    assert reblocker.page_of(chain_of(shared, 24)[0]) == 4
    assert set(reblocker.removed([4])) == set(chain_of(shared + right, 24))
    assert len(reblocker) == 0


def test_three_holders_go_one_by_one() -> None:
    """BLOCK-8: whichever holder goes first, the block stays until the last has gone."""
    for order in ([1, 2, 3], [3, 1, 2], [2, 3, 1]):
        reblocker = Reblocker(3, SEED)
        for page in (1, 2, 3):
            reblocker.stored([page], ROOT, pack_tokens([7, 7, 7, page]))
        block = chain_of([7, 7, 7])[0]
        assert reblocker.removed([order[0]]) == []
        assert reblocker.removed([order[1]]) == []
        assert reblocker.page_of(block) == order[2]
        assert reblocker.removed([order[2]]) == [block]


def test_an_unknown_parent_adds_nothing() -> None:
    """BLOCK-7: a run without its beginning cannot be hashed."""
    reblocker = Reblocker(3, SEED)
    assert reblocker.stored([2], 1, pack_tokens([1, 2, 3])) == []
    assert reblocker.stored([], ROOT, b"") == []
    assert len(reblocker) == 0


def test_f43_known_pages_are_passed_over() -> None:
    """F43: pages 0-4 known, 0-9 reported again: only the new blocks are new, and all ten match."""
    tokens = list(range(30))
    reblocker = Reblocker(3, SEED)
    reblocker.stored([1, 2, 3, 4, 5], ROOT, pack_tokens(tokens[:15]))
    assert reblocker.stored(list(range(1, 11)), ROOT, pack_tokens(tokens)) == chain_of(tokens)[5:]
    assert resident_blocks(hash_chain(pack_tokens(tokens), 3, SEED), reblocker) == 10


def test_f41_cleared_leaves_nothing() -> None:
    """F41."""
    reblocker = Reblocker(3, SEED)
    reblocker.stored([1], ROOT, pack_tokens([1, 2, 3]))
    reblocker.cleared()
    assert list(reblocker.blocks()) == []
    assert reblocker.stored([2], 1, pack_tokens([1, 2, 3])) == []


def test_removing_what_is_not_there_is_fine() -> None:
    reblocker = Reblocker(3, SEED)
    assert reblocker.removed([5, ROOT]) == []
    reblocker.stored([1, 2], ROOT, pack_tokens([1, 2, 3, 4, 5, 6]))
    assert set(reblocker.removed([1, 2])) == set(chain_of([1, 2, 3, 4, 5, 6]))
    with pytest.raises(KeyError):
        reblocker.page_of(chain_of([1, 2, 3])[0])
