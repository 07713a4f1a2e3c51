"""Workers hang: SIGSTOP leaves every connection open, and nobody waits for long. Afterwards the mesh is whole again and at rest."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest

from kvc.core.types import Executor
from kvc.errors import DeadlineExceeded
from tests.support.killing import pool_has
from tests.support.talking import Conversation
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.live_mesh import LiveMesh

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("who", ["p0", "decoder"])
async def test_a_frozen_engine_delays_nobody_for_long(remote_mesh: LiveMesh, who: str) -> None:
    """F25's and F29's sibling: SIGSTOP leaves every connection open. A turn without a token goes on without the frozen engine, prefill or
    decode, once its agent has missed an answer (5 s) and it was away for 2 s; the engine's part of it is gone when it thaws.
    """
    mesh = remote_mesh
    one = Conversation(mesh.client, f"frozen {who}")
    asked = asyncio.create_task(one.turn(60_000, 20))
    await eventually(lambda: pool_has(mesh, "p0", "prefilling"), 10.0, poll_s=0.005)
    pulling = [name for name, books in (await mesh.pools()).items() if books["pulling"]]
    assert len(pulling) == 1
    name = who if who == "p0" else pulling[0]
    engine = mesh.mesh.workers[name].engine
    engine.signal(signal.SIGSTOP)
    try:
        turn = await asked
    finally:
        engine.signal(signal.SIGCONT)
    assert turn.ok, turn.error
    assert turn.wall_s < 15.0
    if who == "p0":
        assert turn.executor is Executor.LOCAL
    else:
        assert turn.worker is not None
        assert turn.worker.worker_id != name
    await mesh.at_rest()


async def test_a_hung_agent_blocks_nobody_else(mesh: LiveMesh) -> None:
    """SIGSTOP of an agent for 5 s: other workers' sessions go on as before, its own move after one Admit timeout, deadlines hold."""
    others = [Conversation(mesh.client, f"hung-{number}") for number in range(9)]
    for one in others:
        assert (await one.turn(2_000, 20)).ok
    homes = {one.session_id: one.turns[-1].worker for one in others}
    hung = others[0].turns[-1].worker
    assert hung is not None
    mine = [one for one in others if homes[one.session_id] == hung]
    rest = [one for one in others if homes[one.session_id] != hung]
    assert len(mine) >= 2
    assert rest
    agent = mesh.mesh.workers[hung.worker_id].agent
    agent.signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        hasty = await mine[0].turn(100, 20, timeout_s=0.4)
        assert isinstance(hasty.error, DeadlineExceeded)
        assert hasty.wall_s < 1.0
        moving = [asyncio.create_task(one.turn(100, 20)) for one in mine]
        slowest = 0.0
        while time.monotonic() - stopped_s < 5.0:
            turns = await asyncio.gather(*(one.turn(100, 20) for one in rest))
            assert all(turn.ok for turn in turns), [turn.error for turn in turns]
            slowest = max(slowest, *(turn.wall_s for turn in turns))
        moved = await asyncio.gather(*moving)
    finally:
        agent.signal(signal.SIGCONT)
    assert slowest < 1.0, "somebody waited for the hung agent"
    for turn in moved:
        assert turn.ok, turn.error
        assert turn.worker is not None
        assert turn.worker.worker_id != hung.worker_id
        assert turn.wall_s < 3.0
    await mesh.at_rest()
    assert (await mesh.ref(hung.worker_id)) == hung, "the same life, found again"
