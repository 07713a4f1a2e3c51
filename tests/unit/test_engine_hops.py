"""Requests that ask for their own admission: the rid, and an engine by hand that decides on them as they arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvc.core.types import Attempt
from kvc.engine import kvvalue, link
from kvc.engine.hop import MAX_ATTEMPT_NUMBER, MAX_EPOCH, hop_rid, parse_hop_rid
from kvc.engine.reference.faults import HopRefused, TicketError
from kvc.engine.reference.request import Bootstrap, Request
from kvc.errors import InvalidField, KvcError
from tests.support.engine_desk import Desk
from tests.support.engines import numbers

IDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=200)


@given(epoch=st.integers(0, MAX_EPOCH), number=st.integers(0, MAX_ATTEMPT_NUMBER), request_id=IDS)
@example(epoch=MAX_EPOCH, number=MAX_ATTEMPT_NUMBER, request_id="-1-2-" * 40)
def test_a_rid_carries_epoch_and_attempt(epoch: int, number: int, request_id: str) -> None:
    rid = hop_rid(epoch, Attempt(request_id, number))
    assert parse_hop_rid(rid) == (epoch, Attempt(request_id, number))
    assert len(rid.encode()) <= 256, "engines take rids of this length"


@given(st.one_of(st.text(), st.from_regex(r"kvc-hop-[0-9+_ \n-]{0,30}"), st.from_regex(r"\Akvc-hop-[0-9]+-[0-9]+-.*")))
def test_one_attempt_has_one_rid(text: str) -> None:
    """Whatever is understood is exactly what would have been written."""
    found = parse_hop_rid(text)
    assert found is None or hop_rid(*found) == text


WRONG = ["kvc-hop-", "kvc-hop-1-2", "kvc-hop-1-2-", "kvc-hop-01-2-r", "kvc-hop-1-02-r", "kvc-hop--1-2-r", "kvc-hop-1--2-r", "kvc-hop-a-2-r"]
WRONG += [
    "kvc-hop-1-2-ä",
    "kvc-hop-1-2-r\n",
    "kvc-hop-\u0661-2-r",
    f"kvc-hop-{2**64}-2-r",
    f"kvc-hop-1-{2**32}-r",
    f"kvc-hop-1-2-{'r' * 201}",
]


@pytest.mark.parametrize("rid", [*WRONG, "kvc-1f-2", "xkvc-hop-1-2-r", ""])
def test_what_is_no_hop(rid: str) -> None:
    assert parse_hop_rid(rid) is None


@pytest.mark.parametrize(
    ("epoch", "attempt"), [(-1, ("r", 0)), (2**64, ("r", 0)), (1, ("r", -1)), (1, ("r", 2**32)), (1, ("", 0)), (1, ("é", 0))]
)
def test_what_no_rid_carries(epoch: int, attempt: tuple[str, int]) -> None:
    with pytest.raises(ValueError, match="hop"):
        hop_rid(epoch, Attempt(*attempt))


class HotDesk(Desk):
    """An engine by hand that holds one session's KV."""

    def __init__(self, profile: Any = "default", **fields: Any) -> None:
        super().__init__(profile, **({"block_tokens": 8} | fields))
        first = self.run(self.arrive("plain", numbers(2400), 10, "s"))
        self.history = numbers(2400) + first.output

    def rid(self, number: int = 0, request_id: str = "a-b-1", epoch: int = 0) -> str:
        return hop_rid(epoch or self.engine.identity.epoch, Attempt(request_id, number))

    def hop(self, ids: list[int], count: int = 100, session: str = "s", **fields: Any) -> Request:
        return self.arrive(self.rid(**fields), ids, count, session)

    def turned_down(self, ids: list[int], count: int = 100, session: str = "s", **fields: Any) -> dict[str, Any]:
        """The answer to a hop that is not taken; nothing of it is left."""
        pool, desk = self.engine.pool, self.engine.desk
        before = self.used, pool.leases, dict(self.engine.inflight), dict(desk.tickets), self.engine.sessions.owner(session)
        with pytest.raises(HopRefused) as caught:
            self.hop(ids, count, session, **fields)
        assert (self.used, pool.leases, self.engine.inflight, desk.tickets, self.engine.sessions.owner(session)) == before
        assert caught.value.http_status == 409
        assert caught.value.retry_after_s == caught.value.answer["retry_after_s"]
        return caught.value.answer


