"""The forest of session chains against a dictionary of plain lists (STATE-6, R14)."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvc.core.forest import Forest
from tests.support.builders import blocks

SESSIONS = st.sampled_from(["session-1", "session-12", "a", "b", "c", "d"])
WORDS = st.lists(st.sampled_from("xy"), max_size=8)


class ForestMachine(RuleBasedStateMachine):
    """Updates, appends and removals; the oracle keeps every chain whole."""

    def __init__(self) -> None:
        super().__init__()
        self.forest = Forest()
        self.chains: dict[str, list[int]] = {}
        self.words: dict[str, list[str]] = {}

    @rule(session=SESSIONS, words=WORDS)
    def rewrite(self, session: str, words: list[str]) -> None:
        self.words[session] = words
        self.chains[session] = list(blocks(*words))
        self.forest.update(session, blocks(*words))

    @rule(session=SESSIONS, words=WORDS)
    def append(self, session: str, words: list[str]) -> None:
        self.rewrite(session, self.words.get(session, []) + words)

    @rule(session=SESSIONS)
    def remove(self, session: str) -> None:
        self.words.pop(session, None)
        self.chains.pop(session, None)
        self.forest.remove(session)

    @rule(words=WORDS)
    def longest_known_prefix(self, words: list[str]) -> None:
        chain = blocks(*words)
        known = {block for owned in self.chains.values() for block in owned}
        assert self.forest.known_blocks(chain) == sum(block in known for block in chain)

    @invariant()
    def same_chains(self) -> None:
        assert len(self.forest) == len(self.chains)
        for session, chain in self.chains.items():
            assert session in self.forest
            assert self.forest.chain(session) == array("Q", chain)
        assert self.forest.chain("never seen") is None

    @invariant()
    def same_owners(self) -> None:
        for session, chain in self.chains.items():
            for more_than in (0, 1, 3):
                owners = [sum(block in other for other in self.chains.values()) for block in chain]
                assert self.forest.shared_blocks(session, more_than) == sum(count > more_than for count in owners)

    @invariant()
    def intact(self) -> None:
        self.forest.check_integrity()


TestForest = ForestMachine.TestCase
TestForest.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@given(updates=st.lists(st.tuples(st.integers(0, 30), WORDS), min_size=1, max_size=40), cap=st.integers(500, 4000))
def test_the_byte_cap_drops_the_least_recently_updated(updates: list[tuple[int, list[str]]], cap: int) -> None:
    """F50: whatever arrives, the forest holds at most `max_bytes` beside its newest session, and drops the oldest first."""
    forest = Forest(max_bytes=cap)
    order: dict[str, None] = {}
    for number, words in updates:
        name = f"s{number}"
        order.pop(name, None)
        order[name] = None
        forest.update(name, blocks(*words))
        assert forest.held_bytes <= cap or len(forest) == 1
        assert [session for session in order if session in forest] == list(order)[len(order) - len(forest) :]
        order = dict.fromkeys(session for session in order if session in forest)
        forest.check_integrity()


def test_sessions_without_a_full_block_are_bounded_too() -> None:
    """F50: a million sessions with a prompt shorter than a block do not escape the cap."""
    forest = Forest(max_bytes=100_000)
    for number in range(5_000):
        forest.update(f"session-{number}", array("Q"))
    assert len(forest) < 1_000
