"""Questions that are asked with a callback, without a task, and how to wait for the answer to one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class Pending(Protocol):
    """A question on its way."""

    def cancel(self) -> object:
        """Nobody waits any more: the answer is dropped when it comes. Nothing happens once there is one."""
        ...


async def answer_of(ask: Callable[[Callable[[Result | Exception], None]], Pending | None]) -> Result:
    """Asks and waits. Whoever stops waiting has cancelled the question.

    Args:
        ask: asks; is given what takes the answer, and returns the question, or None when it is answered already.

    Raises:
        Exception: that was the answer.
    """
    future: asyncio.Future[Result | Exception] = asyncio.get_running_loop().create_future()
    pending = ask(lambda result: None if future.done() else future.set_result(result))
    try:
        result = await future
    finally:
        if pending is not None:
            pending.cancel()
    if isinstance(result, Exception):
        raise result
    return result
