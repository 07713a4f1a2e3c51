"""The front door over real engines: sessions stay, deaths are noticed, errors arrive whole, and whoever leaves gives everything back."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from kvc.core.types import Mode
from tests.support.http_talking import HttpConversation
from tests.support.live_mesh import LiveMesh, live_mesh
from tests.support.waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

TYPED = {"ENGINE_FAILED", "PREFILL_FAILED", "NO_WORKER", "QUEUE_FULL", "DEADLINE_EXCEEDED"}
WAIT_S = 30.0
NOTICE_S = 1.0
ABORT_S = 0.2
REJOIN_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LiveMesh]:
    """Three decode workers and a prefill worker, whose pools hold everything the tests say."""
    async with live_mesh("1P3D", time_scale=20.0, kv_tokens=400_000) as live:
        yield live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote_mesh() -> AsyncIterator[LiveMesh]:
    """Seeds always run on a prefill worker, slowly enough to be interrupted."""
    async with live_mesh("2P2D", time_scale=1.0, engine_args=("--params-executor", "prefill")) as live:
        yield live


@asynccontextmanager
async def talkers(live: LiveMesh, name: str, count: int, *, named: bool = True) -> AsyncIterator[list[HttpConversation]]:
    """Conversations on a client of their own, with a connection each."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield [HttpConversation(http, live.mesh.http_url, f"{name}-{number}", named=named) for number in range(count)]


async def whole_session(one: HttpConversation, turns: int) -> None:
    for turn in range(turns):
        ended = await one.turn(1_500 if turn == 0 else 250, 12)
        assert ended.ok, (ended.status, ended.error)


@pytest.mark.parametrize("named", [True, False], ids=["header", "prefix"])
async def test_sessions_stay_on_their_worker(mesh: LiveMesh, *, named: bool) -> None:
    """F63, one router: 100 sessions x 10 turns at once; at least 99 % of the turns after the first run on the session's worker."""
    sessions, turns = 100, 10
    async with talkers(mesh, f"stay-{named}", sessions, named=named) as all_of_them:
        await asyncio.gather(*(whole_session(one, turns) for one in all_of_them))
    later = [(turn, one.turns[0]) for one in all_of_them for turn in one.turns[1:]]
    stayed = sum(turn.worker == first.worker for turn, first in later)
    direct = sum(turn.mode == Mode.DIRECT.value for turn, _ in later)
    assert stayed >= 0.99 * len(later), f"{stayed} of {len(later)} stayed"
    assert direct >= 0.99 * len(later), f"{direct} of {len(later)} Direct"
    homes = [one.turns[0].worker for one in all_of_them]
    assert max(map(homes.count, homes)) <= 0.5 * sessions, "sessions are spread"
    await mesh.at_rest()


async def test_everybody_dies_and_comes_back(mesh: LiveMesh) -> None:
    """F62: all workers are killed under load and restarted: the router answers all the while, and serves everybody within 10 s."""
    pid = mesh.mesh.router.pid if mesh.mesh.router is not None else None
    async with talkers(mesh, "rejoin", 12) as all_of_them, asyncio.TaskGroup() as group:
        stopping = asyncio.Event()

        async def talk(one: HttpConversation) -> None:
            while not stopping.is_set():
                ended = await one.turn(2_000, 60)
                assert ended.ok or ended.status in {0, 200} or ended.error["type"] in TYPED, ended
                if not ended.ok:
                    await asyncio.sleep(0.05)

        for one in all_of_them:
            group.create_task(talk(one))
        await until(lambda: all(any(turn.ok for turn in one.turns) for one in all_of_them), WAIT_S, "a reply for everybody")
        await asyncio.gather(*(mesh.mesh.kill_worker(name) for name in mesh.mesh.workers))
        async with mesh.http.get(f"{mesh.mesh.http_url}/health") as response:
            assert response.status == 200
        await eventually(lambda: ready(mesh, 503), WAIT_S)
        await asyncio.gather(*(mesh.mesh.start_worker(name) for name in mesh.mesh.workers))
        back_s = time.monotonic()

        def everybody() -> bool:
            return all(any(turn.ok and turn.sent_s > back_s for turn in one.turns) for one in all_of_them)

        await until(everybody, REJOIN_S, "a reply for everybody after the restart")
        stopping.set()
    assert mesh.mesh.router is not None
    assert mesh.mesh.router.pid == pid
    await mesh.at_rest()


async def ready(live: LiveMesh, status: int) -> None:
    async with live.http.get(f"{live.mesh.http_url}/ready") as response:
        assert response.status == status


async def test_a_prefill_worker_dies_in_mid_prefill(remote_mesh: LiveMesh) -> None:
    """F32: kill -9 of P: within a second no decode worker waits for it any longer, and the turn succeeds elsewhere or fails typed."""
    live = remote_mesh
    living = sorted(live.mesh.workers)
    async with talkers(live, "orphan", 2) as all_of_them:
        for one in all_of_them:  # the second time no prefill worker is left afterwards
            living = await orphaned(live, one, living)
    dead = sorted(set(live.mesh.workers) - set(living))
    await asyncio.gather(*(live.mesh.kill_worker(name) for name in dead))
    await asyncio.gather(*(live.mesh.start_worker(name) for name in dead))
    await live.at_rest()


