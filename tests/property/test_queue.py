"""The wait queue against a sorted list (QUEUE-1 to QUEUE-4, R28)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvc.core.queue import WaitQueue

AGEING = 100.0
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.integers(0, 12), st.integers(0, 1000), st.integers(0, 20)), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, limit=st.integers(0, 8))
def test_the_queue_is_a_bounded_list_sorted_by_aged_size(actions: list[tuple[str, int, int, int]], limit: int) -> None:
    """QUEUE-1, QUEUE-2: at most `limit` wait; the place is prefill tokens + ageing x arrival, first come first among equals."""
    queue = WaitQueue(limit, AGEING)
    oracle: dict[str, tuple[float, int]] = {}
    for order, (action, number, tokens, arrival) in enumerate(actions):
        name = f"r{number}"
        if action == "push":
            fits = name in oracle or len(oracle) < limit
            assert queue.push(name, tokens, float(arrival)) is fits
            if fits:
                oracle[name] = (tokens + AGEING * arrival, order)
        elif action == "pop":
            expected = min(oracle, key=lambda waiting: oracle[waiting], default=None)
            assert queue.pop() == expected
            if expected is not None:
                del oracle[expected]
        else:
            assert queue.remove(name) is (oracle.pop(name, None) is not None)
        assert len(queue) == len(oracle)
        assert all(waiting in queue for waiting in oracle)


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(0, 10_000), others=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 500)), max_size=40))
def test_nobody_is_overtaken_for_ever(tokens: int, others: list[tuple[int, float]]) -> None:
    """QUEUE-3: a turn of T tokens is overtaken only by turns that arrive less than T / ageing seconds after it."""
    queue = WaitQueue(1000, AGEING)
    queue.push("first", tokens, 0.0)
    for number, (size, arrival) in enumerate(others):
        queue.push(str(number), size, arrival)
    while (name := queue.pop()) not in ("first", None):
        assert name is not None
        assert others[int(name)][1] <= tokens / AGEING
    assert name == "first"
