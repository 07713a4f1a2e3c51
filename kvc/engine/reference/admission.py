"""Algorithm 2 inside the engine: facts, the decision of kvc.core.admit, and tickets (R7, R8, R10, R16).

A ticket locks the matched prefix and reserves the rest of the turn's need, until the request arrives with the ticket as its rid, the
ticket is released, or its time is over. Tickets live in wall time, because routers do. Sizes are rounded up to pages before the
decision, so the books in pages never exceed what was decided in tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvc.core.admit import admit
from kvc.core.types import Admission, Executor, Facts, Reason, Rejection
from kvc.engine.convert import admit_from_link, outcome_to_link
from kvc.engine.reference.faults import TicketError
from kvc.engine.reference.lease import Lease

if TYPE_CHECKING:
    from kvc.core.params import Params
    from kvc.core.types import Attempt, Outcome, PrefillOffer, Turn
    from kvc.engine import link
    from kvc.engine.reference.node import Node
    from kvc.engine.reference.residency import Residency
    from kvc.engine.reference.scheduler import Scheduler
    from kvc.runtime.clock import Clock

TICKET_PREFIX = "kvc-"
ANSWERS_KEPT = 16_384
ANSWER_LIFE_S = 60.0


@dataclass(slots=True, eq=False)
class Ticket:
    """An open reservation.

    Attributes:
        rid: the ticket id, which is the rid the request must carry.
        attempt: the try of the request it was given to.
        session_id: whose turn it is.
        lease: the locked prefix and the reserved rest.
        expires_s: wall time at which it ends by itself.
        transfer: KV will come from a prefill engine.
        append_tokens: tokens to prefill.
    """

    rid: str
    attempt: Attempt
    session_id: str
    lease: Lease
    expires_s: float
    transfer: bool
    append_tokens: int


class AdmissionDesk:
    """Decides on turns and keeps the tickets. Single-threaded, called between scheduler steps; methods mutate."""

    def __init__(self, scheduler: Scheduler, residency: Residency, params: Params, wall: Clock, epoch: int, max_input_tokens: int) -> None:
        """Starts without tickets.

        Args:
            scheduler: whose memory is handed out.
            residency: where matches are looked up.
            params: rulings in force.
            wall: monotonic wall time.
            epoch: this life of the worker; part of ticket ids.
            max_input_tokens: longest prompt taken.
        """
        self.draining = False
        self.tickets: OrderedDict[str, Ticket] = OrderedDict()  # in order of expiry, because every ticket lives equally long
        self._scheduler = scheduler
        self._residency = residency
        self._params = params
        self._wall = wall
        self._prefix = f"{TICKET_PREFIX}{epoch:x}-"
        self._max_input_tokens = max_input_tokens
        self._last_ticket = 0
        self._used: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[Attempt, tuple[float, link.Admitted | link.Refused]] = OrderedDict()
        self._latest: dict[str, str] = {}

    def admit(self, body: link.Admit) -> link.Admitted | link.Refused:
        """Answers one Admit; the same attempt gets the same answer.

        Raises:
            InvalidField: a field is out of its range.
        """
        attempt, turn, offer = admit_from_link(body, self._residency.block_tokens)
        self.expire()
        known = self._answers.get(attempt)
        if known is not None:
            return known[1]
        self._supersede(attempt)
        answer = outcome_to_link(*self._decide(attempt, turn, offer))
        self._answers[attempt] = (self._wall.now_s() + ANSWER_LIFE_S, answer)
        while len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        return answer

    def arrive(self, rid: str, session_id: str) -> Ticket:
        """The ticket that a request arrives with; it is used up, and its lease is the caller's to end.

        Raises:
            TicketError: it is unknown, expired, released, used (F27), or another session's.
        """
        self.expire()
        ticket = self.tickets.get(rid)
        if ticket is not None and session_id not in {"", ticket.session_id}:
            raise TicketError("the ticket belongs to another session", field="session_id", reason="TICKET_MISMATCH")
        if ticket is None:
            if rid in self._used:
                raise TicketError("another request arrived with this ticket", field="rid", reason="TICKET_USED")
            raise TicketError("the ticket is unknown or expired", field="rid", reason="TICKET_EXPIRED")
        del self.tickets[rid]
        self._latest.pop(ticket.attempt.request_id, None)
        self._used[rid] = None
        while len(self._used) > ANSWERS_KEPT:
            self._used.popitem(last=False)
        return ticket

    def release(self, rid: str) -> bool:
        """Gives a ticket back; False when it was not open."""
        self.expire()
        ticket = self.tickets.pop(rid, None)
        if ticket is None:
            return False
        self._end(ticket)
        return True

    def expire(self) -> None:
        """Ends tickets whose time is over, and forgets old answers."""
        now = self._wall.now_s()
        while self.tickets and next(iter(self.tickets.values())).expires_s <= now:
            self._end(self.tickets.popitem(last=False)[1])
        while self._answers and next(iter(self._answers.values()))[0] <= now:
            self._answers.popitem(last=False)

    def next_expiry_s(self) -> float | None:
        """Wall time at which the next ticket ends; does not mutate."""
        return next(iter(self.tickets.values())).expires_s if self.tickets else None

    def facts(self) -> Facts:
        """The worker's state without a turn; does not mutate."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        page = pool.tree.page_tokens
        speed = scheduler.costs.chunked_prefill_tokens_per_s(scheduler.limits.chunk_tokens)
        backlog = scheduler.prefill_backlog_tokens() + sum(t.append_tokens for t in self.tickets.values() if not t.transfer)
        return Facts(
            capacity_tokens=pool.capacity_pages * page,
            held_tokens=(pool.held_pages + scheduler.set_aside_pages) * page,
            reserved_tokens=pool.reserved_pages * page,
            evictable_tokens=pool.tree.evictable_pages * page,
            prefill_backlog_s=backlog / speed,
            prefill_tokens_per_s=speed,
            running=len(scheduler.running) + len(scheduler.prefilling),
            pending_transfers=len(scheduler.pulling) + sum(t.transfer for t in self.tickets.values()),
            queued_tokens=scheduler.queued_tokens(),
            draining=self.draining,
            max_input_tokens=self._max_input_tokens,
        )

    def _decide(self, attempt: Attempt, turn: Turn, offer: PrefillOffer | None) -> tuple[Outcome, Facts]:
        page = self._scheduler.pool.tree.page_tokens
        total_pages = -(-(turn.input_tokens + turn.output_reserve_tokens) // page)
        node, pages = self._residency.match(turn.chain, turn.input_tokens - 1)
        facts = self._facts_about(turn, node, pages)
        whole = replace(turn, output_reserve_tokens=total_pages * page - turn.input_tokens)
        outcome = admit(facts, whole, self._params, offer)
        if isinstance(outcome, Rejection):
            return outcome, facts
        if not self._can_take(total_pages - facts.matched_held_tokens // page):
            reason = Reason.NO_D_CAPACITY if pages else Reason.SESSION_NOT_RESIDENT_NO_CAPACITY
            return Rejection(reason, self._params.retry_after_s), facts
        lease = Lease(self._scheduler.pool, node, pages, total_pages, reserved=True)
        return self._with_ticket(outcome, attempt, turn.session_id, lease), facts

    def _can_take(self, need_pages: int) -> bool:
        """What the decision does not know: slots, and that the paper's capacity rule promises no room for output."""
        pool = self._scheduler.pool
        return pool.leases < self._scheduler.limits.max_running and need_pages <= pool.room_pages

    def _facts_about(self, turn: Turn, node: Node, pages: int) -> Facts:
        tree, sessions = self._scheduler.pool.tree, self._scheduler.sessions
        record = sessions.get(turn.session_id)
        return replace(
            self.facts(),
            matched_tokens=pages * tree.page_tokens,
            matched_held_tokens=tree.locked_pages(node, pages) * tree.page_tokens,
            session_resident=record is not None and tree.resident_prefix(record.pages) > 0,
            session_busy=sessions.owner(turn.session_id) is not None,
        )

    def _with_ticket(self, admission: Admission, attempt: Attempt, session_id: str, lease: Lease) -> Admission:
        """Opens the ticket of an admission."""
        self._last_ticket += 1
        rid = f"{self._prefix}{self._last_ticket}"
        self.tickets[rid] = Ticket(
            rid=rid,
            attempt=attempt,
            session_id=session_id,
            lease=lease,
            expires_s=self._wall.now_s() + self._params.ticket_ttl_s,
            transfer=admission.executor is Executor.PREFILL,
            append_tokens=admission.append_tokens,
        )
        self._latest[attempt.request_id] = rid
        self._scheduler.sessions.claim(session_id, rid)
        return replace(admission, ticket=rid, ttl_s=self._params.ticket_ttl_s)

    def _supersede(self, attempt: Attempt) -> None:
        """A later try of the same request voids the ticket of an earlier one, whose answer got lost."""
        rid = self._latest.get(attempt.request_id)
        if rid is not None and self.tickets[rid].attempt.attempt_number < attempt.attempt_number:
            self.release(rid)

    def _end(self, ticket: Ticket) -> None:
        ticket.lease.give_back()
        self._latest.pop(ticket.attempt.request_id, None)
        self._scheduler.sessions.release(ticket.session_id, ticket.rid)
        self._scheduler.start_waiting()
