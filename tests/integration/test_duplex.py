"""AdmitStream on a connection of its own, against the servers of the mesh: TLS, tokens, large messages, peers that are none."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvc.runtime.server import ServerConfig
from kvc.v1 import admission_pb2, types_pb2
from services.router.adapters.agents import Agents
from services.router.adapters.duplex import Broken
from services.router.config import AgentsConfig
from tests.support.certificates import Certificates, make_certificates
from tests.support.mesh_server import Scripted, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from kvc.runtime.server import Server
    from services.router.adapters.duplex import Duplex


class Ends:
    """What a call tells its owner."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.why: list[str] = []


@asynccontextmanager
async def calling(target: str, **settings: Any) -> AsyncIterator[tuple[Duplex, Ends]]:
    ends = Ends()
    async with Agents(AgentsConfig(**settings)) as agents:
        call = await agents.stream(target, ends.received.append, lambda: None, ends.why.append)
        try:
            yield call, ends
        finally:
            call.close()


async def refusal(target: str, **settings: Any) -> None:
    """Calls and waits until the call is refused, while it connects or, as TLS 1.3 has it, right after."""
    async with calling(target, **settings) as (_, ends):
        await until(lambda: bool(ends.why))
        raise Broken(*ends.why)


async def echo(requests: Any, _context: Any) -> AsyncGenerator[Any]:
    """Answers each question with its own attempt."""
    async for request in requests:
        results = [admission_pb2.AdmitStreamResult(attempt=one.attempt) for one in request.admits]
        yield admission_pb2.AdmitStreamResponse(results=results)


def question(name: str = "r", block_bytes: int = 0) -> bytes:
    turn = types_pb2.Turn(block_hashes=bytes(block_bytes))
    asked = admission_pb2.AdmitRequest(attempt=types_pb2.Attempt(request_id=name), turn=turn)
    return admission_pb2.AdmitStreamRequest(admits=[asked]).SerializeToString()


def names(ends: Ends) -> list[str]:
    responses = [admission_pb2.AdmitStreamResponse.FromString(raw) for raw in ends.received]
    return [result.attempt.request_id for response in responses for result in response.results]


def target_of(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


def echoing() -> Scripted:
    servicer = Scripted()
    servicer.many = echo
    return servicer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


async def test_messages_there_and_back_in_order() -> None:
    async with serving(echoing()) as server, calling(target_of(server)) as (call, ends):
        asked = [f"r{number}" for number in range(300)]
        for name in asked:
            call.send(question(name))
        await until(lambda: len(ends.received) == len(asked))
        assert names(ends) == asked
        assert ends.why == []


async def test_questions_of_megabytes_go_through_windows_and_frames() -> None:
    async with serving(echoing()) as server, calling(target_of(server)) as (call, ends):
        for number in range(4):
            call.send(question(f"r{number}", 8 << 20))
        await until(lambda: len(ends.received) == 4)
        assert names(ends) == ["r0", "r1", "r2", "r3"]
        assert call.writable


async def test_answers_of_megabytes_come_whole() -> None:
    async def many(_requests: Any, _context: Any) -> AsyncGenerator[Any]:
        results = [admission_pb2.AdmitStreamResult(attempt=types_pb2.Attempt(request_id="x" * 128)) for _ in range(10_000)]
        for _ in range(10):
            yield admission_pb2.AdmitStreamResponse(results=results)
        await asyncio.Event().wait()

    servicer = Scripted()
    servicer.many = many
    async with serving(servicer) as server, calling(target_of(server)) as (_, ends):
        await until(lambda: len(ends.received) == 10)
        assert len(set(ends.received)) == 1
        assert len(ends.received[0]) > 1 << 20


async def test_tls_client_certificates_and_tokens(certificates: Certificates) -> None:
    config = ServerConfig(
        tls_cert=certificates.certificate, tls_key=certificates.key, tls_client_ca=certificates.authority, auth_token="t0k"
    )
    own = {"tls_ca": certificates.authority, "tls_cert": certificates.certificate, "tls_key": certificates.key}
    async with serving(echoing(), config) as server:
        async with calling(target_of(server), token="t0k", **own) as (call, ends):
            call.send(question())
            await until(lambda: names(ends) == ["r"])
        async with calling(target_of(server), token="wrong", **own) as (_, refused):
            await until(lambda: refused.why == ["the peer ended the call"])
        for settings in ({}, {"tls_ca": certificates.authority}):
            with pytest.raises((OSError, Broken)):
                await refusal(target_of(server), token="t0k", **settings)


async def test_an_agent_that_stops_ends_the_call() -> None:
    async with serving(echoing()) as server, calling(target_of(server)) as (call, ends):
        call.send(question())
        await until(lambda: names(ends) == ["r"])
        await server.stop(0)
        await until(lambda: bool(ends.why))


async def test_nobody_there_and_peers_that_speak_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            async with calling(nobody, silence_s=0.1):
                raise AssertionError("it never spoke")
    with pytest.raises(ConnectionRefusedError):
        async with calling(nobody):
            raise AssertionError("nobody is there")

    async def http1(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(http1, "127.0.0.1", 0)
    async with server:
        with pytest.raises(Broken):
            async with calling(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"):
                raise AssertionError("it is no HTTP/2")