def test_a_direct_turn_is_taken_as_with_its_ticket() -> None:
    """R7: the same memory, the same match, the same reply, the same record as after an Admit; the session is busy meanwhile."""
    ends = []
    for probe_first in (True, False):
        desk = HotDesk()
        turn = [*desk.history, *numbers(90, 50_000)]
        if probe_first:
            ticket = desk.admitted("s", turn, 100, known_session=True)
            assert ticket.mode == "direct"
            request = desk.arrive(ticket.ticket, turn, 100, "s")
        else:
            request = desk.hop(turn)
        assert desk.refused("s", turn).reason == "session-busy"
        held = desk.used
        desk.run(request)
        assert desk.used == desk.engine.pool.leases == 0
        assert request.output == kvvalue.expected_output(request.prompt, 100, request.vocab, desk.engine.salt)
        record = desk.engine.sessions.get("s")
        assert record is not None
        ends.append((held, request.cached_tokens, request.output, request.times.latency_s, record))
        assert desk.engine.desk.hops["direct"] == (not probe_first)
    assert ends[0] == ends[1]


def test_a_rid_is_taken_once() -> None:
    """F27: while it runs and afterwards; one that was turned down took nothing, and may ask again."""
    desk = HotDesk()
    turn = [*desk.history, *numbers(90, 50_000)]
    desk.engine.desk.draining = True
    assert desk.turned_down(turn)["reason"] == "draining"
    desk.engine.desk.draining = False
    request = desk.hop(turn)
    for _ in range(2):
        with pytest.raises(TicketError) as caught:
            desk.hop(turn)
        assert (caught.value.reason, caught.value.field) == ("TICKET_USED", "rid")
        if desk.engine.inflight:
            assert desk.engine.inflight[request.rid] is request
            desk.run(request)
    assert desk.engine.desk.hops["ticket-used"] == 2
    assert not desk.engine.desk.release(desk.rid())


def test_an_aborted_hop_gives_everything_back() -> None:
    """F68, F70: and the record of the session stays as it was."""
    desk = HotDesk()
    record = desk.engine.sessions.get("s")
    request = desk.hop([*desk.history, *numbers(90, 50_000)])
    assert desk.engine.abort(request.rid) == 1
    desk.engine.forget(request)
    assert desk.used == desk.engine.pool.leases == 0
    assert desk.engine.sessions.get("s") is record
    assert desk.engine.sessions.owner("s") is None


def test_large_append_and_lost_kv_are_not_direct() -> None:
    desk = HotDesk()
    large = desk.turned_down([*desk.history, *numbers(1001, 50_000)])
    assert (large["reason"], large["terminal"], large["retry_after_s"]) == ("not-direct", False, 0.0)
    assert large["append_tokens"] == len(desk.history) + 1001 - large["facts"]["matched_tokens"]
    assert large["epoch"] == desk.engine.identity.epoch
    assert desk.turned_down(numbers(50, 70_000))["append_tokens"] == 50
    assert desk.engine.desk.hops["not-direct"] == 2


