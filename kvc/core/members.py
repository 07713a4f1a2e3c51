"""What Σ knows of one worker and of one session. Read freely; only Sigma writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core.blocks import resident_blocks
from kvc.core.types import Facts, Mode, WorkerInfo, WorkerRef

if TYPE_CHECKING:
    from kvc.core.types import Turn


@dataclass(slots=True)
class WorkerState:
    """What Σ knows of one life of one worker. Read freely; only Sigma writes."""

    info: WorkerInfo
    healthy: bool = True
    draining: bool = False
    resident: set[int] = field(default_factory=set)
    fresh: bool = False
    facts: Facts | None = None
    inflight: int = 0
    asked: int = 0
    assigned: int = 0
    failures: int = 0
    placed_tokens: int = 0
    placed_sessions: int = 0
    prefill_tokens: int = 0
    modes: dict[Mode, int] = field(default_factory=dict)

    ref: WorkerRef = field(init=False)
    why_not: str = field(init=False)
    """Why the worker may not be routed to; empty when it may (R19)."""

    def __post_init__(self) -> None:
        """`ref` and `why_not` are looked at many times a turn: fields, not walks."""
        self.ref = self.info.ref
        self.judge()

    def judge(self, *, healthy: bool | None = None, draining: bool | None = None) -> None:
        """Changes whether the worker may be routed to; after a change of `info`, too. Mutates."""
        self.healthy = self.healthy if healthy is None else healthy
        self.draining = self.draining if draining is None else draining
        self.why_not = "unhealthy" if not self.healthy else "draining" if self.draining or self.info.draining else ""

    @property
    def load(self) -> float:
        """Tokens of open sessions placed here over K_d (R26, without the inflight term).

        What the worker itself holds, promised and queues counts when it is more: other routers place sessions, too (F56).
        """
        facts = self.facts
        reported = facts.held_tokens + facts.reserved_tokens + facts.queued_tokens if facts is not None else 0
        return max(self.placed_tokens, reported) / self.info.capacity_tokens

    @property
    def prefill_backlog_s(self) -> float:
        """Prefill work ahead of a new turn: what this router gave the worker, or what the worker reports, whichever is more."""
        own = self.prefill_tokens / self.info.prefill_tokens_per_s
        return max(own, self.facts.prefill_backlog_s if self.facts else 0.0)

    @property
    def room_tokens(self) -> int:
        """Free and evictable KV less what is queued, by the latest report (R27); the whole pool when nothing is known."""
        if self.facts is None:
            return self.info.capacity_tokens
        facts = self.facts
        return facts.capacity_tokens - facts.held_tokens - facts.reserved_tokens - facts.queued_tokens


@dataclass(slots=True)
class SessionState:
    """What Σ knows of one session. `placed` is where its tokens count for R26; `confirmed` is `Turn.confirmed`, replaced, never changed."""

    pin: WorkerRef | None = None
    turns: int = 0
    context_tokens: int = 0
    input_tokens: int = 0
    rejects: dict[str, int] = field(default_factory=dict)
    placed: WorkerRef | None = None
    placed_tokens: int = 0
    confirmed: dict[WorkerRef, int] | None = None
    open_turns: int = 0
    closed: bool = False


def matched_blocks(turn: Turn, worker: WorkerState, least: int = 0) -> int:
    """Leading blocks of a prompt that the worker holds, as far as Σ knows. `least`: blocks that need no look."""
    if turn.confirmed is not None:
        return turn.confirmed.get(worker.ref, 0)
    return resident_blocks(turn.chain, worker.resident, least)
