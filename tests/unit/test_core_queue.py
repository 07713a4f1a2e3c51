"""The wait queue under churn."""

from __future__ import annotations

from kvc.core.queue import WaitQueue


def test_turns_that_leave_do_not_stay_in_memory() -> None:
    """F50, QUEUE-1: ten thousand turns that come and are taken out again leave no more behind than the limit."""
    queue = WaitQueue(limit=4, ageing_tokens_per_s=1.0)
    for number in range(10_000):
        assert queue.push(f"r{number}", 10, float(number))
        if number >= 3:
            assert queue.remove(f"r{number - 3}")
    assert len(queue) == 3
    assert len(queue._heap) <= 2 * 4 + 17
    assert [queue.pop() for _ in range(4)] == ["r9997", "r9998", "r9999", None]


def test_a_turn_that_is_pushed_again_waits_once() -> None:
    """QUEUE-4: the latest place counts, wherever the old one was."""
    queue = WaitQueue(limit=4, ageing_tokens_per_s=1.0)
    queue.push("a", 100, 0.0)
    queue.push("b", 50, 0.0)
    queue.push("a", 10, 0.0)
    assert len(queue) == 2
    assert "a" in queue
    assert [queue.pop() for _ in range(3)] == ["a", "b", None]
    assert not queue.remove("a")
