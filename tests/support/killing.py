"""What is done to the workers of a mesh whose processes die or hang, and what their engines say meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.live_mesh import LiveMesh
    from tests.support.talking import Conversation


async def pool_has(mesh: LiveMesh, name: str, key: str) -> None:
    """The engine has something of this kind."""
    assert (await mesh.pool(name))[key]


async def pool_lacks(mesh: LiveMesh, name: str, key: str) -> None:
    """The engine has nothing of this kind."""
    assert not (await mesh.pool(name))[key]


async def kill_engine(mesh: LiveMesh, name: str) -> None:
    """Kills a worker's engine alone."""
    mesh.mesh.workers[name].engine.kill()
    await mesh.mesh.workers[name].engine.ended()


async def settle_on(mesh: LiveMesh, one: Conversation, name: str) -> None:
    """A first turn on a certain worker: the others take none meanwhile."""
    others = [other for other in mesh.mesh.workers if other.startswith("d") and other != name]
    for other in others:
        await mesh.drain(other, drain=True)
    turn = await one.turn(2_000, 20)
    for other in others:
        await mesh.drain(other, drain=False)
    assert turn.worker is not None
    assert turn.worker.worker_id == name
