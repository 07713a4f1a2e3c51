"""The scheduler by hand: no loop, no sockets, time by hand; what is asserted are modelled seconds and pages."""

from __future__ import annotations

from typing import Any

import pytest

from kvc.core.blocks import pack_tokens
from kvc.engine import kvvalue
from kvc.engine.reference.engine import Engine
from kvc.engine.reference.faults import ContextTooLong, QueueFull
from kvc.engine.reference.request import Bootstrap, Phase, Request
from kvc.errors import InvalidField, KvcError
from kvc.runtime.clock import ManualClock
from tests.support.engines import config, numbers


def engine(**fields: Any) -> Engine:
    return Engine(config(**({"kv_tokens": 1000, "page_tokens": 1} | fields)), wall=ManualClock())


def request(rid: str, ids: list[int], count: int, session: str = "") -> Request:
    return Request(rid, pack_tokens(ids), count, kvvalue.IDS_VOCAB, session)


def step(subject: Engine, horizon_s: float = 0.0) -> None:
    subject.scheduler.start_waiting()
    subject.scheduler.step(horizon_s)
    subject.scheduler.settle(0.0, 0.0)


def drain(subject: Engine) -> None:
    while subject.scheduler.busy or subject.scheduler.waiting:
        step(subject, 1.0)


def complete(subject: Engine, one: Request) -> Request:
    subject.submit(one)
    drain(subject)
    assert one.phase is Phase.DONE
    subject.forget(one)
    return one


def test_times_are_sums_of_modelled_costs() -> None:
    """One request: chunks of prefill, then decode steps; nothing else."""
    subject = engine(chunk_tokens=200, preset="h100-rdma")
    cost = subject.config.costs
    one = complete(subject, request("a", numbers(500), 10))
    prefill = 2 * cost.prefill_s(200) + cost.prefill_s(100)
    assert one.times.ttft_s == pytest.approx(prefill)
    assert one.times.latency_s == pytest.approx(prefill + cost.decode_s(1, 501, 9))
    assert one.times.queue_s == 0.0


@pytest.mark.parametrize("horizon_s", [0.0, 0.01, 10.0])
def test_coalesced_decode_steps_change_no_modelled_time(horizon_s: float) -> None:
    subject = engine(preset="h100-rdma")
    requests = [request("a", numbers(100), 30), request("b", numbers(200, 500), 12)]
    for one in requests:
        subject.submit(one)
    while subject.scheduler.busy:
        step(subject, horizon_s)
    cost = subject.config.costs
    together = cost.prefill_s(300) + cost.decode_s(2, 302, 11)
    assert requests[1].times.latency_s == pytest.approx(together)
    assert requests[0].times.latency_s == pytest.approx(together + cost.decode_s(1, 112, 18))


def test_decode_goes_on_beside_a_long_prefill() -> None:
    """Chunks and decode steps take turns: one token a chunk, and a new prompt does not stop those that run."""
    subject = engine(chunk_tokens=50)
    first = request("a", numbers(10), 100)
    subject.submit(first)
    step(subject)
    second = request("b", numbers(500, 100), 5)
    subject.submit(second)
    before = len(first.output)
    for _ in range(10):
        step(subject)
    assert len(first.output) == before + 10
    assert second.output
    assert second.prefill_tokens == 500


def test_one_chunk_is_shared_in_order_of_arrival() -> None:
    subject = engine(chunk_tokens=100)
    requests = [request(name, numbers(60, 1000 * index), 2) for index, name in enumerate("abc")]
    for one in requests:
        subject.submit(one)
    subject.scheduler.step(0.0)
    assert [one.kv_tokens for one in requests] == [60, 40, 0]


@pytest.mark.parametrize("page", [1, 16, 24, 64])
def test_cached_tokens_are_whole_pages_and_leave_one_to_prefill(page: int) -> None:
    subject = engine(page_tokens=page)
    complete(subject, request("a", numbers(192), 1))
    same = complete(subject, request("b", numbers(192), 1))
    assert same.cached_tokens == 191 // page * page
    longer = complete(subject, request("c", numbers(250), 1))
    assert longer.cached_tokens == 192 // page * page
    other = complete(subject, request("d", [*numbers(100), *numbers(100, 7000)], 1))
    assert other.cached_tokens == 100 // page * page
    for one in (same, longer, other):
        assert one.output == kvvalue.expected_output(one.prompt, 1, one.vocab, subject.salt)
        assert one.cached_tokens + one.prefill_tokens == one.input_tokens


