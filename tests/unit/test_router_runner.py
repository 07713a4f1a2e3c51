"""Runs of decided turns on engines: alone, and as a pair of prefill and decode."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from kvc.core.types import Admission, Attempt, Decision, Executor, Mode, Role
from services.router.ports import EngineCall, EngineChunk, EngineError
from services.router.runner import Job, PrefillFailedError, Runner
from tests.support.builders import worker
from tests.support.fake_ports import FakeAdmission, FakeEngines, Steps, ok
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

D = worker("d0", engine_url="http://d0")
P = worker("p0", role=Role.PREFILL, engine_url="http://p0", bootstrap_host="10.0.0.1", bootstrap_port=9000)
JOB = Job("s", b"\1\0\0\0" * 8, None, 4, 0.0, "trace")
BROKEN = EngineError(500, "cuda-error", "out of memory on p0")


class Bench:
    """A runner over fake engines."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.engines = FakeEngines(FakeAdmission(self.steps), self.steps)
        self.prefilled = 0

    def stream(self, prefill: bool = True, ticket: str = "") -> AsyncGenerator[EngineChunk, None]:  # noqa: FBT001, FBT002 - a test's switch
        admission = Admission(Mode.SEED, Executor.PREFILL, 8, 12, ticket, 5.0) if ticket else None
        decision = Decision(
            mode=Mode.SEED if ticket else Mode.FALLBACK,
            executor=Executor.PREFILL if prefill else Executor.LOCAL,
            decode=D.ref,
            prefill=P.ref if prefill else None,
            attempt=Attempt("r", 2),
            admission=admission,
        )
        if ticket:
            self.engines.admission.open[ticket] = decision.attempt
        return Runner(self.engines).run(JOB, decision, D, P if prefill else None, self._on_prefilled)

    def _on_prefilled(self) -> None:
        self.prefilled += 1

    def idle(self) -> bool:
        return self.engines.live == 0 and self.engines.live_prefills == 0


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """Checks afterwards that no task and no call is left."""
    made = Bench()
    before = asyncio.all_tasks()
    yield made
    assert made.idle()
    assert asyncio.all_tasks() == before


async def collect(stream: AsyncGenerator[EngineChunk, None]) -> list[EngineChunk]:
    async with aclosing(stream):
        return [chunk async for chunk in stream]


async def test_local() -> None:
    async with bench() as made:
        chunks = await collect(made.stream(prefill=False, ticket="kvc-1"))
        assert "".join(chunk.text for chunk in chunks) == "abc"
        assert chunks[-1].finish_reason == "length"
        assert made.engines.prefill_calls == []
        (call,) = made.engines.calls
        assert call == EngineCall("http://d0", "kvc-1", "s", JOB.tokens, None, 4, 0.0, None, "trace")
        assert made.prefilled == 0


async def test_a_turn_without_a_ticket_has_an_id_of_its_own() -> None:
    async with bench() as made:
        await collect(made.stream(prefill=False))
        assert made.engines.calls[0].rid == "turn-r.2"


async def test_prefill_and_decode_run_at_once() -> None:
    """Both are asked before either answers, and meet in the same room."""
    async with bench() as made:
        made.engines.prefills["http://p0"] = ["connect"]
        made.steps.hold("connect")
        task = asyncio.create_task(collect(made.stream(ticket="kvc-1")))
        await until(lambda: made.engines.live == 1 and made.engines.live_prefills == 1)
        made.steps.go("connect")
        assert len(await task) == 4
        (decode,), (prefill,) = made.engines.calls, made.engines.prefill_calls
        assert decode.bootstrap == prefill.bootstrap
        assert decode.bootstrap is not None
        assert decode.bootstrap[:2] == ("10.0.0.1", 9000)
        assert 0 <= decode.bootstrap[2] < 2**63
        assert (decode.rid, prefill.rid) == ("kvc-1", "turn-r.2")
        assert made.prefilled == 1


async def test_rooms_differ() -> None:
    async with bench() as made:
        for _ in range(20):
            await collect(made.stream())
        rooms = {call.bootstrap[2] for call in made.engines.calls if call.bootstrap}
        assert len(rooms) == 20


async def test_a_prefill_that_fails_at_once_cancels_decode_with_its_reason() -> None:
    """F32: the decode worker is let go within a second, and the caller hears what the prefill worker said."""
    async with bench() as made:
        made.engines.prefills["http://p0"] = [BROKEN]
        made.engines.streams["http://d0"] = ["waits for KV", *ok()]
        made.steps.hold("waits for KV")
        async with asyncio.timeout(1.0):
            with pytest.raises(PrefillFailedError) as failed:
                await collect(made.stream())
        assert (failed.value.status, failed.value.reason, failed.value.message) == (500, "cuda-error", "out of memory on p0")
        assert made.engines.closed == 1
        assert made.prefilled == 0


