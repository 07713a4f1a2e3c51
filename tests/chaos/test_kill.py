"""Workers, agents and the router die and come back under load: who may notice, for how long, and what is right afterwards.

Every reply is checked token by token, also those of turns that fail half-way. After each test the mesh is whole again and at rest:
nothing in flight in the router, no ticket, no held or reserved token, no room in any engine.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from kvc.core.types import Executor, WorkerRef
from kvc.errors import Unavailable
from tests.support.killing import kill_engine, pool_has, pool_lacks, settle_on
from tests.support.talking import Conversation, Shape, load
from tests.support.waiting import eventually, until

if TYPE_CHECKING:
    from tests.support.live_mesh import LiveMesh
    from tests.support.talking import Load, Turn

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS = 24
SHAPE = Shape(first=(3_000, 9_000), append=(300, 2_000), output=(100, 600), limit=15_000)
NOTICE_S = 3.0
"""A client in mid-stream learns of its worker's death within this; the connection breaks at once, the rest is a loaded machine."""


async def under_way(running: Load, sessions: int) -> None:
    """Waits until every session has had a reply."""
    await until(lambda: len(running.conversations) == sessions and running.everybody(0.0), 30.0, "a reply for everybody")


def split(turns: list[Turn]) -> tuple[list[Turn], list[Turn]]:
    """Failed turns: those that had a token, and those that had none."""
    failed = [turn for turn in turns if not turn.ok]
    return [turn for turn in failed if turn.first_s is not None], [turn for turn in failed if turn.first_s is None]


def nothing_credited(turns: list[Turn], life: WorkerRef) -> int:
    """Checks that a new life never reuses more of a session than what the mesh gave it.

    Returns:
        Turns of that life.
    """
    stored: dict[tuple[str, WorkerRef], int] = {}
    seen = 0
    for turn in sorted(turns, key=lambda one: one.ended_s):
        if not turn.ok or turn.worker is None:
            continue
        places = [place for place in (turn.worker, turn.prefiller) if place is not None]
        if turn.worker == life:
            seen += 1
            assert turn.cached_tokens <= max(stored.get((turn.session_id, place), 0) for place in places), (turn.session_id, stored)
        for place in places:
            held = turn.input_tokens + (turn.asked_tokens if place == turn.worker else 0)
            stored[turn.session_id, place] = max(held, stored.get((turn.session_id, place), 0))
    return seen


async def test_a_killed_decode_worker_loses_only_what_had_begun(mesh: LiveMesh) -> None:
    """F38, F40: kill -9 of a decode engine and its agent under load, and their return under the same address.

    Turns without a token all succeed elsewhere; turns in mid-stream end at once with one typed error. The new life is never credited
    with the old one's KV: overlap 0 until it reports, and no cached token that it was not given itself.
    """
    await kill_and_return(mesh)


async def test_the_same_without_prefill_workers(local_mesh: LiveMesh) -> None:
    """F38, F40, R25: |P| = 0."""
    await kill_and_return(local_mesh)


async def kill_and_return(mesh: LiveMesh) -> None:
    """The story of the two tests above, with one session of each kind beside the load: idle, in mid-stream, and without a token."""
    witness, streamer, seeder = (Conversation(mesh.client, f"kill-{name}") for name in ("witness", "streamer", "seeder"))
    first = await witness.turn(3_000, 50)
    assert first.worker is not None
    name, old = first.worker.worker_id, first.worker
    await settle_on(mesh, streamer, name)
    await settle_on(mesh, seeder, name)
    assert (await mesh.candidate(name, "witness", witness.history)).resident_blocks > 100
    async with load(mesh.client, "kill", SESSIONS, SHAPE) as running:
        await under_way(running, SESSIONS)
        streaming = asyncio.create_task(streamer.turn(100, 8_000))
        await until(lambda: len(streamer.turns) == 2 and streamer.turns[1].first_s is not None, 20.0, "the stream has begun")
        seeding = asyncio.create_task(seeder.turn(30_000, 20))
        await eventually(lambda: _prefills(mesh, name, seeder), 20.0, poll_s=0.005)
        open_turns = [*running.open, streamer.turns[1]]
        killed_s = time.monotonic()
        await mesh.mesh.kill_worker(name)
        broken, seeded = await asyncio.gather(streaming, seeding)
        await until(lambda: running.everybody(killed_s), 30.0, "everybody is served without the dead worker")
        restarted_s = time.monotonic()
        overlaps = asyncio.create_task(_overlaps(mesh, name, old, witness.history))
        await mesh.mesh.start_worker(name)
        new = await asyncio.wait_for(overlaps, 30.0)
        assert new.epoch > old.epoch
        await until(lambda: sum(turn.ok and turn.worker == new for turn in running.turns) > 10, 30.0, "the new life serves")
    assert seeded.ok, seeded.error
    assert seeded.worker is not None
    assert seeded.worker.worker_id != name
    assert broken.first_s is not None
    begun, unstarted = split([*running.turns, broken])
    assert broken in begun
    assert not unstarted, [(turn.session_id, turn.error) for turn in unstarted]
    for turn in begun:
        assert turn in open_turns
        assert turn.worker == old
        assert isinstance(turn.error, Unavailable)
        assert turn.error.reason == "ENGINE_FAILED"
        assert turn.ended_s - killed_s < NOTICE_S
    assert all(turn.ok for turn in running.turns if turn.sent_s > restarted_s)
    assert nothing_credited(running.turns, new) > 10
    again = await witness.turn(500, 50)
    assert again.ok
    assert again.cached_tokens == 0, "the witness had KV on the dead worker only"
    await mesh.at_rest()


