"""Values the algorithms work on. All are immutable; none does I/O.

Vocabulary and symbols follow seed 000 section 2; rulings R1-R29 are those of docs/spec.md.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from kvc.core.blocks import Chain
from kvc.core.value import value


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MONOLITHIC = "monolithic"

    @property
    def keeps_sessions(self) -> bool:
        """True for members of D: workers that sessions are routed to."""
        return self is not Role.PREFILL


class Mode(enum.StrEnum):
    """How a turn is executed (seed 000 section 2.5)."""

    DIRECT = "direct"
    SEED = "seed"
    RESEED = "reseed"
    FALLBACK = "fallback"


class Executor(enum.StrEnum):
    """Where the missing part of a prompt is prefilled (R24)."""

    LOCAL = "local"
    PREFILL = "prefill"


class Reason(enum.StrEnum):
    """Why a worker refused; the values are the paper's strings where it has one."""

    REAL_LARGE_APPEND = "real-large-append"
    NO_D_CAPACITY = "no-d-capacity"
    SESSION_NOT_RESIDENT_NO_CAPACITY = "session-not-resident-no-capacity"
    SEED_BUDGET = "seed-budget"
    EXCEEDS_CAPACITY = "exceeds-capacity"
    DRAINING = "draining"
    STALE_EPOCH = "stale-epoch"
    SESSION_BUSY = "session-busy"

    @property
    def counts_as_reject(self) -> bool:
        """True when the refusal says something about the session on this worker, so that rejects[s, d] grows (R13).

        Budget waits, drains, stale epochs, busy sessions and prompts too long for any pool do not.
        """
        return self in _COUNTED


_COUNTED = frozenset({Reason.REAL_LARGE_APPEND, Reason.NO_D_CAPACITY, Reason.SESSION_NOT_RESIDENT_NO_CAPACITY})


class WorkerRef(NamedTuple):
    """One life of one worker; what was learnt under another epoch is void (R18)."""

    worker_id: str
    epoch: int


class Attempt(NamedTuple):
    """One effectful try of a request; effects are idempotent by it (R16)."""

    request_id: str
    attempt_number: int


@value(frozen=True, slots=True)
class Turn:
    """A request r = <s, t, prefix_hashes, append_len, input_len> (seed 000 section 2.2).

    Attributes:
        session_id: s(r), compared exactly.
        turn_index: t(r), from 0.
        chain: chained hashes of the full blocks of the prompt, in order.
        input_tokens: prompt length; includes the partial last block.
        output_reserve_tokens: tokens to hold for the output (R7).
        shared_blocks: leading blocks owned by more than `shared_after` live sessions (R14).
        known_session: the session was served before, so a miss is a reseed.
        new_tokens: append_len(r) as the client sees it: tokens added since the session's last turn. Only the paper profile
            reads it, and a worker that is told lengths only; R10 replaces it by input - matched.
        confirmed: leading blocks that each worker confirmed by completing a turn of the session. None: the chain is of tokens, and
            workers say themselves what they hold. Else it is of the prompt's bytes: no worker's residency is compared with it, no
            worker is told of it, and `input_tokens` is an estimate.
    """

    session_id: str
    turn_index: int
    chain: Chain
    input_tokens: int
    output_reserve_tokens: int
    shared_blocks: int = 0
    known_session: bool = False
    new_tokens: int = 0
    confirmed: Mapping[WorkerRef, int] | None = None

    def tokens_of(self, blocks: int, block_tokens: int) -> int:
        """Tokens in the first `blocks` blocks of the chain; a block of bytes stands for its share of the prompt."""
        if self.confirmed is None:
            return blocks * block_tokens
        return blocks * self.input_tokens // max(1, len(self.chain))


@value(frozen=True, slots=True)
class WorkerInfo:
    """A member of P or D as its agent describes it. Speeds are tokens per second."""

    ref: WorkerRef
    role: Role
    model: str
    capacity_tokens: int
    page_tokens: int
    block_tokens: int
    engine_url: str
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    prefill_tokens_per_s: float = 7000.0
    transfer_tokens_per_s: float = 20000.0
    draining: bool = False
    hash_seed: int = 0
    max_input_tokens: int = 2**31 - 1
    capabilities: tuple[str, ...] = ()


