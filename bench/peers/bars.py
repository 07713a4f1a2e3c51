"""What the router has to reach beside its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.peers.results import HOT, LARGE, PACED, READS, SHORT, Measure
from bench.peers.systems import BASE, HOP, OFF, PD_BASE, PD_OFF, PD_STREAM, STREAM

if TYPE_CHECKING:
    from bench.peers.results import Results, Spread


@dataclass(frozen=True, slots=True)
class Bar:
    """The most that passes, for the median over the rounds.

    Attributes:
        measure: what is judged.
        system: whose.
        limit: the most that passes.
        base: the system that the ratio is to; empty: the value itself is judged.
    """

    measure: Measure
    system: str
    limit: float
    base: str = BASE


BARS: Final = (
    Bar(SHORT, OFF, 0.5),
    Bar(SHORT, STREAM, 0.8),
    Bar(SHORT, HOP, 0.8),
    Bar(PACED, OFF, 0.9),
    Bar(PACED, STREAM, 0.9),
    Bar(PACED, HOP, 0.9),
    Bar(LARGE, OFF, 0.5),
    Bar(LARGE, STREAM, 0.5),
    Bar(LARGE, HOP, 0.5),
    Bar(HOT, OFF, 0.5),
    Bar(HOT, STREAM, 1.5),
    Bar(HOT, HOP, 1.5),
    Bar(SHORT, PD_OFF, 0.5, PD_BASE),
    Bar(SHORT, PD_STREAM, 0.5, PD_BASE),
    Bar(READS, OFF, 1.1, ""),
    Bar(READS, STREAM, 1.1, ""),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """A bar and what was measured; None: it was not."""

    bar: Bar
    measured: Spread | None

    @property
    def met(self) -> bool:
        """What was not measured is not met."""
        return self.measured is not None and self.measured.median <= self.bar.limit


def judge(results: Results, bars: tuple[Bar, ...] = BARS) -> list[Judged]:
    """All bars."""
    return [
        Judged(
            bar,
            results.ratio(bar.measure, bar.system, bar.base) if bar.base else results.value(bar.measure, bar.system),
        )
        for bar in bars
    ]
