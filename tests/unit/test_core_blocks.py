"""Block hashes: identity across processes, seeds, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import pytest
import xxhash

from kvc.core.blocks import PrefixDigests, chain_seed, common_blocks, hash_chain, pack_tokens, resident_blocks, unpack_hashes

PRINT_CHAIN = """
from kvc.core.blocks import chain_seed, hash_chain, pack_tokens
print(list(hash_chain(pack_tokens(list(range(100))), 24, chain_seed("m", "t", "l"))))
"""


def test_f46_hashes_do_not_depend_on_the_process() -> None:
    """F46: PYTHONHASHSEED=0 and 1 give the same block hashes."""
    chains = []
    for seed in ("0", "1"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PRINT_CHAIN], env=environ, capture_output=True, text=True, check=True)
        chains.append(done.stdout.strip())
    assert chains[0] == chains[1]
    assert chains[0] == str(list(hash_chain(pack_tokens(list(range(100))), 24, chain_seed("m", "t", "l"))))


def test_the_hash_is_chained_xxh3() -> None:
    """BLOCK-1, BLOCK-2: parent as seed, u32 little-endian ids, no hash for the partial last block."""
    tokens = list(range(60))
    seed = chain_seed("model")
    first = xxhash.xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens[:24]), seed)
    second = xxhash.xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens[24:48]), first)
    assert list(hash_chain(pack_tokens(tokens), 24, seed)) == [first, second]


def test_models_tokenizers_and_adapters_share_nothing() -> None:
    """BLOCK-2: the seed tells all three apart, and which of them a name belongs to."""
    seeds = {
        chain_seed("a"),
        chain_seed("b"),
        chain_seed("a", "t"),
        chain_seed("a", "", "t"),
        chain_seed("a", "t", "l"),
        chain_seed("", "a"),
    }
    assert len(seeds) == 6


@pytest.mark.parametrize(("ids", "error"), [([-1], OverflowError), ([2**32], OverflowError), ([1.5], TypeError), (["1"], TypeError)])
def test_bad_ids_are_refused(ids: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        pack_tokens(ids)


@pytest.mark.parametrize("size", [1, 7, 9])
def test_a_torn_chain_is_refused(size: int) -> None:
    """BLOCK-6: the message names the field."""
    with pytest.raises(ValueError, match=f"block_hashes: {size} bytes is no multiple of 8"):
        unpack_hashes(bytes(size))


def test_empty_prompts() -> None:
    empty = hash_chain(b"", 24, 1)
    assert len(empty) == 0
    assert resident_blocks(empty, {1}) == 0
    assert common_blocks(empty, array("Q", [1])) == 0


def test_f43_a_run_stored_in_two_parts_matches_as_a_whole() -> None:
    """F43: blocks 0-4 resident, 5-9 stored later: overlap 10."""
    chain = hash_chain(pack_tokens(list(range(240))), 24, chain_seed("m"))
    resident = set(chain[:5])
    assert resident_blocks(chain, resident) == 5
    resident.update(chain[5:])
    assert resident_blocks(chain, resident) == 10


def test_digests_forget_the_least_recently_used() -> None:
    """BLOCK-4: a session beyond the bound is hashed anew; the answer is the same."""
    digests = PrefixDigests(24, 1, max_sessions=1)
    tokens = pack_tokens(list(range(48)))
    first = digests.chain("a", tokens, None)
    digests.chain("b", tokens, None)
    assert len(digests) == 1
    assert digests.chain("a", tokens, first[:]) == first
    digests.forget("nobody")
