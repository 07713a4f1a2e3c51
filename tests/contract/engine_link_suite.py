"""What every engine behind the agent's link port must do. One suite, run against each engine.

A test module subclasses `EngineLinkSuite` and gives it a fixture `engine` that yields an `EngineUnderLink`:

    class TestReferenceEngine(EngineLinkSuite):
        @pytest.fixture
        async def engine(self, tmp_path): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Protocol, cast

import pytest

from kvc.core.blocks import hash_chain, pack_tokens, resident_blocks
from kvc.core.types import Admission, Attempt, Executor, Mode, Reason, Rejection, Turn
from kvc.engine import link
from kvc.engine.convert import admit_to_link, outcome_from_link
from kvc.errors import InvalidField, KvcError, Unavailable
from services.admission_agent.config import AgentConfig, EngineConfig, ResidencyConfig
from services.admission_agent.life import accept
from services.admission_agent.replies import decision_of, load_of, released_of, sessions_of
from services.admission_agent.residency import Residency
from tests.support.follower_model import FollowerModel
from tests.support.waiting import until

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvc.core.types import Facts, Outcome, WorkerInfo
    from kvc.v1 import types_pb2
    from services.admission_agent.ports import EngineLink

WAIT_S = 20.0


class EngineUnderLink(Protocol):
    """One decode engine and what a test may do to it. Its tickets live at most 2 s, its pool holds at least 4,000 tokens."""

    block_tokens: int

    async def connect(self) -> EngineLink:
        """A new connection."""
        ...

    async def run_turn(self, session_id: str, token_ids: list[int], ticket: str) -> None:
        """Runs an admitted turn to its end, so that its KV is resident and its session known."""
        ...

    async def clear(self) -> None:
        """Drops everything that is cached."""
        ...

    async def restart(self) -> None:
        """Ends the engine and starts it anew at the same place."""
        ...


class Talk:
    """One connection, spoken to in the mesh's values."""

    _numbers = itertools.count()

    def __init__(self, engine: EngineUnderLink, link_: EngineLink) -> None:
        config = AgentConfig(
            engine=EngineConfig(socket=cast("Path", "unused")), residency=ResidencyConfig(block_tokens=engine.block_tokens)
        )
        self.engine = engine
        self.link = link_
        self.info: WorkerInfo = accept(link_.welcome, config)

    def chain(self, tokens: list[int]) -> array[int]:
        return hash_chain(pack_tokens(tokens), self.engine.block_tokens, self.info.hash_seed)

    def whole_blocks(self, tokens: list[int]) -> int:
        """Blocks of a prompt that lie in whole pages: those that must be resident after its turn."""
        page = self.info.page_tokens
        return len(tokens) // page * page // self.engine.block_tokens

    async def admit(self, session_id: str, tokens: list[int], request_id: str = "", **fields: Any) -> tuple[Outcome, Facts]:
        turn = Turn(session_id, fields.pop("turn_index", 0), self.chain(tokens), len(tokens), fields.pop("reserve", 8), **fields)
        attempt = Attempt(request_id or f"request-{next(self._numbers)}", 0)
        return outcome_from_link(decision_of(await self.link.call(admit_to_link(attempt, turn, None), WAIT_S)))

    async def admitted(self, session_id: str, tokens: list[int], request_id: str = "", **fields: Any) -> Admission:
        outcome, _ = await self.admit(session_id, tokens, request_id, **fields)
        assert isinstance(outcome, Admission), outcome
        return outcome

    async def turn(self, session_id: str, tokens: list[int], **fields: Any) -> Admission:
        """Admits and runs."""
        admission = await self.admitted(session_id, tokens, **fields)
        await self.engine.run_turn(session_id, tokens, admission.ticket)
        return admission

    async def load(self) -> types_pb2.WorkerLoad:
        return load_of(await self.link.call(link.Load(), WAIT_S))

    async def release(self, ticket: str) -> bool:
        return released_of(await self.link.call(link.Release(ticket), WAIT_S))


