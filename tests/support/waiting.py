"""Waiting for conditions: with a deadline, and with the last thing that was wrong in the failure's message."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
POLL_S = 0.02


async def eventually(check: Callable[[], Awaitable[T]], timeout_s: float, *, poll_s: float = POLL_S) -> T:
    """Calls `check` until it raises no AssertionError.

    Args:
        check: asserts what is waited for.
        timeout_s: deadline.
        poll_s: pause between two looks.

    Returns:
        What `check` returned.

    Raises:
        AssertionError: the last one of `check`, when the deadline has passed.
    """
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            return await check()
        except AssertionError as error:
            if time.monotonic() > ends_s:
                error.add_note(f"still so after {timeout_s} s")
                raise
        await asyncio.sleep(poll_s)


async def until(condition: Callable[[], bool], timeout_s: float, what: str, *, poll_s: float = POLL_S) -> None:
    """Waits until `condition` is true.

    Raises:
        AssertionError: it is not in time; says `what` was waited for.
    """
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(poll_s)