def test_each_refusal_has_its_reason() -> None:
    desk = HotDesk()
    turn = [*desk.history, *numbers(90, 50_000)]
    assert desk.turned_down(turn, 6000) | {"facts": 0, "epoch": 0} == {
        "reason": "exceeds-capacity",
        "retry_after_s": 0.0,
        "terminal": True,
        "append_tokens": 92,
        "epoch": 0,
        "facts": 0,
    }
    ticket = desk.admitted("s", turn).ticket
    assert desk.turned_down(turn)["reason"] == "session-busy"
    desk.engine.desk.release(ticket)
    desk.admitted("t", numbers(3000, 90_000), 0)
    full = desk.turned_down(turn, 300)
    assert full["reason"] == "no-d-capacity"
    assert full["retry_after_s"] > 0
    assert desk.turned_down(numbers(3000, 70_000), session="u")["reason"] == "session-not-resident-no-capacity"
    paper = HotDesk("paper", kv_tokens=20_000)
    assert paper.turned_down([*paper.history, *numbers(1001, 50_000)])["reason"] == "real-large-append"
    assert paper.run(paper.hop([*paper.history, *numbers(1000, 50_000)])).output


def test_f40_another_life_is_refused_as_stale() -> None:
    """F40: what the router knew was about another pool; the answer tells the life it has reached."""
    desk = HotDesk()
    answer = desk.turned_down([*desk.history, *numbers(90, 50_000)], epoch=desk.engine.identity.epoch - 1)
    assert (answer["reason"], answer["terminal"]) == ("stale-epoch", False)
    assert answer["epoch"] == desk.engine.identity.epoch
    assert answer["append_tokens"] == len(desk.history) + 90


def test_a_later_attempt_ends_the_ticket_of_a_lost_answer() -> None:
    """R16: an earlier try of the same request was admitted and nobody knows; it must not make the session busy for the next."""
    desk = HotDesk()
    turn = [*desk.history, *numbers(90, 50_000)]
    lost = desk.admitted("s", turn, 100, request_id="a-b-1", attempt_number=1)
    assert desk.turned_down(turn, number=1)["reason"] == "session-busy"
    assert desk.run(desk.hop(turn, number=2)).output
    assert not desk.engine.desk.release(lost.ticket)
    assert desk.used == 0


def test_a_waiting_request_is_not_overtaken_into_its_room() -> None:
    """R23: room set aside for the first of the queue counts as held for hops, too."""
    desk = HotDesk()
    desk.admitted("t", numbers(2000, 90_000), 0)
    waiting = desk.arrive("plain-2", numbers(3800, 200_000), 1)
    assert list(desk.engine.scheduler.waiting) == [waiting]
    assert desk.turned_down([*desk.history, *numbers(90, 50_000)])["reason"] == "no-d-capacity"


@pytest.mark.parametrize("rid", WRONG)
def test_malformed_rids_are_named(rid: str) -> None:
    """F76."""
    desk = HotDesk()
    with pytest.raises(InvalidField) as caught:
        desk.arrive(rid, numbers(10), 1, "s")
    assert caught.value.field == "rid"
    assert not desk.engine.inflight


def test_what_a_hop_needs_and_must_not_have() -> None:
    desk = HotDesk(role="decode")
    bad: list[tuple[KvcError, str]] = []
    for session, bootstrap in (("", None), ("s", Bootstrap("127.0.0.1", 1, 1))):
        request = Request(desk.rid(), b"\1\0\0\0", 1, kvvalue.IDS_VOCAB, session, bootstrap)
        with pytest.raises(InvalidField) as caught:
            desk.engine.submit(request)
        bad.append((caught.value, caught.value.field))
    assert [field for _, field in bad] == ["session_id", "bootstrap_room"]
    assert not desk.engine.inflight
    assert sum(desk.engine.desk.hops.values()) == 0


def test_a_hop_beside_the_tickets_of_others() -> None:
    """Tickets on the same prefix count it once, whichever way they came."""
    desk = HotDesk()
    fork = desk.admitted("t", [*desk.history[:2400], *numbers(100, 60_000)], 100)
    assert isinstance(fork, link.Admitted)
    request = desk.hop([*desk.history, *numbers(90, 50_000)])
    assert desk.used == 2400 + 200 + 200
    desk.run(request)
    assert desk.used == 2400 + 200
