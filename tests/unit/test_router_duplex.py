"""HTTP/2 for one call, without a network: what is sent, what is taken, and that whatever a peer says ends in one clear reason."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.adapters import duplex
from services.router.adapters.duplex import Duplex
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = [(":method", "POST"), (":path", "/a.B/C"), ("authorization", "Bearer " + "t" * 300)]
MAX_MESSAGE_BYTES = 100_000


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 1) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def setting(name: int, value: int) -> bytes:
    return frame(4, struct.pack(">HI", name, value), stream=0)


def room(by: int, stream: int) -> bytes:
    return frame(8, struct.pack(">I", by), stream=stream)


def message(body: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(body)) + body


def frames(raw: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    while raw:
        length = int.from_bytes(raw[:3], "big")
        yield raw[3], raw[4], int.from_bytes(raw[5:9], "big"), raw[9 : 9 + length]
        raw = raw[9 + length :]


class Wire:
    """A transport: keeps what is written."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.closed = False

    def get_extra_info(self, _name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent += data

    def close(self) -> None:
        self.closed = True


class Talk:
    """A call and what it tells its owner."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.drained = 0
        self.ends: list[str] = []
        self.call = Duplex(HEADERS, self.received.append, self._drain, self.ends.append, MAX_MESSAGE_BYTES)
        self.wire = Wire()
        self.call.connection_made(cast("asyncio.Transport", self.wire))
        self.greeting = bytes(self.wire.sent)
        self.wire.sent.clear()

    def _drain(self) -> None:
        self.drained += 1

    def hear(self, *raw: bytes) -> None:
        for one in raw:
            if not self.ends:
                self.call.data_received(one)

    def said(self) -> list[tuple[int, int, int, bytes]]:
        said = list(frames(bytes(self.wire.sent)))
        self.wire.sent.clear()
        return said

    def end(self) -> None:
        self.call.close()
        if self.call.open.done():
            self.call.open.exception()


def talking(play: Callable[[Talk], None]) -> None:
    """Plays on an event loop of its own, for hypothesis."""

    async def on_loop() -> None:
        talk = Talk()
        play(talk)
        talk.end()

    asyncio.run(on_loop())


async def test_the_call_begins_with_the_connection_and_is_open_when_the_peer_speaks() -> None:
    talk = Talk()
    assert talk.greeting.startswith(PREFACE)
    sent = list(frames(talk.greeting.removeprefix(PREFACE)))
    assert [kind for kind, *_ in sent] == [4, 8, 1]
    kind, flags, stream, headers = sent[-1]
    assert (kind, flags, stream) == (1, 4, 1)
    assert headers.startswith(b"\0\x07:method\x04POST\0\x05:path\x06/a.B/C\0\x0dauthorization\x7f\xb4\x01Bearer t")
    assert not talk.call.open.done()
    talk.hear(setting(3, 100))
    assert talk.call.open.done()
    assert talk.said() == [(4, 1, 0, b"")]
    talk.end()
    assert [kind for kind, *_ in talk.said()] == [3]
    assert talk.ends == ["closed"]
    assert talk.wire.closed
    talk.call.close()
    talk.call.connection_lost(None)
    assert talk.ends == ["closed"]


@given(st.lists(st.binary(max_size=60), max_size=6), st.lists(st.integers(1, 40), max_size=40), st.integers(1, 30))
@example([b"a", b""], [1] * 40, 1)
def test_messages_come_whole_however_they_are_cut(bodies: list[bytes], cuts: list[int], size: int) -> None:
    content = b"".join(message(body) for body in bodies)
    raw = setting(3, 1) + b"".join(frame(0, content[at : at + size]) for at in range(0, len(content), size))
    raw += frame(99, b"unknown") + frame(9, b"continued") + frame(1, b"headers", 4) + frame(7, struct.pack(">II", 1, 0), stream=0)

    def play(talk: Talk) -> None:
        rest = raw
        for cut in cuts:
            talk.hear(rest[:cut])
            rest = rest[cut:]
        talk.hear(rest)
        assert talk.received == bodies
        assert talk.ends == []

    talking(play)


async def test_padding_is_no_data() -> None:
    talk = Talk()
    body = message(b"hello")
    talk.hear(setting(3, 1), frame(0, b"\x03" + body[:4] + bytes(3), 8), frame(0, b"\x00" + body[4:], 8))
    assert talk.received == [b"hello"]
    talk.end()


@given(
    st.lists(st.binary(max_size=50_000), max_size=4),
    st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(1, 70_000)), max_size=30),
    st.sampled_from([0, 10, 65_535, 1 << 20]),
)
@settings(max_examples=60)
def test_never_more_is_sent_than_the_peer_has_room_for_and_nothing_is_lost(
    bodies: list[bytes], rooms: list[tuple[int, int]], window: int
) -> None:
    content = b"".join(message(body) for body in bodies)

    def play(talk: Talk) -> None:
        talk.hear(setting(3, 1))
        talk.said()
        left = {0: 65_535, 1: 65_535}
        got = b""
        steps: list[Any] = [*bodies[:1], ("window", window), *rooms, *bodies[1:], (0, len(content)), (1, len(content) + 65_535)]
        for step in steps:
            if isinstance(step, bytes):
                talk.call.send(step)
            elif step[0] == "window":
                talk.hear(setting(4, step[1]))
                left[1] += step[1] - 65_535
            else:
                talk.hear(room(step[1], step[0]))
                left[step[0]] += step[1]
            for kind, _, stream, payload in talk.said():
                if kind == 0:
                    assert stream == 1
                    assert 0 < len(payload) <= 16_384
                    left = {name: size - len(payload) for name, size in left.items()}
                    assert min(left.values()) >= 0
                    got += payload
        assert got == content
        assert talk.call.writable
        assert talk.ends == []

    talking(play)


@pytest.mark.parametrize("most", [16_384, 1 << 20, 2**24 - 1, 2**32 - 1])
async def test_frames_stay_short_whatever_the_peer_would_take(most: int) -> None:
    talk = Talk()
    talk.hear(setting(5, most), setting(4, 2**31 - 1), room(2**31 - 1 - 65_535, 0))
    talk.said()
    body = bytes(17 << 20)
    talk.call.send(body)
    sent = [payload for kind, _, _, payload in talk.said() if kind == 0]
    assert max(map(len, sent)) == 16_384
    assert b"".join(sent) == message(body)
    assert talk.ends == []
    talk.end()


@pytest.mark.parametrize(
    "trailers",
    [
        [frame(1, b"\0\x0bgrpc-status\x0216", 5)],
        [frame(1, b"\x88", 4), frame(0, message(b"last")), frame(1, b"\0\x0bgrpc-status\x0214", 5)],
        [frame(1, b"\0\x0bgrpc-", 1), frame(9, b"status\x0216", 4)],
        [frame(1, b"\x02" + bytes(5) + b"\x88" + bytes(2), 0x2D)],
    ],
    ids=["at once", "after an answer", "continued", "padded, with a priority"],
)
async def test_a_status_ends_the_call_however_it_comes(trailers: list[bytes]) -> None:
    talk = Talk()
    talk.hear(setting(3, 1), *trailers)
    assert talk.ends == ["the peer ended the call"]
    assert talk.received == [b"last"][: len(trailers) // 3]
    assert talk.wire.closed


async def test_padding_takes_room_like_data() -> None:
    talk = Talk()
    talk.hear(setting(3, 1))
    talk.said()
    one = b"\xff" + message(b"x" * 10) + bytes(255)
    granted = 0
    for _ in range(4200):
        talk.hear(frame(0, one, 8))
        granted += sum(int.from_bytes(payload, "big") for kind, _, stream, payload in talk.said() if (kind, stream) == (8, 1))
    assert talk.received == [b"x" * 10] * 4200
    assert 4200 * len(one) - (1 << 20) <= granted <= 4200 * len(one)
    talk.end()


async def test_who_waits_for_room_is_told_when_there_is_some() -> None:
    talk = Talk()
    talk.hear(setting(3, 1))
    drained = talk.drained
    talk.call.send(bytes(100_000))
    assert not talk.call.writable
    talk.hear(room(20_000, 0), room(20_000, 1))
    assert talk.drained == drained
    talk.hear(room(20_000, 0), room(20_000, 1))
    assert talk.call.writable
    assert talk.drained == drained + 1
    talk.call.pause_writing()
    assert not talk.call.writable
    talk.call.send(b"x")
    talk.said()
    talk.call.resume_writing()
    assert [payload for _, _, _, payload in talk.said()] == [message(b"x")]
    assert talk.drained == drained + 2
    talk.end()


async def test_the_peer_is_given_room_for_what_was_taken() -> None:
    talk = Talk()
    talk.hear(setting(3, 1))
    talk.said()
    one = frame(0, message(bytes(16_384 - 5)))
    granted = 0
    for _ in range(1000):
        talk.hear(one)
        for kind, _, _, payload in talk.said():
            assert kind == 8
            granted += int.from_bytes(payload, "big")
    assert len(talk.received) == 1000
    assert 1000 * 16_384 - (2 << 20) < granted / 2 <= 1000 * 16_384
    talk.end()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (frame(0, b"", 1), "ended the call"),
        (frame(1, b"", 5), "ended the call"),
        (frame(3, bytes(4)), "reset the call"),
        (frame(7, struct.pack(">II", 0, 0), stream=0), "takes no calls"),
        (frame(7, b"", stream=0), "cut short"),
        (frame(5, bytes(4)), "a push"),
        (frame(8, b"\0"), "cut short"),
        (room(2**31 - 1, 0), "beyond all bounds"),
        (room(2**31 - 1, 1), "beyond all bounds"),
        (setting(4, 2**31), "beyond all bounds"),
        (frame(4, b"abc", stream=0), "settings cut short"),
        (frame(0, b"", 8), "padding"),
        (frame(0, b"\x06abcde", 8), "padding"),
        (frame(0, b"\x01" + bytes(4)), "compressed"),
        (frame(0, message(bytes(10))[:1] + struct.pack(">I", MAX_MESSAGE_BYTES + 1)), "a message of 100001 bytes"),
        (b"\xff\xff\xff\x00\x00" + bytes(4), "a frame of 16777215 bytes"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a frame of"),
    ],
)
async def test_whatever_ends_the_call_is_said_once(raw: bytes, why: str) -> None:
    talk = Talk()
    talk.hear(setting(3, 1), raw, setting(3, 1))
    (said,) = talk.ends
    assert why in said
    assert talk.wire.closed
    talk.call.connection_lost(None)
    talk.call.send(b"nobody hears it")
    assert len(talk.ends) == 1


async def test_a_peer_that_ends_the_call_before_it_speaks_is_an_error() -> None:
    talk = Talk()
    talk.call.connection_lost(OSError("reset"))
    with pytest.raises(duplex.Broken, match="reset"):
        await talk.call.open


@given(st.lists(st.binary(max_size=40) | st.builds(frame, st.integers(0, 12), st.binary(max_size=30), st.integers(0, 255)), max_size=12))
def test_any_bytes_end_the_call_or_do_not(raw: list[bytes]) -> None:
    def play(talk: Talk) -> None:
        talk.hear(setting(3, 1), *raw)
        assert len(talk.ends) <= 1
        assert talk.wire.closed == bool(talk.ends)

    talking(play)


async def test_pings_are_answered() -> None:
    talk = Talk()
    talk.hear(setting(3, 1))
    talk.said()
    talk.hear(frame(6, b"12345678", stream=0), frame(6, b"87654321", 1, stream=0))
    assert talk.said() == [(6, 1, 0, b"12345678")]
    talk.end()


async def test_a_peer_that_falls_silent_is_pinged_and_then_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP stays open, yet nobody is there."""
    monkeypatch.setattr(duplex, "IDLE_S", 0.01)
    monkeypatch.setattr(duplex, "PONG_S", 0.01)
    talk = Talk()
    talk.hear(setting(3, 1))
    answered = 0
    while answered < 3:
        await until(lambda: bool(talk.wire.sent), 5.0, "a ping")
        answered += sum(kind == 6 for kind, *_ in talk.said())
        talk.hear(frame(6, bytes(8), 1, stream=0))
    assert talk.ends == []
    await until(lambda: bool(talk.ends), 5.0, "nobody answered")
    assert talk.ends == ["the peer is silent"]
