"""Pauses between tries."""

from __future__ import annotations

import pytest

from kvc.runtime.backoff import pause_s


@pytest.mark.parametrize("least", [0.0, 0.25])
@pytest.mark.parametrize(("in_a_row", "bound_s"), [(1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (10_000, 1.0)])
def test_the_bound_doubles_up_to_the_cap_and_any_pause_below_it_may_come(in_a_row: int, bound_s: float, least: float) -> None:
    pauses = [pause_s(in_a_row, 0.1, 1.0, least=least) for _ in range(300)]
    assert all(least * bound_s <= pause <= bound_s for pause in pauses)
    assert min(pauses) < (least + 0.1) * bound_s
    assert max(pauses) > 0.9 * bound_s
