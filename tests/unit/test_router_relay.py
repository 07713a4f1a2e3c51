"""Coalescing: the first chunk and the end are never held back, what comes between travels together."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from kvc.errors import Internal, Unavailable
from services.router import relay
from services.router.relay import batches
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Source:
    """Outputs by hand."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | BaseException | None] = asyncio.Queue()
        self.taken = 0
        self.closed = False

    def put(self, *items: int | BaseException | None) -> None:
        for item in items:
            self.queue.put_nowait(item)

    async def outputs(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                self.taken += 1
                yield item
        finally:
            self.closed = True


async def turns(count: int = 20) -> None:
    """Lets everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_first_is_sent_at_once_and_the_next_ones_together() -> None:
    source = Source()
    told = batches(source.outputs(), 0.05)
    source.put(0)
    assert await asyncio.wait_for(anext(told), 5) == [0]
    start_s = time.monotonic()
    source.put(1, 2, 3)
    assert await asyncio.wait_for(anext(told), 5) == [1, 2, 3]
    assert time.monotonic() - start_s >= 0.045
    await told.aclose()
    assert source.closed


async def test_a_chunk_is_not_held_for_the_one_after_it() -> None:
    """An engine that pauses: what it sent before the pause arrives when the window is over."""
    source = Source()
    told = batches(source.outputs(), 0.02)
    source.put(0)
    await anext(told)
    source.put(1)
    assert await asyncio.wait_for(anext(told), 5) == [1]
    await told.aclose()


async def held_back() -> tuple[Source, AsyncGenerator[list[int], None], asyncio.Future[list[int]]]:
    """A source, its batches, and the second of them: it has an output and waits for more."""
    source = Source()
    told = batches(source.outputs(), 60.0)
    source.put(0)
    await anext(told)
    source.put(1)
    held = asyncio.ensure_future(anext(told))
    await turns()
    assert not held.done()
    return source, told, held


async def test_the_end_is_not_held_back() -> None:
    source, told, held = await held_back()
    source.put(2, None)
    assert await asyncio.wait_for(held, 5) == [1, 2]
    with pytest.raises(StopAsyncIteration):
        await anext(told)


async def test_an_error_comes_after_everything_before_it_and_is_not_held_back() -> None:
    source, told, held = await held_back()
    source.put(Unavailable("died"))
    assert await asyncio.wait_for(held, 5) == [1]
    with pytest.raises(Unavailable, match="died"):
        await anext(told)


async def test_nothing_at_all() -> None:
    source = Source()
    source.put(None)
    assert [batch async for batch in batches(source.outputs(), 1.0)] == []


async def test_without_a_window_everything_goes_as_it_comes() -> None:
    source = Source()
    told = batches(source.outputs(), 0.0)
    for number in range(5):
        source.put(number)
        assert await asyncio.wait_for(anext(told), 5) == [number]
    await told.aclose()


async def test_a_client_that_does_not_read_holds_the_source_back() -> None:
    source = Source()
    source.put(*range(5 * relay.AHEAD), None)
    told = batches(source.outputs(), 0.0)
    seen = await anext(told)
    await turns()
    assert len(seen) <= relay.AHEAD
    assert source.taken <= len(seen) + relay.AHEAD
    async for batch in told:
        assert len(batch) <= relay.AHEAD
        seen += batch
    assert seen == list(range(5 * relay.AHEAD))


@pytest.mark.parametrize("taken", [0, 1])
async def test_closing_closes_the_source_first(taken: int) -> None:
    """F58: when the call is over, so is the turn."""
    source = Source()
    source.put(0)
    before = asyncio.all_tasks()
    async with aclosing(batches(source.outputs(), 60.0)) as told:
        for _ in range(taken):
            await anext(told)
    assert source.closed == bool(taken)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("held", [False, True])
async def test_cancelling_closes_the_source_first(*, held: bool) -> None:
    source = Source()
    source.put(0)
    before = asyncio.all_tasks()

    async def consume() -> None:
        async for _ in batches(source.outputs(), 60.0 if held else 0.0):
            pass

    task = asyncio.create_task(consume())
    await until(lambda: source.taken == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert source.closed
    assert asyncio.all_tasks() == before


async def test_a_source_that_is_cut_off_is_no_end() -> None:
    source = Source()
    source.put(0, asyncio.CancelledError())
    told = batches(source.outputs(), 0.0)
    assert await anext(told) == [0]
    with pytest.raises(Internal, match="cut off"):
        await anext(told)
