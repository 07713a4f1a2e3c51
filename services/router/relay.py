"""Coalescing: what a turn yields, as messages to its client.

A task of its own reads the turn ahead, so that waiting for more never cancels it. What comes while the client was told something
less than `coalesce_s` ago travels as one message; the first chunk, the end and an error are never held back. The reader stops at
AHEAD outputs, so a client that does not read holds the engine back instead of filling memory.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from kvc.errors import Internal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

T = TypeVar("T")

AHEAD = 1024


class ReadAhead(Generic[T]):
    """Outputs that were read and not taken. `ended` is set when no more come; `error` says why, if something failed."""

    def __init__(self) -> None:
        """Starts empty."""
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self._items: list[T] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def fill(self, outputs: AsyncGenerator[T, None]) -> None:
        """Reads to the end. What fails is kept for the consumer."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._items.append(output)
                    self._news.set()
                    if len(self._items) >= AHEAD:
                        self._room.clear()
                        await self._room.wait()
        except asyncio.CancelledError:
            self.error = Internal("the turn was cut off")
            raise
        except Exception as error:  # noqa: BLE001 - raised again where the outputs are taken
            self.error = error
        finally:
            self.ended.set()
            self._news.set()

    async def take(self) -> list[T]:
        """What was read since the last time; waits for something. Empty at the end."""
        while not self._items and not self.ended.is_set():
            self._news.clear()
            await self._news.wait()
        items, self._items = self._items, []
        self._room.set()
        return items


@asynccontextmanager
async def read_ahead(outputs: AsyncGenerator[T, None]) -> AsyncIterator[ReadAhead[T]]:
    """Reads `outputs` in a task for as long as the context lasts; it is closed, and what it holds is given back, before that ends."""
    reading: ReadAhead[T] = ReadAhead()
    task = asyncio.create_task(reading.fill(outputs))
    try:
        yield reading
    finally:
        task.cancel()
        await asyncio.wait({task})


async def batches(outputs: AsyncGenerator[T, None], coalesce_s: float) -> AsyncGenerator[list[T], None]:
    """Outputs in batches, at least `coalesce_s` apart but for the first and the last.

    Raises:
        Exception: what `outputs` raised, after everything that came before it.
    """
    async with read_ahead(outputs) as reading:
        while batch := await reading.take():
            yield batch
            await _hold(reading, coalesce_s)
        if reading.error is not None:
            raise reading.error


async def _hold(reading: ReadAhead[T], for_s: float) -> None:
    """Waits `for_s` seconds, or for the end."""
    if for_s <= 0 or reading.ended.is_set():
        return
    try:
        async with asyncio.timeout(for_s):
            await reading.ended.wait()
    except TimeoutError:
        return
