"""Pauses between tries, with jitter: those who lost the same thing do not come back for it at the same moment."""

from __future__ import annotations

import random

_MOST_DOUBLINGS = 32


def pause_s(in_a_row: int, base_s: float, cap_s: float, *, least: float = 0.0) -> float:
    """A pause below a bound that doubles with every failure in a row.

    Args:
        in_a_row: failures in a row, the latest included.
        base_s: bound of the first pause, seconds.
        cap_s: bound of the longest, seconds.
        least: the shortest pause as a share of the bound; 0: full jitter. For tries that cost the other side something.
    """
    bound_s = min(cap_s, base_s * 2.0 ** min(in_a_row - 1, _MOST_DOUBLINGS))
    return random.uniform(least * bound_s, bound_s)  # noqa: S311 - spreads tries, guards nothing
