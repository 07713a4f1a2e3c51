"""When a question leaves for its agent: at once when nothing is under way, else with the others, and never later than the hold."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from services.router.adapters.admit_stream import MAX_BATCH, MAX_BATCH_BYTES, Outbox

HOLD_MS = 2
moments = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=60)


class Sent(NamedTuple):
    """A batch that left: when, when it is answered, and when what is in it was asked."""

    at_ms: int
    answered_ms: int
    asked_ms: list[int]


def play(questions: list[tuple[int, int]]) -> list[Sent]:
    """Questions asked at given moments, to an agent that answers a batch after as long as its first question says."""
    outbox, sent = Outbox(HOLD_MS), list[Sent]()
    waiting: list[tuple[int, int]] = []
    order = itertools.count()
    events = [(at_ms, next(order), "ask", takes_ms) for at_ms, takes_ms in questions]
    heapq.heapify(events)
    while events:
        now_ms, _, kind, takes_ms = heapq.heappop(events)
        if kind == "ask":
            outbox.room(1).admits.add()
            waiting.append((now_ms, takes_ms))
        elif kind == "answer":
            outbox.answered()
        if events and events[0][0] == now_ms:
            continue  # one turn of the loop
        if waiting and outbox.due_s(now_ms) <= now_ms:
            batch = outbox.take(now_ms)
            assert len(batch.admits) == len(waiting)
            assert not len(outbox)
            answered_ms = now_ms + waiting[0][1]
            sent.append(Sent(now_ms, answered_ms, [at_ms for at_ms, _ in waiting]))
            waiting = []
            heapq.heappush(events, (answered_ms, next(order), "answer", 0))
        elif waiting:
            heapq.heappush(events, (int(outbox.due_s(now_ms)), next(order), "timer", 0))
    assert not waiting
    return sent


@given(moments)
@example([(0, 12), (1, 0), (2, 0), (3, 0)])
def test_each_question_leaves_once_in_order_and_is_never_held_for_longer_than_the_hold(questions: list[tuple[int, int]]) -> None:
    sent = play(questions)
    assert [at_ms for batch in sent for at_ms in batch.asked_ms] == sorted(at_ms for at_ms, _ in questions)
    for batch in sent:
        assert all(0 <= batch.at_ms - at_ms <= HOLD_MS for at_ms in batch.asked_ms)


@given(moments)
def test_a_question_that_finds_nothing_under_way_leaves_at_once(questions: list[tuple[int, int]]) -> None:
    """Alone it is never slower than without batches."""
    sent = play(questions)
    for index, batch in enumerate(sent):
        before = sent[index - 1] if index else None
        if before is None or before.answered_ms < batch.asked_ms[0]:
            assert batch.at_ms == batch.asked_ms[0]


@given(moments)
def test_a_batch_leaves_before_the_one_before_is_answered_only_when_that_takes_longer_than_the_hold(
    questions: list[tuple[int, int]],
) -> None:
    sent = play(questions)
    for before, batch in itertools.pairwise(sent):
        answers = [one.answered_ms for one in sent if one.at_ms <= before.at_ms <= one.answered_ms]
        assert batch.at_ms >= min(*answers, before.at_ms + HOLD_MS)


@given(st.lists(st.integers(1, 2 * MAX_BATCH_BYTES), max_size=40), st.integers(0, 2 * MAX_BATCH))
def test_no_batch_is_too_long_or_too_large(sizes: list[int], small: int) -> None:
    """A question that is larger than a batch may be travels alone."""
    outbox = Outbox(HOLD_MS)
    asked = sizes + [1] * small
    for number, size in enumerate(asked):
        outbox.room(size).admits.add().attempt.attempt_number = number
    numbers = []
    while outbox:
        batch = [admit.attempt.attempt_number for admit in outbox.take(0.0).admits]
        numbers += batch
        assert 0 < len(batch) <= MAX_BATCH
        assert len(batch) == 1 or sum(asked[number] for number in batch) <= MAX_BATCH_BYTES
    assert numbers == list(range(len(asked)))
