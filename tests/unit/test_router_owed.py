"""Turns without a token move away from workers that are lost; turns with one stay."""

from __future__ import annotations

import asyncio

import pytest

from kvc.core import events as ev
from kvc.core.types import Executor, WorkerRef
from kvc.errors import Unavailable
from services.router.owed import Owed
from services.router.ports import EngineChunk
from tests.support.fake_ports import World, ok, refusal, world
from tests.support.mesh_server import until

D0, D1, P0 = WorkerRef("d0", 1), WorkerRef("d1", 1), WorkerRef("p0", 1)


def away(made: World, ref: WorkerRef) -> None:
    """Its agent says that the engine does not answer, or is not heard itself."""
    made.router.apply(ev.WorkerHealth(ref, healthy=False))


@pytest.mark.parametrize("how", ["away", "left", "restarted"])
async def test_a_turn_without_a_token_leaves_a_lost_decode_worker(how: str) -> None:
    """F29's kind: the engine hangs, its connection stays open. The turn runs elsewhere, long before its deadline."""
    async with world(engines={"lost_s": 0.05 if how == "away" else 60.0}) as made:
        made.join("d0")
        made.engines.streams["http://d0"] = ["hang"]
        made.engines.steps.hold("hang")
        running = asyncio.create_task(made.result())
        await made.engines.steps.reached("hang")
        made.join("d1")
        away(made, D0)
        if how == "left":
            made.router.apply(ev.WorkerLeft("d0"))
        elif how == "restarted":
            made.engines.streams["http://d0"] = ok()
            made.router.sigma.workers["d1"].assigned = 10
            made.join("d0", epoch=2)
        result = await running
        assert result.decision.decode == {"away": D1, "left": D1, "restarted": WorkerRef("d0", 2)}[how]
        assert [(error.reason, error.gone) for error in made.seen.retries] == [("worker-lost", True)]
        await made.check()


async def test_a_turn_without_a_token_leaves_a_lost_prefill_worker() -> None:
    """F25, F32: nobody waits for KV from a prefill engine that hangs; the decode worker is not blamed."""
    async with world(engines={"lost_s": 0.05}) as made:
        made.join("d0")
        made.prefill()
        made.admission.executor = Executor.PREFILL
        made.engines.streams["http://d0"] = ["no KV"]
        made.engines.steps.hold("no KV", "prefill")
        running = asyncio.create_task(made.result())
        await made.engines.steps.reached("no KV")
        made.engines.streams["http://d0"] = ok()
        away(made, P0)
        result = await running
        assert (result.decision.decode, result.decision.executor) == (D0, Executor.LOCAL)
        assert made.router.sigma.workers["d0"].healthy
        await made.check()


async def test_a_turn_with_a_token_stays() -> None:
    async with world(engines={"lost_s": 0.0}) as made:
        made.join("d0")
        made.join("d1")
        made.engines.streams["http://d0"] = made.engines.streams["http://d1"] = [EngineChunk("a", (1,)), "later", *ok()]
        made.engines.steps.hold("later")
        running = asyncio.create_task(made.result())
        await made.engines.steps.reached("later")
        for ref in (D0, D1):
            away(made, ref)
        async with asyncio.timeout(5):
            for _ in range(10):
                await asyncio.sleep(0)
        made.engines.steps.go("later")
        await running
        assert made.seen.retries == []
        await made.check()


async def test_a_worker_that_is_back_in_time_keeps_its_turns() -> None:
    async with world(engines={"lost_s": 60.0}) as made:
        made.join("d0")
        made.engines.steps.hold("connect")
        running = asyncio.create_task(made.result())
        await made.engines.steps.reached("connect")
        away(made, D0)
        made.router.apply(ev.WorkerHealth(D0, healthy=True))
        made.engines.steps.go("connect")
        await running
        assert made.seen.retries == []
        await made.check()


async def test_without_anybody_else_the_caller_is_told() -> None:
    async with world(engines={"lost_s": 0.01, "retries": 0}) as made:
        made.join("d0")
        made.engines.steps.hold("connect")
        running = asyncio.create_task(refusal(Unavailable, made.run()))
        await made.engines.steps.reached("connect")
        away(made, D0)
        assert (await running).reason == "ENGINE_FAILED"
        await made.check()


async def test_turns_that_come_to_a_lost_worker_are_told_too() -> None:
    owed = Owed(0.01)
    owed.away(D0)
    told: list[WorkerRef | None] = []

    async def wait() -> None:
        with owed.by(D0) as debt:
            try:
                async with asyncio.timeout(30) as limit:
                    debt.limit = limit
                    await asyncio.Event().wait()
            except TimeoutError:
                told.append(debt.lost)

    await wait()
    await wait()
    assert told == [D0, D0]
    owed.back(D0)
    waiting = asyncio.create_task(wait())
    await until(lambda: bool(owed._debts))
    owed.over("d0")
    assert not waiting.done(), "a worker that is not away owes nothing"
    waiting.cancel()
    owed.close()
