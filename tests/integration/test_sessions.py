"""Sessions on a mesh of real processes: where they are placed, what they keep, and that every reply is the one the prompt calls for."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvc import wire
from kvc.core.blocks import TOKEN_BYTES
from kvc.core.types import Executor, Mode, Reason
from kvc.errors import SessionBusy, TooLarge
from kvc.evaluation.tokens import tail_tokens
from tests.support.live_mesh import decode_workers, live_mesh
from tests.support.talking import Conversation, Shape, load
from tests.support.waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.live_mesh import LiveMesh
    from tests.support.talking import Turn

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPACITY_TOKENS = 100_000
PREFILL_TOKENS = 60_000
DECODE = ("d0", "d1", "d2", "d3")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LiveMesh]:
    """The prefill worker's pool is the smaller one: there are prompts that only the decode workers can take."""
    async with live_mesh("1P4D", time_scale=20.0, kv_tokens=CAPACITY_TOKENS, prefill_kv_tokens=PREFILL_TOKENS) as live:
        yield live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[LiveMesh]:
    """One prefill and one decode worker; whatever is not resident is prefilled by the former."""
    async with live_mesh("1P1D", time_scale=50.0, kv_tokens=CAPACITY_TOKENS, engine_args=("--params-executor", "prefill")) as live:
        yield live


async def only(mesh: LiveMesh, name: str) -> None:
    """Drains every other decode worker; no name: none."""
    for other in DECODE:
        await mesh.drain(other, drain=bool(name) and other != name)


async def test_a_shared_prefix_does_not_pin_everybody_to_one_worker(mesh: LiveMesh) -> None:
    """F65: 52 sessions with the same 12k prefix on 4 D, in waves of 13: bindings max/min <= 2. The prefix is reused all the same."""
    prefix = tail_tokens("system prompt", 12_000)
    talks = [Conversation(mesh.client, f"shared-{number}", prefix=prefix) for number in range(52)]
    for first in range(0, 52, 13):
        turns = await asyncio.gather(*(one.turn(300, 20) for one in talks[first : first + 13]))
        assert all(turn.ok for turn in turns)
    again = await asyncio.gather(*(one.turn(100, 20) for one in talks))
    assert all(turn.mode is Mode.DIRECT for turn in again), Counter(turn.mode for turn in again)
    for one in talks:
        assert one.turns[0].worker == one.turns[1].worker, "a session moved"
    bindings = Counter(turn.worker for turn in again)
    assert len(bindings) == 4
    assert max(bindings.values()) <= 2 * min(bindings.values()), bindings
    warm = [one.turns[0] for one in talks if one.turns[0].cached_tokens >= 11_900]
    assert len(warm) > 26, "the shared prefix was prefilled again and again"
    await asyncio.gather(*(one.turn(8, 1, last=True) for one in talks))
    await mesh.at_rest()


async def test_sessions_with_similar_names_have_nothing_in_common(mesh: LiveMesh) -> None:
    """F66: "session-1" and "session-12": pins, lengths and ends of their own."""
    one, twelve = Conversation(mesh.client, "session-1"), Conversation(mesh.client, "session-12")
    await only(mesh, "d1")
    assert (await one.turn(2_000, 20)).ok
    await only(mesh, "d2")
    assert (await twelve.turn(3_000, 20)).ok
    await only(mesh, "")
    first, second = await mesh.session("session-1"), await mesh.session("session-12")
    assert (first.pin.worker_id, second.pin.worker_id) == ("d1", "d2")
    assert (first.context_tokens, second.context_tokens) == (2_020, 3_020)
    assert (await mesh.committed("d1", "session-12")).committed_tokens == 0
    assert (await one.turn(100, 20, last=True)).ok
    assert not (await mesh.session("session-1")).known
    assert (await mesh.session("session-12")).pin.worker_id == "d2"
    kept = await twelve.turn(100, 20)
    assert kept.worker is not None
    assert (kept.mode, kept.worker.worker_id) == (Mode.DIRECT, "d2")