async def _overlaps(mesh: LiveMesh, name: str, old: WorkerRef, prompt: bytes) -> WorkerRef:
    """Asks for the worker's overlap with a prompt of its old life until the new one is in use; it must be 0 all along."""
    looks = 0
    while True:
        row = await mesh.candidate(name, "somebody", prompt)
        if row.worker.epoch == old.epoch:
            assert row.excluded, "the old life may be routed to"
        else:
            assert row.resident_blocks == 0
            looks += not row.excluded
        if looks >= 20:
            return WorkerRef(name, row.worker.epoch)
        await asyncio.sleep(0.01)


async def test_a_killed_prefill_worker_takes_its_decode_half_down_at_once(remote_mesh: LiveMesh) -> None:
    """F32: kill -9 of the prefill engine in mid-prefill: the decode half is cancelled within 1 s, the turn succeeds without it.

    When it is back, seeds use it again.
    """
    mesh = remote_mesh
    one = Conversation(mesh.client, "seed")
    asked = asyncio.create_task(one.turn(60_000, 20))
    await eventually(lambda: pool_has(mesh, "p0", "prefilling"), 10.0, poll_s=0.005)
    pulling = [name for name, books in (await mesh.pools()).items() if books["pulling"]]
    assert len(pulling) == 1
    await kill_engine(mesh, "p0")
    killed_s = time.monotonic()
    await eventually(lambda: pool_lacks(mesh, pulling[0], "pulling"), 1.0, poll_s=0.005)
    assert time.monotonic() - killed_s < 1.0
    turn = await asked
    assert turn.ok, turn.error
    assert turn.executor is Executor.LOCAL
    await mesh.mesh.kill_worker("p0")
    await mesh.mesh.start_worker("p0")
    await mesh.at_rest()
    again = await Conversation(mesh.client, "seed again").turn(12_000, 20)
    assert (again.ok, again.executor) == (True, Executor.PREFILL)
    await mesh.at_rest()


async def test_an_agent_may_die_without_a_turn_noticing(mesh: LiveMesh) -> None:
    """An agent is killed alone: turns in flight on its engine go on, new ones go elsewhere; when it is back, so is all residency."""
    steady, waits, moves = (Conversation(mesh.client, f"agent-{name}") for name in ("steady", "waits", "moves"))
    first = await steady.turn(3_000, 20)
    assert first.worker is not None
    name = first.worker.worker_id
    await settle_on(mesh, waits, name)
    await settle_on(mesh, moves, name)
    known = (await mesh.candidate(name, waits.session_id, waits.history)).resident_blocks
    assert known > 50
    streaming = asyncio.create_task(steady.turn(100, 3_000))
    await until(lambda: steady.turns[-1].first_s is not None and len(steady.turns) == 2, 10.0, "the stream has begun")
    mesh.mesh.workers[name].agent.kill()
    moved = await moves.turn(200, 20)
    assert moved.ok
    assert moved.worker is not None
    assert moved.worker.worker_id != name
    assert (await streaming).ok
    await mesh.restart_agent(name)
    await mesh.at_rest()
    row = await mesh.candidate(name, waits.session_id, waits.history)
    assert (row.excluded, row.resident_blocks) == ("", known)
    back = await waits.turn(200, 20)
    assert back.worker == first.worker, "the engine's life went on"
    assert back.cached_tokens > 1_000
    await mesh.at_rest()


async def test_an_engine_comes_back_behind_its_agent(mesh: LiveMesh) -> None:
    """F40: only the engine is killed and restarted; its agent lives on and voids what the engine's earlier life had."""
    one, other = Conversation(mesh.client, "behind"), Conversation(mesh.client, "behind, idle")
    first = await one.turn(3_000, 20)
    assert first.worker is not None
    name, old = first.worker.worker_id, first.worker
    await settle_on(mesh, other, name)
    await kill_engine(mesh, name)
    moved = await one.turn(100, 20)
    assert moved.ok, moved.error
    assert moved.worker is not None
    assert moved.worker.worker_id != name
    overlaps = asyncio.create_task(_overlaps(mesh, name, old, other.history))
    await mesh.restart_engine(name)
    new = await asyncio.wait_for(overlaps, 30.0)
    assert new.epoch > old.epoch
    assert (await mesh.committed(name, other.session_id)).committed_tokens == 0
    back = await other.turn(100, 20)
    assert (back.ok, back.cached_tokens) == (True, 0)
    await mesh.at_rest()


