"""docs/spec.md, Blocks: one example a line; tests/property/test_blocks.py and test_reblock.py have the rest."""

from __future__ import annotations

from array import array

from kvc.core.blocks import PrefixDigests, chain_seed, extend_chain, hash_chain, pack_hashes, pack_tokens, resident_blocks
from kvc.core.reblock import ROOT, Reblocker

SEED = chain_seed("m")
PROMPT = pack_tokens(list(range(100)))


def test_block_1() -> None:
    """BLOCK-1: "the partial last block has no hash"."""
    assert len(hash_chain(PROMPT, 24, SEED)) == 4
    assert len(hash_chain(pack_tokens(list(range(23))), 24, SEED)) == 0


def test_block_2() -> None:
    """BLOCK-2: "a hash names the whole prefix up to its block"."""
    other = pack_tokens([99, *range(1, 100)])
    assert not set(hash_chain(PROMPT, 24, SEED)) & set(hash_chain(other, 24, SEED))
    assert not set(hash_chain(PROMPT, 24, SEED)) & set(hash_chain(PROMPT, 24, chain_seed("another model")))


def test_block_3() -> None:
    """BLOCK-3: "A chain is extended by the append only"."""
    chain = hash_chain(PROMPT[: 50 * 4], 24, SEED)
    before = list(chain)
    extend_chain(chain, PROMPT, 24, SEED)
    assert list(chain[:2]) == before
    assert chain == hash_chain(PROMPT, 24, SEED)


def test_block_4() -> None:
    """BLOCK-4: "a rewritten or unknown one is hashed anew"."""
    digests = PrefixDigests(24, SEED)
    first = digests.chain("s", PROMPT, None)
    assert first == hash_chain(PROMPT, 24, SEED)
    rewritten = pack_tokens([7] * 100)
    assert digests.chain("s", rewritten, first[:]) == hash_chain(rewritten, 24, SEED)
    longer = pack_tokens([7] * 200)
    assert digests.chain("s", longer, hash_chain(rewritten, 24, SEED)) == hash_chain(longer, 24, SEED)


def test_block_5() -> None:
    """BLOCK-5: "the number of resident leading blocks is found by bisection"."""
    chain = hash_chain(PROMPT, 1, SEED)

    class Looked(set[int]):
        looks = 0

        def __contains__(self, block: object) -> bool:
            Looked.looks += 1
            return super().__contains__(block)

    assert resident_blocks(chain, Looked(chain[:77])) == 77
    assert Looked.looks <= 9, "log2(100) and both ends"


def test_block_6() -> None:
    """BLOCK-6: "On the wire a chain is 8 little-endian bytes a block"."""
    assert pack_hashes(array("Q", [1, 2**64 - 1])) == b"\x01" + bytes(7) + b"\xff" * 8


def test_block_7() -> None:
    """BLOCK-7: "A block is resident when every page with one of its tokens is"."""
    reblocker = Reblocker(24, SEED)
    chain = hash_chain(PROMPT, 24, SEED)
    assert reblocker.stored([1], ROOT, PROMPT[: 16 * 4]) == []
    assert reblocker.stored([2], 1, PROMPT[16 * 4 : 32 * 4]) == [chain[0]]
    assert reblocker.stored([3], 2, PROMPT[32 * 4 : 48 * 4]) == [chain[1]]


def test_block_8() -> None:
    """BLOCK-8: "A removed page removes its blocks, unless another resident page ends the same block, and all descendants"."""
    reblocker = Reblocker(24, SEED)
    chain = hash_chain(PROMPT, 24, SEED)
    reblocker.stored([1, 2, 3, 4], ROOT, PROMPT[: 96 * 4])
    assert set(reblocker.removed([2])) == set(chain[1:4])
    assert list(reblocker.blocks()) == [chain[0]]
