"""What several unit tests begin with: a front door, and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.captured import captured_logs
from tests.support.front import front

if TYPE_CHECKING:
    import io
    from collections.abc import AsyncIterator, Iterator

    from tests.support.front import Front


@pytest.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    """A front door with the workers that the test's module names in WORKERS: none, unless it does."""
    async with front() as made:
        for worker_id in getattr(request.module, "WORKERS", ()):
            await made.worker(worker_id)
        yield made


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """The log of a service called "test"."""
    with captured_logs("test") as stream:
        yield stream
