"""Meshes that outlive what is done to them; a module whose tests need another one has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.support.live_mesh import live_mesh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.live_mesh import LiveMesh

SCALE = 5.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LiveMesh]:
    """Pools that hold everything the tests say: what is idle stays resident."""
    async with live_mesh("1P3D", time_scale=SCALE, kv_tokens=1_000_000, prefill_kv_tokens=1_000_000) as live:
        yield live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local_mesh() -> AsyncIterator[LiveMesh]:
    """No prefill worker; pools so large that two workers hold what is in flight on three."""
    async with live_mesh("0P3D", time_scale=SCALE, kv_tokens=200_000) as live:
        yield live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote_mesh() -> AsyncIterator[LiveMesh]:
    """Seeds always run on the prefill worker."""
    async with live_mesh("1P2D", time_scale=4.0, engine_args=("--params-executor", "prefill")) as live:
        yield live
