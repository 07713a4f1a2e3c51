from __future__ import annotations

import pytest

from kvc.engine.reference.clock import MAX_DEBT_S, VirtualClock
from kvc.runtime.clock import ManualClock


def test_idle_time_follows_the_wall() -> None:
    wall = ManualClock(100.0)
    clock = VirtualClock(wall, scale=20.0)
    wall.advance(0.5)
    assert clock.now_s() == pytest.approx(10.0)
    assert clock.wall_until_s(12.0) == pytest.approx(0.1)


def test_working_time_moves_by_costs_only() -> None:
    wall = ManualClock()
    clock = VirtualClock(wall, scale=10.0)
    clock.work()
    wall.advance(5.0)
    assert clock.now_s() == 0.0, "slow Python is not modelled time"
    clock.advance(2.0)
    assert clock.now_s() == 2.0
    clock.work()
    clock.rest()
    wall.advance(1.0)
    assert clock.now_s() == pytest.approx(12.0)


def test_lead_is_what_the_wall_has_to_catch_up() -> None:
    wall = ManualClock()
    clock = VirtualClock(wall, scale=10.0)
    clock.work()
    clock.advance(1.0)
    assert clock.lead_s() == pytest.approx(0.1)
    wall.advance(0.11)
    assert clock.lead_s() == pytest.approx(-0.01), "a short oversleep is made up for by the next step"
    clock.advance(0.5)
    assert clock.lead_s() == pytest.approx(0.04)
    wall.advance(1.0)
    assert clock.lead_s() == 0.0, "a long delay is not"
    clock.advance(0.5)
    assert clock.lead_s() == pytest.approx(0.05)
    assert MAX_DEBT_S < 1.0
