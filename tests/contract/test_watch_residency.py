"""WatchResidency over real sockets: snapshots, deltas and load, for quick and slow followers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.engine import link
from kvc.errors import Exhausted, InvalidField, Unavailable
from kvc.v1 import admission_pb2
from services.admission_agent.config import ResidencyConfig
from tests.support.agent_rig import PROMPT, WAIT_S, Rig, error_of, read_all, read_one, rig_of
from tests.support.fake_engine import SEED, FakeEngine
from tests.support.follower_model import FollowerModel
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rig_of() as one:
        yield await one.ready()


async def test_watch_residency(rig: Rig) -> None:
    rig.engine.store(PROMPT[:96])
    await until(lambda: rig.agent.residency.resident_blocks == 4, WAIT_S, "four blocks")
    call, model = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="r")), FollowerModel()
    model.apply(await read_one(call))
    assert model.blocks == rig.engine.pages.blocks(24)
    rig.engine.store(PROMPT)
    while len(model.blocks) < 10:
        model.apply(await read_one(call))
    rig.engine.publish(rig.engine.pages.clear())
    while model.blocks:
        model.apply(await read_one(call))
    while model.loads < 3:
        model.apply(await read_one(call))
    assert model.snapshots == 1
    call.cancel()
    await until(lambda: rig.agent.residency.followers == 0, WAIT_S, "nobody follows")


async def test_load_comes_at_least_every_second() -> None:
    async with rig_of(residency=ResidencyConfig()) as rig:
        await rig.ready()
        call, model, loop = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()), FollowerModel(), asyncio.get_running_loop()
        model.apply(await read_one(call))
        model.apply(await read_one(call))
        last_s = loop.time()
        for _ in range(3):
            model.apply(await read_one(call))
            assert loop.time() - last_s < 1.0
            last_s = loop.time()
        assert model.loads == 4
        call.cancel()


async def test_f40_watch_ends_with_the_life_and_starts_anew_with_the_next(rig: Rig) -> None:
    """F40: the engine restarts under the same address: the stream ends, the next one starts with the new epoch, empty."""
    rig.engine.store(PROMPT)
    await until(lambda: rig.agent.residency.resident_blocks == 10, WAIT_S, "ten blocks")
    call, model = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()), FollowerModel()
    model.apply(await read_one(call))
    assert len(model.blocks) == 10
    rig.engine.restart()
    error = await error_of(read_all(call))
    assert isinstance(error, Unavailable)
    assert error.reason == "ENGINE_AWAY"
    await rig.ready()
    call = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest())
    model.apply(await read_one(call))
    assert (model.epoch, model.blocks) == (2, set())
    call.cancel()


async def test_several_followers_and_a_bound() -> None:
    residency = ResidencyConfig(load_interval_s=0.02, coalesce_s=0.0, max_followers=3)
    async with rig_of(residency=residency) as rig:
        await rig.ready()
        calls = [rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower=f"r{index}")) for index in range(3)]
        models = [FollowerModel() for _ in calls]
        for call, model in zip(calls, models, strict=True):
            model.apply(await read_one(call))
        error = await error_of(rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()).read())
        assert isinstance(error, Exhausted)
        assert error.reason == "TOO_MANY_FOLLOWERS"
        rig.engine.store(PROMPT)
        for call, model in zip(calls, models, strict=True):
            while len(model.blocks) < 10:
                model.apply(await read_one(call))
            call.cancel()
        await until(lambda: rig.agent.residency.followers == 0, WAIT_S, "nobody follows")


async def test_a_follower_that_does_not_read_is_bounded_and_resynchronised() -> None:
    residency = ResidencyConfig(load_interval_s=0.02, coalesce_s=0.0, buffer_bytes=100_000)
    async with rig_of(FakeEngine(page_tokens=24), residency=residency) as rig:
        await rig.ready()
        call, model = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()), FollowerModel()
        model.apply(await read_one(call))
        first, tokens = 1, b""
        while not rig.agent.residency.resyncs["overflow"]:
            assert first < 5_000_000, "the sockets swallow everything"
            pages = list(range(first, first + 5000))
            tokens = pack_tokens(list(range(first, first + 24 * len(pages))))
            rig.engine.publish(link.AllCleared(), link.PageStored(pages, 0, tokens))
            sequence = rig.engine.sequence
            await until(lambda now=sequence: rig.agent.residency._engine_sequence == now, WAIT_S, "taken in", poll_s=0)  # type: ignore[misc]
            rig.agent.residency.flush()
            first += len(pages)
        expected = set(hash_chain(tokens, 24, SEED))
        while model.blocks != expected:
            model.apply(await read_one(call))
        assert model.snapshots == 2
        call.cancel()


async def test_follower_names_are_bounded(rig: Rig) -> None:
    error = await error_of(rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="x" * 129)).read())
    assert isinstance(error, InvalidField)
    assert error.field == "follower"
