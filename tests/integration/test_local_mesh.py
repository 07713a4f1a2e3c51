"""The local mesh itself: what does not start, and what comes back."""

from __future__ import annotations

import pytest

from kvc.errors import Unavailable
from services.local_mesh.mesh import LocalMesh, MeshConfig
from services.local_mesh.topology import Topology

START_S = 60.0


async def test_a_process_that_does_not_start_is_one_error() -> None:
    """Not a group of them, and with its reason; the others are stopped."""
    mesh = LocalMesh(MeshConfig(Topology(1, 1), engine_args=("--chunk-tokens", "0")))
    with pytest.raises(Unavailable, match=r"engine .* ended with status 2: .*chunk_tokens"):
        await mesh.__aenter__()
    assert [child.pid for worker in mesh.workers.values() for child in (worker.engine, worker.agent)] == [None] * 4
    assert not mesh.directory.exists()


async def test_a_worker_comes_back_under_its_address() -> None:
    """Also after a start that failed: the ports are not forgotten, and nothing of the failed start is left running."""
    async with LocalMesh(MeshConfig(Topology(0, 1), time_scale=20.0)) as mesh:
        await mesh.ready(START_S)
        before = mesh.workers["d0"]
        await mesh.kill_worker("d0")
        config, mesh.config = mesh.config, MeshConfig(Topology(0, 1), engine_args=("--chunk-tokens", "0"))
        with pytest.raises(Unavailable, match="engine d0 ended with status 2"):
            await mesh.start_worker("d0")
        assert (mesh.workers["d0"].engine.pid, mesh.workers["d0"].agent.pid) == (None, None)
        mesh.config = config
        after = await mesh.start_worker("d0")
        assert after is not before
        assert (after.engine_port, after.agent_port) == (before.engine_port, before.agent_port)
        await mesh.ready(START_S)
