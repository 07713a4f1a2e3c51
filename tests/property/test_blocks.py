"""Block hashes: the incremental cache equals hashing anew, and bisection equals sets (BLOCK-1 to BLOCK-6)."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from kvc.core.blocks import (
    PrefixDigests,
    chain_seed,
    common_blocks,
    extend_chain,
    hash_chain,
    pack_hashes,
    pack_tokens,
    resident_blocks,
    unpack_hashes,
)

SEED = chain_seed("model")
# A tiny vocabulary makes shared prefixes common.
PROMPTS = st.lists(st.integers(0, 1), max_size=40)
WIDTHS = st.integers(1, 7)


def oracle_prefixes(tokens: list[int], width: int) -> list[tuple[int, ...]]:
    """The prefix that each full block names."""
    return [tuple(tokens[: end * width]) for end in range(1, len(tokens) // width + 1)]


@given(one=PROMPTS, other=PROMPTS, width=WIDTHS)
def test_a_hash_names_the_whole_prefix(one: list[int], other: list[int], width: int) -> None:
    """BLOCK-2: two hashes are equal exactly when everything up to the end of the block is."""
    chain_one = hash_chain(pack_tokens(one), width, SEED)
    chain_other = hash_chain(pack_tokens(other), width, SEED)
    prefixes_one, prefixes_other = oracle_prefixes(one, width), oracle_prefixes(other, width)
    assert len(chain_one) == len(prefixes_one)
    for left, left_prefix in zip(chain_one, prefixes_one, strict=True):
        for right, right_prefix in zip(chain_other, prefixes_other, strict=True):
            assert (left == right) == (left_prefix == right_prefix)
    shared = sum(left == right for left, right in zip(prefixes_one, prefixes_other, strict=False))
    assert common_blocks(chain_one, chain_other) == shared


@given(tokens=PROMPTS, width=WIDTHS, cut=st.integers(0, 40))
def test_extending_equals_hashing_anew(tokens: list[int], width: int, cut: int) -> None:
    """BLOCK-3: a chain extended by the append equals the chain of the whole prompt."""
    packed = pack_tokens(tokens)
    chain = hash_chain(pack_tokens(tokens[:cut]), width, SEED)
    extend_chain(chain, packed, width, SEED)
    assert chain == hash_chain(packed, width, SEED)


SESSIONS = st.sampled_from(["session-1", "session-12", "s"])


@settings(max_examples=400)
@given(
    turns=st.lists(st.tuples(SESSIONS, PROMPTS, st.sampled_from(["append", "rewrite"]), st.sampled_from(["kept", "lost"])), max_size=12),
    width=WIDTHS,
)
def test_recognised_appends_never_change_a_chain(turns: list[tuple[str, list[int], str, str]], width: int) -> None:
    """BLOCK-4: appended, rewritten, forgotten or unknown: the chain is what hashing the whole prompt gives; memory is bounded."""
    digests = PrefixDigests(width, SEED, max_sessions=2)
    prompts: dict[str, list[int]] = {}
    chains: dict[str, array[int]] = {}
    for session, tokens, how, memory in turns:
        prompt = prompts.get(session, []) + tokens if how == "append" else tokens
        prompts[session] = prompt
        previous = chains[session][:] if session in chains and memory == "kept" else None
        chains[session] = digests.chain(session, pack_tokens(prompt), previous)
        assert chains[session] == hash_chain(pack_tokens(prompt), width, SEED)
        assert len(digests) <= 2
    for session in prompts:
        digests.forget(session)
    assert len(digests) == 0


@given(paths=st.lists(PROMPTS, max_size=6), prompt=PROMPTS, width=WIDTHS)
def test_bisect_equals_set_intersection(paths: list[list[int]], prompt: list[int], width: int) -> None:
    """BLOCK-5: on a residency closed under prefixes the bisected overlap equals the paper's set intersection."""
    resident = {block for path in paths for block in hash_chain(pack_tokens(path), width, SEED)}
    chain = hash_chain(pack_tokens(prompt), width, SEED)
    expected = len(resident & set(chain))
    assert resident_blocks(chain, resident) == expected
    for least in range(expected + 1):
        assert resident_blocks(chain, resident, least) == expected
    assert resident_blocks(chain, set(), len(chain)) == len(chain), "what is not to be looked at counts"


@given(hashes=st.lists(st.integers(0, 2**64 - 1)))
def test_chains_travel_unchanged(hashes: list[int]) -> None:
    """BLOCK-6: the wire form is 8 little-endian bytes a block."""
    chain = array("Q", hashes)
    packed = pack_hashes(chain)
    assert packed == b"".join(value.to_bytes(8, "little") for value in hashes)
    assert unpack_hashes(packed) == chain
