from __future__ import annotations

import math

import pytest

from kvc.runtime.clock import ManualClock, SystemClock


def test_system_clock_does_not_go_back() -> None:
    clock = SystemClock()
    readings = [clock.now_s() for _ in range(100)]
    assert readings == sorted(readings)


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(10.0)
    assert clock.now_s() == 10.0
    clock.advance(2.5)
    assert clock.now_s() == 12.5


@pytest.mark.parametrize("step", [-0.1, math.nan])
def test_manual_clock_refuses_steps_back(step: float) -> None:
    with pytest.raises(ValueError, match="by_s"):
        ManualClock().advance(step)
