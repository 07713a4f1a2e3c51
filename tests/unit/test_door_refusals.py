"""What the front door refuses: requests of two meanings, and bodies that are none. Never with 500, never the next one along with it."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.door_engine import USAGE, Gate
from tests.support.front import DEADLINE_S, HI, Front, get, post
from tests.support.smuggling import REFUSED
from tests.support.waiting import until

BOTH_LOOPS = True
WORKERS = ("d0",)


# ---- what is refused ----


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
async def test_requests_of_two_meanings_are_refused(door: Front, raw: bytes) -> None:
    """Whole and in single bytes; what follows is never taken for a request."""
    for parts in ([raw], [bytes([byte]) for byte in raw]):
        wire = await door.client()
        for part in parts:
            wire.writer.write(part)
            await asyncio.sleep(0)
        answer = await wire.response()
        assert 400 <= answer.status < 500
        assert answer.header("connection") == "close"
        assert answer.json["error"]["code"] == answer.status
        assert await wire.ended()
    assert door.engines["d0"].requests == []
    await door.check(0)


async def test_a_bad_request_after_a_good_one_waits_for_its_answer(door: Front) -> None:
    """The good one was understood before anything was wrong."""
    gate = Gate()
    door.engines["d0"].answers = [gate]
    wire = await door.client()
    await wire.send(post(HI) + get() + b"\x00garbage" + post(HI))
    await until(lambda: len(door.engines["d0"].requests) == 1, DEADLINE_S, "it is asked")
    gate.go.set()
    assert (await wire.response()).body == USAGE
    assert (await wire.response(method="GET")).status == 200
    assert (await wire.response()).status == 400
    assert await wire.ended()
    await door.check(1)


async def test_nothing_is_done_for_what_follows_the_last_request(door: Front) -> None:
    wire = await door.client()
    await wire.send(post(HI, Connection="close") + post(HI))
    assert (await wire.response()).header("connection") == "close"
    assert await wire.ended()
    await door.check(1)


BAD_BODIES: dict[str, bytes] = {
    "an array": b"[1,2]",
    "null": b"null",
    "truncated": b'{"messages":[{"role":"user"',
    "empty": b"",
    "bad UTF-8": b'{"messages":[{"role":"user","content":"\xff"}]}',
    "bad UTF-8 in a key": b'{"\xff":1}',
    "NaN": b'{"messages":[{"role":"user","content":"a"}],"max_tokens":NaN}',
    "a number out of range": b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1e400}',
    "a huge number": b'{"messages":[{"role":"user","content":"a"}],"max_tokens":%b}' % (b"9" * 10_000),
    "a negative number": b'{"messages":[{"role":"user","content":"a"}],"max_tokens":-1}',
    "a number out of range in a message": b'{"messages":[{"role":"user","content":"a","n":1e400}]}',
    "a lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "deep": b'{"messages":%b%b}' % (b"[" * 5000, b"]" * 5000),
    "a deep message": b'{"messages":[{"role":"user","content":"a","n":%b%b}]}' % (b"[" * 999, b"]" * 999),
    "a key twice": b'{"messages":[],"messages":[]}',
    "a room": b'{"messages":[{"role":"user","content":"a"}],"bootstrap_room":1}',
    "no messages": b"{}",
    "messages that are none": b'{"messages":{"role":"user"}}',
    "a role that is none": b'{"messages":[{"role":7,"content":"a"}]}',
    "a session that is none": b'{"messages":[{"role":"user","content":"a"}],"session_id":7}',
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_bad_payloads_are_the_clients_fault(door: Front, body: bytes) -> None:
    """F76: 4xx with the field's name, and the connection goes on."""
    wire = await door.client()
    await wire.send(post(body))
    answer = await wire.response()
    assert answer.status == 400
    assert answer.kind == "INVALID_FIELD"
    assert answer.json["error"]["param"]
    await wire.works()
    assert door.engines["d0"].requests == []
    await door.check(0)
