"""The chains of all live sessions as one compressed tree of blocks.

Sessions that share a prefix share its nodes, so a block costs 8 bytes however many sessions own it, the number of live sessions that
own a block (R14) is the owner count of its node, and the longest known prefix of any prompt is one walk. A session that appends
extends its own leaf: O(append). Chained hashes make "same prefix" one comparison: equal hashes at a depth mean equal prefixes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvc.core.blocks import HASH_BYTES, common_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE_BYTES = 400
"""What one node costs beside its hashes, as measured by `python -m bench.memory`."""
SESSION_BYTES = 160
"""What the entry of one session costs."""


class _Node:
    """A run of blocks. `owners` = sessions whose chain passes or ends here."""

    __slots__ = ("blocks", "children", "end", "owners", "parent")

    def __init__(self, blocks: array[int], parent: _Node | None, end: int) -> None:
        self.blocks = blocks
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.owners = 0
        self.end = end


class Forest:
    """Chains by session, least recently updated first out when `max_bytes` is exceeded. Every method but the readers mutates."""

    def __init__(self, max_bytes: int = 512 * 1024 * 1024) -> None:
        """Starts empty.

        Args:
            max_bytes: cap on hashes and nodes; the newest session always stays.
        """
        self.max_bytes = max_bytes
        self._root = _Node(array("Q"), None, 0)
        self._leaf: dict[str, _Node] = {}
        self._blocks = 0
        self._nodes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes held: 8 a distinct block, NODE_BYTES a node, SESSION_BYTES a session."""
        return self._blocks * HASH_BYTES + self._nodes * NODE_BYTES + len(self._leaf) * SESSION_BYTES

    def update(self, session_id: str, chain: array[int]) -> None:
        """Makes `chain` the session's chain. O(append) when it extends the old one, O(chain) after a rewrite."""
        leaf = self._leaf.pop(session_id, None)
        if leaf is not None and (leaf.end > len(chain) or (leaf.end > 0 and chain[leaf.end - 1] != leaf.blocks[-1])):
            self._release(leaf)
            leaf = None
        if leaf is None:
            leaf = self._root
            leaf.owners += 1
        self._leaf[session_id] = self._descend(leaf, chain)
        while self.held_bytes > self.max_bytes and len(self._leaf) > 1:
            self.remove(next(iter(self._leaf)))

    def remove(self, session_id: str) -> None:
        """Forgets a session; an unknown one is fine."""
        leaf = self._leaf.pop(session_id, None)
        if leaf is not None:
            self._release(leaf)

    def chain(self, session_id: str) -> array[int] | None:
        """A copy of the session's chain; None when it is not known (any more)."""
        node: _Node | None = self._leaf.get(session_id)
        if node is None:
            return None
        runs: list[array[int]] = []
        while node is not None:
            runs.append(node.blocks)
            node = node.parent
        whole = array("Q")
        for run in reversed(runs):
            whole.extend(run)
        return whole

    def blocks(self, session_id: str) -> int:
        """Length of the session's chain; 0 when it is not known (any more)."""
        leaf = self._leaf.get(session_id)
        return leaf.end if leaf is not None else 0

    def shared_blocks(self, session_id: str, more_than: int) -> int:
        """Leading blocks of the session's chain that more than `more_than` live sessions own (R14)."""
        node: _Node | None = self._leaf.get(session_id)
        while node is not None and node.owners <= more_than:
            node = node.parent
        return node.end if node is not None else 0

    def known_blocks(self, chain: array[int]) -> int:
        """Length of the longest prefix of `chain` that any session owns."""
        return self.shared_prefix(chain, 0)

    def shared_prefix(self, chain: array[int], more_than: int) -> int:
        """Length of the longest prefix of any chain that more than `more_than` live sessions own."""
        node, depth = self._root, 0
        while depth < len(chain) and (child := node.children.get(chain[depth])) is not None and child.owners > more_than:
            common = common_blocks(child.blocks, chain[depth : depth + len(child.blocks)])
            depth += common
            if common < len(child.blocks):
                break
            node = child
        return depth

    def sessions(self) -> Iterator[str]:
        """Sessions held, least recently updated first."""
        return iter(self._leaf)

    def __len__(self) -> int:
        """Sessions held."""
        return len(self._leaf)

    def __contains__(self, session_id: object) -> bool:
        """True when the session's chain is held."""
        return session_id in self._leaf

    def check_integrity(self) -> None:
        """Verifies owner counts, depths and totals against a full walk. For tests; O(everything).

        Raises:
            AssertionError: an invariant does not hold.
        """
        ends: dict[int, int] = {}
        for leaf in self._leaf.values():
            ends[id(leaf)] = ends.get(id(leaf), 0) + 1
        blocks = nodes = 0
        for node in self._walk():
            owners = ends.get(id(node), 0) + sum(child.owners for child in node.children.values())
            assert node.owners == owners, f"owners {node.owners}, counted {owners}"
            assert all(child.parent is node and child.blocks[0] == key for key, child in node.children.items())
            assert all(child.end == node.end + len(child.blocks) for child in node.children.values())
            if node is not self._root:
                assert node.owners > 0
                assert node.blocks
                nodes += 1
            blocks += len(node.blocks)
        assert (blocks, nodes) == (self._blocks, self._nodes), f"{blocks}, {nodes} counted as {self._blocks}, {self._nodes}"

    def _walk(self) -> Iterator[_Node]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _descend(self, node: _Node, chain: array[int]) -> _Node:
        """Walks or grows from `node`, which the session already owns, to the end of `chain`."""
        while node.end < len(chain):
            child = node.children.get(chain[node.end])
            if child is None:
                return self._grow(node, chain[node.end :])
            common = common_blocks(child.blocks, chain[node.end : node.end + len(child.blocks)])
            if common < len(child.blocks):
                child = self._split(child, common)
            child.owners += 1
            node = child
        return node

    def _grow(self, node: _Node, run: array[int]) -> _Node:
        self._blocks += len(run)
        if node is not self._root and node.owners == 1 and not node.children:
            node.blocks.extend(run)
            node.end += len(run)
            return node
        child = _Node(run, node, node.end + len(run))
        child.owners = 1
        node.children[run[0]] = child
        self._nodes += 1
        return child

    def _split(self, node: _Node, at: int) -> _Node:
        """Cuts a node after `at` blocks; returns the new upper part. The lower part keeps its identity, so leaves stay valid."""
        parent = node.parent
        assert parent is not None, "the root has no blocks to split"
        upper = _Node(node.blocks[:at], parent, parent.end + at)
        upper.owners = node.owners
        node.blocks = node.blocks[at:]
        node.parent = upper
        upper.children[node.blocks[0]] = node
        parent.children[upper.blocks[0]] = upper
        self._nodes += 1
        return upper

    def _release(self, leaf: _Node) -> None:
        """Takes one owner off the path above and including `leaf`; prunes what nobody owns, joins what no longer branches."""
        node: _Node | None = leaf
        while node is not None:
            node.owners -= 1
            parent = node.parent
            if parent is not None and node.owners == 0:
                del parent.children[node.blocks[0]]
                self._blocks -= len(node.blocks)
                self._nodes -= 1
            elif parent is not None:
                self._join(node)
            node = parent

    def _join(self, node: _Node) -> None:
        """Merges `node` into its only child when no session ends at it; the child keeps its identity."""
        if len(node.children) != 1:
            return
        child = next(iter(node.children.values()))
        if child.owners != node.owners or node.parent is None:
            return
        child.blocks = node.blocks + child.blocks
        child.parent = node.parent
        node.parent.children[child.blocks[0]] = child
        self._nodes -= 1