def test_a_finished_turn_commits_all_but_its_last_token() -> None:
    subject = engine(page_tokens=16)
    one = complete(subject, request("a", numbers(100), 20, "s"))
    record = subject.sessions.get("s")
    assert record is not None
    assert (record.committed_tokens, record.generation) == (119, 1)
    follow = complete(subject, request("b", [*numbers(100), *one.output, 5, 6], 4, "s"))
    assert follow.cached_tokens == 112
    assert record.generation == 1
    assert subject.sessions.get("s") is not record
    assert subject.residency.delta() is not None


def test_memory_is_never_promised_beyond_rho_and_everything_completes() -> None:
    """F18: K=1000, rho=.95, ten 95-token seeds each growing 50: never above 950, and no deadlock."""
    subject = engine()
    requests = [request(f"r{index}", numbers(95, 1000 * index), 50) for index in range(10)]
    for one in requests:
        subject.submit(one)
    peak = 0
    while subject.scheduler.busy or subject.scheduler.waiting:
        step(subject)
        subject.pool.check()
        peak = max(peak, subject.pool.used_pages)
    assert [one.phase for one in requests] == [Phase.DONE] * 10
    assert 800 < peak <= 950
    for one in requests:
        assert one.output == kvvalue.expected_output(one.prompt, 50, one.vocab, subject.salt)


def test_what_can_never_fit_is_refused_at_once() -> None:
    """F10, F19: too long a prompt, or prompt and output, is a typed error on an empty engine; nothing is kept."""
    subject = engine()
    for ids, count, field in ((950, 1, "input_ids"), (900, 51, "sampling_params.max_new_tokens")):
        with pytest.raises(ContextTooLong) as caught:
            subject.submit(request("x", numbers(ids), count))
        assert caught.value.field == field
    assert not subject.inflight
    assert not subject.scheduler.waiting
    complete(subject, request("fits", numbers(900), 50))


def test_waiting_requests_start_in_order_and_a_large_one_is_not_starved() -> None:
    """R23: small requests that would fit do not overtake the first of the queue for ever."""
    subject = engine()
    running = request("running", numbers(400), 100)
    subject.submit(running)
    large = request("large", numbers(600, 2000), 10)
    small = request("small", numbers(50, 9000), 10)
    subject.submit(large)
    subject.submit(small)
    assert (large.phase, small.phase) == (Phase.QUEUED, Phase.QUEUED)
    assert subject.scheduler.set_aside_pages == 950 - 500, "room is kept for the first of the queue"
    assert subject.desk.facts().held_tokens == 950
    assert subject.scheduler.queued_tokens() == 610 + 60
    drain(subject)
    assert {one.phase for one in (running, large, small)} == {Phase.DONE}
    assert large.times.queue_s == pytest.approx(running.times.latency_s)
    assert subject.scheduler.set_aside_pages == 0


def test_queue_is_bounded() -> None:
    """F9: past the bound a typed error with a hint, and nothing of the refused request stays."""
    subject = engine(queue_limit=2)
    subject.submit(request("running", numbers(800), 100))
    for name in ("a", "b"):
        subject.submit(request(name, numbers(200, 2000), 10))
    with pytest.raises(QueueFull) as caught:
        subject.submit(request("c", numbers(10, 5000), 10, "s"))
    assert caught.value.retry_after_s > 0
    assert "c" not in subject.inflight
    assert subject.sessions.owner("s") is None


def test_slots_are_bounded() -> None:
    subject = engine(max_running_requests=3)
    requests = [request(f"r{index}", numbers(5, 100 * index), 10) for index in range(6)]
    for one in requests:
        subject.submit(one)
    assert subject.scheduler.active == 3
    drain(subject)
    assert {one.phase for one in requests} == {Phase.DONE}


def test_idle_sessions_are_evicted_block_by_block() -> None:
    """F67: five 300-token sessions on K=1000 are all served, oldest blocks go first, and only as many as are short."""
    subject = engine()
    for index in range(5):
        complete(subject, request(f"r{index}", numbers(300, 1000 * index), 1, f"s{index}"))
    assert subject.pool.evicted_pages == 5 * 300 - 1000
    resident = []
    for index in range(5):
        record = subject.sessions.get(f"s{index}")
        assert record is not None
        assert record.committed_tokens == 300, "eviction changes no record"
        resident.append(subject.tree.resident_prefix(record.pages))
    assert resident == [0, 100, 300, 300, 300], "the tail of the second oldest went, its head survives"
    again = complete(subject, request("again", numbers(300, 1000), 1, "s1"))
    assert again.cached_tokens == 100


