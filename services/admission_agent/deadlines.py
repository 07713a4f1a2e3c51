"""Time a call may still take."""

from __future__ import annotations

import math

from kvc.errors import DeadlineExceeded


def child_timeout_s(configured_s: float, remaining_s: float | None, margin_s: float) -> float:
    """min(configured, remaining - margin).

    Args:
        configured_s: the longest wait by configuration.
        remaining_s: what is left of the caller's deadline; None: the caller has none.
        margin_s: kept back for the way home.

    Raises:
        DeadlineExceeded: nothing is left.
    """
    if remaining_s is None or not math.isfinite(remaining_s):
        return configured_s
    left_s = min(configured_s, remaining_s - margin_s)
    if left_s <= 0:
        raise DeadlineExceeded(f"{max(0.0, remaining_s) * 1000:.0f} ms are left, of which {margin_s * 1000:.0f} ms are for the way home")
    return left_s
