"""What the router takes at a time, and what it remembers: requests, turns of a session, sessions."""

from __future__ import annotations

import asyncio

import pytest

from kvc.core.types import Attempt
from kvc.errors import AlreadyExists, Exhausted, SessionBusy, Unavailable
from services.router.claims import Claims
from services.router.ports import EngineChunk, EngineError
from tests.support.fake_ports import ok, refusal, world
from tests.support.mesh_server import until


async def test_a_request_id_in_flight_is_taken() -> None:
    """F8: two Dispatch with one id; the second is refused, the first goes on, and the books stay right."""
    async with world() as made:
        made.join("d0")
        made.engines.steps.hold("connect")
        first = asyncio.create_task(made.result(made.request("one", request_id="same")))
        await made.engines.steps.reached("connect")
        error = await refusal(AlreadyExists, made.run(made.request("two", request_id="same")))
        assert (error.reason, error.field) == ("REQUEST_IN_FLIGHT", "request_id")
        assert made.router.sigma.workers["d0"].inflight == 1
        made.engines.steps.go("connect")
        await first
        await made.check()


async def test_a_request_id_may_come_again() -> None:
    """Its attempts count on, so that the worker does not answer with the ticket of the first time (R16)."""
    async with world() as made:
        made.join("d0")
        for number in range(3):
            result = await made.result(made.request(request_id="same"))
            assert result.decision.attempt == Attempt("same", number)
        assert made.seen.retries == []
        await made.check()


async def test_too_many_requests() -> None:
    async with world(requests={"max_turns": 2}) as made:
        made.join("d0")
        made.engines.steps.hold("connect")
        tasks = [asyncio.create_task(made.run(made.request(name))) for name in ("one", "two")]
        await until(lambda: made.engines.live == 2)
        error = await refusal(Exhausted, made.run(made.request("three")))
        assert (error.reason, error.retry_after_s) == ("TOO_MANY_TURNS", 1.0)
        made.engines.steps.go("connect")
        await asyncio.gather(*tasks)
        await made.check()


async def test_too_many_turns_of_one_session() -> None:
    async with world(requests={"session_waiters": 1}) as made:
        made.join("d0")
        made.engines.steps.hold("connect")
        tasks = [asyncio.create_task(made.run(made.request("s"))) for _ in range(2)]
        await until(lambda: len(made.router.claims) == 2 and made.engines.live == 1)
        await refusal(SessionBusy, made.run(made.request("s")))
        made.engines.steps.go("connect")
        await asyncio.gather(*tasks)
        await made.check()


async def test_one_turn_of_a_session_at_a_time() -> None:
    """R21."""
    async with world() as made:
        made.join("d0")
        made.engines.streams["http://d0"] = [EngineChunk("a"), "middle", *ok()]
        made.engines.steps.hold("middle")
        tasks = [asyncio.create_task(made.run(made.request("s"))) for _ in range(5)]
        await made.engines.steps.reached("middle")
        assert made.engines.live == 1
        made.engines.steps.go("middle")
        await asyncio.gather(*tasks)
        assert made.router.sigma.session("s").turns == 5  # type: ignore[union-attr]  # it was served
        await made.check()


@pytest.mark.parametrize("end", ["completed", "failed"])
async def test_close_session(end: str) -> None:
    """The session is forgotten after its last turn; when that fails it may be repeated."""
    async with world(engines={"retries": 0}) as made:
        made.join("d0")
        await made.run(made.request("s"))
        if end == "failed":
            made.engines.streams["http://d0"] = [EngineError(500, "http-500", "")]
            await refusal(Unavailable, made.run(made.request("s", close_session=True)))
        else:
            await made.run(made.request("s", close_session=True))
        assert (made.router.sigma.session("s") is None) == (end == "completed")
        assert ("s" in made.router.sigma.forest) == (end == "failed")
        await made.check()


async def test_idle_sessions_are_forgotten() -> None:
    """F50: sessions are bounded in number, least recently used first; one with a turn in flight stays."""
    async with world(requests={"max_sessions": 3}) as made:
        made.join("d0")
        await made.run(made.request("in flight"))
        async with made.router.gate.turn("in flight", made.request().deadline_s):
            for number in range(20):
                await made.run(made.request(f"s{number}"))
                assert len(made.router.sigma.sessions) <= 4
                assert "in flight" in made.router.sigma.sessions
        for number in range(3):
            await made.run(made.request(f"t{number}"))
        made.router.forget_idle(at_most=10)
        assert set(made.router.sigma.sessions) == {"t0", "t1", "t2"}
        await made.check()


def test_claims_forget_old_ids() -> None:
    claims = Claims(limit=10, attempts_kept=2)
    for name in ("a", "b", "a", "c"):
        claims.count(name, claims.next_attempt(name) + 1)
    assert [claims.next_attempt(name) for name in "abc"] == [2, 0, 1]