def test_a_second_turn_of_a_session_waits_and_lets_others_pass() -> None:
    """R21."""
    subject = engine()
    first, second, other = request("1", numbers(50), 20, "s"), request("2", numbers(60), 5, "s"), request("3", numbers(10, 500), 5, "t")
    for one in (first, second, other):
        subject.submit(one)
    assert [one.phase for one in (first, second, other)] == [Phase.PREFILL, Phase.QUEUED, Phase.PREFILL]
    drain(subject)
    assert [one.phase for one in (first, second, other)] == [Phase.DONE] * 3


@pytest.mark.parametrize("moment", ["queued", "before the first chunk", "prefill", "decode", "last token, not yet shown"])
def test_ending_a_turn_anywhere_gives_everything_back(moment: str) -> None:
    """F68, F69, F70: memory back at once, record unchanged, the session's next turn runs."""
    subject = engine(chunk_tokens=50)
    complete(subject, request("t0", numbers(100), 20, "s"))
    base = subject.pool.used_pages
    blocker = None
    if moment == "queued":
        blocker = request("blocker", numbers(880, 5000), 50)
        subject.submit(blocker)
    turn = request("t1", numbers(300), 10, "s")
    subject.submit(turn)
    if moment == "prefill":
        step(subject)
    elif moment == "decode":
        while len(turn.output) < 4:
            step(subject)
    elif moment == "last token, not yet shown":
        while len(turn.output) < 10:
            subject.scheduler.step(0.0)
            if len(turn.output) < 10:
                subject.scheduler.settle(0.0, 0.0)
        assert turn.phase is Phase.ENDING
    assert turn.phase is not Phase.DONE
    subject.end(turn, aborted="test")
    subject.pool.check()
    if blocker is not None:
        subject.end(blocker, aborted="test")
    assert subject.pool.used_pages == base == 0
    record = subject.sessions.get("s")
    assert record is not None
    assert (record.committed_tokens, record.generation) == (119, 1)
    subject.scheduler.settle(0.0, 0.0)
    subject.forget(turn)
    subject.end(turn, aborted="twice")
    after = complete(subject, request("t2", numbers(130), 5, "s"))
    assert after.output == kvvalue.expected_output(after.prompt, 5, after.vocab, subject.salt)
    assert subject.sessions.get("s") != record


def test_duplicate_rid_is_refused() -> None:
    subject = engine()
    subject.submit(request("a", numbers(10), 5))
    with pytest.raises(KvcError) as caught:
        subject.submit(request("a", numbers(20), 5))
    assert (caught.value.reason, caught.value.field) == ("RID_IN_USE", "rid")
    drain(subject)


def test_roles_take_what_they_can_do() -> None:
    room = Bootstrap("127.0.0.1", 1, 1)
    for role, bootstrap in (("monolithic", room), ("prefill", None)):
        subject = engine(role=role)
        one = request("a", numbers(10), 5)
        one.bootstrap = bootstrap
        with pytest.raises(InvalidField) as caught:
            subject.submit(one)
        assert caught.value.field == "bootstrap_room"
        assert not subject.inflight


def test_concurrent_requests_with_one_prefix_share_it_in_the_end() -> None:
    """Both prefill it; the second finds the first's pages in the tree and frees its own."""
    subject = engine()
    twins = [request(name, [*numbers(200), 900 + index], 10) for index, name in enumerate("ab")]
    for one in twins:
        subject.submit(one)
    drain(subject)
    subject.pool.check()
    for one in twins:
        assert one.output == kvvalue.expected_output(one.prompt, 10, one.vocab, subject.salt)
    assert subject.tree.total_pages == 200 + 2 * 10


def test_transfers_share_the_outgoing_link_one_after_the_other() -> None:
    subject = engine(role="prefill", preset="h100-tcp")
    cost = subject.config.costs
    requests = [request(name, numbers(100, 500 * index), 1) for index, name in enumerate("ab")]
    for one in requests:
        subject.scheduler.submit(one)
    step(subject)
    assert [one.phase for one in requests] == [Phase.SEND] * 2
    arrived: list[str] = []
    for one in requests:
        subject.scheduler.send(one, 100, lambda rid=one.rid: arrived.append(rid))  # type: ignore[misc]  # a bound default
    assert requests[0].times.transfer_s == pytest.approx(cost.transfer_s(100) + cost.transfer_latency_s)
    assert requests[1].times.transfer_s == pytest.approx(2 * cost.transfer_s(100) + cost.transfer_latency_s)
    due = subject.scheduler.next_timer_s()
    assert due is not None
    subject.clock.advance(due - subject.clock.now_s())
    subject.scheduler.fire_timers()
    assert arrived == ["a"]
    for one in requests:
        subject.scheduler.sent(one)
    assert subject.pool.used_pages == 0
    assert subject.tree.evictable_pages == 200, "a prefill engine keeps what it prefilled"