async def test_two_workers_come_back_under_each_others_addresses(mesh: LiveMesh) -> None:
    """F60: an address is reused by a worker of another name: each is known by its name again, and nothing of one counts for the other."""
    talks = [Conversation(mesh.client, f"swap-{number}") for number in range(6)]
    for number, one in enumerate(talks):
        await settle_on(mesh, one, f"d{number % 3}")
    lives = {name: await mesh.ref(name) for name in ("d0", "d1")}
    first, second = mesh.mesh.workers["d0"], mesh.mesh.workers["d1"]
    await asyncio.gather(mesh.mesh.kill_worker("d0"), mesh.mesh.kill_worker("d1"))
    first.engine_port, second.engine_port = second.engine_port, first.engine_port
    first.agent_port, second.agent_port = second.agent_port, first.agent_port
    await asyncio.gather(mesh.mesh.start_worker("d0"), mesh.mesh.start_worker("d1"))

    async def swapped() -> None:
        workers = await mesh.workers()
        assert set(lives) <= set(workers)
        for name, life in lives.items():
            status = workers[name]
            assert status.info.worker.epoch > life.epoch
            assert status.info.engine_url.endswith(f":{mesh.mesh.workers[name].engine_port}")
            assert status.eligible

    await eventually(swapped, 20.0)
    for one in talks:
        before = one.turns[0].worker
        turn = await one.turn(100, 20)
        assert turn.ok, turn.error
        if before is not None and before.worker_id in lives:
            assert turn.cached_tokens == 0
        else:
            assert turn.worker == before
    await mesh.at_rest()


async def test_serving_again_soon_after_everybody_died(mesh: LiveMesh) -> None:
    """F62: all decode workers are killed under load and restarted: the router lives, waiting turns are served, within 10 s."""
    names = ["d0", "d1", "d2"]
    router = mesh.mesh.router
    assert router is not None
    pid = router.pid
    async with load(mesh.client, "all", SESSIONS, SHAPE) as running:
        await under_way(running, SESSIONS)
        open_turns = list(running.open)
        killed_s = time.monotonic()
        await asyncio.gather(*(mesh.mesh.kill_worker(name) for name in names))
        await asyncio.gather(*(mesh.mesh.start_worker(name) for name in names))
        back_s = time.monotonic()
        await until(lambda: running.everybody(killed_s), 10.0, "everybody is served again")
    assert router.pid == pid
    begun, unstarted = split(running.turns)
    assert not unstarted, [(turn.session_id, turn.error) for turn in unstarted]
    assert all(turn in open_turns and turn.ended_s - killed_s < NOTICE_S for turn in begun)
    waited = [turn for turn in running.turns if turn.ok and turn.sent_s < back_s < turn.ended_s]
    assert waited, "nobody waited for the restart"
    await mesh.at_rest()


async def test_sessions_resume_with_a_new_router(mesh: LiveMesh) -> None:
    """The router is killed under load and comes back knowing nothing: engines drop what it had in flight, sessions go on where they are."""
    witnesses = [Conversation(mesh.client, f"router-{number}") for number in range(6)]
    await asyncio.gather(*(one.turn(2_000, 20) for one in witnesses))
    async with load(mesh.client, "router", SESSIONS, SHAPE) as running:
        await under_way(running, SESSIONS)
        router = mesh.mesh.router
        assert router is not None
        router.kill()
        await router.ended()
        await mesh.restart_router()
        back_s = time.monotonic()
        await until(lambda: running.everybody(back_s), 20.0, "everybody is served by the new router")
    failed = [turn for turn in running.turns if not turn.ok]
    assert all(isinstance(turn.error, Unavailable) for turn in failed), {str(turn.error) for turn in failed}
    await mesh.at_rest()
    for one in witnesses:
        turn = await one.turn(100, 20)
        assert turn.ok
        assert turn.worker == one.turns[0].worker, "residency alone leads back"
        assert turn.cached_tokens > 1_500
    await mesh.at_rest()


async def _prefills(mesh: LiveMesh, name: str, one: Conversation) -> None:
    """The conversation's second turn is under way on the worker, without a token."""
    books = await mesh.pool(name)
    assert len(one.turns) == 2
    assert one.turns[1].first_s is None
    assert books["prefilling"] + books["pulling"], books
