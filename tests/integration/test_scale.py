"""Two routers over the same workers: each sees only its own half of the load, and yet nobody is promised what is not there."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvc.core.params import Params
from kvc.core.types import Mode
from kvc.runtime.channel import channel
from kvc.v1 import admission_pb2, admission_pb2_grpc
from tests.support.live_mesh import another_router, decode_workers, live_mesh
from tests.support.talking import Conversation
from tests.support.waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.local_mesh.client import RouterClient
    from tests.support.live_mesh import LiveMesh
    from tests.support.talking import Turn

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPACITY_TOKENS = 200_000
LIMIT_TOKENS = Params().rho * CAPACITY_TOKENS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LiveMesh]:
    async with live_mesh("1P2D", time_scale=20.0, kv_tokens=CAPACITY_TOKENS) as live:
        yield live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def second(mesh: LiveMesh) -> AsyncIterator[RouterClient]:
    async with another_router(mesh) as client:
        yield client


@asynccontextmanager
async def reports(mesh: LiveMesh) -> AsyncIterator[list[admission_pb2.WatchResidencyResponse]]:
    """Every load report of the decode workers' agents, as a third follower sees them."""
    seen: list[admission_pb2.WatchResidencyResponse] = []

    async def follow(port: int) -> None:
        async with channel(f"127.0.0.1:{port}") as opened:
            stub: admission_pb2_grpc.AdmissionServiceAsyncStub = admission_pb2_grpc.AdmissionServiceStub(opened)
            async for message in stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="test"), timeout=60.0):
                if message.HasField("load"):
                    seen.append(message)  # noqa: PERF401 - as they come

    tasks = [asyncio.create_task(follow(mesh.mesh.workers[name].agent_port)) for name in ("d0", "d1")]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_two_routers_never_promise_the_same_room_twice(mesh: LiveMesh, second: RouterClient) -> None:
    """R8: 24 sessions whose turns together need twice the pools, over two routers by turns: held + reserved <= rho K in every report and
    at every look into the engines' books; all replies are right.
    """
    clients = (mesh.client, second)
    looks = 0

    async def talk(number: int) -> list[Turn]:
        draw = random.Random(number)
        one = Conversation(clients[number % 2], f"two-{number}")
        for count in range(6):
            one.client = clients[(number + count) % 2]
            turn = await one.turn(draw.randint(14_000, 20_000) if not one.history else draw.randint(100, 1_000), draw.randint(100, 500))
            assert turn.ok, turn.error
        return one.turns

    async def look() -> None:
        nonlocal looks
        while True:
            await mesh.pools()  # asserts held + reserved <= the limit
            looks += 1
            await asyncio.sleep(0.02)

    async with reports(mesh) as seen:
        looking = asyncio.create_task(look())
        turns = [turn for talked in await asyncio.gather(*(talk(number) for number in range(24))) for turn in talked]
        looking.cancel()
        await asyncio.wait([looking])
        assert looking.cancelled(), looking.exception()
        await until(lambda: len(seen) >= 4, 10.0, "reports")
    for report in seen:
        facts = report.load.facts
        assert facts.held_tokens + facts.reserved_tokens <= LIMIT_TOKENS, report
    assert looks > 10
    assert len(turns) == 24 * 6
    refused = [probe for turn in turns if turn.decision is not None for probe in turn.decision.probes if not probe.admitted]
    assert refused, "the pools were never full"
    await mesh.at_rest()
    assert all(status.inflight == 0 for status in (await mesh.workers(second)).values())


async def test_a_session_may_change_its_router(mesh: LiveMesh, second: RouterClient) -> None:
    """F63's kind: a router that never saw a session finds its KV by residency alone."""
    one = Conversation(mesh.client, "changes")
    first = await one.turn(10_000, 50)
    assert first.ok
    name = first.worker.worker_id if first.worker is not None else ""
    blocks = first.input_tokens // 24

    async def followed() -> None:
        assert (await mesh.candidate(name, "changes", first.prompt, second)).resident_blocks == blocks

    await eventually(followed, 5.0)
    one.client = second
    turn = await one.turn(200, 50)
    assert (turn.ok, turn.mode, turn.worker) == (True, Mode.DIRECT, first.worker)
    assert turn.cached_tokens > 9_900


async def test_a_worker_full_of_long_contexts_is_seen_by_both_routers(mesh: LiveMesh, second: RouterClient) -> None:
    """F54, F56: three 60k sessions fill D0 through one router, twenty short ones run on D1: a new seed avoids D0 on both."""
    await mesh.at_rest()
    long = [Conversation(mesh.client, f"sixty-{number}") for number in range(3)]
    short = [Conversation(mesh.client, f"short-{number}") for number in range(20)]
    await mesh.drain("d1", drain=True)
    tasks = [asyncio.create_task(one.turn(60_000, 3_000)) for one in long]
    await until(lambda: all(one.turns and one.turns[0].first_s for one in long), 20.0, "the long ones run")
    await mesh.drain("d1", drain=False)
    await mesh.drain("d0", drain=True)
    tasks += [asyncio.create_task(one.turn(100, 3_000)) for one in short]
    await until(lambda: all(one.turns and one.turns[0].first_s for one in short), 20.0, "the short ones run")
    await mesh.drain("d0", drain=False)

    async def reported() -> None:
        load = decode_workers(await mesh.workers(second))["d0"].load.facts
        assert load.held_tokens + load.reserved_tokens > 0.9 * CAPACITY_TOKENS

    await eventually(reported, 5.0)
    for client in (second, mesh.client):
        seeded = await Conversation(client, f"new seed {id(client)}").turn(5_000, 10)
        assert seeded.ok
        assert seeded.worker is not None
        assert seeded.worker.worker_id == "d1"
        assert seeded.decision is not None
        if client is second:
            assert len(seeded.decision.probes) == 1, "it was not even asked"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await mesh.at_rest()
