"""How turns of one reference engine wait and end: at whatever moment, everything is given back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvc.core.blocks import pack_tokens
from kvc.engine import kvvalue
from kvc.engine.reference.request import Phase, Request
from tests.support.engines import Answer, EngineUnderTest, config, numbers, serving, until

if TYPE_CHECKING:
    from pathlib import Path


async def test_queue_bound_and_its_hint() -> None:
    """F9: past the bound 503 with Retry-After, and what waits is served."""
    async with serving(config(queue_limit=1, time_scale=1.0)) as subject:
        running = asyncio.create_task(subject.generate(numbers(4000), 500))
        await until(lambda: bool(subject.engine.scheduler.prefilling or subject.engine.scheduler.running))
        waiting = asyncio.create_task(subject.generate(numbers(100, 9000), 500))
        await until(lambda: bool(subject.engine.scheduler.waiting))
        async with subject.http.post(subject.url + "/generate", json={"text": "abc"}) as response:
            refused = Answer(response.status, await response.json())
            assert (refused.status, refused.kind) == (503, "queue-full")
            assert int(response.headers["Retry-After"]) >= 1
        await subject.post("/abort_request", {"rid": "", "abort_all": True})
        assert {(await task).body["meta_info"]["finish_reason"]["type"] for task in (running, waiting)} == {"abort"}
        await subject.idle()


async def test_a_queued_request_starts_at_the_modelled_moment_the_memory_is_free() -> None:
    """Not a wall clock's rounding later, whatever the time scale, and without anybody waking the engine."""
    async with serving(config(time_scale=1000.0)) as subject:
        first = Request("first", pack_tokens(numbers(4000)), 500, kvvalue.IDS_VOCAB)
        second = Request("second", pack_tokens(numbers(3000, 9000)), 5, kvvalue.IDS_VOCAB)
        for request in (first, second):
            subject.engine.submit(request)
        await until(lambda: second.phase is Phase.DONE)
        assert second.times.arrival_s == first.times.arrival_s
        assert second.times.queue_s == pytest.approx(first.times.latency_s, abs=1e-9)
        for request in (first, second):
            subject.engine.forget(request)


MOMENTS = ["queued", "prefill", "first chunk", "decode", "stream decode", "whole reply"]


@pytest.mark.parametrize("how", ["disconnect", "abort"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_ends_at_any_moment_give_everything_back(tmp_path: Path, moment: str, how: str) -> None:
    """F5, F68, F69, F70: the pool returns to its baseline, the session's record does not move, its next turn runs at once and is right."""
    settings = config(link_path=tmp_path / "l.sock", time_scale=0.5 if moment != "whole reply" else 50.0, chunk_tokens=64)
    async with serving(settings) as subject:
        scheduler = subject.engine.scheduler
        subject.engine.clock.scale = 50.0
        first = await subject.checked(numbers(100), 20, session_id="s")
        subject.engine.clock.scale = settings.time_scale
        record = await subject.session("s")
        blocker = None
        if moment == "queued":
            blocker = asyncio.create_task(subject.generate(numbers(4000, 9000), 500, rid="blocker"))
            await until(lambda: scheduler.active == 1)
        prompt = [*numbers(100), *first, *numbers(400, 5000)]
        fields: dict[str, Any] = {"rid": "victim", "session_id": "s", "stream": moment in {"first chunk", "stream decode"}}
        turn = asyncio.create_task(send(subject, prompt, 300, fields))
        await until(lambda: "victim" in subject.engine.inflight or turn.done())
        if moment == "whole reply":
            await turn
        else:
            victim = subject.engine.inflight["victim"]
            reached = {
                "queued": lambda: victim.phase is Phase.QUEUED,
                "prefill": lambda: 0 < victim.kv_tokens - victim.cached_tokens < 300,
                "first chunk": lambda: victim.visible == 1,
                "decode": lambda: len(victim.output) > 5,
                "stream decode": lambda: victim.visible > 5,
            }[moment]
            await until(reached)
        if how == "abort":
            await subject.post("/abort_request", {"rid": "victim"})
        else:
            turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await until(lambda: "victim" not in subject.engine.inflight)
        subject.engine.pool.check()
        if moment != "whole reply":
            assert await subject.session("s") == record
        if blocker is not None:
            await subject.post("/abort_request", {"rid": "blocker"})
            await blocker
        subject.engine.clock.scale = 50.0
        await subject.idle()
        after = await subject.generate([*numbers(100), *first, 7, 8, 9], 10, session_id="s")
        assert after.body["output_ids"] == subject.expected([*numbers(100), *first, 7, 8, 9], 10)
        assert after.body["meta_info"]["cached_tokens"] == 112, "F68: the session's KV is still there"
        await subject.idle()


async def send(subject: EngineUnderTest, ids: list[int], count: int, fields: dict[str, Any]) -> bytes:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": count}, **fields}
    async with subject.http.post(subject.url + "/generate", json=body) as response:
        return await response.read()


async def test_a_turn_right_after_a_cancelled_one(tmp_path: Path) -> None:
    """F68: t0 completes, t1 is cancelled after its first chunk, t2 comes at once: length = t0 + its own append, and the engine lives."""
    async with serving(config(link_path=tmp_path / "l.sock", time_scale=2.0)) as subject:
        first = await subject.checked(numbers(100), 10, session_id="s")
        base = [*numbers(100), *first]
        body = {"input_ids": [*base, *numbers(20, 700)], "sampling_params": {"max_new_tokens": 2000}, "session_id": "s", "stream": True}
        async with subject.http.post(subject.url + "/generate", json=body) as response:
            await response.content.readuntil(b"\n\n")
        prompt = [*base, *numbers(30, 800)]
        await subject.checked(prompt, 10, session_id="s")
        record = await subject.session("s")
        assert record is not None
        assert (record.committed_tokens, record.generation, record.busy) == (len(prompt) + 9, 2, False)
        await subject.idle()


async def test_a_hundred_random_disconnects_leave_nothing() -> None:
    """F5, F58."""
    async with serving(config(time_scale=2.0, chunk_tokens=128, kv_tokens=3000)) as subject:

        async def impatient(index: int) -> None:
            try:
                async with asyncio.timeout(0.002 * (index % 40)):
                    await subject.generate(
                        numbers(50 + 13 * index % 700, 1000 * index), 50, session_id=f"s{index % 9}", stream=index % 2 == 0
                    )
            except TimeoutError:
                return

        await asyncio.gather(*(impatient(index) for index in range(100)))
        await subject.idle()
        assert not any(subject.engine.sessions.owner(f"s{index}") for index in range(9))
        await subject.checked(numbers(100), 5)


async def test_stopping_ends_what_is_in_flight() -> None:
    async with serving(config(time_scale=0.1)) as subject:
        task = asyncio.create_task(subject.generate(numbers(100), 100))
        await until(lambda: bool(subject.engine.inflight))
        await subject.engine.stop()
        answer = await task
        assert (answer.status, answer.kind) == (503, "stopping")
        assert (await subject.generate(numbers(5), 1)).kind == "stopping"
        assert (await subject.get("/health")).status == 503
