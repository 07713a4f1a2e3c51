"""Clients that go, deadlines, and faults of ours: nothing of a request is left, wherever it was."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
from typing import TYPE_CHECKING, Any

import pytest

from kvc.core.dispatch import Unreachable
from kvc.core.types import Reason
from services.router.door.door import tls_context
from tests.support.certificates import make_certificates
from tests.support.door_engine import CHUNKED, END, USAGE, Gate, answers, breaks, chunk, good, hangs, head, streams, whole
from tests.support.fake_ports import no
from tests.support.front import CANCELLED, DEADLINE_S, HI, Front, Wire, front, post
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.certificates import Certificates

BOTH_LOOPS = True


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


# ---- clients that go ----


async def in_the_gate(door: Front) -> Wire:
    """Behind another turn of the session."""
    await door.worker("d0", hangs)
    wire = await door.client()
    await wire.send(post(HI, x_session_id="s"))
    await until(lambda: door.engines["d0"].live == 1, DEADLINE_S, "the other turn")
    return wire


async def in_the_queue(door: Front) -> None:
    """Every worker is full."""
    await door.worker("d0")
    door.admission.answer = lambda _ask: no(Reason.NO_D_CAPACITY, retry_after_s=30.0)


async def in_a_pause(door: Front) -> None:
    """The worker says that the session is busy."""
    await door.worker("d0")
    door.admission.answer = lambda _ask: no(Reason.SESSION_BUSY, retry_after_s=30.0)


async def at_the_agent(door: Front) -> None:
    """Admit has not been answered."""
    await door.worker("d0")
    door.asking.hold = True


async def at_the_engine(door: Front) -> None:
    await door.worker("d0", hangs)


async def at_both_engines(door: Front) -> None:
    await door.pair(hangs, hangs)


async def in_the_head(door: Front) -> None:
    await door.worker("d0", streams(head(200, CHUNKED), gap_s=30.0))


async def in_the_stream(door: Front) -> None:
    await door.worker("d0", streams(head(200, CHUNKED) + chunk(b"1"), gap_s=30.0))


async def in_an_error(door: Front) -> None:
    await door.worker("d0", streams(head(500, CHUNKED) + chunk(b"1"), gap_s=30.0))


@pytest.mark.parametrize("close", ["whole", "half", "reset"])
@pytest.mark.parametrize(
    "where", [in_the_gate, in_the_queue, in_a_pause, at_the_agent, at_the_engine, at_both_engines, in_the_head, in_the_stream, in_an_error]
)
async def test_a_client_that_goes_leaves_nothing(door: Front, where: Any, close: str) -> None:
    """F57, F58: aborted on the engine within 200 ms, and every count back to what it was."""
    other = await where(door)
    before = len(door.door.exchanges)
    asked_before = sum(len(engine.requests) for engine in door.engines.values())
    wire = await door.client()
    await wire.send(post(HI, x_session_id="s"))
    await until(lambda: len(door.door.exchanges) == before + 1, DEADLINE_S, "the exchange")
    if where in (at_the_engine, at_both_engines, in_the_head, in_the_stream, in_an_error):
        await until(lambda: sum(len(e.requests) for e in door.engines.values()) > asked_before, DEADLINE_S, "the engine is asked")
    if where is in_the_stream:
        await wire.head()
    await asyncio.sleep(0.02)
    go(wire, close)
    await until(lambda: len(door.door.exchanges) == before, 0.2, "the door has noticed")
    if not before:
        await until(lambda: all(engine.live == 0 for engine in door.engines.values()), 0.2, "the engines have noticed")
    door.asking.go()
    if other is not None:
        await other.close()
    await door.check()
    door.admission.answer = lambda _ask: None
    for engine in door.engines.values():
        engine.answers = [good]
    assert (await door.ask(x_session_id="s")).status == 200
    await door.check()


@pytest.mark.parametrize("over", ["tcp", "tls"])
@pytest.mark.parametrize("close", ["whole", "half", "reset"])
@pytest.mark.parametrize(
    "more",
    [b"", post(HI) * 20, post(HI) * 100, post(HI | {"user": "x" * 1_200_000})[:-9]],
    ids=["nothing", "some requests", "many requests", "a long one"],
)
async def test_a_client_that_sent_more_goes(more: bytes, close: str, over: str, certificates: Certificates) -> None:
    """F58: within 200 ms, also when nobody reads on because too much waits, so that the end of its stream is out of sight."""
    tls, reads = over == "tls", len(more) < 20 * len(post(HI)) + 1
    server = tls_context(certificates.certificate, certificates.key, None) if tls else None
    trust = ssl.create_default_context(cafile=str(certificates.authority)) if tls else None
    async with front(tls=server, client_tls=trust) as door:
        await door.worker("d0", streams(head(200, CHUNKED) + chunk(b"1"), gap_s=30.0))
        wire = await door.client()
        await wire.send(post(HI))
        await wire.head()
        await wire.reader.readexactly(len(chunk(b"1")))
        await wire.send(more)
        (one,) = door.door.clients
        await until(lambda: one._reads is reads, DEADLINE_S, "reading stops")
        await asyncio.sleep(0.15)
        assert one._reads is reads
        assert door.engines["d0"].live == 1
        if tls and (close == "half" or not reads):  # nobody answers its farewell, which a client over TLS may wait for: it just leaves
            wire.writer.transport.abort()
        else:
            go(wire, close)
        await until(lambda: not door.door.exchanges, 0.2, "the door has noticed")
        await until(lambda: door.engines["d0"].live == 0, 0.2, "the engine has noticed")
        await until(lambda: not door.door.clients, DEADLINE_S, "the connection is gone")
        assert not door.door.watch._clients
        await door.check(1)


async def test_whoever_is_read_from_again_is_not_watched(door: Front) -> None:
    """A client that waits for many replies is no client that has gone."""
    gate = Gate()
    await door.worker("d0", gate)
    wire = await door.client()
    await wire.send(post(HI) * 100)
    (one,) = door.door.clients
    await until(lambda: one in door.door.watch._clients, DEADLINE_S, "it is watched")
    await asyncio.sleep(0.3)
    gate.go.set()
    assert [(await wire.response()).status for _ in range(100)] == [200] * 100
    assert one not in door.door.watch._clients
    await until(lambda: door.door.watch._timer is None, DEADLINE_S, "nobody looks")
    await wire.works()
    await door.check(100)


def go(wire: Wire, close: str) -> None:
    """The client closes all of its connection, its sending half, or resets it."""
    if close == "half":
        wire.writer.write_eof()
    elif close == "reset":
        sock: socket.socket = wire.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.writer.transport.abort()
    else:
        wire.writer.close()


async def test_cancels_at_any_moment_leave_nothing(door: Front) -> None:
    """F58: 300 clients that go at random moments, one after the other and beside others, and no count is off by one."""
    random.seed(58)
    chunks = [head(200, CHUNKED) + chunk(b"1"), *[chunk(b"2")] * 5, END]
    await door.pair(streams(whole(USAGE), gap_s=0.004), streams(*chunks, gap_s=0.002))
    await door.worker("d1", streams(*chunks, gap_s=0.002), breaks, streams(*chunks, gap_s=0.001))

    async def goes(number: int) -> None:
        wire = await door.client()
        await wire.send(post(HI, x_session_id=f"s{number % 20}"))
        await asyncio.sleep(random.random() * 0.03)
        wire.writer.transport.abort() if number % 3 else wire.writer.close()

    for start in range(0, 300, 25):
        await asyncio.gather(*(goes(number) for number in range(start, start + 25)))
    await until(lambda: not door.door.exchanges, DEADLINE_S, "all have gone")
    await door.check()
    assert sum(end is CANCELLED for end in door.ends) > 50


async def test_load_counts_from_the_decision(door: Front) -> None:
    """F59: 32 requests at once spread over the workers, before any of them has answered; F57: +1 and -1 a request."""
    for name in ("d0", "d1", "d2", "d3"):
        await door.worker(name, hangs)
    wires = [await door.client() for _ in range(32)]
    for index, wire in enumerate(wires):
        body = HI | {"messages": [{"role": "user", "content": f"{index} " * 50}]}
        await wire.send(post(body, x_session_id=f"s{index}"))
    await until(lambda: len(door.router.sigma.open) == 32, DEADLINE_S, "all are decided")
    loads = [state.inflight for state in door.router.sigma.workers.values()]
    assert sum(loads) == 32
    assert max(loads) - min(loads) <= 1
    for wire in wires:
        wire.writer.transport.abort()
    await door.check(32)


async def test_a_ticket_that_comes_too_late_is_given_back(door: Front) -> None:
    await door.worker()
    door.asking.hold = True
    wire = await door.client()
    await wire.send(post(HI))
    await until(lambda: len(door.asking.held) == 1, DEADLINE_S, "the question")
    wire.writer.transport.abort()
    await until(lambda: not door.door.exchanges, 0.2, "the door has noticed")
    door.asking.go()
    assert len(door.admission.open) == 1
    await door.check(1)
    assert len(door.admission.released) == 1
    assert door.engines["d0"].requests == []


async def test_a_cancelled_wait_gives_its_chance_to_the_next(door: Front) -> None:
    """A turn that leaves the queue while others stay neither takes their place nor their chance (waiting turns with a pause ahead)."""
    await door.worker("d0")
    room = [False]
    door.admission.answer = lambda _ask: None if room[0] else no(Reason.NO_D_CAPACITY, retry_after_s=0.05)
    wires = [await door.client() for _ in range(3)]
    for index, wire in enumerate(wires):
        await wire.send(post(HI, x_session_id=f"s{index}"))
    await until(lambda: len(door.router.room) == 3, DEADLINE_S, "three wait")
    wires[0].writer.transport.abort()
    await until(lambda: len(door.router.room) == 2, 0.2, "it has left")
    room[0] = True
    door.router.room.notify()
    for wire in wires[1:]:
        assert (await wire.response()).status == 200
    await door.check(3)


async def test_an_engine_that_aborts_a_turn_has_not_completed_it(door: Front) -> None:
    await door.worker("d0", answers(200, b'{"text":"half","meta_info":{"finish_reason":{"type":"abort"},"prompt_tokens":9}}'))
    assert (await door.ask(x_session_id="s")).status == 200
    assert door.ends == [CANCELLED]
    session = door.router.sigma.session("s")
    assert session is not None
    assert session.turns == 0
    await door.check(1)


# ---- time ----


@pytest.mark.parametrize(
    "where", [in_the_gate, in_the_queue, in_a_pause, at_the_agent, at_the_engine, at_both_engines, in_the_head, in_the_stream, in_an_error]
)
async def test_a_request_has_a_deadline(where: Any) -> None:
    async with front(requests={"timeout_s": 0.3}) as door:
        await where(door)
        wire = await door.client()
        await wire.send(post(HI, x_session_id="s"))
        if where is in_the_stream:
            await wire.head()
            assert await wire.rest() in (b"", chunk(b"1"))
        else:
            answer = await wire.response()
            assert (answer.status, answer.kind) == (504, "DEADLINE_EXCEEDED")
            await wire.works()
        door.asking.go()
        await door.check()


# ---- faults of ours ----


@pytest.mark.parametrize("at", ["arrive", "observer", "asking"])
async def test_a_fault_of_ours_is_one_clients_problem(door: Front, at: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """500 with an incident id, nothing held, and the connection goes on."""
    await door.worker()

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret")

    with monkeypatch.context() as broken:
        if at == "arrive":
            broken.setattr(door.door.router, "arrive", fails)
        elif at == "observer":
            broken.setattr(door.observer, "decided", fails)
        else:
            broken.setattr(door.asking, "ask", fails)
        wire = await door.client()
        await wire.send(post(HI, x_session_id="s"))
        answer = await wire.response()
        assert (answer.status, answer.kind) == (500, "INTERNAL")
        assert b"secret" not in answer.body
    await wire.send(post(HI, x_session_id="s"))
    assert (await wire.response()).status == 200
    await door.check(2)


async def test_agents_that_do_not_answer() -> None:
    async with front(params={"queue_wait_s": 0.1}) as door:
        await door.worker()
        door.admission.answer = lambda _ask: Unreachable("UNAVAILABLE", gone=True)
        answer = await door.ask()
        assert (answer.status, answer.kind) == (503, "NO_WORKER")
        await door.check(1)


async def test_many_workers_that_refuse_at_once(door: Front) -> None:
    """Answers that come at once are no recursion."""
    url = (await door.worker("d0")).url
    for index in range(1, 400):
        door.join(f"d{index}", url)
    asked: list[object] = []
    door.admission.answer = lambda ask: (asked.append(ask), no(Reason.NO_D_CAPACITY))[1] if len(asked) < 399 else None  # type: ignore[func-returns-value]
    answer = await door.ask()
    assert answer.status == 200
    await door.check(1)
