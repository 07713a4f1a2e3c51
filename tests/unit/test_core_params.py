"""Profiles and overrides."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kvc.core.params import Params, params_for

SPEC = Path(__file__).parents[2] / "docs" / "spec.md"


def test_single_rulings_can_be_overridden() -> None:
    params = params_for("paper", exclude_tried=True, tau_reject=7)
    assert params.profile == "paper"
    assert (params.exclude_tried, params.tau_reject, params.capacity) == (True, 7, "used")
    assert params_for("default") == Params()


@pytest.mark.parametrize(("profile", "overrides"), [("v1", {}), ("default", {"tau": 1}), ("paper", {"profile": "default"})])
def test_unknown_names_are_refused_by_name(profile: Any, overrides: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"v1|tau|profile"):
        params_for(profile, **overrides)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rho", 0.0),
        ("rho", 1.5),
        ("rho", float("nan")),
        ("ticket_ttl_s", 0.0),
        ("alpha", -1.0),
        ("epsilon", -1),
        ("queue_wait_s", float("inf")),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .* is out of range"):
        params_for("default", **{name: value})


def shown(value: object) -> str:
    """A value as the table writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def test_the_table_of_the_spec_has_every_parameter() -> None:
    """docs/spec.md, Parameters: every field of Params is a row with its value in both profiles."""
    table = SPEC.read_text().split("## Parameters")[1].split("## Blocks")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", table, re.MULTILINE)
    profiles = params_for("default"), params_for("paper")
    names = [field.name for field in dataclasses.fields(Params) if field.name != "profile"]
    assert rows == [(name, *(shown(getattr(params, name)) for params in profiles)) for name in names]
