"""Rows of all rounds as values and ratios: a ratio is taken inside a round, where both systems had the same machine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bench.peers.rig import Row


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a row.

    Attributes:
        name: heading of its column, with its unit.
        scenario: the scenario whose rows have it.
        value: reads it from a row that has replies.
        digits: after the point.
    """

    name: str
    scenario: str
    value: Callable[[Row], float]
    digits: int = 1


def _cpu_request(row: Row) -> float:
    return 1e6 * row.cpu_s / row.seen.requests


def _cpu_chunk(row: Row) -> float:
    return 1e6 * row.cpu_s / row.seen.chunks


HOT: Final = Measure("hot p10, µs", "hot", lambda row: row.seen.end_us.p10)
SHORT: Final = Measure("CPU µs/request", "short", _cpu_request)
LARGE: Final = Measure("CPU µs/request, 40-400 KB", "large", _cpu_request)
PACED: Final = Measure("CPU µs/chunk, 10 ms apart", "paced", _cpu_chunk)
READS: Final = Measure("chunks/read, 10 ms apart", "paced", lambda row: row.seen.chunks / row.seen.reads, 2)
STREAMED: Final = Measure("CPU µs/chunk, flat out", "stream", _cpu_chunk)
LATENCY: Final = Measure("first byte p50, µs", "latency", lambda row: row.seen.first_us.p50)
TURNS: Final = Measure("first byte p50, 40-400 KB, µs", "turns", lambda row: row.seen.first_us.p50)
TTFT50: Final = Measure("first byte p50 after 50 ms, µs", "ttft50", lambda row: row.seen.first_us.p50)
MEASURES: Final = (HOT, SHORT, LARGE, PACED, READS, STREAMED, LATENCY, TURNS, TTFT50)


class Spread(NamedTuple):
    """A number over the rounds."""

    median: float
    least: float
    most: float


def spread(values: Iterable[float]) -> Spread | None:
    """None of nothing."""
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[0], ordered[-1]) if ordered else None


class Results:
    """All rows of a run."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """Rows in any order."""
        self.rows = tuple(rows)

    def values(self, measure: Measure, system: str) -> dict[int, float]:
        """By round; rounds without a reply are absent."""
        return {
            row.round: measure.value(row)
            for row in self.rows
            if row.scenario == measure.scenario and row.system == system and row.seen.requests
        }

    def value(self, measure: Measure, system: str) -> Spread | None:
        """Over all rounds; None when it was not measured."""
        return spread(self.values(measure, system).values())

    def ratio(self, measure: Measure, system: str, base: str) -> Spread | None:
        """To the base, round by round; None without a round that has both."""
        bases = self.values(measure, base)
        return spread(value / bases[number] for number, value in self.values(measure, system).items() if bases.get(number))

    def resident_mib(self, system: str) -> float:
        """The most of all rows."""
        return max((row.resident_mib for row in self.rows if row.system == system), default=0.0)

    def errors(self, system: str) -> dict[str, int]:
        """Replies that were not right, by kind."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row.system == system:
                for kind, count in row.seen.errors.items():
                    found[kind] = found.get(kind, 0) + count
        return found
