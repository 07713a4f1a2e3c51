"""What every test can ask for: the `--rewrite` option and the hypothesis profiles."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

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
