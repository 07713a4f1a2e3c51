"""Σ, the router's state (seed 000 section 2.3): one object, changed only by `apply(event)`.

    resident[d]   WorkerState.resident      blocks, closed under prefixes, from the worker's events (R18)
    pin[s]        SessionState.pin          the worker that served s last (R20)
    inflight[d]   WorkerState.inflight      started and not ended (R11)
    assigned[d]   WorkerState.assigned      routing decisions
    rejects[s,d]  SessionState.rejects      refusals since the last success

Beside them: chains of live sessions (forest), tokens of open sessions placed on each worker (R26), prefill work given to each
prefill worker (R24), turns in flight by attempt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvc.core import events as ev
from kvc.core.blocks import common_blocks
from kvc.core.forest import Forest
from kvc.core.members import SessionState, WorkerState
from kvc.core.types import Mode, Role, Turn
from kvc.core.value import value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvc.core.blocks import Chain
    from kvc.core.params import Params
    from kvc.core.types import Attempt, WorkerRef

UNREACHABLE_LIMIT = 3
"""Unanswered questions in a row after which a worker counts as unhealthy until its agent is heard again."""


@value(frozen=True, slots=True)
class OpenTurn:
    """A turn in flight."""

    started: ev.Started
    prefill_open: bool


class Sigma:
    """The router's state. Mutated by `apply` only; everything else reads."""

    def __init__(self, params: Params, forest_bytes: int = 512 * 1024 * 1024) -> None:
        """Starts empty.

        Args:
            params: rulings in force.
            forest_bytes: cap on session chains.
        """
        self.params = params
        self.workers: dict[str, WorkerState] = {}
        self.sessions: dict[str, SessionState] = {}
        self._decode: tuple[WorkerState, ...] = ()
        self._prefill: tuple[WorkerState, ...] = ()
        self.open: dict[Attempt, OpenTurn] = {}
        self.asking: dict[Attempt, WorkerRef] = {}
        self.forest = Forest(forest_bytes)
        self.prefill_cursor = 0
        self.decode_cursor = 0
        self._handlers: dict[type, Callable[..., None]] = {
            ev.WorkerJoined: self._worker_joined,
            ev.WorkerLeft: self._worker_left,
            ev.WorkerHealth: self._worker_health,
            ev.WorkerDraining: self._worker_draining,
            ev.ResidencyReset: self._residency_reset,
            ev.ResidencyChanged: self._residency_changed,
            ev.ResidencyStale: self._residency_stale,
            ev.LoadReported: self._load_reported,
            ev.TurnArrived: self._turn_arrived,
            ev.Assigned: self._assigned,
            ev.Asked: self._asked,
            ev.Answered: self._answered,
            ev.Started: self._started,
            ev.PrefillDone: self._prefill_done,
            ev.Refused: self._refused,
            ev.WorkerUnreachable: self._worker_unreachable,
            ev.TurnEnded: self._turn_ended,
            ev.SessionClosed: self._session_closed,
        }

    def apply(self, event: ev.Event) -> None:
        """Changes Σ by one event. Events of an earlier epoch of a worker change nothing about the current one."""
        self._handlers[type(event)](event)

    def worker(self, ref: WorkerRef) -> WorkerState | None:
        """The worker if it still lives under this epoch."""
        worker = self.workers.get(ref[0])
        return worker if worker is not None and worker.ref == ref else None

    def decode_workers(self) -> Iterable[WorkerState]:
        """Members of D, in the order they joined, eligible or not."""
        return self._decode

    @property
    def has_prefill(self) -> bool:
        """False when |P| = 0."""
        return bool(self._prefill)

    def prefill_workers(self) -> list[WorkerState]:
        """Members of P that may be used."""
        return [worker for worker in self._prefill if not worker.why_not]

    def session(self, session_id: str) -> SessionState | None:
        """A session, compared exactly; None when it was never served or is closed."""
        return self.sessions.get(session_id)

    def rejects(self, session_id: str, worker_id: str) -> int:
        """rejects[s, d]."""
        session = self.sessions.get(session_id)
        return session.rejects.get(worker_id, 0) if session is not None else 0

    def preview(self, session_id: str, chain: Chain, input_tokens: int) -> Turn:
        """The turn that a prompt would be, without its arrival: for explanation. Reads only."""
        session = self.sessions.get(session_id) or SessionState()
        return Turn(
            session_id=session_id,
            turn_index=session.turns,
            chain=chain,
            input_tokens=input_tokens,
            output_reserve_tokens=0,
            shared_blocks=self._shared_on_arrival(session_id, chain),
            known_session=session.turns > 0,
            new_tokens=max(0, input_tokens - session.context_tokens),
        )

    def _shared_on_arrival(self, session_id: str, chain: Chain) -> int:
        """What Forest.shared_blocks will say once the session owns `chain`: beyond its present chain it is one owner more."""
        after = self.params.shared_after
        if after < 1:
            return len(chain)
        shared = self.forest.shared_prefix(chain, after)
        own = self.forest.chain(session_id)
        if shared < (common_blocks(own, chain) if own is not None else 0):
            return shared
        return self.forest.shared_prefix(chain, after - 1)

    def turn(self, session_id: str, chain: Chain, input_tokens: int, output_reserve_tokens: int) -> Turn:
        """The turn to decide on, from what is known of its session; TurnArrived must have been applied."""
        session = self.sessions[session_id]
        turns, confirmed = session.turns, session.confirmed
        new_tokens = max(0, input_tokens - session.context_tokens)
        if confirmed is not None:  # a worker that is not told the chain must not count on more than is the same
            new_tokens = input_tokens - max(confirmed.values(), default=0) * input_tokens // max(1, len(chain))
        shared_blocks = self.forest.shared_blocks(session_id, self.params.shared_after)
        return Turn(session_id, turns, chain, input_tokens, output_reserve_tokens, shared_blocks, turns > 0, new_tokens, confirmed)

    def _worker_joined(self, event: ev.WorkerJoined) -> None:
        info = event.info
        known = self.workers.get(info.ref.worker_id)
        if known is not None and known.ref == info.ref:
            known.info = info
            known.judge(healthy=True)
            known.failures = 0
            return
        fresh = WorkerState(info, draining=known.draining if known is not None else False)
        self._void(known)
        self.workers[info.ref.worker_id] = fresh
        self._members()
        fresh.asked = sum(ref == info.ref for ref in self.asking.values())
        for turn in self.open.values():  # a worker that left and is back under the same epoch still has its turns
            fresh.inflight += (turn.started.ref == info.ref) + (turn.prefill_open and turn.started.prefill == info.ref)
            fresh.prefill_tokens += turn.started.prefill_tokens if turn.prefill_open and turn.started.prefill == info.ref else 0

    def _worker_left(self, event: ev.WorkerLeft) -> None:
        self._void(self.workers.pop(event.worker_id, None))
        self._members()

    def _members(self) -> None:
        """P and D in the order in which the workers joined."""
        self._decode = tuple(worker for worker in self.workers.values() if worker.info.role.keeps_sessions)
        self._prefill = tuple(worker for worker in self.workers.values() if worker.info.role is Role.PREFILL)

    def _void(self, worker: WorkerState | None) -> None:
        """Nothing learnt about a dead life stays: sessions placed on it are lost ones, and count nowhere until admitted again (R26)."""
        if worker is None:
            return
        for session in self.sessions.values():
            if session.placed == worker.ref:
                session.placed, session.placed_tokens = None, 0
            if session.pin == worker.ref:
                session.pin = None
            session.rejects.pop(worker.ref.worker_id, None)
        self._unconfirm(worker.ref)

    def _unconfirm(self, ref: WorkerRef) -> None:
        """The worker has lost its KV."""
        for session in self.sessions.values():
            if session.confirmed is not None and ref in session.confirmed:
                session.confirmed = {other: blocks for other, blocks in session.confirmed.items() if other != ref}

    def _worker_health(self, event: ev.WorkerHealth) -> None:
        worker = self.worker(event.ref)
        if worker is not None:
            worker.judge(healthy=event.healthy)
            worker.failures = 0

    def _worker_draining(self, event: ev.WorkerDraining) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is not None:
            worker.judge(draining=event.draining)

    def _residency_reset(self, event: ev.ResidencyReset) -> None:
        worker = self.worker(event.ref)
        if worker is not None:
            worker.resident = set(event.blocks)
            worker.fresh = event.fresh

    def _residency_changed(self, event: ev.ResidencyChanged) -> None:
        worker = self.worker(event.ref)
        if worker is None:
            return
        if event.cleared:
            worker.resident.clear()
            self._unconfirm(worker.ref)
        worker.resident.difference_update(event.removed)
        worker.resident.update(event.stored)

    def _residency_stale(self, event: ev.ResidencyStale) -> None:
        worker = self.worker(event.ref)
        if worker is not None:
            worker.fresh = False

    def _load_reported(self, event: ev.LoadReported) -> None:
        worker = self.worker(event.ref)
        if worker is not None:
            worker.facts = event.facts
            worker.failures = 0

    def _turn_arrived(self, event: ev.TurnArrived) -> None:
        session = self.sessions.pop(event.session_id, None) or SessionState()
        self.sessions[event.session_id] = session
        session.input_tokens = event.input_tokens
        session.closed = False
        session.confirmed = self._still_confirmed(event, session.confirmed or {}) if event.estimated else None
        self.forest.update(event.session_id, event.chain)

    def _still_confirmed(self, event: ev.TurnArrived, confirmed: dict[WorkerRef, int]) -> dict[WorkerRef, int]:
        """What workers confirmed of the session's old prompt, as far as it is the new one's, too."""
        before = self.forest.chain(event.session_id) if confirmed else None
        same = common_blocks(before, event.chain) if before is not None else 0
        return {ref: min(blocks, same) for ref, blocks in confirmed.items()} if same else {}

    def _assigned(self, event: ev.Assigned) -> None:
        worker = self.worker(event.ref)
        if worker is not None:
            worker.assigned += 1

    def _asked(self, event: ev.Asked) -> None:
        worker = self.worker(event.ref)
        if worker is None:
            return
        worker.assigned += event.assigns
        if event.attempt not in self.asking:
            self.asking[event.attempt] = event.ref
            worker.asked += 1

    def _answered(self, event: ev.Answered) -> None:
        ref = self.asking.pop(event.attempt, None)
        worker = self.worker(ref) if ref is not None else None
        if worker is None:
            return
        worker.asked -= 1
        if event.facts is not None:
            worker.facts = event.facts
            worker.failures = 0

    def _started(self, event: ev.Started) -> None:
        if event.attempt in self.open:
            return
        self.open[event.attempt] = OpenTurn(event, prefill_open=event.prefill is not None)
        worker = self.worker(event.ref)
        if worker is not None:
            worker.inflight += 1
        prefill = self.worker(event.prefill) if event.prefill is not None else None
        self.prefill_cursor += event.prefill is not None
        self.decode_cursor += event.mode is Mode.FALLBACK
        if prefill is not None:
            prefill.inflight += 1
            prefill.assigned += 1
            prefill.prefill_tokens += event.prefill_tokens
        # Only an arrival makes a session: one that was closed while its turn was being decided stays closed.
        session = self.sessions.setdefault(event.session_id, SessionState(closed=True))
        session.open_turns += 1
        if session.closed:
            return
        self._place(session, event.ref, event.tokens)
        if worker is None or event.mode is Mode.FALLBACK:
            return
        if self.params.reset_on_admit:
            session.rejects.pop(event.ref.worker_id, None)
        if session.pin is None or self.params.pin_on_admit:
            session.pin = event.ref

    def _prefill_done(self, event: ev.PrefillDone) -> None:
        turn = self.open.get(event.attempt)
        if turn is None or not turn.prefill_open or turn.started.prefill is None:
            return
        self.open[event.attempt] = replace(turn, prefill_open=False)
        prefill = self.worker(turn.started.prefill)
        if prefill is not None:
            prefill.inflight -= 1
            prefill.prefill_tokens -= turn.started.prefill_tokens

    def _refused(self, event: ev.Refused) -> None:
        worker = self.worker(event.ref)
        if worker is not None:
            worker.failures = 0
        session = self.sessions.get(event.session_id)
        if worker is not None and session is not None and not session.closed and event.reason.counts_as_reject:
            session.rejects[event.ref.worker_id] = session.rejects.get(event.ref.worker_id, 0) + 1

    def _worker_unreachable(self, event: ev.WorkerUnreachable) -> None:
        worker = self.worker(event.ref)
        if worker is None:
            return
        worker.failures += 1
        if event.gone or worker.failures >= UNREACHABLE_LIMIT:
            worker.judge(healthy=False)

    def _turn_ended(self, event: ev.TurnEnded) -> None:
        turn = self.open.get(event.attempt)
        if turn is None:
            return
        if turn.prefill_open:
            self._prefill_done(ev.PrefillDone(event.attempt))
        del self.open[event.attempt]
        started = turn.started
        worker = self.worker(started.ref)
        if worker is not None:
            worker.inflight -= 1
        session = self.sessions[started.session_id]  # Started made it at the latest, and it stays while a turn of it is open
        session.open_turns -= 1
        if session.closed:
            if not session.open_turns:
                del self.sessions[started.session_id]
            return
        if event.end is not ev.End.COMPLETED:
            self._place(session, session.pin, session.context_tokens)
            return
        session.turns += 1
        session.context_tokens = event.prompt_tokens + event.output_tokens
        session.pin = started.ref if worker is not None else None
        self._place(session, session.pin, session.context_tokens)
        if started.mode is Mode.DIRECT and self.params.reset_on_complete:
            session.rejects.clear()
        if worker is not None:
            worker.modes[started.mode] = worker.modes.get(started.mode, 0) + 1
            self._holds(worker, session, started.session_id)

    def _holds(self, worker: WorkerState, session: SessionState, session_id: str) -> None:
        """A completed turn tells what the worker holds, where its own events do not."""
        if session.confirmed is not None:
            session.confirmed = {**session.confirmed, worker.ref: self.forest.blocks(session_id)}
        elif not worker.fresh:
            self._estimate(worker, session_id)

    def _estimate(self, worker: WorkerState, session_id: str) -> None:
        """Without the worker's events, resident[d] is what this router sent there, at most what fits (R18)."""
        chain = self.forest.chain(session_id)
        if chain is None:
            return
        if len(worker.resident) + len(chain) > worker.info.capacity_tokens // worker.info.block_tokens:
            worker.resident.clear()
        worker.resident.update(chain)

    def _session_closed(self, event: ev.SessionClosed) -> None:
        session = self.sessions.pop(event.session_id, None)
        self.forest.remove(event.session_id)
        if session is None:
            return
        self._place(session, None, 0)
        if session.open_turns:
            self.sessions[event.session_id] = SessionState(open_turns=session.open_turns, closed=True)

    def _place(self, session: SessionState, ref: WorkerRef | None, tokens: int) -> None:
        """Moves the session's tokens to `ref` in the placement load (R26)."""
        if ref is not None and session.placed == ref and (here := self.worker(ref)) is not None:
            here.placed_tokens += tokens - session.placed_tokens
            session.placed_tokens = tokens
            return
        before = self.worker(session.placed) if session.placed is not None else None
        if before is not None:
            before.placed_tokens -= session.placed_tokens
            before.placed_sessions -= 1
        after = self.worker(ref) if ref is not None else None
        session.placed, session.placed_tokens = (after.ref, tokens) if after is not None else (None, 0)
        if after is not None:
            after.placed_tokens += tokens
            after.placed_sessions += 1

    def check_integrity(self) -> None:
        """Recounts what is kept incrementally. For tests; O(everything).

        Raises:
            AssertionError: an invariant does not hold.
        """
        for worker in self.workers.values():
            turns = [turn.started for turn in self.open.values()]
            decoding = sum(turn.ref == worker.ref for turn in turns)
            prefilling = [t.started for t in self.open.values() if t.prefill_open and t.started.prefill == worker.ref]
            assert worker.asked == sum(ref == worker.ref for ref in self.asking.values()), f"asked[{worker.ref}] = {worker.asked}"
            assert worker.inflight == decoding + len(prefilling), f"inflight[{worker.ref}] = {worker.inflight}"
            assert worker.prefill_tokens == sum(turn.prefill_tokens for turn in prefilling)
            placed = [session for session in self.sessions.values() if session.placed == worker.ref]
            assert worker.placed_sessions == len(placed)
            assert worker.placed_tokens == sum(session.placed_tokens for session in placed)
        for session in self.sessions.values():
            assert session.open_turns >= 0
            assert session.pin is None or self.worker(session.pin) is not None
        assert all(name in self.sessions for name in self.forest.sessions())
        self.forest.check_integrity()
