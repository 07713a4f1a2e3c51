"""Whether replies are the engine's byte for byte: the comparison of the benchmark beside peer routers."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bench.peers import replies
from bench.peers.engine import Pace, Worker
from bench.peers.framing import body_end, framed, payload
from bench.peers.identity import ASKS, Answer, Ask, compare, difference
from tests.support.listening import listening

if TYPE_CHECKING:
    from collections.abc import Mapping


def answer(raw: bytes, **fields: Any) -> Answer:
    values: dict[str, Any] = {"status": 200, "kind": b"text/event-stream", "chunked": True} | fields
    return Answer(raw=raw, **values)


WHOLE = framed(b"abc") + framed(b"def") + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (answer(WHOLE), ""),
        (answer(WHOLE, status=500), "status 500 instead of 200"),
        (answer(WHOLE, kind=b"x"), "content-type b'x' instead of b'text/event-stream'"),
        (answer(b"abcdef", chunked=False), "chunked False instead of True"),
        (answer(WHOLE.replace(b"e", b"E")), "body differs at byte 4 of 6: b'abcdEf' instead of b'abcdef'"),
        (answer(framed(b"abc") + b"0\r\n\r\n"), "body differs at byte 3 of 6: b'abc' instead of b'abcdef'"),
        (answer(framed(b"abcdef") + b"0\r\n\r\n"), "framing differs at byte 0 of 21: "),
        (answer(WHOLE[:-2] + b"x: y\r\n\r\n"), "framing differs at byte 19 of 21: "),
    ],
)
def test_any_difference_is_told(other: Answer, told: str) -> None:
    found = difference(answer(WHOLE), other)
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_every_kind_of_request_is_compared() -> None:
    kinds = {(ask.path, ask.stream, ask.chunked) for ask in ASKS}
    assert len(kinds) == 12
    assert len(ASKS) == len(set(ASKS)) == 144
    head, _, body = Ask(replies.CHAT, 3, stream=True, chunked=True).request(1).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert msgspec.json.decode(payload(body))["seed"] == 3


async def test_replies_are_compared_with_the_engines() -> None:
    """A faithful relay passes; one that joins two chunks, drops bytes or fails is found."""
    loop = asyncio.get_running_loop()
    pace = Pace(loop)
    pace.tune("varied=1")
    server = await loop.create_server(lambda: Worker(pace), "127.0.0.1", 0)
    engine = server.sockets[0].getsockname()[1]
    asks = ASKS[:48]
    spoil: Mapping[str, Any] = {
        "as it is": lambda data: data,
        "another letter": lambda data: data.replace(b"cmpl-mock", b"cmpl-Mock"),
        "rewritten framing": lambda data: re.sub(rb"; id=7\r\n", b"\r\n", data),
        "nothing": lambda _: b"",
    }
    found: dict[str, int] = {}
    for name, change in spoil.items():

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Any = change) -> None:
            to_engine, engine_writer = None, None
            try:
                to_engine, engine_writer = await asyncio.open_connection("127.0.0.1", engine)
                engine_writer.write(await reader.read(1 << 16))
                reply = await to_engine.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", reply)
                body = b""
                while len(body) < int(length[1]) if length else body_end(body) is None:
                    body += await to_engine.read(1 << 16)
                writer.write(change(reply + body))
            finally:
                for each in (engine_writer, writer):
                    if each is not None:
                        each.close()

        async with listening(relay) as port:
            identity = await compare(engine, port, asks)
        assert identity.replies == 48
        found[name] = len(identity.differences)
    server.close()
    await server.wait_closed()
    assert found["as it is"] == 0
    assert found["another letter"] > 20
    assert 0 < found["rewritten framing"] < 48
    assert found["nothing"] == 48
