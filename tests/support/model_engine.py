"""A decode worker in a hundred lines: block-level cache, locks, tickets, eviction; the oracle around `kvc.core.admit`.

It counts memory the slow way, block by block, and never asks the core what it counted. Memory is in tokens. A cached block is a
chained hash, so two sessions that share a prefix share its blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core.admit import admit
from kvc.core.types import Admission, Facts

if TYPE_CHECKING:
    from kvc.core.params import Params
    from kvc.core.types import Attempt, Outcome, PrefillOffer, Turn


@dataclass(slots=True)
class _Hold:
    """What one ticket or one running turn keeps from being evicted: locked blocks and tokens of its own."""

    turn: Turn
    locked: tuple[int, ...]
    own_tokens: int
    expires_s: float


@dataclass(slots=True)
class ModelEngine:
    """One D. `tickets` are admitted turns that have not arrived; `running` ones have; `outcomes` makes Admit idempotent."""

    params: Params
    capacity_tokens: int
    tickets: dict[Attempt, _Hold] = field(default_factory=dict)
    running: dict[Attempt, _Hold] = field(default_factory=dict)
    outcomes: dict[Attempt, Outcome] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)
    """Cached block -> its parent block, least recently used first."""
    evicted: list[int] = field(default_factory=list)
    transfers: int = 0
    others_tokens: int = 0
    """Held by turns of other routers, as one number."""
    draining: bool = False

    @property
    def limit_tokens(self) -> float:
        """Rho K."""
        return self.params.rho * self.capacity_tokens

    @property
    def locks(self) -> Counter[int]:
        """How often each block is locked."""
        return Counter(block for hold in (*self.tickets.values(), *self.running.values()) for block in hold.locked)

    @property
    def held_tokens(self) -> int:
        """Locked blocks once each, what running turns own, and what others hold."""
        own_tokens = sum(hold.own_tokens for hold in self.running.values())
        return len(self.locks) * self.params.block_tokens + own_tokens + self.others_tokens

    @property
    def reserved_tokens(self) -> int:
        """What open tickets were promised beyond what they lock."""
        return sum(hold.own_tokens for hold in self.tickets.values())

    @property
    def evictable_tokens(self) -> int:
        """Cached and not locked."""
        return (len(self.cache) - len(self.locks)) * self.params.block_tokens

    @property
    def committed_tokens(self) -> int:
        """What invariant I1 bounds: memory that no eviction frees."""
        return self.held_tokens + self.reserved_tokens

    @property
    def physical_tokens(self) -> int:
        """What is in the pool now."""
        return self.held_tokens + self.evictable_tokens

    def matched(self, turn: Turn) -> tuple[int, ...]:
        """Leading blocks of the turn that are cached, found by walking."""
        found = []
        for block in turn.chain:
            if block not in self.cache:
                break
            found.append(block)
        return tuple(found)

    def facts(self, turn: Turn) -> Facts:
        """What the worker tells Admit about a turn."""
        matched, locks, width = self.matched(turn), self.locks, self.params.block_tokens
        return Facts(
            capacity_tokens=self.capacity_tokens,
            held_tokens=self.held_tokens,
            reserved_tokens=self.reserved_tokens,
            evictable_tokens=self.evictable_tokens,
            matched_tokens=len(matched) * width,
            matched_held_tokens=sum(block in locks for block in matched) * width,
            running=len(self.running),
            pending_transfers=self.transfers,
            session_resident=bool(matched),
            session_busy=any(hold.turn.session_id == turn.session_id for hold in (*self.tickets.values(), *self.running.values())),
            draining=self.draining,
        )

    def admit(self, attempt: Attempt, turn: Turn, now_s: float = 0.0, offer: PrefillOffer | None = None) -> Outcome:
        """Answers once per attempt; a yes locks the matched prefix and reserves the rest in the same step (R8)."""
        if attempt in self.outcomes:
            return self.outcomes[attempt]
        outcome = admit(self.facts(turn), turn, self.params, offer)
        if isinstance(outcome, Admission):
            locked = self.matched(turn)
            own = turn.input_tokens + turn.output_reserve_tokens - len(locked) * self.params.block_tokens
            self.tickets[attempt] = _Hold(turn, locked, own, now_s + self.params.ticket_ttl_s)
        self.outcomes[attempt] = outcome
        return outcome

    def arrive(self, attempt: Attempt) -> bool:
        """The ticketed turn reaches the engine and takes its memory, evicting what must go. False: its ticket is gone."""
        hold = self.tickets.pop(attempt, None)
        if hold is None:
            return False
        self.running[attempt] = hold
        self._make_room()
        return True

    def start_without_ticket(self, attempt: Attempt, turn: Turn) -> bool:
        """Fallback: starts when it fits, else stays queued (R23)."""
        locked = self.matched(turn)
        unlocked = sum(block not in self.locks for block in locked) * self.params.block_tokens
        own = turn.input_tokens + turn.output_reserve_tokens - len(locked) * self.params.block_tokens
        if self.committed_tokens + unlocked + own > self.limit_tokens:
            return False
        self.running[attempt] = _Hold(turn, locked, own, 0.0)
        self._make_room()
        return True

    def release(self, attempt: Attempt) -> None:
        """Gives a ticket back; twice is fine."""
        self.tickets.pop(attempt, None)

    def expire(self, now_s: float) -> None:
        """Tickets past their time go by themselves."""
        for attempt in [attempt for attempt, hold in self.tickets.items() if hold.expires_s <= now_s]:
            del self.tickets[attempt]

    def finish(self, attempt: Attempt, *, keep: bool = True) -> None:
        """A running turn ends; a completed one leaves its prompt's blocks in the cache."""
        hold = self.running.pop(attempt)
        if keep:
            parent = 0
            for block in hold.turn.chain:
                self.cache.pop(block, None)
                self.cache[block] = parent
                parent = block
        self._make_room()

    def occupy(self, tokens: int) -> None:
        """Turns of other routers hold that much now; cached KV makes way."""
        self.others_tokens = tokens
        self._make_room()

    def _make_room(self) -> None:
        """Block-level LRU eviction of leaves until the pool is at most rho K."""
        while self.physical_tokens + self.reserved_tokens > self.limit_tokens:
            parents, locks = set(self.cache.values()), self.locks
            victim = next(block for block in self.cache if block not in parents and block not in locks)
            del self.cache[victim]
            self.evicted.append(victim)