async def test_a_prefill_that_fails_after_the_first_chunk_cancels_decode() -> None:
    """F32."""
    async with bench() as made:
        made.engines.prefills["http://p0"] = ["half way", BROKEN]
        made.engines.streams["http://d0"] = [EngineChunk("a"), "never", *ok()]
        made.steps.hold("half way", "never")
        stream = made.stream()
        assert (await anext(stream)).text == "a"
        following = asyncio.ensure_future(anext(stream))
        await made.steps.reached("never")
        made.steps.go("half way")
        async with asyncio.timeout(1.0):
            with pytest.raises(PrefillFailedError, match="cuda-error"):
                await following
        assert made.engines.closed == 1


async def test_a_prefill_that_ends_in_a_way_nobody_foresaw() -> None:
    """A fault of the adapter is a failed prefill, too, also when it looks like a cancellation."""
    for fault in (RuntimeError("oops"), asyncio.CancelledError()):
        async with bench() as made:
            made.engines.streams["http://d0"] = ["never"]
            made.steps.hold("never")
            made.engines.prefills["http://p0"] = [fault]
            with pytest.raises(PrefillFailedError, match="prefill-failed"):
                await collect(made.stream())


async def test_decode_fails() -> None:
    async with bench() as made:
        made.engines.streams["http://d0"] = [EngineError(503, "queue-full", "too many", retry_after_s=2.0)]
        made.engines.prefills["http://p0"] = ["busy"]
        made.steps.hold("busy")
        with pytest.raises(EngineError) as failed:
            await collect(made.stream())
        assert not isinstance(failed.value, PrefillFailedError)
        assert failed.value.reason == "queue-full"


async def test_decode_fails_because_prefill_did() -> None:
    """The decode worker often notices first; the prefill worker's own words are the better reason."""
    async with bench() as made:
        made.engines.streams["http://d0"] = [EngineError(502, "prefill-failed", "the other side went away")]
        made.steps.hold("prefill")
        made.engines.prefills["http://p0"] = [BROKEN]
        task = asyncio.create_task(collect(made.stream()))
        await until(lambda: made.engines.closed == 1)
        made.steps.go("prefill")
        with pytest.raises(PrefillFailedError, match="cuda-error"):
            await task


async def test_decode_ends_before_the_prefill_reply() -> None:
    """The prefill worker gets a moment to finish its reply: cutting it off would look like an abort there."""
    async with bench() as made:
        made.engines.prefills["http://p0"] = ["reply"]
        made.steps.hold("reply")
        stream = made.stream()
        chunks = [await anext(stream) for _ in range(4)]
        assert chunks[-1].finish_reason == "length"
        end = asyncio.ensure_future(anext(stream, None))
        await made.steps.reached("reply")
        for _ in range(10):
            await asyncio.sleep(0)
        assert not end.done()
        assert made.engines.live_prefills == 1
        made.steps.go("reply")
        assert await end is None
        assert made.engines.live_prefills == 0


async def test_a_prefill_that_never_replies_does_not_hold_the_end_for_long() -> None:
    async with bench() as made:
        made.engines.prefills["http://p0"] = ["never"]
        made.steps.hold("never")
        async with asyncio.timeout(5.0):
            assert len(await collect(made.stream())) == 4


@pytest.mark.parametrize("place", ["connect", "prefill", "chunk", "later"])
async def test_cancelling_ends_both_halves(place: str) -> None:
    """F4, F5, F58."""
    async with bench() as made:
        made.engines.streams["http://d0"] = [EngineChunk("a"), "later", *ok()]
        made.engines.prefills["http://p0"] = ["prefill"]
        made.steps.hold(place)
        task = asyncio.create_task(collect(made.stream()))
        await made.steps.reached(place)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.idle()


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 2, 4])
async def test_closing_ends_both_halves(taken: int, *, prefill: bool) -> None:
    async with bench() as made:
        made.engines.prefills["http://p0"] = ["never"]
        made.steps.hold("never")
        stream = made.stream(prefill=prefill)
        for _ in range(taken):
            await anext(stream)
        await stream.aclose()
        assert made.idle()


async def test_cancelling_after_any_number_of_steps_leaves_nothing() -> None:
    """F58: at every await."""
    steps = 0
    done = False
    while not done:
        async with bench() as made:
            task = asyncio.create_task(collect(made.stream(ticket="kvc-1")))
            for _ in range(steps):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        steps += 1
    assert steps > 10