@value(frozen=True, slots=True)
class PrefillOffer:
    """What the cheapest prefill worker needs for a turn; None in its place means that |P| = 0 (R25).

    Attributes:
        backlog_s: work queued before the turn could start.
        prefill_tokens_per_s: prefill speed.
        transfer_tokens_per_s: KV transfer speed to the decode worker.
        matched_tokens: prompt tokens already cached on the prefill worker.
    """

    backlog_s: float
    prefill_tokens_per_s: float
    transfer_tokens_per_s: float
    matched_tokens: int = 0


@value(frozen=True, slots=True)
class Facts:
    """What a worker knows about itself and a turn, all read in one scheduler iteration (R7, R8, R10).

    Attributes:
        capacity_tokens: K_d.
        held_tokens: KV that cannot be evicted now: running turns, locked prefixes, growth of what runs or waits.
        reserved_tokens: promised to open tickets beyond what they lock.
        evictable_tokens: cached KV that may go; counts as free.
        matched_tokens: prompt tokens with KV on the device, floored to blocks.
        matched_held_tokens: of those, tokens already counted in held.
        host_matched_tokens: prompt tokens beyond matched_tokens in the host tier.
        load_back_s: time to load them.
        prefill_backlog_s: prefill work queued here.
        prefill_tokens_per_s: prefill speed here.
        running: requests decoding.
        pending_transfers: KV transfers admitted towards this worker and not finished.
        queued_tokens: tokens wanted by requests queued without memory.
        session_resident: the session has a record here (paper's s in M_d).
        session_busy: another turn of the session is in flight here.
        draining: takes no new sessions.
        max_input_tokens: longest prompt the engine takes.
    """

    capacity_tokens: int
    held_tokens: int = 0
    reserved_tokens: int = 0
    evictable_tokens: int = 0
    matched_tokens: int = 0
    matched_held_tokens: int = 0
    host_matched_tokens: int = 0
    load_back_s: float = 0.0
    prefill_backlog_s: float = 0.0
    prefill_tokens_per_s: float = 7000.0
    running: int = 0
    pending_transfers: int = 0
    queued_tokens: int = 0
    session_resident: bool = False
    session_busy: bool = False
    draining: bool = False
    max_input_tokens: int = 2**31 - 1


@value(frozen=True, slots=True)
class Admission:
    """Yes. `ticket` and `ttl_s` are filled in by the engine that stores the reservation."""

    mode: Mode
    executor: Executor
    append_tokens: int
    need_tokens: int
    ticket: str = ""
    ttl_s: float = 0.0


@value(frozen=True, slots=True)
class Rejection:
    """No, and why: an answer, not an error."""

    reason: Reason
    retry_after_s: float = 0.0
    terminal: bool = False


Outcome = Admission | Rejection


@value(frozen=True, slots=True)
class Probe:
    """One Admit question and its answer, for explanation: `reason` or `error` is set when not admitted."""

    worker: WorkerRef
    admitted: bool
    reason: Reason | None = None
    error: str = ""
    elapsed_s: float = 0.0


@value(frozen=True, slots=True)
class Decision:
    """delta(r): how a turn runs (seed 000 section 2.5). `prefill` is None when the decode worker prefills itself."""

    mode: Mode
    executor: Executor
    decode: WorkerRef
    prefill: WorkerRef | None
    attempt: Attempt
    admission: Admission | None
    probes: tuple[Probe, ...] = ()
    overlap_blocks: int = 0
    queued_s: float = 0.0


class Give(enum.Enum):
    """Why Dispatch gave up without a decision."""

    EXCEEDS_CAPACITY = "exceeds-capacity"
    NO_WORKER = "no-worker"
    QUEUE_FULL = "queue-full"
    DEADLINE = "deadline"


@value(frozen=True, slots=True)
class GaveUp:
    """Dispatch ended without a decision: a typed error for the caller. `retry_after_s` is the hint for RESOURCE_EXHAUSTED."""

    why: Give
    probes: tuple[Probe, ...] = ()
    retry_after_s: float = 0.0
    queued_s: float = 0.0