async def test_five_sessions_on_a_worker_for_three(mesh: LiveMesh) -> None:
    """F67: K = 100k. Five 30k sessions in flight: three run, the others are refused with a reason, wait, and run. The same five idle:
    all are admitted, the oldest blocks go, work continues.
    """
    await only(mesh, "d3")
    talks = [Conversation(mesh.client, f"five-{number}") for number in range(5)]
    evicted = (await mesh.pool("d3"))["evicted_tokens"]
    turns = await asyncio.gather(*(one.turn(30_000, 600) for one in talks))
    assert all(turn.ok for turn in turns), [turn.error for turn in turns]
    at_once = [turn for turn in turns if turn.decision is not None and turn.decision.queued_s == 0]
    assert len(at_once) == 3
    for turn in turns:
        if turn not in at_once:
            assert turn.decision is not None
            assert wire.REASON_FROM_PB[turn.decision.probes[0].reason] is Reason.SESSION_NOT_RESIDENT_NO_CAPACITY
    for one in talks:
        turn = await one.turn(300, 20)
        assert turn.ok
        assert turn.worker is not None
        assert turn.worker.worker_id == "d3"
    assert (await mesh.pool("d3"))["evicted_tokens"] > evicted
    await only(mesh, "")
    await mesh.at_rest()


