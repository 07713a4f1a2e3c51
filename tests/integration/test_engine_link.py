"""One reference engine over its link: tickets, records of sessions, residency."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.core.params import params_for
from kvc.core.reblock import Reblocker
from kvc.engine import link
from kvc.engine.link_io import CallFailed, LinkClient
from tests.support.engines import EngineUnderTest, config, numbers, paired, serving, until

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [1, 16, 24, 64]


async def test_tickets_over_the_wire(tmp_path: Path) -> None:
    """F27: admitted, used, used again, expired: each has its answer, and an expired ticket is an error before any token."""
    params = params_for("default", ticket_ttl_s=0.05)
    async with serving(config(link_path=tmp_path / "l.sock"), params) as subject:
        prompt = numbers(100)
        first = await subject.admit("s", prompt, 20)
        assert isinstance(first, link.Admitted)
        assert first.mode == "seed"
        books = await subject.pool()
        assert books["reserved_tokens"] == 128
        await subject.checked(prompt, 20, rid=first.ticket)
        again = await subject.generate(prompt, 20, rid=first.ticket)
        assert (again.status, again.kind, again.param) == (409, "ticket-used", "rid")
        second = await subject.admit("s", prompt, 20)
        assert isinstance(second, link.Admitted)
        assert second.mode == "direct"
        await until(lambda: not subject.engine.desk.tickets)
        late = await subject.generate(prompt, 20, rid=second.ticket, stream=True)
        assert (late.status, late.kind) == (409, "ticket-expired")
        third = await subject.admit("s", prompt, 20)
        assert await subject.client.call(link.Release(third.ticket)) == link.Released(released=True)
        assert await subject.client.call(link.Release(third.ticket)) == link.Released(released=False)
        assert (await subject.generate(prompt, 20, rid=third.ticket)).status == 409
        await subject.idle()


async def test_two_routers_admitting_at_once_do_not_over_commit(tmp_path: Path) -> None:
    """R8: K=6000, four concurrent admits of 3,000 tokens on two connections: one ticket, three refusals."""
    async with serving(config(kv_tokens=6000, page_tokens=1, link_path=tmp_path / "l.sock")) as subject:
        other = EngineUnderTest(subject.running, subject.http, await LinkClient.connect(tmp_path / "l.sock"))
        admits = [(subject, other)[index % 2].admit(f"s{index}", numbers(2900, 10_000 * index), 100, f"r{index}") for index in range(4)]
        answers = await asyncio.gather(*admits)
        assert sorted(type(answer).__name__ for answer in answers) == ["Admitted", "Refused", "Refused", "Refused"]
        assert {answer.reason for answer in answers if isinstance(answer, link.Refused)} == {"session-not-resident-no-capacity"}
        assert (await subject.pool())["reserved_tokens"] == 3000
        await other.client.close()


async def test_an_expiring_ticket_lets_the_queue_move(tmp_path: Path) -> None:
    async with serving(config(link_path=tmp_path / "l.sock"), params_for("default", ticket_ttl_s=0.1)) as subject:
        assert isinstance(await subject.admit("s", numbers(4000), 100), link.Admitted)
        await subject.checked(numbers(2000, 50_000), 10)
        await subject.idle()


async def test_link_calls(tmp_path: Path) -> None:
    async with serving(config(role="decode", worker_id="d", page_tokens=24, link_path=tmp_path / "l.sock")) as subject:
        welcome = subject.client.welcome
        assert (welcome.worker_id, welcome.role, welcome.page_tokens, welcome.block_tokens) == ("d", "decode", 24, 24)
        assert (welcome.capacity_tokens, welcome.engine_url) == (4800, subject.url)
        assert welcome.epoch == subject.engine.identity.epoch > 0
        await subject.checked(numbers(100), 5, session_id="a")
        await subject.checked(numbers(50, 500), 5, session_id="b")
        sessions = await subject.client.call(link.ListSessions())
        assert [(one.session_id, one.committed_tokens, one.resident_tokens) for one in sessions.sessions] == [("b", 54, 48), ("a", 104, 96)]
        assert sessions.total == 2
        assert len((await subject.client.call(link.ListSessions(limit=1))).sessions) == 1
        assert await subject.session("nobody") is None
        load = await subject.client.call(link.Load())
        assert (load.sessions, load.open_tickets, load.facts.evictable_tokens) == (2, 0, 144)
        assert 0 < load.peak_use < 0.1
        assert await subject.client.call(link.Drain(draining=True)) == link.Drained(0)
        assert (await subject.admit("c", numbers(10), 1)).reason == "draining"
        with pytest.raises(CallFailed) as caught:
            await subject.client.call(link.ListSessions(limit=-1))
        assert caught.value.field == "limit"
        with pytest.raises(CallFailed) as caught:
            await subject.admit("", numbers(10), 1)
        assert caught.value.field == "session_id"


@pytest.mark.parametrize("page", PAGES)
async def test_residency_events_rebuild_what_is_resident(tmp_path: Path, page: int) -> None:
    """R17, R18: a follower that re-blocks the events knows exactly the blocks that Admit matches; sequences have no gap."""
    async with serving(config(kv_tokens=960, page_tokens=page, link_path=tmp_path / "l.sock")) as subject:
        await subject.checked(numbers(200), 10)
        follower = await LinkClient.connect(tmp_path / "l.sock")
        stream = follower.events()
        mirror = Reblocker(24, subject.client.welcome.hash_seed)
        snapshot = await anext(stream)
        assert isinstance(snapshot, link.Snapshot)
        assert snapshot.last
        for run in snapshot.stored:
            mirror.stored(run.page_hashes, run.parent, run.token_ids)
        sequence = snapshot.sequence
        prompts = [[*numbers(120), *numbers(100, 3000 + 500 * index)] for index in range(8)]
        for prompt in prompts:
            await subject.checked(prompt, 10)
        subject.engine.publish()
        assert subject.engine.pool.evicted_pages > 0
        while sequence < subject.engine.residency.sequence:
            delta = await asyncio.wait_for(anext(stream), 5)
            assert isinstance(delta, link.Delta)
            assert delta.sequence == sequence + 1
            sequence = delta.sequence
            apply(mirror, delta)
        for prompt in [numbers(200), *prompts]:
            chain = hash_chain(pack_tokens(prompt), 24, subject.client.welcome.hash_seed)
            _, pages = subject.engine.residency.match(chain, len(prompt))
            assert pages == sum(block in mirror for block in chain) * 24 // page
        await subject.post("/flush_cache", {})
        delta = await asyncio.wait_for(anext(stream), 5)
        assert isinstance(delta, link.Delta)
        assert isinstance(delta.changes[-1], link.AllCleared)
        await follower.close()


def apply(mirror: Reblocker, delta: link.Delta) -> None:
    for change in delta.changes:
        match change:
            case link.PageStored(hashes, parent, token_ids):
                mirror.stored(hashes, parent, token_ids)
            case link.PageRemoved(hashes):
                mirror.removed(hashes)
            case _:
                mirror.cleared()


async def test_prefill_engines_keep_no_sessions(tmp_path: Path) -> None:
    async with paired(prefill={"link_path": tmp_path / "p.sock"}) as pair:
        with pytest.raises(CallFailed) as caught:
            await pair.prefill.admit("s", numbers(10), 1)
        assert caught.value.code == "FAILED_PRECONDITION"
        assert pair.prefill.client.welcome.bootstrap_port == pair.prefill.running.bootstrap_port > 0
        refused = await pair.prefill.generate(numbers(10), 1)
        assert (refused.status, refused.param) == (400, "bootstrap_room")
