"""The agent's connection to its engine: refused, lost, restarted, wedged, and followed without a hole."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.engine import link
from kvc.errors import KvcError, Unavailable
from services.admission_agent.config import AdmitConfig, AgentConfig, EngineConfig, ResidencyConfig
from services.admission_agent.connection import EngineConnection
from services.admission_agent.residency import Residency
from tests.support.fake_engine import SEED, FakeEngine
from tests.support.follower_model import FollowerModel
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.admission_agent.follower import Follower

PROMPT = list(range(1, 241))
WAIT_S = 5.0


class Rig:
    """A connection that runs against a fake engine, and what it told its owner."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        values: dict[str, Any] = {"backoff_base_s": 0.001, "backoff_cap_s": 0.004} | settings
        draining = values.pop("draining", False)
        self.config = AgentConfig(
            engine=EngineConfig(socket=cast("Path", "engine.sock"), **values),
            admit=AdmitConfig(draining=draining),
            residency=ResidencyConfig(load_interval_s=0.02, coalesce_s=0.0),
        )
        self.engine = engine
        self.residency = Residency(self.config.residency)
        self.changes: list[bool] = []
        self.connection = EngineConnection(engine, self.config, self.residency, self.changes.append)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        task = asyncio.create_task(self.connection.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not self.engine.links, "every link is closed at the end"

    async def alive(self, epoch: int = 1) -> None:
        await until(lambda: self.connection.life is not None and self.connection.life.ref.epoch == epoch, WAIT_S, f"life {epoch}")

    async def refused(self, reason: str) -> None:
        await until(lambda: (self.connection.why_not() or "").startswith(f"{reason}:"), WAIT_S, f"refused as {reason}")


def drain(follower: Follower, model: FollowerModel) -> FollowerModel:
    while (message := follower.take()) is not None:
        model.apply(message)
    return model


def overlap(model: FollowerModel) -> int:
    return len(model.blocks & set(hash_chain(pack_tokens(PROMPT), 24, SEED)))


async def test_connects_checks_follows_and_polls() -> None:
    engine = FakeEngine()
    engine.store(PROMPT)
    async with Rig(engine).running() as rig:
        assert rig.connection.why_not() == "ENGINE_AWAY: the engine has not been reached yet"
        await rig.alive()
        assert rig.connection.why_not() is None
        assert rig.changes == [True]
        assert rig.residency.resident_blocks == 10
        await until(lambda: rig.residency.load is not None, WAIT_S, "a load report")
        assert rig.residency.load is not None
        assert rig.residency.load.facts.held_tokens == 20_000
        polls = sum(isinstance(call, link.Load) for call in engine.calls)
        await until(lambda: sum(isinstance(call, link.Load) for call in engine.calls) > polls + 1, WAIT_S, "further polls")
    assert rig.changes == [True, False]


async def test_changes_reach_a_follower() -> None:
    engine = FakeEngine()
    async with Rig(engine).running() as rig:
        await rig.alive()
        with rig.residency.follow() as follower:
            model = FollowerModel()
            engine.store(PROMPT)
            await until(lambda: overlap(drain(follower, model)) == 10, WAIT_S, "ten blocks")
            engine.publish(engine.pages.clear())
            await until(lambda: overlap(drain(follower, model)) == 0, WAIT_S, "F41: none")
        assert (model.snapshots, model.deltas) == (1, 2)


async def test_waits_for_an_engine_that_is_not_there_yet() -> None:
    engine = FakeEngine()
    engine.up = False
    async with Rig(engine).running() as rig:
        await until(lambda: engine.connects >= 5, WAIT_S, "several tries")
        assert rig.connection.life is None
        with pytest.raises(Unavailable) as caught:
            rig.connection.require()
        assert caught.value.reason == "ENGINE_AWAY"
        engine.up = True
        await rig.alive()
    assert rig.changes == [True, False]


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        ({"capabilities": ["admit"]}, {}, "ENGINE_CAPABILITY_MISSING"),
        ({"capabilities": ["residency"]}, {}, "ENGINE_CAPABILITY_MISSING"),
        ({"block_tokens": 16}, {}, "ENGINE_BLOCK_TOKENS_MISMATCH"),
        ({}, {"model": "qwen"}, "ENGINE_MODEL_MISMATCH"),
        ({"role": "?"}, {}, "ENGINE_WELCOME_INVALID"),
    ],
)
async def test_f73_an_unfit_engine_is_refused_until_it_is_replaced(fields: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    """F73: the agent says why, stays out of service, and takes the engine that comes next."""
    engine = FakeEngine(**fields)
    async with Rig(engine, **settings).running() as rig:
        await rig.refused(reason)
        assert rig.changes == []
        with pytest.raises(Unavailable) as caught:
            rig.connection.require()
        assert caught.value.reason == reason
        engine.restart(capabilities=["admit", "residency"], block_tokens=24, model="qwen", role="decode")
        await rig.alive(2)


async def test_f40_a_restarted_engine_is_a_new_life() -> None:
    """F40: the stream of the old epoch ends, its blocks are gone, and the new epoch starts with its own snapshot."""
    engine = FakeEngine()
    engine.store(PROMPT)
    async with Rig(engine).running() as rig:
        await rig.alive()
        with rig.residency.follow() as follower:
            assert overlap(drain(follower, FollowerModel())) == 10
            engine.restart()
            await rig.alive(2)
            with pytest.raises(Unavailable) as caught:
                follower.take()
            assert caught.value.reason == "ENGINE_AWAY"
        assert rig.residency.followers == 0
        with rig.residency.follow() as follower:
            model = drain(follower, FollowerModel())
        assert (model.epoch, model.sequence, model.blocks) == (2, 1, set())
    assert rig.changes == [True, False, True, False]


async def test_an_engine_that_dies_is_noticed_at_once_and_followers_are_told() -> None:
    engine = FakeEngine()
    async with Rig(engine).running() as rig:
        await rig.alive()
        with rig.residency.follow() as follower:
            drain(follower, FollowerModel())
            engine.die()
            await until(lambda: rig.connection.life is None, WAIT_S, "no life")
            with pytest.raises(Unavailable):
                follower.take()
        assert rig.residency.view() is None
        assert rig.residency.load is None


@pytest.mark.parametrize("repeat", [True, False])
async def test_a_gap_is_healed_by_a_new_snapshot_while_calls_go_on(*, repeat: bool) -> None:
    engine = FakeEngine()
    async with Rig(engine).running() as rig:
        await rig.alive()
        life = rig.connection.life
        with rig.residency.follow() as follower:
            model = drain(follower, FollowerModel())
            engine.pages.store(PROMPT)
            engine.send(link.Delta(engine.sequence if repeat else engine.sequence + 2, []))
            await until(lambda: overlap(drain(follower, model)) == 10, WAIT_S, "the new snapshot")
            engine.store([9] * 48)
            await until(lambda: len(drain(follower, model).blocks) == 12, WAIT_S, "deltas after it")
        assert (model.epoch, model.snapshots) == (1, 2)
        assert rig.residency.resyncs == {"gap": 1, "snapshot": 1}
        assert rig.connection.life is life
        assert rig.changes == [True]


async def test_a_lost_event_connection_is_replaced_while_calls_go_on() -> None:
    engine = FakeEngine()
    async with Rig(engine).running() as rig:
        await rig.alive()
        life = rig.connection.life
        next(one for one in engine.links if one.subscribed).lose()
        engine.pages.store(PROMPT)
        await until(lambda: rig.residency.resident_blocks == 10, WAIT_S, "the new snapshot")
        assert rig.connection.life is life
        assert rig.residency.resyncs["link"] == 1


async def test_events_that_never_make_sense_end_the_life_and_it_is_tried_again() -> None:
    engine = FakeEngine()
    broken = True

    def snapshot() -> list[link.Snapshot | link.Delta]:
        events: list[link.Snapshot | link.Delta] = [*engine.pages.snapshot(engine.sequence)]
        return [*events, link.Delta(77, [])] if broken else events

    engine.snapshot = snapshot  # type: ignore[assignment,method-assign]  # events an engine must not send
    async with Rig(engine).running() as rig:
        await rig.refused("RESIDENCY_UNUSABLE")
        broken = False
        await rig.alive()


async def test_snapshots_in_parts_are_whole_before_there_is_a_life() -> None:
    engine = FakeEngine()
    engine.parts = 3
    engine.store(PROMPT, [5] * 96)
    async with Rig(engine).running() as rig:
        await rig.alive()
        assert rig.residency.resident_blocks == 14


async def test_a_snapshot_that_never_ends_is_not_waited_for_for_ever() -> None:
    engine = FakeEngine()
    engine.snapshot = lambda: [link.Snapshot(0, [], last=False)]  # type: ignore[method-assign]
    async with Rig(engine, snapshot_timeout_s=0.02).running() as rig:
        await rig.refused("ENGINE_TIMEOUT")
        assert rig.changes == []


async def test_an_engine_that_stops_answering_is_away() -> None:
    """A frozen engine keeps its sockets open; the load poll notices."""
    engine = FakeEngine()
    async with Rig(engine, call_timeout_s=0.03).running() as rig:
        await rig.alive()
        on_load = engine.on_load

        async def frozen() -> link.ReplyBody:
            await asyncio.Event().wait()
            raise AssertionError

        engine.on_load = frozen
        await rig.refused("ENGINE_TIMEOUT")
        engine.on_load = on_load
        await rig.alive()


@pytest.mark.parametrize(
    "report",
    [
        link.Released(released=True),
        link.LoadReport(link.LinkFacts(capacity_tokens=-1)),
        link.LoadReport(link.LinkFacts(capacity_tokens=1), peak_use=float("inf")),
        link.LoadReport(link.LinkFacts(capacity_tokens=1), sessions=2**40),
    ],
)
async def test_f76_a_load_report_that_makes_no_sense_ends_the_life_not_the_agent(report: link.ReplyBody) -> None:
    """F76: nonsense from the engine is a typed refusal of that life."""
    engine = FakeEngine()
    on_load = engine.on_load

    async def odd() -> link.ReplyBody:
        return report

    engine.on_load = odd
    async with Rig(engine).running() as rig:
        await rig.refused("ENGINE_PROTOCOL")
        engine.on_load = on_load
        await rig.alive()


async def test_a_fault_of_the_agents_own_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    on_load = engine.on_load

    async def faulty() -> link.ReplyBody:
        raise ZeroDivisionError

    engine.on_load = faulty
    async with Rig(engine).running() as rig:
        await rig.refused("AGENT_FAULT")
        engine.on_load = on_load
        await rig.alive()
    assert "engine_connection_fault" in [record.message for record in caplog.records]


@pytest.mark.parametrize("draining", [True, False])
async def test_the_engine_is_told_whether_it_drains(*, draining: bool) -> None:
    engine = FakeEngine()
    async with Rig(engine, draining=draining).running() as rig:
        await rig.alive()
        assert [call.draining for call in engine.calls if isinstance(call, link.Drain)] == [draining]
        assert rig.connection.require().info.draining is draining


async def test_a_prefill_engine_needs_neither_admit_nor_residency() -> None:
    engine = FakeEngine(role="prefill", capabilities=[])
    async with Rig(engine).running() as rig:
        await rig.alive()
        await until(lambda: rig.residency.load is not None, WAIT_S, "a load report")
        with rig.residency.follow() as follower:
            model = drain(follower, FollowerModel())
        assert (model.snapshots, model.loads, model.blocks) == (1, 1, set())
        assert not [call for call in engine.calls if isinstance(call, link.Drain | link.Subscribe)]


async def test_the_engine_may_refuse_the_subscription() -> None:
    engine = FakeEngine()
    answer = engine.answer

    async def refuse(body: link.RequestBody) -> link.ReplyBody:
        return link.Failed("FAILED_PRECONDITION", "not now") if isinstance(body, link.Subscribe) else await answer(body)

    engine.answer = refuse  # type: ignore[method-assign]
    async with Rig(engine).running() as rig:
        await rig.refused("FAILED_PRECONDITION")
        engine.answer = answer  # type: ignore[method-assign]
        await rig.alive()


def test_pauses_double_up_to_the_cap_with_full_jitter() -> None:
    rig = Rig(FakeEngine(), backoff_base_s=0.1, backoff_cap_s=1.0)
    for in_a_row, bound in [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (60, 1.0), (5000, 1.0)]:
        pauses = [rig.connection._pause_s(in_a_row) for _ in range(200)]
        assert all(0 <= pause <= bound for pause in pauses)
        assert min(pauses) < bound / 10
        assert max(pauses) > bound * 0.9


async def test_the_log_tells_a_lost_engine_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.up = False
    async with Rig(engine).running():
        await until(lambda: engine.connects >= 8, WAIT_S, "several tries")
    assert [record.message for record in caplog.records].count("engine_away") == 1


async def test_calls_fail_with_the_tree_while_the_engine_comes_and_goes() -> None:
    """Whatever moment the engine goes away, a caller sees an answer or a KvcError."""
    engine = FakeEngine()
    async with Rig(engine).running() as rig:
        for epoch in range(1, 6):
            await rig.alive(epoch)
            life = rig.connection.require()
            calls = [asyncio.ensure_future(life.link.call(link.Load(), 1.0)) for _ in range(20)]
            await asyncio.sleep(0)
            engine.restart()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, link.LoadReport | KvcError) for result in results)
        await rig.alive(6)
