"""The reference engine behind the agent's link port, on its real socket."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from kvc.core.params import params_for
from kvc.engine.hop import HOP_CAPABILITY
from services.admission_agent.adapters.engine_link import SocketConnector
from tests.contract.engine_link_suite import EngineLinkSuite
from tests.support import engines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.admission_agent.ports import EngineLink
    from tests.contract.engine_link_suite import Talk


class ReferenceEngine:
    """EngineUnderLink of a reference engine."""

    block_tokens = 24

    def __init__(self, socket: Path, page_tokens: int) -> None:
        self._config = engines.config(worker_id="d0", role="decode", link_path=socket, page_tokens=page_tokens)
        self._connector = SocketConnector(socket, 5.0)
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        running = engines.serving(self._config, params_for("default", ticket_ttl_s=1.0))
        self._subject = await self._stack.enter_async_context(running)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def connect(self) -> EngineLink:
        return await self._connector.connect()

    async def run_turn(self, session_id: str, token_ids: list[int], ticket: str) -> None:
        await self._subject.checked(token_ids, 4, rid=ticket, session_id=session_id)

    async def clear(self) -> None:
        await self._subject.post("/flush_cache", {})

    async def restart(self) -> None:
        await self.stop()
        await self.start()


class TestReferenceEngine(EngineLinkSuite):
    """Pages as large as the mesh's blocks, smaller and larger."""

    @pytest.fixture(params=[1, 16, 24, 64])
    async def engine(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ReferenceEngine]:
        one = ReferenceEngine(tmp_path / "link.sock", request.param)
        await one.start()
        yield one
        await one.stop()

    async def test_it_admits_on_arrival(self, talk: Talk) -> None:
        assert HOP_CAPABILITY in talk.info.capabilities
