"""Continuous batching in modelled time: chunked prefill beside decode, memory first come first served.

Each step takes at most one chunk of prefill, shared by the requests that need it in order of arrival, and one decode step of every
running request; so a long prefill delays decode by a chunk at a time and never starves it. Without prefill, many decode steps of an
unchanging batch are taken at once.

Memory. A request with a ticket has its memory already. Any other waits in one queue until its whole need fits, in order; what room
there is meanwhile is set aside for the first of the queue and counts as held, so a stream of admitted turns cannot starve it (R23).
Nothing that has memory is ever retracted.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc.engine.reference.faults import QueueFull, TicketError
from kvc.engine.reference.lease import Lease
from kvc.engine.reference.request import Phase, Request

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from kvc.engine.reference.clock import VirtualClock
    from kvc.engine.reference.costs import CostModel
    from kvc.engine.reference.node import Node
    from kvc.engine.reference.pool import KvPool
    from kvc.engine.reference.sessions import Sessions
    from kvc.errors import KvcError

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a scheduler.

    Attributes:
        chunk_tokens: prefill tokens a step.
        max_running: requests and tickets with memory.
        queue_limit: requests waiting for memory.
        sends_kv: finished prompts are sent away instead of decoded (prefill engines).
    """

    chunk_tokens: int
    max_running: int
    queue_limit: int
    sends_kv: bool


