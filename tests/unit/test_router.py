"""The router over fake agents and engines: what it decides, whom it asks again, and what it keeps account of."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvc.core import events as ev
from kvc.core.blocks import hash_chain, pack_tokens
from kvc.core.dispatch import Refused
from kvc.core.types import Attempt, Executor, Facts, Mode, Reason, WorkerRef
from kvc.errors import Exhausted, TooLarge
from services.router.ports import EngineChunk, Result, Started
from tests.support.fake_ports import kinds, no, ok, refusal, world
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from tests.support.fake_ports import Steps, World


async def test_a_turn() -> None:
    async with world() as made:
        d0 = made.join("d0")
        outputs = await made.run(made.request(tokens=48))
        assert kinds(outputs) == "SccccR"
        assert isinstance(outputs[0], Started)
        decision = outputs[0].decision
        assert (decision.mode, decision.decode, decision.prefill) == (Mode.SEED, d0, None)
        result = outputs[-1]
        assert isinstance(result, Result)
        assert result.decision == decision
        assert (result.last.finish_reason, result.last.cached_tokens) == ("length", 24)
        assert 0 <= result.decide_s <= result.ttft_s <= result.latency_s
        assert 0 <= result.mesh_s <= result.decide_s
        session = made.router.sigma.session("s")
        assert session is not None
        assert (session.pin, session.turns, session.context_tokens) == (d0, 1, 51)
        await made.check()


async def test_direct_on_the_worker_that_has_the_session() -> None:
    async with world() as made:
        made.join("d0")
        d1 = made.join("d1")
        prompt = pack_tokens(list(range(240)))
        made.router.apply(ev.ResidencyReset(d1, tuple(hash_chain(prompt, 24, 0))))
        made.admission.answer = lambda ask: made.admission.yes(ask, Mode.DIRECT)
        result = await made.result(made.request(tokens=240))
        assert (result.decision.mode, result.decision.decode, result.decision.overlap_blocks) == (Mode.DIRECT, d1, 10)
        assert made.router.sigma.workers["d1"].modes == {Mode.DIRECT: 1}
        await made.check()


async def test_a_seed_on_prefill_and_decode() -> None:
    async with world() as made:
        made.join("d0")
        p0 = made.prefill()
        made.admission.executor = Executor.PREFILL
        result = await made.result()
        assert result.decision.prefill == p0
        assert (len(made.engines.calls), len(made.engines.prefill_calls)) == (1, 1)
        await made.check()


def in_steps(made: World, prefill: str, decode: str) -> Steps:
    """A seed on two workers whose halves wait for these steps."""
    made.join("d0")
    made.prefill()
    made.admission.executor = Executor.PREFILL
    steps = made.engines.steps
    made.engines.prefills["http://p0"] = [prefill]
    made.engines.streams["http://d0"] = [EngineChunk("a"), decode, *ok()]
    steps.hold(prefill, decode)
    return steps


async def test_inflight_of_both_workers() -> None:
    """F57, F59: counted from the decision on, on prefill until its half is done."""
    async with world() as made:
        steps = in_steps(made, "half way", "rest")
        task = asyncio.create_task(made.run())
        await steps.reached("rest")
        workers = made.router.sigma.workers
        assert (workers["d0"].inflight, workers["p0"].inflight) == (1, 1)
        steps.go("half way")
        await until(lambda: workers["p0"].inflight == 0)
        assert workers["d0"].inflight == 1
        steps.go("rest")
        await task
        await made.check()


async def test_fallback_when_the_asked_worker_refuses_and_another_has_room() -> None:
    async with world() as made:
        made.join("d0")
        made.join("d1")
        made.admission.answer = lambda _ask: no(Reason.NO_D_CAPACITY)
        result = await made.result()
        decision = result.decision
        assert decision.mode is Mode.FALLBACK
        assert [probe.reason for probe in decision.probes] == [Reason.NO_D_CAPACITY]
        assert decision.decode != decision.probes[0].worker
        assert decision.admission is None
        await made.check()


async def test_a_refused_turn_waits_and_is_admitted_when_room_comes() -> None:
    """R28."""
    async with world() as made:
        d0 = made.join("d0")
        full = [True]
        made.admission.answer = lambda _ask: no(Reason.NO_D_CAPACITY) if full[0] else None
        task = asyncio.create_task(made.result())
        await until(lambda: len(made.router.room) == 1)
        full[0] = False
        made.router.apply(ev.LoadReported(d0, Facts(92_104)))
        result = await asyncio.wait_for(task, 10)
        assert result.decision.mode is Mode.SEED
        assert result.decision.queued_s > 0
        await made.check()


async def test_room_for_many_wakes_all_of_them() -> None:
    """R28: one report that there is room; each turn that gets its share wakes the next one, before any of them ends."""
    async with world() as made:
        d0 = made.join("d0")
        full = Refused(no(Reason.NO_D_CAPACITY).rejection, Facts(92_104, held_tokens=92_104))
        made.admission.answer = lambda _ask: full
        tasks = [asyncio.create_task(made.result(made.request(f"s{number}"))) for number in range(10)]
        await until(lambda: len(made.router.room) == 10)
        made.admission.answer = lambda _ask: None
        made.engines.steps.hold("connect")
        made.router.apply(ev.LoadReported(d0, Facts(92_104)))
        await until(lambda: made.engines.live == 10)
        made.engines.steps.go("connect")
        await asyncio.gather(*tasks)
        await made.check()


async def test_the_end_of_a_prefill_lets_a_waiting_seed_try_again() -> None:
    """R15: the seed budget is free as soon as the KV has moved, long before the turn ends."""
    async with world() as made:
        steps = in_steps(made, "transfer", "decode")
        first = asyncio.create_task(made.result(made.request("one")))
        await steps.reached("decode")
        made.admission.answer = lambda _ask: no(Reason.SEED_BUDGET) if made.engines.live_prefills else None
        made.router.apply(ev.LoadReported(WorkerRef("d0", 1), Facts(92_104, held_tokens=92_104)))
        second = asyncio.create_task(made.result(made.request("two")))
        await until(lambda: len(made.router.room) == 1)
        steps.go("transfer")
        await until(lambda: len(made.admission.asked) >= 3 and not len(made.router.room))
        assert not first.done()
        steps.go("decode")
        await asyncio.gather(first, second)
        await made.check()


async def test_too_large_for_every_worker() -> None:
    """F10, F19: answered at once, nothing is started."""
    async with world() as made:
        made.join("d0", capacity_tokens=1000)
        made.admission.answer = lambda _ask: no(Reason.EXCEEDS_CAPACITY, terminal=True)
        error = await refusal(TooLarge, made.run(made.request(tokens=2000)))
        assert (error.reason, error.field) == ("EXCEEDS_CAPACITY", "prompt")
        assert made.engines.calls == []
        await made.check()


async def test_the_queue_is_full() -> None:
    async with world(params={"queue_limit": 1}) as made:
        made.join("d0")
        made.admission.answer = lambda _ask: no(Reason.NO_D_CAPACITY)
        made.router.apply(ev.LoadReported(WorkerRef("d0", 1), Facts(92_104, held_tokens=92_104)))
        task = asyncio.create_task(made.run(made.request("one")))
        await until(lambda: len(made.router.room) == 1)
        error = await refusal(Exhausted, made.run(made.request("two")))
        assert error.reason == "QUEUE_FULL"
        assert error.retry_after_s >= 1.0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.check()


async def test_new_prompts_go_to_the_idle_worker() -> None:
    """F54: a worker with a tiny tree and 200 turns in flight is no place for cache misses."""
    async with world() as made:
        made.join("busy")
        made.join("idle")
        for number in range(200):
            attempt, ref = Attempt(f"other-{number}", 0), WorkerRef("busy", 1)
            made.router.sigma.apply(ev.Started(attempt, attempt.request_id, ref, Mode.SEED, Executor.LOCAL, tokens=100))
        for number in range(20):
            result = await made.result(made.request(f"new-{number}"))
            assert result.decision.decode.worker_id == "idle"


async def test_sessions_with_similar_names_are_different() -> None:
    """F66: session-1 and session-12 have independent pins, counters and busy marks."""
    async with world() as made:
        made.join("d0")
        made.join("d1")
        await made.run(made.request("session-1"))
        await made.run(made.request("session-12"))
        one, twelve = made.router.sigma.session("session-1"), made.router.sigma.session("session-12")
        assert one is not None
        assert twelve is not None
        assert one is not twelve
        assert one.pin != twelve.pin
        made.router.close_session("session-1")
        assert made.router.sigma.session("session-12") is twelve


@pytest.mark.parametrize("policy", ["sticky", "round_robin"])
async def test_baselines_ask_nobody(policy: str) -> None:
    async with world(policy=policy) as made:
        made.join("d0")
        made.join("d1")
        workers = [(await made.result()).decision.decode.worker_id for _ in range(4)]
        assert made.admission.asked == []
        assert len(set(workers)) == (1 if policy == "sticky" else 2)
        await made.check()