class Watcher:
    """Follows a connection's events with the agent's own residency."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.residency = Residency(ResidencyConfig(block_tokens=talk.engine.block_tokens))
        self.residency.begin(talk.info.ref, talk.info.hash_seed, talk.info.page_tokens)
        self.model = FollowerModel()
        self.ended: BaseException | None = None

    async def run(self) -> None:
        """Feeds events in until the connection ends; a gap fails the test."""
        try:
            async for event in self._talk.link.events(WAIT_S):
                for _ in self.residency.apply(event):
                    pass
                self.residency.flush()
        except KvcError as error:
            self.ended = error

    def has(self, tokens: list[int]) -> bool:
        """True when all of a prompt that must be resident after its turn is."""
        return self.overlap(tokens) >= self._talk.whole_blocks(tokens)

    def overlap(self, tokens: list[int]) -> int:
        """Leading blocks of a prompt that are resident."""
        return resident_blocks(self._talk.chain(tokens), self.residency._blocks)


def prompt(first: int, count: int) -> list[int]:
    """Token ids of a prompt."""
    return list(range(first, first + count))


class EngineLinkSuite:
    """The conformance suite."""

    @pytest.fixture
    async def talk(self, engine: EngineUnderLink) -> AsyncIterator[Talk]:
        """A connection."""
        one = await engine.connect()
        yield Talk(engine, one)
        await one.close()

    @contextlib.asynccontextmanager
    async def watching(self, engine: EngineUnderLink) -> AsyncIterator[Watcher]:
        """A follower on a connection of its own, which has its snapshot."""
        one = await engine.connect()
        watcher = Watcher(Talk(engine, one))
        task = asyncio.create_task(watcher.run())
        try:
            await asyncio.wait_for(watcher.residency.wait_installed(), WAIT_S)
            yield watcher
        finally:
            await one.close()
            await asyncio.wait_for(task, WAIT_S)

    async def test_the_greeting_describes_a_worker(self, talk: Talk) -> None:
        assert talk.link.welcome.version == link.LINK_VERSION
        assert talk.info.ref.epoch >= 1
        assert talk.info.role.keeps_sessions
        assert {"admit", "residency"} <= set(talk.info.capabilities)
        load = await talk.load()
        assert load.facts.capacity_tokens == talk.info.capacity_tokens
        assert load.open_tickets == load.facts.reserved_tokens == load.sessions == 0

    async def test_f40_a_restart_is_a_later_epoch_of_the_same_worker_without_residency(self, engine: EngineUnderLink, talk: Talk) -> None:
        """F40: same name, higher epoch, nothing resident."""
        await talk.turn("s", prompt(1000, 480))
        await engine.restart()
        with pytest.raises(Unavailable):
            await talk.load()
        again = await engine.connect()
        try:
            other = Talk(engine, again)
            assert other.info.ref.worker_id == talk.info.ref.worker_id
            assert other.info.ref.epoch > talk.info.ref.epoch
            assert (await other.load()).sessions == 0
        finally:
            await again.close()
        async with self.watching(engine) as watcher:
            assert watcher.residency.resident_blocks == 0

    async def test_a_first_turn_is_a_seed_under_a_ticket(self, talk: Talk) -> None:
        admission = await talk.admitted("s", prompt(1000, 480), reserve=20)
        assert (admission.mode, admission.executor) == (Mode.SEED, Executor.LOCAL)
        assert (admission.append_tokens, admission.ttl_s > 0) == (480, True)
        assert admission.need_tokens >= 500
        load = await talk.load()
        assert load.open_tickets == 1
        assert load.facts.held_tokens + load.facts.reserved_tokens >= 500

    async def test_admit_is_idempotent_by_attempt(self, talk: Talk) -> None:
        first = await talk.admitted("s", prompt(1000, 480), "r1")
        again = await talk.admitted("s", prompt(1000, 480), "r1")
        assert again == first
        assert (await talk.load()).open_tickets == 1

    async def test_a_ticket_is_given_back_once(self, talk: Talk) -> None:
        admission = await talk.admitted("s", prompt(1000, 480))
        assert await talk.release(admission.ticket) is True
        assert await talk.release(admission.ticket) is False
        assert await talk.release("never-given") is False
        load = await talk.load()
        assert load.open_tickets == load.facts.reserved_tokens == load.facts.held_tokens == 0

    async def test_an_unused_ticket_expires(self, talk: Talk) -> None:
        admission = await talk.admitted("s", prompt(1000, 480))
        assert admission.ttl_s <= 2.0
        end_s = asyncio.get_running_loop().time() + admission.ttl_s + 5.0
        while (await talk.load()).open_tickets:
            assert asyncio.get_running_loop().time() < end_s, "the ticket lives on"
            await asyncio.sleep(0.02)
        assert (await talk.load()).facts.reserved_tokens == 0
        assert await talk.release(admission.ticket) is False

    async def test_an_open_ticket_makes_its_session_busy(self, talk: Talk) -> None:
        await talk.admitted("s", prompt(1000, 480), "r1")
        outcome, _ = await talk.admit("s", prompt(1000, 480), "r2")
        assert isinstance(outcome, Rejection)
        assert outcome.reason is Reason.SESSION_BUSY

    async def test_f19_what_can_never_fit_is_refused_for_good(self, talk: Talk) -> None:
        """F19: input above the pool: a terminal reason at once."""
        outcome, _ = await talk.admit("s", prompt(0, talk.info.capacity_tokens + 1))
        assert outcome == Rejection(Reason.EXCEEDS_CAPACITY, 0.0, terminal=True)

    async def test_f18_tickets_never_promise_more_than_there_is(self, talk: Talk) -> None:
        """F18: turns are admitted until a refusal names the lack of room; what is promised stays within the pool."""
        for index in range(1000):
            outcome, _ = await talk.admit(f"s{index}", prompt(10_000 * (index + 1), 400))
            if isinstance(outcome, Rejection):
                break
        else:
            pytest.fail("the pool never fills")
        assert outcome.reason is Reason.SESSION_NOT_RESIDENT_NO_CAPACITY
        assert not outcome.terminal
        facts = (await talk.load()).facts
        assert facts.held_tokens + facts.reserved_tokens <= facts.capacity_tokens

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("input_tokens", {"input_tokens": 0}),
            ("input_tokens", {"input_tokens": -5}),
            ("session_id", {"session_id": ""}),
            ("request_id", {"request_id": ""}),
            ("block_hashes", {"block_hashes": b"1234567"}),
            ("output_reserve_tokens", {"output_reserve_tokens": -1}),
        ],
    )
    async def test_f76_a_bad_field_is_named_and_the_connection_lives(self, talk: Talk, field: str, values: dict[str, Any]) -> None:
        """F76: INVALID_ARGUMENT with the field, and the next call works."""
        good: dict[str, Any] = {
            "request_id": "r",
            "attempt_number": 0,
            "session_id": "s",
            "turn_index": 0,
            "input_tokens": 10,
            "output_reserve_tokens": 1,
            "block_hashes": b"",
        }
        with pytest.raises(InvalidField) as caught:
            await talk.link.call(link.Admit(**(good | values)), WAIT_S)
        assert caught.value.field == field
        assert (await talk.load()).open_tickets == 0

    async def test_many_calls_at_once_each_get_their_answer(self, talk: Talk) -> None:
        calls = [talk.admit(f"s{index}", prompt(10_000 * (index + 1), 24), f"r{index}") for index in range(40)]
        outcomes = [outcome for outcome, _ in await asyncio.gather(*calls)]
        tickets = {outcome.ticket for outcome in outcomes if isinstance(outcome, Admission)}
        assert len(tickets) == 40
        assert (await talk.load()).open_tickets == 40
        assert all(await asyncio.gather(*(talk.release(ticket) for ticket in tickets)))
        assert (await talk.load()).open_tickets == 0

    async def test_f43_events_make_the_blocks_that_admit_matches(self, engine: EngineUnderLink, talk: Talk) -> None:
        """F43: a turn's prompt is resident block by block, a longer turn extends the same chain, and Admit matches what events say."""
        async with self.watching(engine) as watcher:
            base = prompt(1000, 480)
            await talk.turn("s", base)
            await until(lambda: watcher.has(base), WAIT_S, "the first turn is resident")
            longer = [*base, *prompt(5000, 480)]
            admission, facts = await talk.admit("s", longer, turn_index=1, known_session=True)
            assert isinstance(admission, Admission)
            assert admission.mode is Mode.DIRECT
            page = talk.info.page_tokens
            assert facts.matched_tokens >= talk.whole_blocks(base) * engine.block_tokens // page * page
            assert admission.append_tokens == 960 - facts.matched_tokens
            await engine.run_turn("s", longer, admission.ticket)
            await until(lambda: watcher.has(longer), WAIT_S, "the second turn is resident")
            assert watcher.ended is None

    async def test_every_subscriber_sees_the_same(self, engine: EngineUnderLink, talk: Talk) -> None:
        async with self.watching(engine) as early:
            for index in range(4):
                await talk.turn(f"s{index}", prompt(10_000 * (index + 1), 240 + 48 * index))
            last = prompt(40_000, 240 + 48 * 3)
            await until(lambda: early.has(last), WAIT_S, "the last turn is resident")
            async with self.watching(engine) as late:
                assert set(late.residency._blocks.blocks()) == set(early.residency._blocks.blocks())
                await talk.turn("s9", prompt(90_000, 240))
                for watcher in (early, late):
                    await until(lambda one=watcher: one.has(prompt(90_000, 240)), WAIT_S, "seen by both")  # type: ignore[misc]
                assert set(late.residency._blocks.blocks()) == set(early.residency._blocks.blocks())

    async def test_f41_clearing_empties_every_subscriber(self, engine: EngineUnderLink, talk: Talk) -> None:
        """F41: the cache is flushed: overlap 0, and the next turn seeds again."""
        async with self.watching(engine) as watcher:
            await talk.turn("s", prompt(1000, 480))
            await until(lambda: watcher.has(prompt(1000, 480)), WAIT_S, "resident")
            await engine.clear()
            await until(lambda: watcher.residency.resident_blocks == 0, WAIT_S, "cleared")
        _, facts = await talk.admit("t", prompt(1000, 480))
        assert facts.matched_tokens == 0

    async def test_eviction_is_told(self, engine: EngineUnderLink, talk: Talk) -> None:
        """F67: idle sessions beyond the pool are evicted block by block; what events say never exceeds the pool."""
        most = talk.info.capacity_tokens // engine.block_tokens
        async with self.watching(engine) as watcher:
            for index in range(talk.info.capacity_tokens // 400 + 4):
                await talk.turn(f"s{index}", prompt(10_000 * (index + 1), 400))
            last = prompt(10_000 * (index + 1), 400)
            await until(lambda: watcher.has(last), WAIT_S, "the last turn is resident")
            assert watcher.residency.resident_blocks <= most
            assert watcher.ended is None
        load = await talk.load()
        assert load.evicted_tokens > 0
        assert 0 < load.peak_use <= 1

    async def test_f66_sessions_are_listed_by_exact_name(self, talk: Talk) -> None:
        """F66: "session-1" and "session-12" are two sessions."""
        for name in ("session-12", "session-1"):
            await talk.turn(name, prompt(1000, 240) if name == "session-1" else prompt(5000, 480))
        sessions, total = sessions_of(await talk.link.call(link.ListSessions(), WAIT_S))
        assert total == 2
        assert [one.session_id for one in sessions] == ["session-1", "session-12"], "most recently used first"
        (one,), _ = sessions_of(await talk.link.call(link.ListSessions(session_id="session-1"), WAIT_S))
        assert one.session_id == "session-1"
        assert 240 <= one.committed_tokens < 480
        assert 0 < one.resident_tokens <= one.committed_tokens
        assert (one.generation, one.busy) == (1, False)
        assert sessions_of(await talk.link.call(link.ListSessions(session_id="session"), WAIT_S))[0] == []
        assert len(sessions_of(await talk.link.call(link.ListSessions(limit=1), WAIT_S))[0]) == 1

    async def test_a_draining_engine_takes_no_new_sessions_until_it_is_told(self, talk: Talk) -> None:
        assert isinstance(await talk.link.call(link.Drain(draining=True), WAIT_S), link.Drained)
        outcome, _ = await talk.admit("new", prompt(1000, 240))
        assert isinstance(outcome, Rejection)
        assert outcome.reason is Reason.DRAINING
        await talk.link.call(link.Drain(draining=False), WAIT_S)
        await talk.admitted("new", prompt(1000, 240))

    async def test_closing_fails_what_is_in_flight_and_what_comes_after(self, engine: EngineUnderLink) -> None:
        one = await engine.connect()
        calls = [asyncio.ensure_future(one.call(link.Load(), WAIT_S)) for _ in range(10)]
        await one.close()
        await one.close()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, Unavailable | link.LoadReport)
        with pytest.raises(Unavailable):
            await one.call(link.Load(), WAIT_S)

    async def test_an_engine_that_ends_ends_its_events(self, engine: EngineUnderLink) -> None:
        async with self.watching(engine) as watcher:
            await engine.restart()
            await until(lambda: watcher.ended is not None, WAIT_S, "the stream ends")
            assert isinstance(watcher.ended, Unavailable)
