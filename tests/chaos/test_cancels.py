"""Clients go away, at every moment of a turn: nothing of theirs stays, and what they said before is still true."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvc.core.types import Mode
from tests.support.live_mesh import live_mesh
from tests.support.talking import Conversation
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.live_mesh import LiveMesh
    from tests.support.talking import Turn

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANCELS = 1_000
CLIENTS = 20
REST_S = 8.0
"""Tickets whose answer got lost live 5 s; everything else is given back at once."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LiveMesh]:
    """Seeds run on the prefill worker, so that both engines have a part in them."""
    async with live_mesh("1P2D", time_scale=10.0, kv_tokens=200_000, engine_args=("--params-executor", "prefill")) as live:
        yield live


@pytest.mark.timeout(180)
async def test_a_thousand_cancels_leave_nothing_behind(mesh: LiveMesh) -> None:
    """F5, F58, F69, F70: 1,000 cancels at random moments, of seeds and of direct turns, before the decision, in prefill, after the first
    chunk and near the end: inflight, tickets, slots, queues and connections return to 0. Between them every session has complete turns:
    their replies are right and their lengths are committed.
    """
    left: list[Turn] = []
    complete: list[Turn] = []

    async def client(number: int) -> None:
        draw = random.Random(number)
        one = Conversation(mesh.client, f"cancel-{number}")
        for count in range(CANCELS // CLIENTS):
            if count % 10 == 9:
                # A new session: its first turns are seeds, whoever leaves them.
                one = Conversation(mesh.client, f"cancel-{number}-{count}")
            left.append(await leave(one, draw))
            if count % 3 == 2:
                turn = await one.turn(draw.randint(50, 1_000), draw.randint(5, 60))
                assert turn.ok, turn.error
                complete.append(turn)
                await committed(mesh, one)

    files = mesh.open_files()
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
    assert time.monotonic() - started_s < 60.0
    assert len(left) == CANCELS
    kinds = {
        "no token": sum(not turn.ok and turn.first_s is None for turn in left),
        "mid-stream": sum(not turn.ok and turn.first_s is not None for turn in left),
    }
    assert min(kinds.values()) > CANCELS // 5, kinds
    assert all(turn.error is None for turn in left), {str(turn.error) for turn in left}
    assert {Mode.SEED, Mode.DIRECT} <= {turn.mode for turn in complete}
    await mesh.at_rest(REST_S)
    assert await mesh.metric("kvc_router_waiting") == 0
    assert await mesh.metric("kvc_router_requests") == 0
    assert await mesh.metric("kvc_router_releases") == 0

    async def closed() -> None:
        grown = {name: count - files[name] for name, count in mesh.open_files().items() if count > files[name] + 10}
        assert not grown, f"connections that nobody uses: {grown}"

    await eventually(closed, REST_S)


async def leave(one: Conversation, draw: random.Random) -> Turn:
    """A turn that is left at a random moment."""
    append, output = draw.randint(50, 3_000), draw.randint(40, 300)
    moment = draw.choice(["at once", "deciding", "prefilling", "first chunk", "later", "near the end"])
    if moment in {"at once", "deciding", "prefilling"}:
        bound_s = {"at once": 0.001, "deciding": 0.012, "prefilling": 0.08}[moment]
        return await one.leave(append, output, after_s=draw.uniform(0.0, bound_s))
    share = {"first chunk": 0.0, "later": draw.random(), "near the end": 0.95}[moment]
    return await one.leave(append, output, after_tokens=max(1, int(share * output)))


async def committed(mesh: LiveMesh, one: Conversation) -> None:
    """What the router and the worker know of a session is its last turn, to the token; of turns that were left, at most those are
    counted that had come to their end before their client's goodbye was heard.
    """
    last = one.turns[-1]
    whole = last.input_tokens + last.asked_tokens
    known = await mesh.session(one.session_id)
    assert known.context_tokens == whole
    assert sum(turn.ok for turn in one.turns) <= known.turns <= len(one.turns)
    assert last.worker is not None
    record = await mesh.committed(last.worker.worker_id, one.session_id)
    assert record.committed_tokens == whole - 1, "the last token's own KV is not computed"


@pytest.mark.parametrize("moment", ["before the decision", "in prefill", "first chunk"])
async def test_the_turn_after_a_cancelled_one_runs_at_once(mesh: LiveMesh, moment: str) -> None:
    """F68, F69: t0 is served, t1 is left, t2 follows at once: it runs directly on what t0 left, its reply is right, its length is
    t0's and the append; nobody waits for a forgotten ticket.
    """
    one = Conversation(mesh.client, f"t0-t1-t2 {moment}")
    first = await one.turn(3_000, 50)
    assert first.ok
    kept = len(one.history)
    waited = []
    for _ in range(8):
        if moment == "first chunk":
            left = await one.leave(200, 2_000, after_tokens=1)
            assert left.first_s is not None
        else:
            left = await one.leave(2_000, 2_000, after_s=0.002 if moment == "before the decision" else 0.015)
        assert not left.ok
        assert len(one.history) == kept
        second = await one.turn(100, 20)
        assert second.ok, second.error
        assert second.mode is Mode.DIRECT
        assert second.worker == first.worker
        assert second.cached_tokens >= kept // 4 - 2 * 24
        await committed(mesh, one)
        kept = len(one.history)
        waited.append(second.wall_s)
    assert max(waited) < 3.0, "a turn waited for a ticket to expire"
    await mesh.at_rest(REST_S)


async def test_callers_with_short_deadlines_leave_nothing_behind(mesh: LiveMesh) -> None:
    """F5: 400 calls whose deadline ends long before the worker could answer: inflight 0, nothing pending, workers as healthy as before."""
    talks = [Conversation(mesh.client, f"deadline-{number}") for number in range(400)]
    gate = asyncio.Semaphore(50)

    async def ask(one: Conversation) -> Turn:
        async with gate:
            return await one.turn(2_000, 3_000, timeout_s=0.05)

    turns = await asyncio.gather(*(ask(one) for one in talks))
    assert {turn.error.code if turn.error else "" for turn in turns} == {"DEADLINE_EXCEEDED"}
    await mesh.at_rest(REST_S)
    assert (await talks[0].turn(100, 20)).ok


async def test_a_waiting_turn_that_is_left_frees_its_place(mesh: LiveMesh) -> None:
    """F58, F69: turns left while they wait for room, in the router or in an engine, and while they wait for their session's previous
    turn. What they waited for is there for the next one at once.
    """
    blockers = [Conversation(mesh.client, f"blocker-{number}") for number in range(4)]
    blocking = [asyncio.create_task(one.turn(60_000, 30_000)) for one in blockers]

    async def full() -> None:
        books = await mesh.pools()
        assert all(books[name]["held_tokens"] + books[name]["reserved_tokens"] > 170_000 for name in ("d0", "d1")), books

    await eventually(full, 20.0)
    queued = [Conversation(mesh.client, f"queued-{number}") for number in range(10)]
    waiting = [asyncio.create_task(one.turn(30_000, 1_000)) for one in queued]
    behind = [asyncio.create_task(Conversation(mesh.client, blockers[0].session_id).turn(10, 10)) for _ in range(5)]

    async def queues() -> None:
        books = await mesh.pools()
        assert await mesh.metric("kvc_router_waiting") + sum(pool["waiting"] for pool in books.values()) == 10
        assert await mesh.metric("kvc_router_requests") == 19

    await eventually(queues, 10.0)
    for task in (*waiting, *behind):
        task.cancel()
    await asyncio.wait([*waiting, *behind])
    assert all(one.turns[0].first_s is None for one in queued)

    async def left() -> None:
        books = await mesh.pools()
        assert await mesh.metric("kvc_router_waiting") + sum(pool["waiting"] for pool in books.values()) == 0
        assert await mesh.metric("kvc_router_requests") == 4

    await eventually(left, 2.0)
    for task in blocking:
        task.cancel()
    await asyncio.wait(blocking)
    turns = await asyncio.gather(*(one.turn(1_000, 20) for one in (*blockers, *queued)))
    assert all(turn.ok for turn in turns)
    assert max(turn.wall_s for turn in turns) < 3.0
    await mesh.at_rest(REST_S)
