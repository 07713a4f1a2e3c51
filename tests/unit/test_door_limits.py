"""Limits of the front door: each has its status, and what waits for its turn is bounded and comes in order."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from services.router.door import client as client_module
from tests.support.door_engine import CHUNKED, END, USAGE, Asked, Gate, chunk, good, head
from tests.support.front import DEADLINE_S, HI, Front, chunked, front, get, post
from tests.support.waiting import until

BOTH_LOOPS = True
WORKERS = ("d0",)


# ---- limits ----


async def test_a_head_that_is_too_long_is_431() -> None:
    """F76: 10 MB of header, in many headers, in one, or in the target; and it makes no difference how it is cut."""
    async with front(http={"max_head_bytes": 4096}) as door:
        cases = [
            get(X="a" * 5000),
            get(X="a" * 10_000_000),
            b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: door\r\n\r\n",
            b"GET /" + b"a" * 10_000_000,
            b"GET /health HTTP/1.1\r\nHost: door\r\n" + b"X: " + b"a" * 300 + b"\r\n" + b"Y: 1\r\n" * 101,
            b"GET /health HTTP/1.1\r\nHost: door\r\n" + b"".join(b"X%d: %b\r\n" % (n, b"a" * 300) for n in range(20)) + b"\r\n",
        ]
        for raw in cases:
            wire = await door.client()
            wire.writer.write(raw)
            answer = await wire.response()
            assert (answer.status, answer.kind) == (431, "HEAD_TOO_LARGE")
            assert await wire.ended()
        fits = get(X="a" * 3900)
        for cut in (0, 20, 2000, 3000, len(fits) - 1):
            wire = await door.client()
            await wire.send(fits[:cut], fits[cut:])
            assert (await wire.response(method="GET")).status == 200


def promised(size: int) -> bytes:
    """A head whose body is yet to come."""
    return b"POST /v1/completions HTTP/1.1\r\nHost: door\r\nContent-Length: %d\r\n\r\n" % size


async def test_a_prompt_that_is_too_long_is_413() -> None:
    """`requests.max_prompt_tokens` holds whichever way a prompt comes; one token is a byte here, and no worker is asked."""
    async with front(requests={"max_prompt_tokens": 100}) as door:
        await door.worker()
        fits, long = [await door.ask(HI | {"prompt": "x" * size}, "/v1/completions") for size in (100, 101)]
        assert (fits.status, long.status, long.kind) == (200, 413, "TOO_LARGE")
        assert len(door.engines["d0"].requests) == 1
        assert not door.door.exchanges


async def test_a_body_that_is_too_long_is_413() -> None:
    async with front(http={"max_body_bytes": 4096}) as door:
        await door.worker()
        fits = json.dumps(HI).encode()
        fits += b" " * (4096 - len(fits))
        for request in (post(fits), chunked(fits[:2000], fits[2000:])):
            wire = await door.client()
            await wire.send(request)
            assert (await wire.response()).status == 200
        for request in (
            post(fits + b" "),
            promised(4097),
            chunked(fits, b" "),
            chunked(fits)[:-7] + b"\r\n99999999\r\n",
        ):
            wire = await door.client()
            wire.writer.write(request + b"x" * 20_000_000)  # a client that sends on before it looks
            answer = await wire.response()
            assert (answer.status, answer.kind) == (413, "TOO_LARGE")
            assert answer.header("connection") == "close"
        assert len(door.engines["d0"].requests) == 2


async def test_a_client_that_sends_on_can_still_read_its_refusal() -> None:
    """Closing at once would reset the connection and take the answer away."""
    async with front(http={"max_body_bytes": 4096}) as door:
        wire = await door.client()
        wire.writer.write(promised(50_000_000))
        sending = asyncio.create_task(send_much(wire.writer, 50_000_000))
        await asyncio.sleep(0.1)
        assert (await wire.response()).status == 413
        assert await wire.ended()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def send_much(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size // 100_000):
        writer.write(b"x" * 100_000)
        await writer.drain()


@pytest.mark.parametrize("piece", [b"1;%b\r\nx\r\n" % (b"a" * 2000), b"X: %b" % (b"a" * 2000)], ids=["extensions", "trailers"])
async def test_framing_without_end_is_refused(piece: bytes) -> None:
    """Chunk extensions and trailers are neither head nor body, but bytes all the same."""
    async with front(http={"max_head_bytes": 4096}) as door:
        wire = await door.client()
        await wire.send(chunked(b"{}")[:-2] if piece.startswith(b"X") else chunked(b"{}")[:-5])
        for _ in range(1000):
            wire.writer.write(piece)
            await asyncio.sleep(0)
        assert (await wire.response()).status == 413


SLOW = {"request_timeout_s": 0.3, "idle_timeout_s": 0.6}


@pytest.mark.parametrize(
    "part", [b"G", get()[:-2], get(X="1")[:-3], post(HI)[:-1], post(HI)[:-50], chunked(b"{}")[:-5], chunked(b"{}")[:-2]]
)
async def test_a_request_that_does_not_come_to_its_end_is_408(part: bytes) -> None:
    """Slow-loris, in the head and in the body: the time counts from the first byte, however many come in between."""
    async with front(http=SLOW) as door:
        await door.worker()
        wire = await door.client()
        began_s = asyncio.get_running_loop().time()
        for byte in part:
            wire.writer.write(bytes([byte]))
            await asyncio.sleep(0.4 / len(part))
        answer = await wire.response()
        assert (answer.status, answer.kind) == (408, "REQUEST_TIMEOUT")
        assert asyncio.get_running_loop().time() - began_s < 2.0
        assert await wire.ended()
        assert door.engines["d0"].requests == []


async def test_an_idle_connection_closes() -> None:
    async with front(http=SLOW) as door:
        await door.worker()
        silent, used = await door.client(), await door.client()
        await used.works()
        assert await silent.ended()
        assert await used.ended()
        await until(lambda: not door.door.clients, DEADLINE_S, "they are gone")


async def test_empty_lines_are_no_request() -> None:
    """Old clients send one after a body; many of them do not keep a connection open."""
    async with front(http=SLOW) as door:
        await door.worker()
        wire = await door.client()
        await wire.send(post(HI) + b"\r\n" + post(HI) + b"\r\n")
        for _ in range(2):
            assert (await wire.response()).body == USAGE
        await wire.works()
        drip = asyncio.create_task(drip_lines(wire.writer))
        assert await wire.ended()
        drip.cancel()
        await asyncio.gather(drip, return_exceptions=True)


async def drip_lines(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\r\n")
        await asyncio.sleep(0.05)


async def test_a_request_in_flight_is_not_idle() -> None:
    async with front(http=SLOW) as door:
        gate = Gate()
        await door.worker("d0", gate)
        wire = await door.client()
        await wire.send(post(HI))
        await asyncio.sleep(1.2)
        gate.go.set()
        assert (await wire.response()).body == USAGE


async def test_the_time_of_a_request_begun_behind_another_counts_from_its_turn() -> None:
    async with front(http=SLOW) as door:
        gate = Gate()
        await door.worker("d0", gate)
        wire = await door.client()
        await wire.send(post(HI) + post(HI)[:-5])
        await asyncio.sleep(0.7)
        gate.go.set()
        assert (await wire.response()).body == USAGE
        assert (await wire.response()).status == 408


async def test_bodies_of_all_connections_together_have_a_limit() -> None:
    """Whoever is still sending when there is too much is refused; what is held is counted to the byte."""
    async with front(http={"max_held_bytes": 4 << 20}) as door:
        gate = Gate()
        await door.worker("d0", gate)
        body = json.dumps({"prompt": "x" * 900_000, "max_tokens": 1}).encode()
        wires = [await door.client() for _ in range(10)]
        for wire in wires:
            wire.writer.write(post(body, "/v1/completions")[:-1])
        answers = [asyncio.create_task(wire.response()) for wire in wires]

        def others_are_there() -> bool:
            others = sum(not answer.done() for answer in answers)
            return others < 10 and door.door.held_bytes == others * (len(body) - 1)

        await until(others_are_there, DEADLINE_S, "some are refused, and the others are there but for their last byte")
        assert 2 << 20 < door.door.held_bytes <= 4 << 20
        for wire in wires:
            wire.writer.write(body[-1:])
        gate.go.set()
        statuses = [(await answer).status for answer in answers]
        assert 2 <= statuses.count(200) <= 4
        assert set(statuses) == {200, 503}
        assert {(await answer).kind for answer in answers if (await answer).status == 503} == {"OVERLOADED"}
        await until(lambda: door.door.held_bytes == 0, DEADLINE_S, "nothing is held")
        assert (await door.ask(body, "/v1/completions")).status == 200
        assert door.door.held_bytes == 0


# ---- Expect: 100-continue ----


async def test_a_client_that_waits_is_told_to_go_on(door: Front) -> None:
    wire = await door.client()
    for request in (post(HI, Expect="100-continue"), chunked(json.dumps(HI).encode(), Expect="100-Continue")):
        edge = request.index(b"\r\n\r\n") + 4
        await wire.send(request[:edge])
        assert (await wire.head())[1] == 100
        await wire.send(request[edge:])
        assert (await wire.response()).body == USAGE
    assert not door.engines["d0"].requests[0].header("expect")
    await wire.works()


async def test_a_body_that_is_too_long_is_not_asked_for() -> None:
    """Whichever header comes first."""
    async with front(http={"max_body_bytes": 4096}) as door:
        for lines in (["Expect: 100-continue", "Content-Length: 5000"], ["Content-Length: 5000", "Expect: 100-continue"]):
            wire = await door.client()
            await wire.send("\r\n".join(["POST /v1/completions HTTP/1.1", "Host: door", *lines, "", ""]).encode())
            version, status, headers, _ = await wire.head()
            assert (version, status) == ("HTTP/1.1", 413)
            assert ("connection", "close") in headers


async def test_no_body_and_no_http11_need_no_word(door: Front) -> None:
    for request in (
        get(Expect="100-continue"),
        get(Expect="100-continue", Content_Length="0"),
        get(Expect="100-continue").replace(b"1.1", b"1.0"),
    ):
        wire = await door.client()
        await wire.send(request)
        assert (await wire.head())[1] == 200


async def test_the_word_waits_for_the_replies_before_it(door: Front) -> None:
    """It must not land in the middle of another reply, and it must come."""
    gate = Gate(head(200, CHUNKED) + chunk(b"a") + chunk(USAGE) + END)
    door.engines["d0"].answers = [gate, good]
    request = post(HI, Expect="100-continue")
    edge = request.index(b"\r\n\r\n") + 4
    wire = await door.client()
    await wire.send(post(HI) + get() + request[:edge])
    await until(lambda: len(door.engines["d0"].requests) == 1, DEADLINE_S, "it is asked")
    await asyncio.sleep(0.05)
    gate.go.set()
    assert (await wire.response()).body == b"a" + USAGE
    assert (await wire.response(method="GET")).status == 200
    assert (await wire.head())[1] == 100
    await wire.send(request[edge:])
    assert (await wire.response()).body == USAGE
    await wire.works()


async def test_a_client_that_does_not_wait_for_the_word(door: Front) -> None:
    gate = Gate()
    door.engines["d0"].answers = [gate, good]
    wire = await door.client()
    await wire.send(post(HI) + post(HI, Expect="100-continue"))
    gate.go.set()
    for _ in range(2):
        assert (await wire.response()).body == USAGE
    await wire.works()


# ---- pipelining ----


async def test_pipelined_requests_are_answered_in_order(door: Front) -> None:
    """Also when a later one could be answered at once and an earlier one takes its time."""
    replies = [head(200, CHUNKED) + chunk(b"%d" % index) + END for index in range(3)]
    gates = [Gate(reply) for reply in replies]
    door.engines["d0"].answers = [*gates, good]
    wire = await door.client()
    await wire.send(post(HI) + get() + post(HI) + get("/nope") + post(HI) + get(Connection="close"))
    for gate in reversed(gates):
        gate.go.set()
    bodies = [(await wire.response()).body for _ in range(6)]
    assert bodies[0::2] == [b"0", b"1", b"2"]
    assert [bodies[1], bodies[5]] == [b'{"status":"ok"}'] * 2
    assert b"NOT_FOUND" in bodies[3]
    assert await wire.ended()
    assert len(door.engines["d0"].requests) == 3
    await door.check(3)


async def test_requests_come_in_while_a_reply_goes_out(door: Front) -> None:
    """A long one, too: neither waits for the other."""
    goes_on = asyncio.Event()

    async def streams(asked: Asked) -> None:
        await asked.send(head(200, CHUNKED) + chunk(b"1"))
        await goes_on.wait()
        await asked.send(chunk(b"2") + END)

    door.engines["d0"].answers = [streams, good]
    wire = await door.client()
    await wire.send(post(HI))
    await wire.head()
    long = post(HI | {"user": "x" * 5_000_000})
    sending = asyncio.create_task(wire.send(long + get()))
    assert await wire.reader.readexactly(len(chunk(b"1"))) == chunk(b"1")
    await asyncio.sleep(0.1)
    goes_on.set()
    assert await wire.reader.readexactly(len(chunk(b"2") + END)) == chunk(b"2") + END
    assert (await wire.response()).body == USAGE
    assert (await wire.response(method="GET")).status == 200
    await sending
    assert len(door.engines["d0"].requests[1].body) > 5_000_000
    await door.check(2)


async def test_only_one_request_of_a_connection_is_worked_on(door: Front) -> None:
    gate = Gate()
    door.engines["d0"].answers = [gate]
    wire = await door.client()
    await wire.send(post(HI) * 3)
    await until(lambda: len(door.engines["d0"].requests) == 1, DEADLINE_S, "the first")
    await asyncio.sleep(0.1)
    assert len(door.engines["d0"].requests) == 1
    gate.go.set()
    for _ in range(3):
        assert (await wire.response()).body == USAGE
    await door.check(3)


async def test_what_waits_is_bounded(door: Front) -> None:
    """In requests and in bytes: reading stops, and goes on when there is room."""
    gate = Gate()
    door.engines["d0"].answers = [gate]
    for request, count in ((post(HI), 2000), (post(HI | {"messages": [{"role": "user", "content": "x" * 500_000}]}), 12)):
        gate.go.clear()
        wire = await door.client()
        sending = asyncio.create_task(wire.send(request * count))
        await until(lambda: len(door.door.exchanges) == 1, DEADLINE_S, "the first")
        await asyncio.sleep(0.3)
        one = next(iter(door.door.exchanges))._client
        assert len(one._waiting) <= client_module.MOST_WAITING
        assert sum(len(waiting.body) for waiting in one._waiting) <= client_module.MAX_WAITING_BYTES + 600_000
        gate.go.set()
        refused = 0
        for _ in range(count):
            answer = await wire.response()
            if answer.status == 429:
                refused += 1
                break
            assert answer.body == USAGE
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await wire.close()
    await door.check()


@pytest.mark.parametrize("first", [b"", post(HI)], ids=["pages", "pages behind a turn"])
async def test_a_client_that_reads_nothing_gets_no_more_answers(door: Front, first: bytes) -> None:
    """Own pages are answered without an engine: what a client does not read holds its next request back."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, ("127.0.0.1", door.port))
        await until(lambda: len(door.door.clients) == 1, DEADLINE_S, "it is there")
        (one,) = door.door.clients
        assert one._transport is not None
        one._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sending = asyncio.create_task(loop.sock_sendall(sock, first + get("/") * 200))
        await until(lambda: not one._writes, DEADLINE_S, "it is full")
        await asyncio.sleep(0.3)
        assert one._transport.get_write_buffer_size() < 200_000
        assert 0 < len(one._waiting) <= client_module.MOST_WAITING
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