async def test_two_hundred_turns_are_right(pair: LiveMesh) -> None:
    """F16: 200 turns of one session, half of them through the prefill worker because they rewrite what was said before."""
    one = Conversation(pair.client, "long")
    draw = random.Random(16)
    executors: Counter[Executor] = Counter()
    for number in range(200):
        if number % 2 == 0:
            # History from a random place on is replaced.
            keep = draw.randrange(len(one.history) // TOKEN_BYTES + 1)
            prompt = one.history[: keep * TOKEN_BYTES] + one.words(
                draw.randint(10_000, 12_000) if number % 20 == 0 else draw.randint(20, 600)
            )
            turn = await one.ask(prompt[: 40_000 * TOKEN_BYTES], draw.randint(1, 40))
        else:
            turn = await one.turn(draw.randint(1, 300), draw.randint(1, 40))
        assert turn.ok, turn.error
        executors[turn.executor] += 1
    assert executors[Executor.LOCAL] > 20
    session = await pair.session("long")
    assert (session.turns, session.context_tokens) == (200, len(one.history) // TOKEN_BYTES)
    await pair.at_rest()


async def test_a_hundred_seeds_through_the_prefill_worker_are_right(pair: LiveMesh) -> None:
    """F16: prompts of every length around page and block borders, prefilled there and decoded here."""
    draw = random.Random(17)
    sizes = [1, 2, 15, 16, 17, 23, 24, 25, 47, 48, 49, 383, 384, 385, *(draw.randint(1, 9_000) for _ in range(86))]
    gate = asyncio.Semaphore(8)

    async def seed(number: int, size: int) -> Turn:
        async with gate:
            return await Conversation(pair.client, f"seed-{number}").turn(size, draw.randint(1, 50), last=True)

    turns = await asyncio.gather(*(seed(number, size) for number, size in enumerate(sizes)))
    assert all(turn.ok for turn in turns), [str(turn.error) for turn in turns if not turn.ok]
    assert sum(turn.executor is Executor.PREFILL for turn in turns) == 100
    await pair.at_rest()


async def test_rewritten_and_compacted_histories_are_right(mesh: LiveMesh) -> None:
    """History rewrite: what is no longer said is not remembered; what is, is reused. Compaction: a short new history under the same id."""
    one = Conversation(mesh.client, "rewrite")
    assert (await one.turn(12_000, 100)).ok
    before = one.history
    edited = await one.ask(before[: 6_000 * TOKEN_BYTES] + one.words(500), 50)
    assert edited.ok
    assert 5_900 < edited.cached_tokens <= 6_000
    compacted = await one.ask(before[: 1_000 * TOKEN_BYTES] + one.words(800), 50)
    assert compacted.ok
    assert 900 < compacted.cached_tokens <= 1_000
    back = await one.ask(before + one.words(100), 50)
    assert back.ok
    assert back.cached_tokens > 12_000, "an earlier branch is still resident"
    fresh = await one.ask(one.words(700), 20)
    assert fresh.ok
    assert fresh.cached_tokens == 0
    session = await mesh.session("rewrite")
    assert (session.turns, session.context_tokens) == (5, 720)


async def test_a_second_turn_of_a_session_waits_for_the_first(mesh: LiveMesh) -> None:
    """R21: one turn of a session at a time, in order of arrival; more than may wait are told so."""
    one = Conversation(mesh.client, "busy")
    running = asyncio.create_task(one.turn(1_000, 4_000))
    await until(lambda: bool(one.turns) and one.turns[0].first_s is not None, 10.0, "the first turn has begun")
    others = [Conversation(mesh.client, "busy") for _ in range(10)]
    waiting = []
    for number, other in enumerate(others):
        waiting.append(asyncio.create_task(other.turn(50 + number, 10)))
        await eventually(functools.partial(_requests, mesh, min(number + 2, 9)), 5.0)
    first, turns = await running, await asyncio.gather(*waiting)
    assert first.ok
    assert all(isinstance(turn.error, SessionBusy) and turn.error.retry_after_s > 0 for turn in turns[8:])
    served = turns[:8]
    assert all(turn.ok and turn.first_s is not None and turn.first_s >= first.ended_s - 0.05 for turn in served)
    assert [turn.input_tokens for turn in sorted(served, key=lambda turn: turn.ended_s)] == [50 + number for number in range(8)]
    assert (await mesh.session("busy")).turns == 9


async def _requests(mesh: LiveMesh, number: int) -> None:
    assert await mesh.metric("kvc_router_requests") == number


async def test_a_prompt_that_never_fits_is_refused_at_once(mesh: LiveMesh) -> None:
    """F10, F19: longer than any worker can hold, alone or with its output: one typed answer that says so, nothing opened anywhere."""
    await mesh.at_rest()
    before = await mesh.metric("kvc_router_turns_total")
    peaks = {name: books["peak_used_tokens"] for name, books in (await mesh.pools()).items()}
    for size, output in ((95_001, 1), (90_000, 6_000), (200_000, 10), (1, 1_000_000)):
        turn = await Conversation(mesh.client, f"too long {size}").turn(size, output)
        assert isinstance(turn.error, TooLarge), turn.error
        assert turn.error.reason == "EXCEEDS_CAPACITY"
        assert turn.error.field == "prompt"
        assert str(size) in str(turn.error)
        assert turn.wall_s < 2.0
    assert await mesh.metric("kvc_router_turns_total") == before, "a turn was started"
    assert {name: books["peak_used_tokens"] for name, books in (await mesh.pools()).items()} == peaks
    assert (await Conversation(mesh.client, "fits").turn(94_000, 900)).ok
    await mesh.at_rest()


async def test_two_limits_do_not_hang_anybody(mesh: LiveMesh) -> None:
    """F10: a prompt that the decode workers take and the prefill worker does not: it is prefilled where it is decoded."""
    busy = [Conversation(mesh.client, f"limits-{number}") for number in range(4)]
    streams = [asyncio.create_task(one.turn(1_000, 8_000)) for one in busy]
    await until(lambda: all(one.turns and one.turns[0].first_s for one in busy), 10.0, "every worker decodes, so that seeds would go to P")
    fits, longer = Conversation(mesh.client, "fits both"), Conversation(mesh.client, "fits one")
    first = await fits.turn(50_000, 10)
    second = await longer.turn(PREFILL_TOKENS + 5_000, 10)
    assert first.ok, first.error
    assert second.ok, second.error
    assert (first.executor, second.executor) == (Executor.PREFILL, Executor.LOCAL)
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)
    await mesh.at_rest()


async def test_a_drained_worker_gets_no_new_turns_and_loses_none(mesh: LiveMesh) -> None:
    """F31: DrainWorker under load: 0 failures; what runs there ends there, its sessions go on elsewhere; taken back, it serves again."""
    shape = Shape(first=(1_000, 3_000), append=(100, 500), output=(50, 400), limit=8_000)
    async with load(mesh.client, "drain", 16, shape) as running:
        await until(lambda: len(running.conversations) == 16 and running.everybody(0.0), 20.0, "everybody talks")
        await mesh.drain("d1", drain=True)
        drained_s = asyncio.get_running_loop().time()

        async def empty() -> None:
            assert decode_workers(await mesh.workers())["d1"].inflight == 0

        await eventually(empty, 10.0)
        await until(lambda: running.everybody(drained_s), 20.0, "everybody talks elsewhere")
        since = [turn for turn in running.turns if turn.sent_s > drained_s]
        assert all(turn.worker is not None and turn.worker.worker_id != "d1" for turn in since)
        await mesh.drain("d1", drain=False)
        await until(
            lambda: any(turn.worker is not None and turn.worker.worker_id == "d1" for turn in running.turns if turn.sent_s > drained_s),
            20.0,
            "the worker serves again",
        )
    assert not [turn.error for turn in running.turns if not turn.ok]
    await mesh.at_rest()
