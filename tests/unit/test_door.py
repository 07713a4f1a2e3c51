"""The front door as a server: who may come in, what it answers itself, TLS, and how it stops."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from kvc.runtime.config import ConfigError
from services.router.door.door import tls_context
from tests.support.certificates import Certificates, make_certificates
from tests.support.door_engine import CHUNKED, END, USAGE, Asked, Gate, chunk, hangs, head
from tests.support.front import DEADLINE_S, HI, front, get, post
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

BOTH_LOOPS = True


# ---- what it answers itself ----


async def test_its_own_pages() -> None:
    async with front() as door:
        await door.worker()
        wire = await door.client()
        for path, kind in (
            ("/health", "application/json"),
            ("/ready", "application/json"),
            ("/v1/models", "application/json"),
            ("/kvc/state", "application/json"),
            ("/metrics", "text/plain"),
            ("/", "text/html"),
        ):
            await wire.send(get(f"{path}?x=1"))
            answer = await wire.response(method="GET")
            assert answer.status == 200
            assert (answer.header("content-type") or "").startswith(kind)
        await wire.send(get("/v1/models"))
        assert [model["id"] for model in (await wire.response(method="GET")).json["data"]] == ["m"]
        await wire.send(get("/nope"))
        assert (await wire.response(method="GET")).kind == "NOT_FOUND"


@pytest.mark.parametrize(
    "accept", ["", "*/*", "application/openmetrics-text;version=1.0.0", "application/openmetrics-text;version=\xff", "a,b;;;q=x,\xe9"]
)
async def test_metrics_in_any_form_that_is_asked_for(accept: str) -> None:
    async with front() as door:
        wire = await door.client()
        await wire.send(get("/metrics", Accept=accept))
        answer = await wire.response(method="GET")
        assert answer.status == 200
        assert b"kvc_router_turns" in answer.body
        await wire.works()


async def test_not_ready_says_why() -> None:
    async with front() as door:
        door.door._not_ready = lambda: "no decode worker"
        wire = await door.client()
        await wire.send(get("/ready"))
        answer = await wire.response(method="GET")
        assert (answer.status, answer.json) == (503, {"ready": False, "reason": "no decode worker"})


async def test_a_fault_in_a_page_is_one_answer() -> None:
    async with front() as door:
        door.door._not_ready = lambda: str(1 // 0)
        wire = await door.client()
        await wire.send(get("/ready"))
        answer = await wire.response(method="GET")
        assert (answer.status, answer.kind) == (500, "INTERNAL")
        assert b"ZeroDivision" not in answer.body
        await wire.works()


async def test_too_many_requests() -> None:
    async with front(http={"max_requests": 2}) as door:
        await door.worker("d0", hangs)
        wires = [await door.client() for _ in range(3)]
        for index, wire in enumerate(wires[:2]):
            await wire.send(post(HI, x_session_id=str(index)))
        await until(lambda: len(door.door.exchanges) == 2, DEADLINE_S, "two are in flight")
        await wires[2].send(post(HI))
        answer = await wires[2].response()
        assert (answer.status, answer.kind, answer.header("retry-after")) == (429, "TOO_MANY_REQUESTS", "1")
        await wires[2].works()


async def test_too_many_turns_of_a_session() -> None:
    async with front(requests={"session_waiters": 1}) as door:
        await door.worker("d0", hangs)
        wires = [await door.client() for _ in range(3)]
        for count, wire in enumerate(wires[:2], start=1):
            await wire.send(post(HI, x_session_id="s"))
            await until(lambda count=count: len(door.door.exchanges) == count, DEADLINE_S, "it is there")  # type: ignore[misc]
        await wires[2].send(post(HI, x_session_id="s"))
        answer = await wires[2].response()
        assert (answer.status, answer.kind) == (409, "SESSION_BUSY")
        await wires[2].works()


async def test_turns_of_a_session_come_one_after_the_other() -> None:
    async with front() as door:
        gates = [Gate(head(200, CHUNKED) + chunk(b"%d" % index) + END) for index in range(3)]
        await door.worker("d0", *gates)
        wires = [await door.client() for _ in range(3)]
        for count, wire in enumerate(wires, start=1):
            await wire.send(post(HI, x_session_id="s"))
            await until(lambda count=count: len(door.door.exchanges) == count, DEADLINE_S, "it is there")  # type: ignore[misc]
        for index, wire in enumerate(wires):
            assert len(door.engines["d0"].requests) == index + 1
            gates[index].go.set()
            assert (await wire.response()).body == b"%d" % index
            if index < 2:
                await until(lambda index=index: len(door.engines["d0"].requests) == index + 2, DEADLINE_S, "the next")  # type: ignore[misc]
        await door.check(3)


# ---- who may come in ----


GOOD = "Bearer secret"
BAD_TOKENS = [None, "", "secret", "Bearer", "Bearer ", "Bearer other", "Bearer secret2", "Basic secret", "Bearer \xff", "bearer  secret x"]


@pytest.mark.parametrize("given", BAD_TOKENS)
async def test_without_the_token_nothing_is_done(given: str | None) -> None:
    async with front(token="secret") as door:
        await door.worker()
        headers = {} if given is None else {"Authorization": given}
        wire = await door.client()
        for request in (
            post(HI, **headers),
            get("/metrics", **headers),
            get("/kvc/state", **headers),
            get("/nope", **headers),
            post(b"[", **headers),
        ):
            await wire.send(request)
            answer = await wire.response()
            assert (answer.status, answer.kind, answer.header("www-authenticate")) == (401, "UNAUTHENTICATED", "Bearer")
        for path in ("/health", "/ready", "/"):
            await wire.send(get(path, **headers))
            assert (await wire.response(method="GET")).status == 200
        await door.check(0)


async def test_with_the_token() -> None:
    """It is for the door only: the engine does not see it."""
    async with front(token="secret") as door:
        await door.worker()
        for given in (GOOD, "bearer secret", "BEARER  secret "):
            assert (await door.ask(Authorization=given)).body == USAGE
            assert door.engines["d0"].requests[-1].header("authorization") == []
        twice = post(HI, Authorization=GOOD).replace(b"Host:", b"Authorization: Bearer other\r\nHost:")
        wire = await door.client()
        await wire.send(twice)
        assert (await wire.response()).status == 401


async def test_a_long_body_is_not_read_for_somebody_without_the_token() -> None:
    async with front(token="secret") as door:
        await door.worker()
        for lines in ("Content-Length: 60000000", "Transfer-Encoding: chunked", "Content-Length: 2\r\nExpect: 100-continue"):
            wire = await door.client()
            await wire.send(f"POST /v1/completions HTTP/1.1\r\nHost: door\r\n{lines}\r\n\r\n".encode())
            _, status, headers, _ = await wire.head()
            assert status == 401
            assert ("connection", "close") in headers
            assert ("www-authenticate", "Bearer") in headers
        big = json.dumps({"prompt": "x" * 100_000}).encode()
        assert (await door.ask(big, "/v1/completions", Authorization=GOOD)).status == 200


# ---- TLS ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


async def test_tls(certificates: Certificates) -> None:
    """Everything as without: streams, keep-alive, refusals that can be read."""

    async def streams(asked: Asked) -> None:
        await asked.send(head(200, CHUNKED))
        for index in range(20):
            await asked.send(chunk(b"%d" % index * 5000))
            await asyncio.sleep(0.001)
        await asked.send(END)

    tls = tls_context(certificates.certificate, certificates.key, None)
    trust = ssl.create_default_context(cafile=str(certificates.authority))
    trust.set_alpn_protocols(["h2", "http/1.1"])
    async with front(tls=tls, client_tls=trust, http={"max_body_bytes": 100_000}) as door:
        await door.worker("d0", streams)
        wire = await door.client()
        assert wire.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        for _ in range(2):
            await wire.send(post(HI))
            assert (await wire.response()).body == b"".join(b"%d" % index * 5000 for index in range(20))
        await wire.works()
        await wire.send(b"garbage\r\n\r\n")
        assert (await wire.response()).status == 400
        wire = await door.client()
        await wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: door\r\nContent-Length: 999999\r\n\r\n" + b"x" * 50_000)
        assert (await wire.response()).status == 413
        await door.check(2)


async def test_a_tls_client_that_goes(certificates: Certificates) -> None:
    tls = tls_context(certificates.certificate, certificates.key, None)
    async with front(tls=tls, client_tls=ssl.create_default_context(cafile=str(certificates.authority))) as door:
        await door.worker("d0", hangs)
        for abort in (True, False):
            wire = await door.client()
            await wire.send(post(HI))
            await until(lambda: door.engines["d0"].live == 1, DEADLINE_S, "the engine works")
            wire.writer.transport.abort() if abort else wire.writer.close()
            await until(lambda: door.engines["d0"].live == 0, 0.2, "the engine has noticed")
        await door.check(2)


async def test_clients_may_have_to_show_a_certificate(certificates: Certificates) -> None:
    tls = tls_context(certificates.certificate, certificates.key, certificates.authority)
    trust = ssl.create_default_context(cafile=str(certificates.authority))
    async with front(tls=tls, client_tls=trust) as door:
        wire = await door.client()
        wire.writer.write(get())
        assert await wire.rest() == b""
        trust.load_cert_chain(certificates.certificate, certificates.key)
        await (await door.client()).works()


async def test_a_client_without_tls_gets_nothing(certificates: Certificates) -> None:
    tls = tls_context(certificates.certificate, certificates.key, None)
    async with front(tls=tls) as door:
        wire = await door.client()
        wire.writer.write(get())
        assert b"HTTP" not in await wire.rest()


def test_certificates_that_cannot_be_used(tmp_path: Path, certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match=r"server\.tls_cert"):
        tls_context(tmp_path / "missing.pem", tmp_path / "missing.pem", None)
    with pytest.raises(ConfigError, match=r"server\.tls_cert"):
        tls_context(certificates.authority, certificates.key, None)
    with pytest.raises(ConfigError, match=r"^server\.tls_client_ca"):
        tls_context(certificates.certificate, certificates.key, tmp_path / "missing.pem")
    assert tls_context(None, None, None) is None


# ---- start and stop ----


async def test_a_port_that_is_taken() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        async with front() as door:
            with pytest.raises(ConfigError, match=r"http\.port"):
                await door.door.start("127.0.0.1", sock.getsockname()[1], None)


async def test_stopping_lets_replies_end_and_takes_nothing_new() -> None:
    async with front() as door:
        gates = [Gate(head(200, CHUNKED) + chunk(b"a")), Gate()]

        async def streams(asked: Asked) -> None:
            await asked.send(head(200, CHUNKED) + chunk(b"a"))
            await gates[0].go.wait()
            await asked.send(chunk(b"b") + END)

        await door.worker("d0", streams, gates[1])
        streaming, waiting, idle, half = [await door.client() for _ in range(4)]
        await streaming.send(post(HI, x_session_id="1") + post(HI))
        await streaming.head()
        await waiting.send(post(HI, x_session_id="2"))
        await until(lambda: len(door.engines["d0"].requests) == 2, DEADLINE_S, "both are asked")
        await idle.works()
        await half.send(post(HI)[:-3])
        stopping = asyncio.create_task(door.door.stop(5.0))
        assert await idle.ended()
        assert await half.ended()
        with pytest.raises(OSError, match=r"(?i)connect"):
            await asyncio.open_connection("127.0.0.1", door.port)
        for gate in gates:
            gate.go.set()
        assert await streaming.rest() == chunk(b"a") + chunk(b"b") + END
        answer = await waiting.response()
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert await waiting.ended()
        async with asyncio.timeout(DEADLINE_S):
            await stopping
        assert len(door.engines["d0"].requests) == 2
        await door.check(2)


async def test_what_does_not_end_in_time_is_cut_off() -> None:
    async with front() as door:
        await door.worker("d0", hangs)
        wire = await door.client()
        await wire.send(post(HI))
        await until(lambda: door.engines["d0"].live == 1, DEADLINE_S, "it is asked")
        async with asyncio.timeout(2.0):
            await door.door.stop(0.2)
        assert await wire.ended()
        assert not door.door.clients
        await door.check(1)
        assert [end.value for end in door.ends] == ["cancelled"]


async def test_requests_that_wait_are_told_that_the_door_stops() -> None:
    async with front() as door:
        await door.worker("d0", hangs)
        door.door.stopping = True
        answer = await door.ask()
        assert (answer.status, answer.kind, answer.header("connection")) == (503, "SHUTTING_DOWN", "close")
        wire = await door.client()
        await wire.send(get("/ready"))
        answer = await wire.response(method="GET")
        assert (answer.status, answer.json["reason"], answer.header("connection")) == (503, "stopping", "close")


async def test_engines_that_left_are_not_held_on_to() -> None:
    """Connections to a worker's former address close soon after the first turn at the new one."""
    async with front() as door:
        former = await door.worker("d0")
        assert (await door.ask()).status == 200
        for epoch in (2, 3):
            engine = await door.worker("d0", epoch=epoch)
            assert (await door.ask()).status == 200
            assert (len(engine.requests), engine.open) == (1, 1)
            await until(lambda former=former: former.open == 0, DEADLINE_S, "it is closed")  # type: ignore[misc]
            assert len(door.door.upstreams) == 1
            former = engine
