"""An admission agent whose engine says yes to everything, in process: what is measured is the mesh, not an engine."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from kvc.core.blocks import chain_seed, unpack_hashes
from kvc.engine import link
from kvc.engine.hop import HOP_CAPABILITY
from kvc.errors import Unavailable
from kvc.runtime import logs, service
from kvc.runtime.server import ServerConfig
from services.admission_agent.config import AgentConfig, EngineConfig
from services.admission_agent.main import running_agent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from services.admission_agent.residency import Residency

CAPACITY_TOKENS = 100_000_000
TTL_S = 5.0


FLUSH_S = 0.01


class AlwaysAdmits:
    """EngineLink of an engine that admits every turn as Direct. `admitted` is told the blocks of each."""

    def __init__(self, worker_id: str, role: str, url: str, admitted: Callable[[bytes], None] | None = None) -> None:
        """Nothing is resident. With `admitted` the engine says that it decides on arrival, too."""
        self._tickets = 0
        self._admitted = admitted
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
            capabilities=["admit", "release", "residency", "local-append", *([HOP_CAPABILITY] if admitted is not None else [])],
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
            if self._admitted is not None:
                self._admitted(body.block_hashes)
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

    def __init__(self, worker_id: str, role: str, url: str, admitted: Callable[[bytes], None] | None = None) -> None:
        """Connects to nothing."""
        self._arguments = (worker_id, role, url, admitted)

    async def connect(self) -> AlwaysAdmits:
        """The engine."""
        return AlwaysAdmits(*self._arguments)


class Held:
    """Residency of an engine that keeps what it admits. Its agent reports the router's own hashes: it never sees a token."""

    def __init__(self) -> None:
        """Nothing is held."""
        self.residency: Residency | None = None
        self._blocks: set[int] = set()
        self._due = False

    def admitted(self, block_hashes: bytes) -> None:
        """Blocks of a turn; followers hear of new ones soon, as an agent tells them."""
        fresh = [block for block in unpack_hashes(block_hashes) if block not in self._blocks]
        if fresh and self.residency is not None:
            self._blocks.update(fresh)
            self.residency._fold.stored(fresh)  # noqa: SLF001 - past the re-blocking, for which tokens would be needed
            if not self._due:
                self._due = True
                asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._due = False
        if self.residency is not None:
            self.residency.flush()


def main() -> int:
    """`python -m bench.peers.always --port P --worker-id d0 --role decode --url http://...`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--role", default="decode")
    parser.add_argument("--url", required=True)
    parser.add_argument("--on-arrival", action="store_true", help="the engine decides on hot turns as they arrive")
    arguments = parser.parse_args()
    logs.configure("warning", "agent")
    config = AgentConfig(engine=EngineConfig(socket=Path("unused")), server=ServerConfig(port=arguments.port))

    held = Held()
    admitted = held.admitted if arguments.on_arrival else None

    async def serve(stop: asyncio.Event) -> None:
        async with running_agent(config, Connector(arguments.worker_id, arguments.role, arguments.url, admitted)) as agent:
            held.residency = agent.residency
            await stop.wait()

    return service.run(serve)


if __name__ == "__main__":
    raise SystemExit(main())
