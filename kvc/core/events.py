"""The closed set of events that change Σ (architecture rule 2). Frozen values: a log of them replays Σ bit-exact."""

from __future__ import annotations

import enum

from kvc.core.blocks import Chain
from kvc.core.types import Attempt, Executor, Facts, Mode, Reason, WorkerInfo, WorkerRef
from kvc.core.value import value


class End(enum.StrEnum):
    """How a turn that was started ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@value(frozen=True, slots=True)
class WorkerJoined:
    """A worker is known under this epoch. A new epoch voids what was known of the old one (R18)."""

    info: WorkerInfo


@value(frozen=True, slots=True)
class WorkerLeft:
    """A worker is no longer part of the mesh."""

    worker_id: str


@value(frozen=True, slots=True)
class WorkerHealth:
    """The worker answers, or no longer does: whether it may be routed to (R13, R19)."""

    ref: WorkerRef
    healthy: bool


@value(frozen=True, slots=True)
class WorkerDraining:
    """The worker takes no new turns, or does again."""

    worker_id: str
    draining: bool


@value(frozen=True, slots=True)
class ResidencyReset:
    """A snapshot: resident[d] is exactly these blocks, closed under prefixes. `fresh`: it comes from the worker's own events."""

    ref: WorkerRef
    blocks: tuple[int, ...]
    fresh: bool = True


@value(frozen=True, slots=True)
class ResidencyChanged:
    """A delta of the worker's own events, applied in the order cleared, removed, stored."""

    ref: WorkerRef
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cleared: bool = False


@value(frozen=True, slots=True)
class ResidencyStale:
    """The worker's events were interrupted: what is known is an estimate until the next ResidencyReset (R18)."""

    ref: WorkerRef


@value(frozen=True, slots=True)
class LoadReported:
    """The worker's own numbers, or those that came with an Admit answer."""

    ref: WorkerRef
    facts: Facts


@value(frozen=True, slots=True)
class TurnArrived:
    """A session's next prompt: its chain replaces the session's old one. `estimated`: it is of bytes, not of tokens (Turn.confirmed)."""

    session_id: str
    chain: Chain
    input_tokens: int
    estimated: bool = False


@value(frozen=True, slots=True)
class Assigned:
    """A routing decision in favour of d: assigned[d] += 1 (R11)."""

    ref: WorkerRef


@value(frozen=True, slots=True)
class Asked:
    """A question is on its way to d: until Answered it counts like a turn in flight for placement (R26, F54).

    `assigns`: Route chose d for it, as Assigned says.
    """

    attempt: Attempt
    ref: WorkerRef
    assigns: bool = False


@value(frozen=True, slots=True)
class Answered:
    """The question was answered, or nobody waits for its answer any more. `facts`: d's own numbers in the answer, as LoadReported."""

    attempt: Attempt
    facts: Facts | None = None


@value(frozen=True, slots=True)
class Started:
    """A turn was admitted, or sent to d as Fallback: inflight[d] += 1 until TurnEnded of the same attempt (R11).

    `tokens` = prompt and output reserve; `prefill_tokens` = work given to `prefill`.
    """

    attempt: Attempt
    session_id: str
    ref: WorkerRef
    mode: Mode
    executor: Executor
    tokens: int
    prefill: WorkerRef | None = None
    prefill_tokens: int = 0


@value(frozen=True, slots=True)
class PrefillDone:
    """The prefill worker has finished its part of an attempt."""

    attempt: Attempt


@value(frozen=True, slots=True)
class Refused:
    """d said no to a turn of the session (R13: only answers count, and only some reasons)."""

    session_id: str
    ref: WorkerRef
    reason: Reason


@value(frozen=True, slots=True)
class WorkerUnreachable:
    """No answer could be had from d: health, never rejects (R13). `gone`: the connection was refused or broken, not slow."""

    ref: WorkerRef
    gone: bool


@value(frozen=True, slots=True)
class TurnEnded:
    """The end of an attempt that was started; repeated or unknown ends change nothing. Token counts as the engine reports them."""

    attempt: Attempt
    end: End
    prompt_tokens: int = 0
    output_tokens: int = 0


@value(frozen=True, slots=True)
class SessionClosed:
    """The session is over, or was idle for longer than the router remembers."""

    session_id: str


Event = (
    WorkerJoined
    | WorkerLeft
    | WorkerHealth
    | WorkerDraining
    | ResidencyReset
    | ResidencyChanged
    | ResidencyStale
    | LoadReported
    | TurnArrived
    | Assigned
    | Asked
    | Answered
    | Started
    | PrefillDone
    | Refused
    | WorkerUnreachable
    | TurnEnded
    | SessionClosed
)