class Scheduler:
    """Owns every request in flight. Single-threaded and without I/O; methods mutate unless they say otherwise."""

    def __init__(self, pool: KvPool, sessions: Sessions, costs: CostModel, clock: VirtualClock, limits: Limits, salt: int) -> None:
        """Starts idle. `salt` is the KV state of the empty context."""
        self.pool = pool
        self.sessions = sessions
        self.costs = costs
        self.clock = clock
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.pulling: set[Request] = set()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.sending: set[Request] = set()
        self._ending: list[Request] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._link_free_s = 0.0
        self._head_need_pages = 0
        self._salt = salt
        self._page = pool.tree.page_tokens

    @property
    def busy(self) -> bool:
        """True when a step would do something. Does not mutate."""
        return bool(self.prefilling or self.running)

    @property
    def active(self) -> int:
        """Requests with memory. Does not mutate."""
        return len(self.pulling) + len(self.prefilling) + len(self.running) + len(self.sending) + len(self._ending)

    @property
    def set_aside_pages(self) -> int:
        """Room kept for the first of the queue. Does not mutate."""
        return min(self._head_need_pages, max(0, self.pool.room_pages)) if self.waiting else 0

    def total_pages(self, request: Request) -> int:
        """Pages of a request from its first to its last token. Does not mutate."""
        output = 0 if self.limits.sends_kv else request.max_new_tokens
        return -(-(request.input_tokens + output) // self._page)

    def match(self, request: Request) -> tuple[Node, int]:
        """Resident prefix of a prompt, leaving at least one token to prefill. Does not mutate."""
        return self.pool.tree.match(request.prompt, (request.input_tokens - 1) // self._page)

    def submit(self, request: Request) -> None:
        """Takes a request without a ticket.

        Raises:
            QueueFull: too many wait.
        """
        if len(self.waiting) >= self.limits.queue_limit:
            raise QueueFull(f"{len(self.waiting)} requests wait for memory", retry_after_s=RETRY_AFTER_S)
        self._arrive(request)
        self.sessions.claim(request.session_id, request.rid)
        request.move(Phase.QUEUED)
        self.waiting.append(request)
        self.start_waiting()

    def submit_admitted(self, request: Request, ticket: Lease) -> None:
        """Takes a request whose ticket holds its memory; the ticket's lease ends in any case.

        Raises:
            TicketError: it needs more than the ticket holds, and there is no more.
        """
        self._arrive(request)
        ticket.give_back()
        node, pages = self.match(request)
        if self._need(request, node, pages) > self.pool.room_pages:
            raise TicketError(
                f"the request needs {self.total_pages(request) * self._page} tokens, more than its ticket holds", reason="TICKET_EXCEEDED"
            )
        self._grant(request, node, pages)

    def start_waiting(self) -> None:
        """Grants memory to waiting requests, in order, as long as it lasts. A request whose session is busy lets others pass."""
        for request in list(self.waiting):
            if not self.sessions.claim(request.session_id, request.rid):
                continue
            node, pages = self.match(request)
            self._head_need_pages = self._need(request, node, pages)
            if self._head_need_pages > self.pool.room_pages or self.pool.leases >= self.limits.max_running:
                return
            self.waiting.remove(request)
            self._grant(request, node, pages)
        self._head_need_pages = 0

    def step(self, horizon_s: float) -> None:
        """One step; advances virtual time by its cost.

        Args:
            horizon_s: modelled seconds that may pass at once when only decode is going on.
        """
        chunk = self._next_chunk()
        steps = 0
        if self.running:
            context = sum(request.context_tokens for request in self.running)
            steps = 1 if chunk else self._steps_within(horizon_s, context)
            self.clock.advance(self.costs.decode_s(len(self.running), context, steps))
        if chunk:
            self.clock.advance(self.costs.prefill_s(sum(tokens for _, tokens in chunk)))
        if steps:
            for request in self.running:
                request.generate(steps, self._page)
            self._collect()
        for request, tokens in chunk:
            request.prefill(tokens, self._page)
            if request.kv_tokens == request.input_tokens:
                self.prefilling.remove(request)
                self._prompt_ready(request)

    def settle(self, wall_s: float, interval_s: float) -> list[Request]:
        """Makes visible what the steps so far did, once their time has passed.

        Args:
            wall_s: wall time now.
            interval_s: wall seconds between two outputs of one request; the first and the last go out at once.

        Returns:
            Requests that completed.
        """
        ended, self._ending = self._ending, []
        for request in ended:
            if self.limits.sends_kv:
                request.move(Phase.SEND)
                self.sending.add(request)
            else:
                self._complete(request)
        for request in self.running:
            if not request.visible or wall_s - request.flushed_s >= interval_s:
                request.flushed_s = wall_s
                self._show(request)
        return [] if self.limits.sends_kv else ended

    def kv_arrived(self, request: Request, values: array[int], tail: int) -> None:
        """The KV of a pulled request is here; the caller has filled in the prefill engine's times."""
        self.clock.work()
        self.pulling.remove(request)
        request.receive(values, tail, self._page)
        request.times.since_s = self.clock.now_s()
        self._prompt_ready(request)

    def send(self, request: Request, tokens: int, delivered: Callable[[], None]) -> None:
        """Sends the KV of some tokens over the outgoing link, one transfer at a time; calls back when it has arrived."""
        now = request.times.since_s + request.times.ttft_s - request.times.elapsed_s
        self._link_free_s = max(self._link_free_s, now) + self.costs.transfer_s(tokens)
        due = self._link_free_s + self.costs.transfer_latency_s
        request.times.transfer_s = due - now
        self._timer_count += 1
        heapq.heappush(self._timers, (due, self._timer_count, delivered))

    def next_timer_s(self) -> float | None:
        """Virtual time of the next callback. Does not mutate."""
        return self._timers[0][0] if self._timers else None

    def fire_timers(self) -> None:
        """Calls what is due."""
        now = self.clock.now_s()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def sent(self, request: Request) -> None:
        """The decode engine has the KV: a prefill engine's request is complete, and its KV stays cached."""
        self.sending.discard(request)
        self._complete(request)

    def end(self, request: Request, aborted: str = "", error: KvcError | None = None) -> bool:
        """Ends a request before its time: its memory is back at once and nothing is committed (F68, F70).

        Returns:
            False when it had ended already.
        """
        if request.phase is Phase.DONE:
            return False
        self._forget(request)
        request.aborted, request.error = aborted, error
        self._release(request)
        return True

    def prefill_backlog_tokens(self) -> int:
        """Prompt tokens of requests that will be prefilled here. Does not mutate."""
        queued = sum(request.input_tokens for request in self.waiting if request.bootstrap is None or self.limits.sends_kv)
        return queued + sum(request.input_tokens - request.kv_tokens for request in self.prefilling)

    def queued_tokens(self) -> int:
        """Tokens wanted by requests without memory. Does not mutate."""
        return sum(self.total_pages(request) for request in self.waiting) * self._page

    def _arrive(self, request: Request) -> None:
        self.clock.work()
        request.times.arrival_s = request.times.since_s = self.clock.now_s()

    def _need(self, request: Request, node: Node, pages: int) -> int:
        return self.total_pages(request) - self.pool.tree.locked_pages(node, pages)

    def _grant(self, request: Request, node: Node, pages: int) -> None:
        request.lease = Lease(self.pool, node, pages, self.total_pages(request), reserved=False)
        request.begin(self.pool.tree, self._salt)
        if request.bootstrap is not None and not self.limits.sends_kv:
            request.times.queue_s = request.times.at(self.clock.now_s())
            self.pulling.add(request)
            request.move(Phase.PULL)
        else:
            self.prefilling.append(request)
            request.move(Phase.PREFILL)

    def _next_chunk(self) -> list[tuple[Request, int]]:
        chunk: list[tuple[Request, int]] = []
        left = self.limits.chunk_tokens
        for request in self.prefilling:
            tokens = min(left, request.input_tokens - request.kv_tokens)
            if not request.prefill_tokens:
                request.times.queue_s += request.times.at(self.clock.now_s())
            chunk.append((request, tokens))
            left -= tokens
            if not left:
                break
        return chunk

    def _steps_within(self, horizon_s: float, context: int) -> int:
        one = self.costs.decode_s(len(self.running), context)
        most = min(request.remaining_tokens for request in self.running)
        return max(1, min(most, int(horizon_s / one)))

    def _prompt_ready(self, request: Request) -> None:
        """The prompt's KV is complete, which yields the first token."""
        request.times.ttft_s = request.times.at(self.clock.now_s())
        request.generate(1, self._page)
        if self.limits.sends_kv:
            self._ending.append(request)
            request.move(Phase.ENDING)
            return
        self.running.append(request)
        request.move(Phase.DECODE)
        if not request.remaining_tokens:
            self._collect()

    def _collect(self) -> None:
        """Takes finished requests out of the batch."""
        now = self.clock.now_s()
        for request in self.running:
            request.times.latency_s = request.times.at(now)
            if not request.remaining_tokens:
                request.move(Phase.ENDING)
                self._ending.append(request)
        self.running = [request for request in self.running if request.remaining_tokens]

    def _complete(self, request: Request) -> None:
        assert request.lease is not None
        if not self.limits.sends_kv:
            committed = request.finish(self._page)
            pages = self.pool.tree.path_hashes(request.lease.node, request.lease.locked_pages)
            self.sessions.commit(request.session_id, committed, pages)
        self._release(request)

    def _release(self, request: Request) -> None:
        if request.lease is not None:
            request.lease.give_back()
        self.sessions.release(request.session_id, request.rid)
        request.move(Phase.DONE)
        self._show(request)

    def _show(self, request: Request) -> None:
        request.visible = len(request.output)
        request.output_ready.set()

    def _forget(self, request: Request) -> None:
        """Removes a request from wherever it is."""
        places: dict[Phase, list[Request] | set[Request] | deque[Request]] = {
            Phase.QUEUED: self.waiting,
            Phase.PULL: self.pulling,
            Phase.PREFILL: self.prefilling,
            Phase.DECODE: self.running,
            Phase.ENDING: self._ending,
            Phase.SEND: self.sending,
        }
        place = places.get(request.phase)
        if place is not None:
            place.remove(request)
