"""Prefill and decode engines together: KV travels and is right, with one order of memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvc.core.params import params_for
from kvc.engine import link
from tests.support.engines import SLOW, config, numbers, paired, serving, until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("page", [1, 16, 24, 64])
async def test_seed_direct_and_reseed_are_right(page: int) -> None:
    """KV from P, an append on D over it, KV from P again (only the missing suffix travels): page sizes change nothing."""
    async with paired(page_tokens=page) as pair:
        history = numbers(300)
        first, second = await pair.generate(history, 20, session_id="s")
        assert (first.status, second.status) == (200, 200)
        assert second.body["output_ids"] == pair.decode.expected(history, 20)
        assert first.body["output_ids"] == second.body["output_ids"][:1]
        meta = second.body["meta_info"]
        assert (meta["cached_tokens"], meta["kvc_prefill_tokens"]) == (0, 300)
        history += [*second.body["output_ids"], *numbers(40, 5000)]
        history += [*await pair.decode.checked(history, 20, session_id="s"), *numbers(200, 9000)]
        _, third = await pair.generate(history, 10, session_id="s")
        assert third.body["output_ids"] == pair.decode.expected(history, 10)
        meta = third.body["meta_info"]
        resident = (300 + 20 + 40 + 20 - 1) // page * page
        assert meta["kvc_resident_tokens"] == resident
        assert meta["cached_tokens"] == 300 // page * page, "what P had cached is what nobody prefilled"
        assert meta["kvc_transfer_s"] < 0.002
        await pair.idle()


async def test_modelled_times_add_up_over_both_engines() -> None:
    """TTFT = wait and prefill on P + transfer; wall time and scale do not enter."""
    for scale in (20.0, 500.0):
        async with paired(preset="h100-tcp", time_scale=scale, kv_tokens=40_000) as pair:
            _, answer = await pair.generate(numbers(20_000), 50)
            cost, meta = pair.decode.engine.config.costs, answer.body["meta_info"]
            prefill = 2 * cost.prefill_s(8192) + cost.prefill_s(20_000 - 2 * 8192)
            transfer = cost.transfer_s(20_000) + cost.transfer_latency_s
            assert meta["kvc_transfer_s"] == pytest.approx(transfer)
            assert meta["kvc_ttft_s"] == pytest.approx(prefill + transfer)
            assert meta["kvc_latency_s"] == pytest.approx(prefill + transfer + cost.decode_s(1, 20_001, 49))
            assert meta["kvc_queue_s"] == 0.0


async def test_corrupt_kv_on_the_prefill_engine_is_visible() -> None:
    """Reused pages of P count as well: a stray write into P's cache changes D's reply."""
    async with paired() as pair:
        prompt = numbers(320)
        await pair.checked(prompt, 5)
        tree = pair.prefill.engine.tree
        tree.corrupt(next(iter(tree.nodes())).hashes[2])
        await pair.decode.post("/flush_cache", {})
        _, answer = await pair.generate([*prompt, 1, 2, 3], 5)
        assert answer.status == 200
        assert answer.body["output_ids"] != pair.decode.expected([*prompt, 1, 2, 3], 5)


async def test_two_hundred_seeds_end_to_end() -> None:
    """F16: random KV bytes, checksummed on the way and checked by every reply; caches on both sides are evicted meanwhile."""
    async with paired(kv_tokens=3000, time_scale=1000.0) as pair:
        outputs = await asyncio.gather(*(pair.checked(numbers(100 + 7 * index % 300, 997 * index), 5) for index in range(200)))
        assert len(outputs) == 200
        assert pair.prefill.engine.pool.evicted_pages > 0
        await pair.idle()


async def test_same_room_twice_at_once() -> None:
    """F8: the second pair is refused by name, the first is served, both processes live."""
    async with paired(**SLOW) as pair:
        fields = pair.fields(room=42)
        first = asyncio.create_task(pair.generate(numbers(300), 3, **fields))
        await until(lambda: bool(pair.prefill.engine.scheduler.prefilling))
        second = await pair.generate(numbers(300, 9000), 3, **fields)
        assert {(answer.status, answer.kind, answer.param) for answer in second} == {(409, "room-in-use", "bootstrap_room")}
        pair.prefill.engine.clock.scale = pair.decode.engine.clock.scale = 100.0
        assert [answer.status for answer in await first] == [200, 200]
        await pair.checked(numbers(100), 5)
        await pair.checked(numbers(120), 5, **fields)
        await pair.idle()


async def test_memory_is_acquired_on_the_decode_engine_first(tmp_path: Path) -> None:
    """R29, R23: a fallback that waits for D's memory holds none on P, does not time out there, and runs when D has room."""
    async with paired(tmp_path / "d.sock", {"bootstrap_timeout_s": 0.05}, bootstrap_timeout_s=5.0) as pair:
        ticket = await pair.decode.admit("other", numbers(4000, 90_000), 400)
        task = asyncio.create_task(pair.generate(numbers(1000), 5))
        await until(lambda: bool(pair.decode.engine.scheduler.waiting) and bool(pair.prefill.engine.bootstrap))
        await asyncio.sleep(0.15)  # three bootstrap timeouts of P: D is there, so P's half must not end
        assert pair.prefill.engine.pool.used_pages == 0
        assert not task.done()
        await pair.decode.client.call(link.Release(ticket.ticket))
        first, second = await task
        assert (first.status, second.status) == (200, 200)
        assert second.body["output_ids"] == pair.decode.expected(numbers(1000), 5)
        await pair.idle()


async def test_admitted_seed_uses_its_ticket(tmp_path: Path) -> None:
    """A seed by ticket: the same rid goes to both halves; D consumes the ticket, P does not look at it."""
    params = params_for("default", tau_append_tokens=100, executor="prefill")
    async with (
        serving(config(role="prefill")) as first,
        serving(config(role="decode", link_path=tmp_path / "d.sock"), params) as second,
    ):
        offer = link.Offer(0.0, 1e5, 1e5)
        admitted = await second.admit("s", numbers(500), 20, offer=offer)
        assert (admitted.mode, admitted.executor) == ("seed", "prefill")
        assert second.engine.desk.facts().pending_transfers == 1
        fields = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": first.running.bootstrap_port,
            "bootstrap_room": 7,
            "rid": admitted.ticket,
        }
        await asyncio.gather(first.generate(numbers(500), 20, **fields), second.checked(numbers(500), 20, **fields))
        assert second.engine.desk.facts().pending_transfers == 0
        record = await second.session("s")
        assert record is not None
        assert (record.committed_tokens, record.busy) == (519, False)
        await first.idle()
        await second.idle()
