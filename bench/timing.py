"""Timing of single calls, on a machine that may have other work.

Calls are timed in rounds; each round has its p50 and p99, and the median over the rounds is reported, so that one disturbed round does
not decide. Between calls the process sleeps as long as it has worked, as a router does that is not at its limit: the kernel then seldom
takes the core away in the middle of a call. Beside wall time each call is timed in CPU time of its thread, which does not run while
another process has the core. The garbage collector stays on.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORK_NS = 2_000_000
"""Work between two sleeps, and the length of a sleep."""
MICRO = 1e-3
"""Microseconds a nanosecond."""


class Timing(NamedTuple):
    """Microseconds a call; p50 and p99 are medians over the rounds."""

    p50_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    calls: int
    rounds: int
    preempted: int

    @property
    def detail(self) -> str:
        """One line for the table."""
        busy = f", preempted {self.preempted} times" if self.preempted else ""
        return f"p99 in CPU time {self.cpu_p99_us:.1f} µs; {self.rounds} rounds of {self.calls} calls{busy}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; `values` must be sorted and not empty."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]


def time_calls(prepare: Callable[[int], Callable[[], object]], calls: int, rounds: int, batch: int = 1) -> Timing:
    """Times calls one by one.

    Args:
        prepare: makes the n-th call ready, untimed, and returns it.
        calls: calls a round, of which there is at least one.
        rounds: rounds.
        batch: what is done this many times within one call; the result is divided by it.
    """
    for index in range(min(calls, 20)):
        prepare(index)()
    wall = [0.0] * calls
    cpu = [0.0] * calls
    results: list[tuple[float, float, float, float]] = []
    before = _preemptions()
    now, spent = time.perf_counter_ns, time.thread_time_ns
    awake = now()
    for number in range(rounds):
        for index in range(calls):
            if now() - awake > WORK_NS:
                time.sleep(WORK_NS / 1e9)
                awake = now()
                prepare(number * calls + index)()  # what sleep has cooled down is warm again
            call = prepare(number * calls + index)
            cpu_start = spent()
            start = now()
            call()
            end = now()
            cpu[index] = spent() - cpu_start
            wall[index] = end - start
        wall.sort()
        cpu.sort()
        results.append((percentile(wall, 50), percentile(wall, 99), percentile(cpu, 50), percentile(cpu, 99)))
    p50, p99, cpu_p50, cpu_p99 = (statistics.median(column) * MICRO / batch for column in zip(*results, strict=True))
    return Timing(p50, p99, cpu_p50, cpu_p99, calls, rounds, _preemptions() - before)


def always(call: Callable[[], object]) -> Callable[[int], Callable[[], object]]:
    """Preparation of a call that needs none."""
    return lambda _: call


def repeated(call: Callable[[], object], batch: int) -> Callable[[], object]:
    """A call that does `call` many times: for what takes no longer than reading the clock."""

    def many() -> None:
        for _ in range(batch):
            call()

    return many


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
