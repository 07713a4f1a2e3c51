"""The engine: its parts put together, and the loop that drives them in modelled time."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kvc.core.blocks import chain_seed
from kvc.core.types import WorkerRef
from kvc.engine import kvvalue
from kvc.engine.hop import HOP_PREFIX
from kvc.engine.reference.admission import TICKET_PREFIX, AdmissionDesk
from kvc.engine.reference.bootstrap import BootstrapServer
from kvc.engine.reference.clock import VirtualClock
from kvc.engine.reference.faults import ContextTooLong, EngineBusy, RidInUse
from kvc.engine.reference.pool import KvPool
from kvc.engine.reference.pull import Puller
from kvc.engine.reference.radix import RadixTree
from kvc.engine.reference.residency import Residency
from kvc.engine.reference.scheduler import Limits, Scheduler
from kvc.engine.reference.sessions import Sessions
from kvc.errors import Internal, InvalidField, KvcError, Unavailable
from kvc.runtime.clock import SystemClock
from kvc.runtime.logs import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.core.params import Params
    from kvc.engine import link
    from kvc.engine.reference.admission import Ticket
    from kvc.engine.reference.config import EngineConfig
    from kvc.engine.reference.request import Request
    from kvc.runtime.clock import Clock

logger = logging.getLogger(__name__)

BURST_S = 0.002
"""Wall seconds of decode taken at once, and the shortest sleep: shorter ones cost more than they model."""


class Observer(NamedTuple):
    """What the engine tells others."""

    ended: Callable[[Request], None]
    delta: Callable[[link.Delta], None]


class Engine:
    """One worker. Single-threaded: everything runs on one event loop."""

    def __init__(self, config: EngineConfig, params: Params | None = None, wall: Clock | None = None) -> None:
        """Builds the parts; `run` drives them.

        Args:
            config: settings.
            params: rulings in force for Admit; None: `config.params` as they are.
            wall: monotonic wall time.
        """
        self.config = config
        params = params or config.params
        self.identity = WorkerRef(config.worker_id, time.time_ns())
        self.wall = wall or SystemClock()
        self.salt = kvvalue.salt(config.model)
        self.hash_seed = chain_seed(config.model)
        page = config.page_tokens
        capacity = config.kv_tokens // page
        self.tree = RadixTree(page, xxhash.xxh3_64_intdigest(b"engine pages", self.hash_seed))
        self.pool = KvPool(self.tree, capacity, int(params.rho * capacity * page) // page)
        self.sessions = Sessions(config.max_sessions)
        self.clock = VirtualClock(self.wall, config.time_scale)
        limits = Limits(config.chunk, config.max_running_requests, config.queue_limit, sends_kv=config.role == "prefill")
        self.scheduler = Scheduler(self.pool, self.sessions, config.costs, self.clock, limits, self.salt)
        self.residency = Residency(self.tree, config.block_tokens, self.hash_seed)
        self.desk = AdmissionDesk(self.scheduler, self.residency, params, self.wall, self.identity.epoch, self.max_input_tokens)
        timeouts = (config.bootstrap_timeout_s, config.transfer_timeout_s)
        self.bootstrap = BootstrapServer(self.scheduler, self.wake, self.salt, *timeouts)
        self.puller = Puller(self.scheduler, self.wake, self.salt, *timeouts)
        self.observers: list[Observer] = []
        self.inflight: dict[str, Request] = {}
        self.stopping = False
        self._work = asyncio.Event()

    @property
    def max_input_tokens(self) -> int:
        """Longest prompt that can ever fit, with one token of output."""
        return min(self.config.max_input_tokens, self.pool.limit_pages * self.config.page_tokens - 1)

    def wake(self) -> None:
        """There may be work."""
        self._work.set()

    def submit(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            KvcError: it cannot be taken; nothing of it is kept.
        """
        if self.stopping:
            raise Unavailable("the engine is stopping", reason="STOPPING")
        self._check(request)
        self.desk.expire()
        ticket = self._ticket(request)
        self.inflight[request.rid] = request
        try:
            self._place(request, ticket)
        except KvcError:
            del self.inflight[request.rid]
            raise
        self.wake()

    def end(self, request: Request, aborted: str = "", error: KvcError | None = None) -> bool:
        """Ends a request before its time; False when it had ended already."""
        ended = self.scheduler.end(request, aborted, error)
        self.wake()
        return ended

    def forget(self, request: Request) -> None:
        """The client has its answer or is gone: whatever is left of the request ends."""
        self.end(request, aborted="the client went away")
        if self.inflight.get(request.rid) is request:
            del self.inflight[request.rid]
        for observer in self.observers:
            observer.ended(request)

    def abort(self, rid: str, *, everything: bool = False) -> int:
        """Aborts a request by id, or all; unknown ids are fine.

        Returns:
            Requests aborted.
        """
        chosen = list(self.inflight.values()) if everything else [self.inflight[rid]] if rid in self.inflight else []
        return sum(self.end(request, aborted="aborted on request") for request in chosen)

    def flush(self) -> int:
        """Empties the cache.

        Returns:
            Tokens freed.

        Raises:
            EngineBusy: requests or tickets are open.
        """
        self.desk.expire()
        if self.inflight or self.desk.tickets or self.tree.protected_pages:
            raise EngineBusy(f"{len(self.inflight)} requests and {len(self.desk.tickets)} tickets are open")
        freed = self.tree.clear()
        self.wake()
        return freed * self.config.page_tokens

    def publish(self) -> None:
        """Tells the followers of residency what changed."""
        delta = self.residency.delta()
        if delta is not None:
            for observer in self.observers:
                observer.delta(delta)

    async def run(self) -> None:
        """Drives the scheduler until cancelled. A fault ends every request with an error, and then the loop."""
        try:
            await self._drive()
        except Exception as error:
            event(logger, "engine_fault", level=logging.ERROR, error=error)
            self.stopping = True
            for request in list(self.inflight.values()):
                request.error = Internal("the engine failed")
                request.output_ready.set()
            raise

    async def _drive(self) -> None:
        scheduler, clock = self.scheduler, self.clock
        interval_s = self.config.stream_interval_ms / 1000
        while True:
            self._work.clear()
            self.desk.expire()
            scheduler.fire_timers()
            scheduler.start_waiting()
            if scheduler.busy:
                scheduler.step(BURST_S * clock.scale)
                lead_s = clock.lead_s()
                # A sleep of 0 lets everything else run once.
                await asyncio.sleep(lead_s if lead_s >= BURST_S else 0)
            for request in scheduler.settle(self.wall.now_s(), interval_s):
                event(logger, "completed", level=logging.DEBUG, rid=request.rid, output_tokens=len(request.output))
            if not scheduler.busy:
                scheduler.start_waiting()
            self.publish()
            if not scheduler.busy:
                await self._idle()

    async def stop(self) -> None:
        """Takes no more, ends what is in flight, and closes transfers."""
        self.stopping = True
        for request in list(self.inflight.values()):
            self.end(request, error=Unavailable("the engine is stopping", reason="STOPPING"))
        await self.bootstrap.stop()
        await self.puller.stop()

    async def _idle(self) -> None:
        """Waits for work, the next timer or the next ticket's end."""
        self.clock.rest()
        waits = [60.0]
        timer_s, expiry_s = self.scheduler.next_timer_s(), self.desk.next_expiry_s()
        if timer_s is not None:
            waits.append(self.clock.wall_until_s(timer_s))
        if expiry_s is not None:
            waits.append(max(0.0, expiry_s - self.wall.now_s()))
        try:
            async with asyncio.timeout(min(waits)):
                await self._work.wait()
        except TimeoutError:
            return

    def _ticket(self, request: Request) -> Ticket | None:
        """The ticket that a request arrives with or is given on arrival; None for a plain one."""
        if request.rid.startswith(HOP_PREFIX):
            return self.desk.admit_on_arrival(request)
        if request.rid.startswith(TICKET_PREFIX) and self.config.role != "prefill":
            return self.desk.arrive(request.rid, request.session_id)
        return None

    def _place(self, request: Request, ticket: Ticket | None) -> None:
        if self.config.role == "prefill":
            request.session_id = ""  # sessions live where they are decoded
            self.bootstrap.enter(request)
            return
        if ticket is not None:
            request.session_id = ticket.session_id
            try:
                self.scheduler.submit_admitted(request, ticket.lease)
            except KvcError:
                self.sessions.release(ticket.session_id, ticket.rid)
                raise
        else:
            self.scheduler.submit(request)
        if request.bootstrap is not None:
            self.puller.start(request)

    def _check(self, request: Request) -> None:
        role = self.config.role
        if role == "prefill" and request.bootstrap is None:
            raise InvalidField("a prefill engine needs bootstrap_host, bootstrap_port and bootstrap_room", field="bootstrap_room")
        if role == "monolithic" and request.bootstrap is not None:
            raise InvalidField("a monolithic engine takes no KV from others", field="bootstrap_room")
        if request.rid.startswith(HOP_PREFIX):
            # Its rid is checked with the tickets, and its size is Admit's to judge.
            if request.bootstrap is not None:
                raise InvalidField("a request that asks for its own admission takes no KV from others", field="bootstrap_room")
            return
        if request.rid in self.inflight:
            raise RidInUse("a request with this rid is in flight", field="rid")
        if request.input_tokens > self.max_input_tokens:
            raise ContextTooLong(f"{request.input_tokens} tokens, at most {self.max_input_tokens} possible", field="input_ids")
        limit = self.pool.limit_pages
        if self.scheduler.total_pages(request) > limit:
            total = request.input_tokens + request.max_new_tokens
            raise ContextTooLong(
                f"{total} tokens with output, at most {limit * self.config.page_tokens} possible", field="sampling_params.max_new_tokens"
            )
