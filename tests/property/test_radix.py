"""The radix tree against an oracle that keeps every page as a tuple of all tokens before its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvc.core.blocks import pack_tokens
from kvc.engine import kvvalue
from kvc.engine.reference.node import Cleared, Node, Removed, Stored
from kvc.engine.reference.radix import RadixTree

SALT = kvvalue.salt("test")

Prefix = tuple[int, ...]


@dataclass
class SlowTree:
    """Pages by the whole prefix they end; recency and locks by page; nothing incremental."""

    page: int
    used: dict[Prefix, int] = field(default_factory=dict)
    locks: list[Prefix] = field(default_factory=list)
    ticks: int = 0

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        return [tuple(tokens[: end * self.page]) for end in range(1, len(tokens) // self.page + 1)]

    def match(self, tokens: list[int], limit: int) -> int:
        count = 0
        for prefix in self.prefixes(tokens)[:limit]:
            if prefix not in self.used:
                break
            count += 1
        return count

    def touch(self, prefixes: list[Prefix]) -> None:
        self.ticks += 1
        self.used.update(dict.fromkeys(prefixes, self.ticks))

    def protected(self) -> set[Prefix]:
        return {prefix for locked in self.locks for prefix in self.prefixes(list(locked))}

    def evict(self, count: int) -> set[Prefix]:
        gone: set[Prefix] = set()
        for _ in range(count):
            kept = self.protected()
            inner = {prefix[: -self.page] for prefix in self.used}
            leaves = [prefix for prefix in self.used if prefix not in inner and prefix not in kept]
            if not leaves:
                break
            oldest = min(leaves, key=self.used.__getitem__)
            del self.used[oldest]
            gone.add(oldest)
        return gone


tokens_of = st.lists(st.integers(0, 2), max_size=14)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), tokens_of),
        st.tuples(st.just("lock"), tokens_of),
        st.tuples(st.just("unlock"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(1, 6)),
        st.tuples(st.just("match"), tokens_of),
    ),
    max_size=25,
)


@settings(max_examples=400)
@given(page=st.integers(1, 3), steps=operations)
def test_tree_equals_the_slow_oracle(page: int, steps: list[tuple[str, object]]) -> None:
    tree, slow = RadixTree(page, seed=7), SlowTree(page)
    held: list[Node] = []
    pages_of: dict[int, Prefix] = {}
    for name, argument in steps:
        tokens = argument if isinstance(argument, list) else []
        packed = pack_tokens(tokens)
        pages = len(tokens) // page
        if name == "insert":
            values, _ = kvvalue.page_values(SALT, packed, page)
            _, new = tree.insert(packed, pages, 0, values)
            assert new == pages - slow.match(tokens, pages)
            slow.touch(slow.prefixes(tokens))
        elif name == "lock":
            node, matched = tree.match(packed, pages)
            assert matched == slow.match(tokens, pages)
            assert tree.locked_pages(node, matched) == len([p for p in slow.prefixes(tokens)[:matched] if p in slow.protected()])
            held.append(tree.lock(node, matched))
            slow.locks.append(tuple(tokens[: matched * page]))
            if matched:
                slow.touch(slow.prefixes(tokens)[:matched])
        elif name == "unlock" and held:
            index = int(str(argument)) % len(held)
            tree.unlock(held.pop(index))
            slow.locks.pop(index)
        elif name == "evict":
            gone = slow.evict(int(str(argument)))
            before = len(tree.changes)
            assert tree.evict(int(str(argument))) == len(gone)
            removed = {
                pages_of[page_hash] for change in tree.changes[before:] if isinstance(change, Removed) for page_hash in change.hashes
            }
            assert removed == gone
        else:
            before_state = (tree.protected_pages, tree.evictable_pages, len(tree.changes))
            node, matched = tree.match(packed, pages)
            assert matched == slow.match(tokens, pages)
            assert tree.state(node, matched, SALT) == kvvalue.advance(SALT, packed[: matched * page * 4]), "every page counts"
            assert before_state == (tree.protected_pages, tree.evictable_pages, len(tree.changes))
        note_pages(tree, pages_of)
        tree.check_integrity()
        assert tree.protected_pages == len(slow.protected())
        assert tree.total_pages == len(slow.used)


def note_pages(tree: RadixTree, pages_of: dict[int, Prefix]) -> None:
    """Learns which prefix every page hash names, from the events alone, as a follower of the engine does."""
    for change in tree.changes:
        if isinstance(change, Stored):
            before = pages_of.get(change.parent, ())
            tokens = array("I", change.tokens).tolist()
            for index, page_hash in enumerate(change.hashes):
                pages_of[page_hash] = (*before, *tokens[: (index + 1) * tree.page_tokens])


@given(page=st.integers(1, 4), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), shortage=st.integers(1, 60))
def test_eviction_frees_exactly_the_shortage(page: int, lengths: list[int], shortage: int) -> None:
    """Block-level eviction: as many pages as are short and no more, from the tail of the least recently used prefix."""
    tree = RadixTree(page, seed=7)
    for index, length in enumerate(lengths):
        packed = pack_tokens([index] * length * page)
        tree.insert(packed, length, 0, kvvalue.page_values(SALT, packed, page)[0])
    total = tree.total_pages
    assert tree.evict(shortage) == min(shortage, total)
    left = min(shortage, total)
    for index, length in enumerate(lengths):
        cut = min(left, length)
        left -= cut
        assert tree.match(pack_tokens([index] * length * page), length)[1] == length - cut, "the oldest goes first, its head last"


def test_clear_forgets_everything() -> None:
    tree = RadixTree(1, seed=7)
    packed = pack_tokens([1, 2, 3])
    tree.insert(packed, 3, 0, array("Q", [1, 2, 3]))
    assert tree.clear() == 3
    assert isinstance(tree.changes[-1], Cleared)
    tree.check_integrity()
    assert tree.match(packed, 3)[1] == 0
