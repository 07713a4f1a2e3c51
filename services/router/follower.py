"""Follows one agent: who its worker is, what is resident there, how busy it is. Feeds Σ and nothing else.

    connecting   GetWorker, then the stream; a worker that this mesh cannot use is refused here, and asked again later
    following    from the first whole snapshot on the worker may be routed to: deltas in sequence, load reports, more snapshots
    lost         the worker is unhealthy and its residency stale; after a pause, connecting

A new epoch or a snapshot replaces all that was known; a gap in the sequence starts over (R18). A load report says that the engine
answers its agent, so a worker that turns found unreachable may be tried again (F2).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvc import wire
from kvc.core import events as ev
from kvc.core.blocks import unpack_hashes
from kvc.errors import KvcError, Precondition, Unavailable, from_rpc_error
from kvc.runtime.backoff import pause_s
from kvc.runtime.config import ConfigError
from kvc.runtime.logs import event
from kvc.v1 import admission_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.core.types import WorkerInfo, WorkerRef
    from kvc.v1 import types_pb2
    from services.router.adapters.agents import Agents
    from services.router.config import AgentsConfig

logger = logging.getLogger(__name__)

LEAST_PAUSE = 0.25
"""The shortest pause, as a share of its bound: every try costs the agent a snapshot."""
REQUIRED_OF_DECODE = ("admit", "residency")


class Follower:
    """One agent. `why_not` says why its worker is not used, or is empty."""

    def __init__(
        self,
        target: str,
        agents: Agents,
        config: AgentsConfig,
        block_tokens: int,
        apply: Callable[[ev.Event], None],
        on_load: Callable[[str, types_pb2.WorkerLoad], None],
    ) -> None:
        """Follows nothing until `run`.

        Args:
            target: host:port of the agent.
            agents: channels.
            config: pauses and silences.
            block_tokens: the mesh's block; an agent with another one is refused.
            apply: takes events of Σ.
            on_load: takes a worker's name and its latest load report, for display.
        """
        self.target = target
        self.why_not = "connecting"
        self.worker_id = ""
        self.followed = asyncio.Event()
        self._agents = agents
        self._config = config
        self._block_tokens = block_tokens
        self._apply = apply
        self._on_load = on_load
        self._ref: WorkerRef | None = None
        self._sequence = 0
        self._whole = False
        self._parts: list[int] | None = None

    async def run(self) -> None:
        """Follows until it is cancelled."""
        failures = 0
        while True:
            refused, began_s = False, asyncio.get_running_loop().time()
            try:
                await self._follow()
                problem = "the agent ended the stream"
            except grpc.aio.AioRpcError as error:
                problem = str(from_rpc_error(error))
            except TimeoutError:
                problem = f"silent for {self._config.silence_s} s"
            except Precondition as error:
                problem, refused = str(error), True
            except KvcError as error:
                problem = str(error)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever one agent sends, the others are followed on
                event(logger, "follower_fault", level=logging.ERROR, error=error, target=self.target)
                problem = f"a fault while following: {type(error).__name__}"
            lasted_s = asyncio.get_running_loop().time() - began_s
            failures = 0 if self.followed.is_set() and lasted_s > self._config.backoff_cap_s else failures + 1
            self._lost(problem, refused=refused)
            await asyncio.sleep(pause_s(failures + 1, self._config.backoff_base_s, self._config.backoff_cap_s, least=LEAST_PAUSE))

    def _lost(self, problem: str, *, refused: bool) -> None:
        if self.followed.is_set() or self.why_not != problem:
            name, level = ("agent_refused", logging.ERROR) if refused else ("agent_lost", logging.WARNING)
            event(logger, name, level=level, target=self.target, problem=problem)
        self.followed.clear()
        self.why_not = problem
        if self._ref is not None and self._agents.leave(self._ref.worker_id, self.target):
            self._apply(ev.WorkerHealth(self._ref, healthy=False))
            self._apply(ev.ResidencyStale(self._ref))

    async def _follow(self) -> None:
        stub = self._agents.stub(self.target)
        described = await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=self._config.silence_s)
        info = wire.worker_info_from_pb(described.info)
        self._check(info)
        self._join(info)
        self._load(described.load, info.ref)
        stream = stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="router"))
        try:
            while True:
                async with asyncio.timeout(self._config.silence_s):
                    message = await stream.read()
                if not isinstance(message, admission_pb2.WatchResidencyResponse):  # grpc.aio.EOF
                    return
                self._take(message, info.ref)
        finally:
            stream.cancel()

    def _check(self, info: WorkerInfo) -> None:
        """Refuses a worker that this mesh cannot use (F73)."""
        if info.block_tokens != self._block_tokens:
            raise Precondition(f"the worker counts blocks of {info.block_tokens} tokens, this router of {self._block_tokens}")
        needed = REQUIRED_OF_DECODE if info.role.keeps_sessions else ()
        missing = [name for name in needed if name not in info.capabilities]
        if missing:
            raise Precondition(f"the engine lacks {', '.join(missing)}", reason="ENGINE_CAPABILITY_MISSING")

    def _join(self, info: WorkerInfo) -> None:
        self._agents.follow(info, self.target)
        before, self._ref = self._ref, info.ref
        self.worker_id = info.ref.worker_id
        if before is not None and before.worker_id != info.ref.worker_id and self._agents.stub_of(before.worker_id) is None:
            # Another worker answers at this address now (F60): the old one is gone, nothing of it carries over.
            self._apply(ev.WorkerLeft(before.worker_id))
        self._apply(ev.WorkerJoined(info))
        self._apply(ev.WorkerHealth(info.ref, healthy=False))  # until its residency is known
        self._sequence = 0
        self._whole = False
        self._parts = None

    def _take(self, message: admission_pb2.WatchResidencyResponse, ref: WorkerRef) -> None:
        if wire.ref_from_pb(message.worker) != ref:
            raise Unavailable("another life of the worker answers")
        kind = message.WhichOneof("event")
        if kind == "snapshot":
            if self._parts is None:
                self._parts = []
            self._parts += _hashes(message.snapshot.block_hashes)
            if message.snapshot.more:
                return
            self._apply(ev.WorkerHealth(ref, healthy=True))
            self._apply(ev.ResidencyReset(ref, tuple(self._parts)))
            self._parts, self._sequence, self._whole = None, message.sequence, True
            self.why_not = ""
            if not self.followed.is_set():
                event(logger, "agent_followed", target=self.target, worker_id=ref.worker_id, epoch=ref.epoch)
                self.followed.set()
        elif kind == "delta":
            if not self._whole or self._parts is not None:
                raise Unavailable("a residency delta before the whole snapshot")
            if message.sequence != self._sequence + 1:
                raise Unavailable(f"residency jumped from {self._sequence} to {message.sequence}")
            self._sequence = message.sequence
            delta = message.delta
            self._apply(ev.ResidencyChanged(ref, tuple(_hashes(delta.stored)), tuple(_hashes(delta.removed)), delta.cleared))
        elif kind == "load" and self._whole:
            self._apply(ev.WorkerHealth(ref, healthy=True))
            self._load(message.load, ref)

    def _load(self, load: types_pb2.WorkerLoad, ref: WorkerRef) -> None:
        self._apply(ev.LoadReported(ref, wire.facts_from_pb(load.facts)))
        self._on_load(ref.worker_id, load)


def _hashes(packed: bytes) -> list[int]:
    try:
        return unpack_hashes(packed).tolist()
    except ValueError as error:
        raise Unavailable(str(error)) from None
