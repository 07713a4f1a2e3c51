"""Tickets and facts by hand: what Admit promises is there when the request arrives, and only then is it used."""

from __future__ import annotations

from typing import Any

import pytest

from kvc.engine import kvvalue, link
from kvc.engine.reference.faults import TicketError
from kvc.errors import InvalidField
from tests.support.engine_desk import Desk
from tests.support.engines import numbers


def test_four_admits_for_half_the_pool_give_one_ticket_and_three_refusals() -> None:
    """R8: K=6000, four concurrent admits of 3,000 tokens by as many routers; free again after the ticket's life."""
    desk = Desk()
    desk.admitted("s0", numbers(2900), 100)
    for index in range(1, 4):
        refusal = desk.refused(f"s{index}", numbers(2900, 10_000 * index), 100)
        assert refusal.reason == "session-not-resident-no-capacity"
        assert refusal.retry_after_s > 0
        assert not refusal.terminal
    desk.wall.advance(5.0)
    desk.admitted("s1", numbers(2900, 10_000), 100)
    assert desk.used == 3000


def test_without_hashes_the_sessions_record_tells_what_is_there() -> None:
    """A router without a tokenizer tells lengths only: the record counts, as far as the prompt is not new and the KV is still there."""
    desk = Desk(block_tokens=8)
    history = numbers(2400)
    first = desk.run(desk.arrive("plain", history, 1, "s"))
    turn = [*history, *first.output, *numbers(99, 50_000)]
    told = {"block_hashes": b"", "known_session": True}
    answer = desk.admitted("s", turn, 100, new_tokens=100, **told)
    assert (answer.mode, answer.append_tokens, answer.facts.matched_tokens) == ("direct", 100, 2400)
    second = desk.run(desk.arrive(answer.ticket, turn, 100))
    assert second.cached_tokens == 2400
    rewritten = desk.admitted("s", numbers(2500), 0, new_tokens=1600, **told)
    assert rewritten.facts.matched_tokens == 900
    desk.engine.desk.release(rewritten.ticket)
    longer = desk.admitted("s", numbers(2500), 0, new_tokens=0, **told)
    assert longer.facts.matched_tokens == 2499, "one token at least is always prefilled"
    desk.engine.desk.release(longer.ticket)
    assert desk.admitted("t", numbers(100), 0, new_tokens=0, **told).facts.matched_tokens == 0


def test_three_of_five_large_sessions_in_flight_the_fourth_is_refused_with_a_reason() -> None:
    """F67: K=100k, five 30k sessions in flight: three fit, the others are refused; idle, all five are admitted in turn."""
    desk = Desk(kv_tokens=100_000, page_tokens=16)
    open_ = [desk.admitted(f"s{index}", numbers(29_000, 40_000 * index), 900) for index in range(3)]
    for index in (3, 4):
        assert desk.refused(f"s{index}", numbers(29_000, 40_000 * index), 900).reason == "session-not-resident-no-capacity"
    for index, answer in enumerate(open_):
        desk.run(desk.arrive(answer.ticket, numbers(29_000, 40_000 * index), 900))
    for index in (3, 4):
        answer = desk.admitted(f"s{index}", numbers(29_000, 40_000 * index), 900)
        desk.run(desk.arrive(answer.ticket, numbers(29_000, 40_000 * index), 900))
    assert desk.used == 0
    assert desk.engine.pool.evicted_pages > 0


def test_direct_locks_the_match_until_the_ticket_ends() -> None:
    """R7: what a ticket matched leaves the evictable, so it cannot be promised or evicted away."""
    desk = Desk(block_tokens=8)
    history = numbers(2400)
    first = desk.run(desk.arrive("plain", history, 1, "s"))
    turn = [*history, *first.output, *numbers(99, 50_000)]
    answer = desk.admitted("s", turn, 100)
    assert (answer.mode, answer.executor, answer.append_tokens) == ("direct", "local", 100)
    assert answer.facts.matched_tokens == 2400
    assert answer.facts.evictable_tokens == 2400
    assert desk.engine.tree.protected_pages == 2400
    assert desk.engine.pool.reserved_pages == 200
    assert desk.refused("t", numbers(3200, 90_000), 0).reason == "session-not-resident-no-capacity"
    second = desk.run(desk.arrive(answer.ticket, turn, 100))
    assert second.cached_tokens == 2400
    assert second.output == kvvalue.expected_output(second.prompt, 100, second.vocab, desk.engine.salt)
    assert desk.used == 0


