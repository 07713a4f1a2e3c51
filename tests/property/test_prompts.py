"""Block ids and tokens say the same about what two prompts share."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvc.evaluation.prompts import SessionPrompts
from kvc.evaluation.tokens import Pattern
from kvc.evaluation.traces import TraceRequest, common_blocks, compress

BLOCK = 4
ids = st.integers(0, 3) | st.integers(0, 2**64 - 1)
chains = st.lists(ids, max_size=12)


def ids_of(packed: bytes) -> array[int]:
    tokens = array("I")
    tokens.frombytes(packed)
    return tokens


def common_tokens(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(ids_of(one), ids_of(other), strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)) // 4)


def request(name: str, chain: list[int], tail: int, output: int = 1) -> TraceRequest:
    """A prompt of the chain's blocks and `tail` tokens without an id; at least one token."""
    return TraceRequest(name, "s", 0, 0.0, max(1, BLOCK * len(chain) + tail), output, compress(chain))


@given(chains, chains, chains, st.integers(0, BLOCK - 1), st.integers(0, BLOCK - 1))
def test_equal_block_prefixes_are_equal_token_prefixes(
    shared: list[int], one: list[int], other: list[int], tail: int, other_tail: int
) -> None:
    """In whole blocks, exactly: no token is shared by accident, none that should be is not."""
    first = SessionPrompts(BLOCK, "trace").prompt(request("a", shared + one, tail))
    second = SessionPrompts(BLOCK).prompt(request("b", shared + other, other_tail))
    assert common_tokens(first, second) // BLOCK == common_blocks(compress(shared + one), compress(shared + other))


@given(st.integers(2, 40), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_blocks_differ_in_their_first_two_tokens_iff_their_ids_differ(width: int, one: int, other: int) -> None:
    pattern = Pattern(width, "block")
    assert (pattern.tokens(one)[:8] == pattern.tokens(other)[:8]) == (one == other)


class Branches:
    """Chained ids: a block's id names everything before it, as in a real trace."""

    def __init__(self) -> None:
        self.names: dict[tuple[int, ...], int] = {}

    def chain(self, path: list[int]) -> list[int]:
        return [self.names.setdefault(tuple(path[: k + 1]), len(self.names) + 100) for k in range(len(path))]


turns = st.tuples(
    st.integers(0, 40),  # blocks of the previous prompt that are kept; more than there are: all
    st.lists(st.integers(0, 2), max_size=6),  # what follows
    st.integers(0, BLOCK - 1),  # tail
    st.integers(0, 9),  # reply of the engine
)


@given(st.lists(turns, min_size=2, max_size=12))
def test_a_session_shares_with_its_past_what_its_ids_say(steps: list[tuple[int, list[int], int, int]]) -> None:
    """Whatever was appended, rewritten or gone back to, with replies in between: equal ids at the front <=> equal tokens there.

    And an append keeps all of the previous prompt and its reply.
    """
    branches = Branches()
    session = SessionPrompts(BLOCK)
    sent: list[tuple[TraceRequest, bytes]] = []
    path: list[int] = []
    reply = b""
    for number, (kept, fresh, tail, reply_tokens) in enumerate(steps):
        path = path[:kept] + fresh
        turn = request(f"r{number}", branches.chain(path), tail if path else max(1, tail))
        prompt = session.prompt(turn, reply)
        assert len(prompt) == 4 * turn.input_tokens
        for earlier, earlier_prompt in sent:
            assert common_tokens(earlier_prompt, prompt) // BLOCK == common_blocks(earlier.blocks, turn.blocks)
        if sent:
            assert common_tokens(sent[-1][1] + reply, prompt) >= session.kept_tokens
        sent.append((turn, prompt))
        reply = array("I", range(5_000_000 + 100 * number, 5_000_000 + 100 * number + reply_tokens)).tobytes()
