"""The oracle of Σ: a fold over the whole event log into plain dictionaries and sets, and Algorithm 1 over them as the paper writes it.

Slow on purpose: nothing is kept incrementally that could be counted, chains are compared as sets, and there is no tree.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core import events as ev
from kvc.core.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from kvc.core.params import Params
    from kvc.core.types import Attempt, Facts, Turn, WorkerInfo, WorkerRef


@dataclass(slots=True)
class SlowSigma:
    """Fields of seed 000 section 2.3, and what R19 and R26 need beside them. `lives` are the workers that are known now."""

    params: Params
    lives: dict[str, WorkerInfo] = field(default_factory=dict)
    unhealthy: set[WorkerRef] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    failures: dict[WorkerRef, int] = field(default_factory=lambda: defaultdict(int))
    resident: dict[WorkerRef, set[int]] = field(default_factory=lambda: defaultdict(set))
    facts: dict[WorkerRef, Facts] = field(default_factory=dict)
    assigned: dict[WorkerRef, int] = field(default_factory=lambda: defaultdict(int))
    rejects: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    pin: dict[str, WorkerRef] = field(default_factory=dict)
    chains: dict[str, list[int]] = field(default_factory=dict)
    context: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    placed: dict[str, tuple[WorkerRef, int]] = field(default_factory=dict)
    asking: dict[Attempt, WorkerRef] = field(default_factory=dict)
    open: dict[Attempt, ev.Started] = field(default_factory=dict)
    prefilled: set[Attempt] = field(default_factory=set)
    orphans: set[Attempt] = field(default_factory=set)
    """Open turns of sessions that never arrived or were closed: they are in flight and nothing else."""

    def lives_now(self, ref: WorkerRef | None) -> bool:
        return ref is not None and ref.worker_id in self.lives and self.lives[ref.worker_id].ref == ref

    def inflight(self, ref: WorkerRef) -> int:
        decoding = sum(turn.ref == ref for turn in self.open.values())
        return decoding + sum(turn.prefill == ref and attempt not in self.prefilled for attempt, turn in self.open.items())

    def asked(self, ref: WorkerRef) -> int:
        return sum(where == ref for where in self.asking.values())

    def load(self, ref: WorkerRef) -> float:
        """R26: tokens of open sessions on d, or what d reports if more, over K_d, plus a weight for each turn in flight or asked about."""
        tokens = sum(tokens for where, tokens in self.placed.values() if where == ref)
        if (facts := self.facts.get(ref)) is not None:
            tokens = max(tokens, facts.held_tokens + facts.reserved_tokens + facts.queued_tokens)
        return tokens / self.lives[ref.worker_id].capacity_tokens + self.params.inflight_weight * (self.inflight(ref) + self.asked(ref))

    def owners(self, block: int) -> int:
        return sum(block in chain for chain in self.chains.values())

    def eligible(self) -> list[WorkerRef]:
        """R19, in the order the workers joined."""
        return [
            info.ref
            for info in self.lives.values()
            if info.role.keeps_sessions and info.ref not in self.unhealthy and not info.draining and info.ref.worker_id not in self.draining
        ]

    def route(self, turn: Turn, exclude: AbstractSet[WorkerRef] = frozenset()) -> WorkerRef | None:
        """Algorithm 1; among equals the one that joined first."""
        s, tau = turn.session_id, self.params.tau_reject
        everyone = [d for d in self.eligible() if d not in exclude]
        blacklisted = {d for d in everyone if self.rejects[s, d.worker_id] >= tau}
        candidates = [d for d in everyone if d not in blacklisted]
        if not everyone:
            return None
        if not candidates:
            return min(everyone, key=lambda d: self.rejects[s, d.worker_id])
        return max(candidates, key=lambda d: self.score(turn, d))

    def overlap(self, turn: Turn, d: WorkerRef) -> int:
        """Line 6; R14 leaves out what more than `shared_after` live sessions own."""
        common = set(turn.chain) & self.resident[d]
        if self.params.overlap == "exclusive":
            common = {block for block in common if self.owners(block) <= self.params.shared_after}
        return len(common)

    def score(self, turn: Turn, d: WorkerRef) -> tuple[float, ...]:
        """Line 10."""
        sticky = 1 if self.pin.get(turn.session_id) == d else 0
        floor = self.params.load_floor_bonus if self.inflight(d) == 0 else 0
        primary = self.overlap(turn, d) + self.params.alpha * sticky + floor
        if self.params.placement == "paper":
            return (primary, sticky, -self.inflight(d), -self.assigned[d])
        return (primary, sticky, -self.load(d), -self.assigned[d])

    def apply(self, event: ev.Event) -> None:  # noqa: C901, PLR0912 - one case an event
        match event:
            case ev.WorkerJoined(info):
                known = self.lives.get(info.ref.worker_id)
                if known is not None and known.ref != info.ref:
                    self.void(known.ref)
                self.lives[info.ref.worker_id] = info
                self.unhealthy.discard(info.ref)
                self.failures[info.ref] = 0
            case ev.WorkerLeft(worker_id) if worker_id in self.lives:
                self.void(self.lives.pop(worker_id).ref)
                self.draining.discard(worker_id)
            case ev.WorkerHealth(ref, healthy) if self.lives_now(ref):
                (self.unhealthy.discard if healthy else self.unhealthy.add)(ref)
                self.failures[ref] = 0
            case ev.WorkerDraining(worker_id, draining) if worker_id in self.lives:
                (self.draining.add if draining else self.draining.discard)(worker_id)
            case ev.ResidencyReset(ref, blocks) if self.lives_now(ref):
                self.resident[ref] = set(blocks)
            case ev.ResidencyChanged(ref, stored, removed, cleared) if self.lives_now(ref):
                self.resident[ref] = (set() if cleared else self.resident[ref] - set(removed)) | set(stored)
            case ev.LoadReported(ref, facts) if self.lives_now(ref):
                self.facts[ref] = facts
                self.failures[ref] = 0
            case ev.TurnArrived(session_id, chain, _):
                self.chains[session_id] = list(chain)
                self.orphans -= {attempt for attempt, turn in self.open.items() if turn.session_id == session_id}
            case ev.Assigned(ref) if self.lives_now(ref):
                self.assigned[ref] += 1
            case ev.Asked(attempt, ref, assigns) if self.lives_now(ref):
                self.assigned[ref] += assigns
                self.asking.setdefault(attempt, ref)
            case ev.Answered(attempt, facts) if attempt in self.asking:
                ref = self.asking.pop(attempt)
                if facts is not None and self.lives_now(ref):
                    self.facts[ref] = facts
                    self.failures[ref] = 0
            case ev.Started():
                self.started(event)
            case ev.PrefillDone(attempt) if attempt in self.open:
                self.prefilled.add(attempt)
            case ev.Refused(session_id, ref, reason):
                self.failures[ref] = 0
                if reason.counts_as_reject and self.lives_now(ref) and session_id in self.chains:
                    self.rejects[session_id, ref.worker_id] += 1
            case ev.WorkerUnreachable(ref, gone) if self.lives_now(ref):
                self.failures[ref] += 1
                if gone or self.failures[ref] >= 3:
                    self.unhealthy.add(ref)
            case ev.TurnEnded() if event.attempt in self.open:
                self.ended(event)
            case ev.SessionClosed(session_id):
                self.chains.pop(session_id, None)
                self.forget(session_id)
            case _:
                pass

    def void(self, ref: WorkerRef) -> None:
        """R18: an epoch that is over voids what was learnt from it."""
        for session_id in [s for s, where in self.pin.items() if where == ref]:
            del self.pin[session_id]
        for session_id in [s for s, (where, _) in self.placed.items() if where == ref]:
            del self.placed[session_id]
        self.forget_rejects(lambda _, worker_id: worker_id == ref.worker_id)
        for known in (self.resident, self.assigned, self.failures, self.facts):
            known.pop(ref, None)
        self.unhealthy.discard(ref)

    def forget_rejects(self, which: object) -> None:
        assert callable(which)
        for key in [key for key in self.rejects if which(*key)]:
            del self.rejects[key]

    def forget(self, session_id: str) -> None:
        self.pin.pop(session_id, None)
        self.placed.pop(session_id, None)
        self.context.pop(session_id, None)
        self.forget_rejects(lambda s, _: s == session_id)
        self.orphans |= {attempt for attempt, turn in self.open.items() if turn.session_id == session_id}

    def started(self, event: ev.Started) -> None:
        if event.attempt in self.open:
            return
        self.open[event.attempt] = event
        s = event.session_id
        if s not in self.chains:
            self.orphans.add(event.attempt)
            return
        self.place(s, event.ref, event.tokens)
        if event.mode is Mode.FALLBACK or not self.lives_now(event.ref):
            return
        if self.params.reset_on_admit:
            self.rejects.pop((s, event.ref.worker_id), None)
        if self.params.pin_on_admit or s not in self.pin:
            self.pin[s] = event.ref

    def ended(self, event: ev.TurnEnded) -> None:
        turn = self.open.pop(event.attempt)
        s = turn.session_id
        self.prefilled.discard(event.attempt)
        if event.attempt in self.orphans:
            self.orphans.discard(event.attempt)
            return
        if event.end is ev.End.COMPLETED:
            self.context[s] = event.prompt_tokens + event.output_tokens
            self.pin.pop(s, None)
            if self.lives_now(turn.ref):
                self.pin[s] = turn.ref
            if turn.mode is Mode.DIRECT and self.params.reset_on_complete:
                self.forget_rejects(lambda session, _: session == s)
        self.place(s, self.pin.get(s), self.context[s])

    def place(self, session_id: str, ref: WorkerRef | None, tokens: int) -> None:
        self.placed.pop(session_id, None)
        if ref is not None and self.lives_now(ref):
            self.placed[session_id] = (ref, tokens)


def fold(params: Params, log: Iterable[ev.Event]) -> SlowSigma:
    """Σ after a log, the slow way."""
    sigma = SlowSigma(params)
    for event in log:
        sigma.apply(event)
    return sigma
