"""Engines whose peer breaks the protocol of KV transfers: damaged KV, strangers, a wrong order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvc.engine.reference.transfer import TRANSFER_VERSION, Join, Kv, Ready, Refused, Wire, checksum, prompt_digest
from tests.support.engines import SLOW, config, numbers, paired, serving, until

if TYPE_CHECKING:
    from collections.abc import Callable


def _good(ready: Ready, values: bytes) -> Kv:
    return Kv(ready.first_page, values, 5, checksum(values, 5, ready.first_page), 0.0, 1.0, 1.0, 0, 100)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (lambda ready: _good(ready, bytes(8 * 6)), None),
        (lambda ready: msgspec.structs.replace(_good(ready, bytes(8 * 6)), checksum=1), "kv-checksum"),
        (lambda ready: msgspec.structs.replace(_good(ready, bytes(8 * 6)), values=b"\x01" + bytes(8 * 6 - 1)), "kv-checksum"),
        (lambda ready: msgspec.structs.replace(_good(ready, bytes(8 * 6)), tail=6), "kv-checksum"),
        (lambda ready: _good(ready, bytes(8 * 5)), "kv-checksum"),
        (lambda ready: _good(ready, bytes(8 * 5 + 3)), "kv-checksum"),
        (lambda ready: _good(Ready(ready.first_page + 1), bytes(8 * 5)), "kv-checksum"),
        (lambda _: b"\x02\x00\x00\x00\xc1\xc1", "prefill-failed"),
        (lambda _: b"\xff\xff\xff\xff", "prefill-failed"),
        (lambda _: b"\x10\x00\x00\x00ab", "prefill-failed"),
        (lambda _: b"", "prefill-failed"),
    ],
    ids=["good", "checksum", "value", "tail", "too few", "odd bytes", "other pages", "garbage", "oversize", "truncated", "closed"],
)
async def test_damaged_kv_is_never_taken(reply: Callable[[Ready], Kv | bytes], kind: str | None) -> None:
    """F16: whatever a prefill engine sends, D takes the right KV or fails typed, and its memory is back."""

    async def prefill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        assert isinstance(await wire.from_decode(), Join)
        ready = await wire.from_decode()
        assert isinstance(ready, Ready)
        answer = reply(ready)
        if isinstance(answer, bytes):
            writer.write(answer)
            writer.write_eof()
        else:
            await wire.send(answer)
        with contextlib.suppress(Exception):
            await wire.from_decode()
        await wire.close()

    server = await asyncio.start_server(prefill, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with serving(config(role="decode", page_tokens=16)) as subject:
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
        answer = await subject.generate(numbers(100), 5, **fields)
        assert (answer.status, None if kind is None else answer.kind) == (200 if kind is None else 502, kind)
        await subject.idle()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xc1\xc1", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["nothing", "short", "oversize", "garbage", "http"],
)
async def test_strangers_on_the_bootstrap_port(data: bytes) -> None:
    async with paired() as pair:
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.prefill.running.bootstrap_port)
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await pair.checked(numbers(100), 5)
        await pair.idle()


async def test_a_protocol_breaker_gets_no_kv() -> None:
    """A decode engine that asks for pages that do not exist, or sends Ready first, ends its own room only."""
    async with paired(**SLOW) as pair:
        port = pair.prefill.running.bootstrap_port
        wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
        await wire.send(Ready(0))
        refused = await wire.from_prefill()
        assert isinstance(refused, Refused)
        assert refused.reason == "DECODE_GONE"
        await wire.close()
        task = asyncio.create_task(pair.prefill.generate(numbers(100), 5, **pair.fields(room=5)))
        await until(lambda: bool(pair.prefill.engine.bootstrap))
        wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
        request = next(iter(pair.prefill.engine.inflight.values()))
        salt = pair.prefill.engine.salt
        await wire.send(Join(TRANSFER_VERSION, 5, "x", salt, 16, 100, prompt_digest(request)))
        await wire.send(Ready(99))
        answer = await task
        assert (answer.status, answer.kind) == (502, "decode-gone")
        await wire.close()
        await pair.idle()