async def orphaned(live: LiveMesh, one: HttpConversation, living: list[str]) -> list[str]:
    """One turn whose prefill worker dies; who lives afterwards."""
    turn = asyncio.create_task(one.turn(60_000, 20))
    victim = await eventually(lambda: prefilling(live, living), WAIT_S)
    live.mesh.workers[victim].engine.kill()
    killed_s = time.monotonic()
    living = [name for name in living if name != victim]
    await eventually(lambda: nobody_waits_in_vain(live, living), NOTICE_S)
    ended = await turn
    if not ended.ok:
        assert ended.error["type"] in TYPED, ended
        assert ended.ended_s - killed_s < NOTICE_S, ended
    again = await one.turn(500, 10)
    assert again.ok, again
    assert again.mode == Mode.DIRECT.value or not ended.ok
    return living


async def books_of(live: LiveMesh, names: list[str]) -> dict[str, dict[str, int]]:
    return dict(zip(names, await asyncio.gather(*(live.pool(name) for name in names)), strict=True))


async def prefilling(live: LiveMesh, living: list[str]) -> str:
    """The prefill worker at work, while a decode worker waits for it."""
    books = await books_of(live, living)
    busy = [name for name, pool in books.items() if name.startswith("p") and pool["prefilling"]]
    assert busy, books
    assert any(pool["pulling"] for name, pool in books.items() if name.startswith("d")), books
    return busy[0]


async def nobody_waits_in_vain(live: LiveMesh, living: list[str]) -> None:
    """No decode worker waits for KV, or only for that of a prefill worker who lives and is at it."""
    books = await books_of(live, living)
    pulling = sum(pool["pulling"] for name, pool in books.items() if name.startswith("d"))
    at_it = sum(pool["prefilling"] + pool["sending"] + pool["waiting"] for name, pool in books.items() if name.startswith("p"))
    assert pulling <= at_it, books


BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "temperature": -1, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 5, "stream": True}),
    ("/v1/completions", {"prompt": "hi", "temperature": -1, "stream": True}),
    ("/generate", {"text": "hi", "sampling_params": {"temperature": -1}, "stream": True}),
    ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "tool", "content": "hi"}], "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), BAD, ids=[path for path, _ in BAD])
async def test_an_engines_error_arrives_whole(mesh: LiveMesh, path: str, body: dict[str, Any]) -> None:
    """F75: status, type, length and every byte of an upstream 400 on a stream; the connection goes on."""
    engine = f"http://127.0.0.1:{mesh.mesh.workers['d0'].engine_port}"
    async with mesh.http.post(engine + path, json=body) as response:
        right = response.status, response.content_type, await response.read()
    assert right[0] == 400
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:
        for _ in range(2):
            async with http.post(mesh.mesh.http_url + path, json=body) as response:
                assert (response.status, response.content_type, await response.read()) == right
                assert int(response.headers["content-length"]) == len(right[2])
        good = {"text": "hi", "sampling_params": {"max_new_tokens": 2}}
        async with http.post(mesh.mesh.http_url + "/generate", json=good) as response:
            assert response.status == 200
    await mesh.at_rest()


async def busy(live: LiveMesh) -> int:
    books = await live.pools()
    return sum(pool["active"] + pool["waiting"] + pool["tickets"] for pool in books.values())


async def left(live: LiveMesh) -> float:
    """Closes a client in mid-stream; seconds until its engine has nothing of it left."""
    async with aiohttp.ClientSession() as http:
        body = {"messages": [{"role": "user", "content": "long " * 100}], "max_tokens": 20_000, "stream": True}
        reply = await http.post(f"{live.mesh.http_url}/v1/chat/completions", json=body)
        await reply.content.readany()
        assert await busy(live) == 1
        assert reply.connection is not None
        closed_s = time.monotonic()
        reply.close()

        async def check() -> None:
            assert await busy(live) == 0

        await eventually(check, WAIT_S, poll_s=0.005)
        return time.monotonic() - closed_s


async def test_a_client_that_leaves_stops_its_engine_within_200_ms(mesh: LiveMesh) -> None:
    await mesh.at_rest()
    waits_s = [await left(mesh) for _ in range(5)]
    assert sorted(waits_s)[len(waits_s) // 2] < ABORT_S, waits_s
    await mesh.at_rest()


async def test_clients_that_leave_at_any_moment_give_everything_back(mesh: LiveMesh) -> None:
    """F4's and F58's kind: 120 clients leave before, at and after the first token; all books return to zero."""
    await mesh.at_rest()
    address = mesh.mesh.http_port
    for number in range(120):
        content = f"leaving {number} " * (40 + 37 * (number % 50))
        body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2_000, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: m\r\ncontent-length: %d\r\n\r\n" % len(body)
        _, writer = await asyncio.open_connection("127.0.0.1", address)
        writer.write(head + body[: len(body) - (number % 7 == 0)])  # some leave before their request is complete
        await writer.drain()
        await asyncio.sleep(0.002 * (number % 13))
        writer.transport.abort()
    await mesh.at_rest()
    async with mesh.http.get(f"{mesh.mesh.http_url}/kvc/state") as response:
        state = await response.json()
    assert (state["in_flight"], state["waiting"]) == (0, 0)
    assert {worker["in_flight"] for worker in state["workers"]} == {0}
