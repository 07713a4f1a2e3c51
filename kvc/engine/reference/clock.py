"""Virtual time: modelled seconds, which run `scale` times as fast as the wall clock.

While the engine is idle, virtual time follows the wall. While it works, each scheduler step advances virtual time by its modelled
cost, and the engine then waits until the wall has caught up. Python that is slower than the model makes virtual time late, never
wrong: what is reported is the sum of modelled costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc.runtime.clock import Clock

MAX_DEBT_S = 0.02


class VirtualClock:
    """Modelled time of one engine."""

    def __init__(self, wall: Clock, scale: float) -> None:
        """Starts idle at 0.

        Args:
            wall: monotonic wall time.
            scale: modelled seconds per wall second.
        """
        self.scale = scale
        self._wall = wall
        self._virtual_s = 0.0
        self._anchor_wall_s = wall.now_s()
        self._anchor_virtual_s = 0.0
        self._working = False

    def now_s(self) -> float:
        """Modelled seconds since the start."""
        if self._working:
            return self._virtual_s
        return self._virtual_s + (self._wall.now_s() - self._anchor_wall_s) * self.scale

    def work(self) -> None:
        """From now on time moves by `advance` only. Mutates; no effect while working."""
        if not self._working:
            self._virtual_s = self.now_s()
            self._working = True
            self._anchor()

    def rest(self) -> None:
        """From now on time follows the wall. Mutates; no effect while idle."""
        if self._working:
            self._working = False
            self._anchor()

    def advance(self, cost_s: float) -> None:
        """Adds the modelled cost of a step. Mutates."""
        self._virtual_s += cost_s

    def lead_s(self) -> float:
        """Wall seconds to wait until the wall has caught up with virtual time; negative or 0: none.

        A debt of the wall (a late wake-up) is made up for, up to MAX_DEBT_S; beyond that virtual time is simply late. Mutates.
        """
        lead = (self._virtual_s - self._anchor_virtual_s) / self.scale - (self._wall.now_s() - self._anchor_wall_s)
        if lead < -MAX_DEBT_S:
            self._anchor()
            return 0.0
        return lead

    def wall_until_s(self, virtual_s: float) -> float:
        """Wall seconds until an idle engine reaches a virtual time."""
        return max(0.0, (virtual_s - self.now_s()) / self.scale)

    def _anchor(self) -> None:
        self._anchor_wall_s = self._wall.now_s()
        self._anchor_virtual_s = self._virtual_s