def test_two_tickets_on_one_prefix_count_it_once() -> None:
    desk = Desk(block_tokens=8)
    shared = numbers(4000)
    desk.run(desk.arrive("plain", shared, 1))
    one = desk.admitted("a", [*shared, *numbers(100, 50_000)], 100)
    two = desk.admitted("b", [*shared, *numbers(100, 60_000)], 100)
    assert (one.need_tokens, two.need_tokens) == (4200, 200)
    assert desk.used == 4000 + 200 + 200
    assert desk.engine.desk.release(one.ticket)
    assert desk.used == 4000 + 200
    assert desk.engine.desk.release(two.ticket)
    assert not desk.engine.desk.release(two.ticket), "a ticket is given back once"
    assert desk.used == 0


@pytest.mark.parametrize(("page", "block"), [(1, 24), (16, 24), (24, 24), (64, 24), (16, 7)])
def test_matches_are_whole_blocks_and_whole_pages(page: int, block: int) -> None:
    """R17: block hashes of the mesh find engine pages of any size; a ticket never locks a page that may differ."""
    desk = Desk(page_tokens=page, block_tokens=block)
    base = numbers(500)
    desk.run(desk.arrive("plain", base, 1))
    for length in (0, 1, 23, 24, 47, 48, 63, 64, 100, 191, 192, 333, 500):
        turn = [*base[:length], *numbers(60, 70_000)]
        answer = desk.admitted(f"s{length}", turn, 10)
        shared = min(length, 500 // page * page)
        assert answer.facts.matched_tokens == shared // block * block // page * page
        request = desk.run(desk.arrive(answer.ticket, turn, 10))
        assert request.cached_tokens >= answer.facts.matched_tokens
        assert request.output == kvvalue.expected_output(request.prompt, 10, request.vocab, desk.engine.salt)
        assert desk.used == 0


def test_a_ticket_is_used_once() -> None:
    """F27: a second request with the ticket, or one after its life, is an error before any token."""
    desk = Desk()
    ticket = desk.admitted("s", numbers(100), 10).ticket
    assert ticket.startswith(f"kvc-{desk.engine.identity.epoch:x}-")
    desk.run(desk.arrive(ticket, numbers(100), 10))
    with pytest.raises(TicketError) as caught:
        desk.arrive(ticket, numbers(100), 10)
    assert caught.value.reason == "TICKET_USED"
    late = desk.admitted("s", numbers(100), 10).ticket
    desk.wall.advance(5.0)
    for unknown in (late, "kvc-0-1"):
        with pytest.raises(TicketError) as caught:
            desk.arrive(unknown, numbers(100), 10)
        assert caught.value.reason == "TICKET_EXPIRED"
    assert desk.used == 0
    assert not desk.engine.inflight


def test_a_request_larger_than_its_ticket_is_taken_only_if_there_is_room() -> None:
    desk = Desk()
    larger = desk.admitted("s", numbers(100), 10).ticket
    assert desk.run(desk.arrive(larger, numbers(120), 30)).output
    ticket = desk.admitted("s", numbers(100, 5000), 10).ticket
    desk.admitted("t", numbers(5500, 20_000))
    with pytest.raises(TicketError) as caught:
        desk.arrive(ticket, numbers(300, 5000), 200, "s")
    assert caught.value.reason == "TICKET_EXCEEDED"
    assert desk.used == 5500, "the refused request's ticket is gone, too"
    desk.admitted("s", numbers(100, 5000), 10)


def test_a_ticket_is_not_another_sessions() -> None:
    desk = Desk()
    ticket = desk.admitted("s", numbers(100), 10).ticket
    with pytest.raises(TicketError) as caught:
        desk.arrive(ticket, numbers(100), 10, "t")
    assert (caught.value.reason, caught.value.field) == ("TICKET_MISMATCH", "session_id")
    assert desk.arrive(ticket, numbers(100), 10).session_id == "s"


def test_same_attempt_same_answer() -> None:
    """R16: a hedge or a repeat of an Admit neither reserves twice nor changes its answer."""
    desk = Desk()
    first = desk.admitted("s", numbers(2900), 100, request_id="x")
    assert desk.admit("s", numbers(2900), 100, request_id="x") == first
    assert desk.used == 3000
    refused = desk.refused("t", numbers(5000), 100, request_id="y")
    desk.engine.desk.release(first.ticket)
    assert desk.admit("t", numbers(5000), 100, request_id="y") == refused
    desk.admitted("t", numbers(5000), 100, request_id="y", attempt_number=1)


def test_a_later_attempt_replaces_the_ticket_of_a_lost_answer() -> None:
    desk = Desk()
    lost = desk.admitted("s", numbers(2900), 100, request_id="x")
    again = desk.admitted("s", numbers(2900), 100, request_id="x", attempt_number=1)
    assert desk.used == 3000
    assert list(desk.engine.desk.tickets) == [again.ticket] != [lost.ticket]


def test_one_turn_of_a_session_at_a_time() -> None:
    """R21, F69: busy by a ticket, by a request in flight, and free again after every kind of end."""
    desk = Desk()

    def busy() -> bool:
        answer = desk.admit("s", numbers(50), 5)
        if isinstance(answer, link.Admitted):
            desk.engine.desk.release(answer.ticket)
            return False
        return answer.reason == "session-busy"

    ticket = desk.admitted("s", numbers(100), 10).ticket
    assert busy()
    assert not isinstance(desk.admit("s2", numbers(50), 5), link.Refused), "other sessions are not"
    request = desk.arrive(ticket, numbers(100), 10)
    assert busy()
    desk.engine.end(request, aborted="test")
    desk.engine.forget(request)
    assert not busy()
    desk.admitted("s", numbers(100), 10)
    desk.wall.advance(5.0)
    assert not busy()
    desk.run(desk.arrive("plain", numbers(100), 10, "s"))
    assert not busy()


def test_drain_stops_new_turns_only() -> None:
    desk = Desk()
    ticket = desk.admitted("s", numbers(100), 10).ticket
    desk.engine.desk.draining = True
    assert desk.refused("t", numbers(10)).reason == "draining"
    assert desk.run(desk.arrive(ticket, numbers(100), 10)).output


def test_terminal_refusal_of_what_can_never_fit() -> None:
    """F10, F19."""
    desk = Desk()
    for ids, reserve in ((numbers(5701), 0), (numbers(5000), 701)):
        refusal = desk.refused("s", ids, reserve)
        assert (refusal.reason, refusal.terminal) == ("exceeds-capacity", True)
    desk.admitted("s", numbers(5000), 700)


def test_slots_bound_tickets() -> None:
    desk = Desk(max_running_requests=2)
    for index in range(2):
        desk.admitted(f"s{index}", numbers(10, 100 * index))
    assert desk.refused("s2", numbers(10, 200)).reason == "session-not-resident-no-capacity"


def test_paper_capacity_rule_never_overcommits_by_output() -> None:
    """The paper's rule counts no output; the engine refuses what it cannot hold in spite of it."""
    desk = Desk("paper")
    desk.admitted("s", numbers(3000), 2700)
    assert isinstance(desk.admit("t", numbers(100, 9000), 500), link.Refused)
    assert desk.used == 5700


def test_transfers_are_bounded_by_the_seed_budget() -> None:
    """R15: tickets whose KV comes from a prefill worker count until the KV is here."""
    desk = Desk(preset="h100-rdma", kv_tokens=100_000)
    fast = link.Offer(0.0, 1e6, 1e6)
    answers = [desk.admit(f"s{index}", numbers(15_000, 20_000 * index), offer=fast) for index in range(5)]
    assert [getattr(answer, "executor", "") for answer in answers[:4]] == ["prefill"] * 4
    assert getattr(answers[4], "reason", "") == "seed-budget"
    assert desk.engine.desk.facts().pending_transfers == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("request_id", "x" * 257),
        ("session_id", ""),
        ("session_id", "ä" * 129),
        ("attempt_number", -1),
        ("turn_index", -1),
        ("turn_index", 2**40),
        ("input_tokens", 0),
        ("input_tokens", -5),
        ("input_tokens", 2**31),
        ("output_reserve_tokens", -1),
        ("new_tokens", -1),
        ("block_hashes", b"1234567"),
        ("block_hashes", b"12345678" * 101),
        ("offer.backlog_s", link.Offer(float("nan"), 1.0, 1.0)),
        ("offer.prefill_tokens_per_s", link.Offer(0.0, 0.0, 1.0)),
        ("offer.transfer_tokens_per_s", link.Offer(0.0, 1.0, float("inf"))),
        ("offer.matched_tokens", link.Offer(0.0, 1.0, 1.0, -1)),
    ],
)
def test_malformed_admits_name_the_field(field: str, value: Any) -> None:
    """F76: and reserve nothing."""
    desk = Desk()
    with pytest.raises(InvalidField) as caught:
        desk.admit("s", numbers(100), **{field.partition(".")[0]: value})
    assert caught.value.field == field
    assert desk.used == 0
