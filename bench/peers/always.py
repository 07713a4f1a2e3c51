"""An admission agent whose engine says yes to everything, in process: what is measured is the mesh, not an engine."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from kvc.core.blocks import chain_seed
from kvc.engine import link
from kvc.errors import Unavailable
from kvc.runtime import logs, service
from kvc.runtime.server import ServerConfig
from services.admission_agent.config import AgentConfig, EngineConfig
from services.admission_agent.main import running_agent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

CAPACITY_TOKENS = 100_000_000
TTL_S = 5.0


class AlwaysAdmits:
    """EngineLink of an engine that admits every turn as Direct."""

    def __init__(self, worker_id: str, role: str, url: str) -> None:
        """Nothing is resident."""
        self._tickets = 0
        self._closed = asyncio.Event()
        self.welcome = link.Welcome(
            version=link.LINK_VERSION,
            worker_id=worker_id,
            epoch=1,
            role=role,
            model="mock",
            capacity_tokens=CAPACITY_TOKENS,
            page_tokens=16,
            max_input_tokens=2**31 - 1,
            engine_url=url,
            bootstrap_host="127.0.0.1" if role == "prefill" else "",
            bootstrap_port=8998 if role == "prefill" else 0,
            prefill_tokens_per_s=30_000.0,
            transfer_tokens_per_s=250_000.0,
            hash_seed=chain_seed("mock"),
            capabilities=["admit", "release", "residency", "local-append"],
        )

    def ask(self, body: link.RequestBody, answered: Callable[[link.ReplyBody], None], timeout_s: float) -> None:  # noqa: ARG002 - the port's
        """Answers at once."""
        answered(self._reply(body))

    async def call(self, body: link.RequestBody, timeout_s: float) -> link.ReplyBody:  # noqa: ARG002 - the port's
        """Answers at once."""
        return self._reply(body)

    def _reply(self, body: link.RequestBody) -> link.ReplyBody:
        facts = link.LinkFacts(capacity_tokens=CAPACITY_TOKENS)
        if isinstance(body, link.Admit):
            self._tickets += 1
            offered = body.offer is not None
            mode, executor = ("seed", "prefill") if offered else ("direct", "local")
            return link.Admitted(mode, executor, f"kvc-1-{self._tickets}", TTL_S, body.input_tokens if offered else 0, 1, facts)
        if isinstance(body, link.Release):
            return link.Released(released=False)
        if isinstance(body, link.Load):
            return link.LoadReport(facts)
        if isinstance(body, link.Drain):
            return link.Drained(0)
        return link.Sessions([], 0)

    async def events(self, timeout_s: float) -> AsyncGenerator[link.EventBody, None]:  # noqa: ARG002 - the port's
        """An empty snapshot, then nothing."""
        yield link.Snapshot(0, [])
        await self._closed.wait()
        raise Unavailable("closed")

    async def close(self) -> None:
        """Ends the events."""
        self._closed.set()


class Connector:
    """EngineConnector."""

    def __init__(self, worker_id: str, role: str, url: str) -> None:
        """Connects to nothing."""
        self._arguments = (worker_id, role, url)

    async def connect(self) -> AlwaysAdmits:
        """The engine."""
        return AlwaysAdmits(*self._arguments)


def main() -> int:
    """`python -m bench.peers.always --port P --worker-id d0 --role decode --url http://...`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--role", default="decode")
    parser.add_argument("--url", required=True)
    arguments = parser.parse_args()
    logs.configure("warning", "agent")
    config = AgentConfig(engine=EngineConfig(socket=Path("unused")), server=ServerConfig(port=arguments.port))

    async def serve(stop: asyncio.Event) -> None:
        async with running_agent(config, Connector(arguments.worker_id, arguments.role, arguments.url)):
            await stop.wait()

    return service.run(serve)


if __name__ == "__main__":
    raise SystemExit(main())
