"""What the door counts: replies by status, whoever gave them, and connections, of which there is a limit."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Any

from services.router.door import client as client_module
from services.router.door.answers import REASONS
from services.router.door.door import tls_context
from tests.support.certificates import make_certificates
from tests.support.door_engine import answers, good, hangs, head, streams
from tests.support.front import DEADLINE_S, HI, Front, front, get, post
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

BOTH_LOOPS = True


def moved(door: Front) -> dict[str, float]:
    """Series of replies that stand at more than 0."""
    return {status: value for status, value in series(door).items() if value}


def series(door: Front) -> dict[str, float]:
    """Replies by status, as Prometheus reads them."""
    return {sample.labels["status"]: sample.value for sample in samples(door, "kvc_router_http_responses_total")}


def samples(door: Front, name: str) -> list[Any]:
    return [sample for family in door.door._registry.collect() for sample in family.samples if sample.name == name]


def value(door: Front, name: str) -> float:
    (sample,) = samples(door, name)
    return float(sample.value)


async def test_replies_are_counted_by_status(door: Front) -> None:
    """Requests that are refused before they are routed are seen, too; each reply counts once."""
    assert set(series(door)) == {str(status) for status in REASONS}
    assert moved(door) == {}
    await door.worker("d0", good, answers(422), streams(head(204)))
    wire = await door.client()
    await wire.send(post(HI) + post(HI) + post(b"nonsense") + get("/nowhere") + get("/health") + get("/v1/completions"))
    assert [(await wire.response(method="GET" if index > 2 else "POST")).status for index in range(6)] == [200, 422, 400, 404, 200, 405]
    await wire.send(b"GET / HTTP/1.1\r\n\r\n")
    assert (await wire.response()).status == 400
    assert (await door.ask()).status == 204
    assert moved(door) == {"200": 2, "204": 1, "400": 2, "404": 1, "405": 1, "422": 1}
    body = (await get_metrics(door)).decode()
    assert 'kvc_router_http_responses_total{status="422"} 1.0' in body
    await door.check(3)


async def get_metrics(door: Front) -> bytes:
    wire = await door.client()
    await wire.send(get("/metrics"))
    return (await wire.response(method="GET")).body


async def test_a_reply_that_nobody_gets_is_not_counted(door: Front) -> None:
    await door.worker("d0", hangs)
    wire = await door.client()
    await wire.send(post(HI))
    await until(lambda: len(door.door.exchanges) == 1, DEADLINE_S, "the exchange")
    wire.writer.transport.abort()
    await until(lambda: not door.door.exchanges, DEADLINE_S, "it has gone")
    assert moved(door) == {}
    await door.check(1)


async def test_connections_have_a_limit() -> None:
    """One too many is told so and closed, and what it sent is not worked on; when one goes, there is room again."""
    async with front(http={"max_connections": 3}) as door:
        await door.worker()
        wires = [await door.client() for _ in range(3)]
        for wire in wires:
            await wire.works()
        assert value(door, "kvc_router_http_connections") == 3
        for index in range(1, 4):
            late = await door.client()
            late.writer.write(post(HI))
            answer = await late.response()
            assert (answer.status, answer.kind, answer.header("connection")) == (503, "TOO_MANY_CONNECTIONS", "close")
            assert answer.header("retry-after") == "1"
            assert await late.ended()
            assert value(door, "kvc_router_http_connections_refused_total") == index
            await late.close()
        assert moved(door) == {"200": 3, "503": 3}
        await until(lambda: not door.door.turned_away, DEADLINE_S, "they are gone")
        await wires[0].close()
        await until(lambda: len(door.door.clients) == 2, DEADLINE_S, "one is gone")
        await (await door.client()).works()
        for wire in wires[1:]:
            await wire.works()
        assert door.engines["d0"].requests == []
        await door.check(0)


async def test_those_who_are_turned_away_and_stay_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may read their answer for a while, a bounded number of them; others are reset at once. They take no place of the others."""
    monkeypatch.setattr(client_module, "MOST_TURNED_AWAY", 2)
    monkeypatch.setattr(client_module, "LINGER_S", 0.1)
    async with front(http={"max_connections": 1}) as door:
        first = await door.client()
        await first.works()
        late = [await door.client() for _ in range(5)]
        await until(lambda: door.door.counts.turned_away.value == 5, DEADLINE_S, "all were turned away")
        assert len(door.door.turned_away) == 2
        assert len(door.door.clients) == 3
        assert sorted([b"503" in await wire.rest() for wire in late]) == [False] * 3 + [True] * 2
        await first.close()
        await until(lambda: not door.door.is_crowded, DEADLINE_S, "there is room")
        await until(lambda: not door.door.clients, DEADLINE_S, "all are closed")
        await (await door.client()).works()


def contexts(folder: Path) -> tuple[ssl.SSLContext | None, ssl.SSLContext]:
    """Of the door, and of a client that trusts it."""
    made = make_certificates(folder)
    return tls_context(made.certificate, made.key, None), ssl.create_default_context(cafile=str(made.authority))


async def test_a_connection_too_many_over_tls(tmp_path: Path) -> None:
    server, client = contexts(tmp_path)
    async with front(http={"max_connections": 1}, tls=server, client_tls=client) as door:
        first = await door.client()
        await first.works()
        late = await door.client()
        answer = await late.response()
        assert (answer.status, answer.kind) == (503, "TOO_MANY_CONNECTIONS")
        await late.close()
        await first.works()


async def test_a_handshake_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    """Nobody counts a connection before its handshake is done, so that has a limit of its own: the request's."""
    server, client = contexts(tmp_path)
    async with front(http={"request_timeout_s": 0.2}, tls=server, client_tls=client) as door:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)  # noqa: FBT003 - the standard library's
            await loop.sock_connect(sock, ("127.0.0.1", door.port))
            async with asyncio.timeout(DEADLINE_S):
                assert await ended(sock)
        await (await door.client()).works()


async def ended(sock: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    except ConnectionError:
        return True
