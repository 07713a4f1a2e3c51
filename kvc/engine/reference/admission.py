"""Algorithm 2 inside the engine: facts, the decision of kvc.core.admit, and tickets (R7, R8, R10, R16).

A ticket locks the matched prefix and reserves the rest of the turn's need, until the request arrives with the ticket as its rid, the
ticket is released, or its time is over. Tickets live in wall time, because routers do. Sizes are rounded up to pages before the
decision, so the books in pages never exceed what was decided in tokens.

A request may also bring its own admission (kvc.engine.hop): then the decision and the arrival are one step, and only Direct is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvc.core.admit import admit
from kvc.core.blocks import hash_chain
from kvc.core.types import Admission, Executor, Facts, Mode, Reason, Rejection, Turn
from kvc.engine.convert import admit_from_link, facts_to_link, outcome_to_link
from kvc.engine.hop import HOP_PREFIX, NOT_DIRECT, parse_hop_rid
from kvc.engine.reference.faults import HopRefused, TicketError
from kvc.engine.reference.lease import Lease
from kvc.errors import InvalidField

if TYPE_CHECKING:
    from kvc.core.params import Params
    from kvc.core.types import Attempt, Outcome, PrefillOffer
    from kvc.engine import link
    from kvc.engine.reference.node import Node
    from kvc.engine.reference.request import Request
    from kvc.engine.reference.residency import Residency
    from kvc.engine.reference.scheduler import Scheduler
    from kvc.runtime.clock import Clock

TICKET_PREFIX = "kvc-"
ANSWERS_KEPT = 16_384
ANSWER_LIFE_S = 60.0
DIRECT = Mode.DIRECT.value
TICKET_USED = "ticket-used"
HOP_OUTCOMES = (DIRECT, NOT_DIRECT, TICKET_USED, *(reason.value for reason in Reason))
"""What becomes of requests that ask for their own admission."""


class Place(NamedTuple):
    """Where a turn would go: the end and length of its resident prefix, and its pages from first to last."""

    node: Node
    pages: int
    total_pages: int


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
        self.hops = dict.fromkeys(HOP_OUTCOMES, 0)
        self.tickets: OrderedDict[str, Ticket] = OrderedDict()  # in order of expiry, because every ticket lives equally long
        self._scheduler = scheduler
        self._residency = residency
        self._params = params
        self._wall = wall
        self._epoch = epoch
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
        outcome, facts, place = self._decide(turn, offer)
        if isinstance(outcome, Admission):
            self._last_ticket += 1
            outcome = self._open(f"{self._prefix}{self._last_ticket}", outcome, attempt, turn.session_id, place)
        answer = outcome_to_link(outcome, facts)
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

    def admit_on_arrival(self, request: Request) -> Ticket:
        """Decides on a request whose rid carries its attempt, and takes it at once when it is Direct.

        Returns:
            The ticket of its admission, used up; its lease is the caller's to end.

        Raises:
            InvalidField: the rid is malformed, or no session is named.
            TicketError: a request with this rid was admitted before.
            HopRefused: the turn is not Direct here and now; nothing is held.
        """
        hop = parse_hop_rid(request.rid)
        if hop is None:
            raise InvalidField(f"must be {HOP_PREFIX}<epoch>-<attempt_number>-<request_id>", field="rid")
        if not request.session_id:
            raise InvalidField("a request that asks for its own admission must name its session", field="session_id")
        self.expire()
        if request.rid in self._used:
            self.hops[TICKET_USED] += 1
            return self.arrive(request.rid, request.session_id)
        epoch, attempt = hop
        if epoch != self._epoch:
            raise self._refusal(request, Rejection(Reason.STALE_EPOCH), self.facts())
        self._supersede(attempt)
        outcome, facts, place = self._decide(self._turn(request), None)
        if isinstance(outcome, Rejection) or outcome.mode is not Mode.DIRECT:
            raise self._refusal(request, outcome, facts)
        self._open(request.rid, outcome, attempt, request.session_id, place)
        self.hops[DIRECT] += 1
        return self.arrive(request.rid, request.session_id)

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

    def _decide(self, turn: Turn, offer: PrefillOffer | None) -> tuple[Outcome, Facts, Place]:
        """The decision on a turn now; opens nothing."""
        page = self._scheduler.pool.tree.page_tokens
        total_pages = -(-(turn.input_tokens + turn.output_reserve_tokens) // page)
        place = Place(*self._matched(turn), total_pages)
        facts = self._facts_about(turn, place)
        whole = replace(turn, output_reserve_tokens=total_pages * page - turn.input_tokens)
        outcome = admit(facts, whole, self._params, offer)
        if isinstance(outcome, Admission) and not self._can_take(total_pages - facts.matched_held_tokens // page):
            reason = Reason.NO_D_CAPACITY if place.pages else Reason.SESSION_NOT_RESIDENT_NO_CAPACITY
            outcome = Rejection(reason, self._params.retry_after_s)
        return outcome, facts, place

    def _matched(self, turn: Turn) -> tuple[Node, int]:
        """The resident prefix of a turn, in pages; of one without hashes, what its session's record says of the tokens that are not new."""
        if turn.chain:
            return self._residency.match(turn.chain, turn.input_tokens - 1)
        tree, record = self._scheduler.pool.tree, self._scheduler.sessions.get(turn.session_id)
        old_tokens = turn.input_tokens - max(1, turn.new_tokens)
        pages = min(tree.resident_prefix(record.pages), old_tokens // tree.page_tokens) if record is not None else 0
        return (tree.locate(record.pages[pages - 1], pages), pages) if record is not None and pages else tree.match(b"", 0)

    def _turn(self, request: Request) -> Turn:
        """The turn of a request that came without an Admit, as a router would tell it."""
        record = self._scheduler.sessions.get(request.session_id)
        context_tokens = 0 if record is None else record.committed_tokens + 1
        return Turn(
            session_id=request.session_id,
            turn_index=0,
            chain=hash_chain(request.prompt, self._residency.block_tokens, self._residency.seed),
            input_tokens=request.input_tokens,
            output_reserve_tokens=request.max_new_tokens,
            known_session=True,
            new_tokens=max(0, request.input_tokens - context_tokens),
        )

    def _refusal(self, request: Request, outcome: Outcome, facts: Facts) -> HopRefused:
        """The answer to a request that is not taken on arrival, counted."""
        rejection = outcome if isinstance(outcome, Rejection) else None
        why = NOT_DIRECT if rejection is None else rejection.reason.value
        self.hops[why] += 1
        return HopRefused(
            {
                "reason": why,
                "retry_after_s": 0.0 if rejection is None else rejection.retry_after_s,
                "terminal": rejection is not None and rejection.terminal,
                "append_tokens": request.input_tokens - facts.matched_tokens - facts.host_matched_tokens,
                "epoch": self._epoch,
                "facts": msgspec.to_builtins(facts_to_link(facts)),
            }
        )

    def _can_take(self, need_pages: int) -> bool:
        """What the decision does not know: slots, and that the paper's capacity rule promises no room for output."""
        pool = self._scheduler.pool
        return pool.leases < self._scheduler.limits.max_running and need_pages <= pool.room_pages

    def _facts_about(self, turn: Turn, place: Place) -> Facts:
        tree, sessions = self._scheduler.pool.tree, self._scheduler.sessions
        record = sessions.get(turn.session_id)
        return replace(
            self.facts(),
            matched_tokens=place.pages * tree.page_tokens,
            matched_held_tokens=tree.locked_pages(place.node, place.pages) * tree.page_tokens,
            session_resident=record is not None and tree.resident_prefix(record.pages) > 0,
            session_busy=sessions.owner(turn.session_id) is not None,
        )

    def _open(self, rid: str, admission: Admission, attempt: Attempt, session_id: str, place: Place) -> Admission:
        """Opens the ticket `rid` of an admission: locks the prefix, reserves the rest, claims the session."""
        self.tickets[rid] = Ticket(
            rid=rid,
            attempt=attempt,
            session_id=session_id,
            lease=Lease(self._scheduler.pool, *place, reserved=True),
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
