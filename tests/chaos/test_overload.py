"""More load than the mesh can carry: who waits how long, who is told to come back, and how soon everything is as before."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvc.errors import Exhausted
from tests.support.live_mesh import live_mesh
from tests.support.talking import Conversation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.live_mesh import LiveMesh
    from tests.support.talking import Turn

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCALE = 4.0
LOAD_S = 60.0 / SCALE
CAPACITY_TOKENS = 20_000
QUEUE_LIMIT = 24
QUEUE_WAIT_S = 4.0
RETRIES = 1
ENGINE_QUEUE = 12
RECOVERY_S = 10.0
WINDOW = 8
MEMORY_BYTES = 100 * 1024 * 1024


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LiveMesh]:
    async with live_mesh(
        "1P2D",
        time_scale=SCALE,
        kv_tokens=CAPACITY_TOKENS,
        router_args=(
            *("--params-queue-limit", str(QUEUE_LIMIT)),
            *("--params-queue-wait-s", str(QUEUE_WAIT_S)),
            *("--engines-retries", str(RETRIES)),
        ),
        engine_args=("--queue-limit", str(ENGINE_QUEUE), "--params-executor", "prefill"),
    ) as live:
        yield live


@dataclass
class Arrivals:
    """Turns of sessions that come at a pace of their own, whatever becomes of those before them."""

    mesh: LiveMesh
    name: str
    turns: list[Turn] = field(default_factory=list)
    _draw: random.Random = field(default_factory=lambda: random.Random(7))
    last_s: float = 0.0
    _count: int = 0

    async def one(self) -> None:
        """A session of one turn; every twentieth prompt fills half a worker."""
        self._count += 1
        size = 10_000 if self._count % 20 == 0 else self._draw.randint(2_000, 6_000)
        talk = Conversation(self.mesh.client, f"{self.name}-{self._count}")
        self.turns.append(await talk.turn(size, self._draw.randint(150, 300), last=True))

    async def closed(self, clients: int, duration_s: float) -> float:
        """`clients` at a time.

        Returns:
            Turns served a second.
        """
        ends_s = time.monotonic() + duration_s

        async def client() -> None:
            while time.monotonic() < ends_s:
                await self.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return sum(turn.ok and turn.ended_s <= ends_s for turn in self.turns) / duration_s

    @asynccontextmanager
    async def open(self, rate: float, duration_s: float) -> AsyncIterator[None]:
        """`rate` a second, then the block; turns that have arrived end after it."""
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(int(rate * duration_s)):
                await asyncio.sleep(max(0.0, start_s + number / rate - time.monotonic()))
                group.create_task(self.one())
            self.last_s = time.monotonic()
            yield


async def ttft_s(mesh: LiveMesh, name: str) -> float:
    """Time to first token of a seed on its own, in modelled seconds: engine, waiting for room, and the mesh; whoever is told to come
    back does, and his wait counts.
    """
    started_s = time.monotonic()
    turn = await Conversation(mesh.client, name).turn(4_000, 10, last=True)
    while isinstance(turn.error, Exhausted):
        await asyncio.sleep(turn.error.retry_after_s)
        turn = await Conversation(mesh.client, name).turn(4_000, 10, last=True)
    assert turn.finished is not None, turn.error
    outside_s = turn.sent_s - started_s + turn.finished.decision.queued_s
    return turn.finished.engine_ttft_s + turn.finished.mesh_s + outside_s * SCALE


@pytest.mark.timeout(180)
async def test_three_times_the_capacity_for_a_minute(mesh: LiveMesh) -> None:
    """Overload: 3 times what the mesh serves, for 60 modelled seconds.

    No starvation: a turn that is served has its first token within
    (retries + 1) x queue_wait_s + (engine queue limit + 1) x S, S = the longest service of one turn: each try waits at most queue_wait_s
    in the router, then it falls back to an engine whose queue is served in order, at worst one turn at a time. Past the bounds of the
    queues the answer is RESOURCE_EXHAUSTED with a retry hint, at once when it is the router's. No process grows. Within 10 s after the
    load drops TTFT is what it was.
    """
    before = [await ttft_s(mesh, f"before-{number}") for number in range(2 * WINDOW)]
    normal_s = max(1.5 * statistics.median(before), *before)
    rate = await Arrivals(mesh, "measure").closed(16, 4.0)
    assert rate > 1.0
    memory = mesh.resident_bytes()
    load = Arrivals(mesh, "load")
    async with load.open(3 * rate, LOAD_S):
        after: list[float] = []
        while len(after) < WINDOW or statistics.median(after[-WINDOW:]) > normal_s:
            after.append(await ttft_s(mesh, f"after-{len(after)}"))
        recovered_s = time.monotonic() - load.last_s
    assert recovered_s < RECOVERY_S, after
    served = [turn for turn in load.turns if turn.ok]
    refused = [turn for turn in load.turns if not turn.ok]
    assert len(load.turns) == int(3 * rate * LOAD_S)
    assert len(served) > rate * LOAD_S / 2, "overload costs throughput"
    for turn in refused:
        assert isinstance(turn.error, Exhausted), turn.error
        assert turn.error.reason in {"QUEUE_FULL", "ENGINE_BUSY"}
        assert turn.error.retry_after_s > 0
        assert turn.first_s is None
    assert any(turn.error is not None and turn.error.reason == "QUEUE_FULL" for turn in refused)
    longest_service_s = max(turn.ended_s - (turn.first_s or turn.ended_s) for turn in served) + 1.0
    bound_s = (RETRIES + 1) * QUEUE_WAIT_S + (ENGINE_QUEUE + 1) * longest_service_s
    longest_s = max(turn.ttft_s for turn in served)
    assert longest_s < bound_s
    large = [turn for turn in served if turn.input_tokens == 10_000]
    assert large, "large turns starve"
    assert await mesh.metric("kvc_router_longest_wait_seconds") < (RETRIES + 1) * QUEUE_WAIT_S + 1.0
    grown = {name: size - memory[name] for name, size in mesh.resident_bytes().items() if size - memory[name] > MEMORY_BYTES}
    assert not grown
    await mesh.at_rest()


async def test_seeds_beyond_what_a_worker_takes_are_bounded(mesh: LiveMesh) -> None:
    """F9: 64 seeds a second that each last for seconds, on workers with room for fourteen: what is pending stays bounded, the rest is told
    RESOURCE_EXHAUSTED and when to come back; nothing hangs.
    """
    slots = CAPACITY_TOKENS // 2_500
    talks = [Conversation(mesh.client, f"long-{number}") for number in range(160)]
    start_s = time.monotonic()
    asking = []
    for number, one in enumerate(talks):
        await asyncio.sleep(max(0.0, start_s + number / 64 - time.monotonic()))
        asking.append(asyncio.create_task(one.turn(500, 2_000)))
        if number % 16 == 15:
            books = await mesh.pools()
            for name in ("d0", "d1"):
                assert books[name]["active"] + books[name]["tickets"] <= slots
                assert books[name]["waiting"] <= ENGINE_QUEUE
            assert books["p0"]["rooms"] <= 2 * (slots + ENGINE_QUEUE)
            assert await mesh.metric("kvc_router_waiting") <= QUEUE_LIMIT
    served = await asyncio.gather(*asking)
    refused = [turn for turn in served if not turn.ok]
    assert len(refused) > 60
    assert all(isinstance(turn.error, Exhausted) and turn.error.retry_after_s > 0 for turn in refused), {
        str(turn.error) for turn in refused
    }
    assert len(refused) < len(served) - 10
    await mesh.at_rest()
