"""Time as a port: code that waits or measures takes a `Clock`, so tests move time by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    now_s = staticmethod(time.monotonic)
    """Seconds, without a call in between: a request looks at the clock nine times."""


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Starts at `start_s` seconds."""
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds."""
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Moves the clock forward. Mutates.

        Raises:
            ValueError: `by_s` is negative or not a number.
        """
        if not by_s >= 0:
            raise ValueError(f"by_s: a monotonic clock cannot be moved by {by_s}")
        self._now_s += by_s
