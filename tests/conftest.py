"""What every test can ask for: the `--rewrite` option, the hypothesis profiles, and both event loops."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Wall time says nothing on a shared machine, so no profile has a deadline. `ci` draws the same examples every time.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", max_examples=30, deadline=None)
settings.register_profile("nightly", max_examples=5_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write golden files and pages instead of comparing with them")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be written with what the code does now."""
    return bool(request.config.getoption("--rewrite"))


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of a module with BOTH_LOOPS run on asyncio's own loop and on uvloop: what they look at differs between the two."""
    both = getattr(getattr(item, "module", None), "BOTH_LOOPS", False)
    return {"asyncio": asyncio.new_event_loop} | ({"uvloop": uvloop.new_event_loop} if both else {})
