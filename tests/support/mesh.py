"""Two routers and three decode workers whose steps interleave one at a time; what the Σ machine and its oracle share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Ask, Pause, Refused, Unreachable, WaitForRoom, dispatch
from kvc.core.params import params_for
from kvc.core.state import Sigma
from kvc.core.types import Decision, Rejection, Role, WorkerRef
from tests.support.builders import run, worker
from tests.support.driver import busy
from tests.support.model_engine import ModelEngine

if TYPE_CHECKING:
    from kvc.core.dispatch import Answer, Dispatch, Effect
    from kvc.core.params import Params
    from kvc.core.types import GaveUp, Turn

CAPACITY = 600
BLOCK = 10
PARAMS = params_for("default", block_tokens=BLOCK, tau_append_tokens=60, tau_reject=2, ticket_ttl_s=5.0, seed_budget=2, shared_after=2)


class RecordedSigma(Sigma):
    """Σ that keeps its log."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.log: list[ev.Event] = []

    def apply(self, event: ev.Event) -> None:
        self.log.append(event)
        super().apply(event)


@dataclass(slots=True)
class Talk:
    """A dispatch that is waiting for an answer, and what it asked since its sweep began."""

    generator: Dispatch
    effect: Effect
    turn: Turn
    limit: int
    answered: list[WorkerRef] = field(default_factory=list)


@dataclass(slots=True)
class Running:
    """A decision whose turn has not ended."""

    decision: Decision
    turn: Turn
    on_engine: bool = False


class Router:
    """One router: Σ, the dispatches it has open, the turns it has in flight."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sigma = RecordedSigma(PARAMS)
        self.talks: dict[str, Talk] = {}
        self.running: dict[str, Running] = {}
        self.length: dict[str, int] = {}
        self.requests = 0
        self.told: dict[WorkerRef, set[int]] = {}

    def limit(self) -> int:
        """Epsilon by R1."""
        return max(1, sum(not member.why_not for member in self.sigma.decode_workers()) - 1)

    def begin(self, session: str, more: int, reserve: int) -> None:
        """A turn arrives; its first effect is pending afterwards."""
        self.length[session] = self.length.get(session, 0) + more
        chain = run(session, min(self.length[session], 30), run("system", 8))
        tokens = len(chain) * BLOCK + 3
        self.sigma.apply(ev.TurnArrived(session, chain, tokens))
        self.requests += 1
        turn = self.sigma.turn(session, chain, tokens, reserve)
        generator = dispatch(turn, self.sigma, f"{self.name}{self.requests}")
        limit = self.limit()
        try:
            self.talks[session] = Talk(generator, next(generator), turn, limit)
        except StopIteration as stop:
            self.ended(session, turn, stop.value)

    def reply(self, session: str, answer: Answer) -> None:
        """Sends an answer; checks I2 and I3 on the way."""
        talk = self.talks[session]
        if isinstance(talk.effect, Ask):
            if isinstance(answer, Admitted | Refused) and not busy(answer):
                assert talk.effect.worker not in talk.answered, "I3"
                talk.answered.append(talk.effect.worker)
                assert len(talk.answered) <= talk.limit, "I2"
        elif isinstance(talk.effect, WaitForRoom):
            talk.answered.clear()
            talk.limit = self.limit()
        else:
            assert isinstance(talk.effect, Pause)
        try:
            talk.effect = talk.generator.send(answer)
        except StopIteration as stop:
            del self.talks[session]
            self.ended(session, talk.turn, stop.value)

    def ended(self, session: str, turn: Turn, result: Decision | GaveUp) -> None:
        if isinstance(result, Decision):
            self.running[session] = Running(result, turn)

    def end(self, session: str, end: ev.End) -> None:
        """The turn's end, told twice as a careless driver would."""
        running = self.running.pop(session)
        tokens = running.turn.input_tokens, running.turn.output_reserve_tokens
        self.sigma.apply(ev.TurnEnded(running.decision.attempt, end, *tokens))
        self.sigma.apply(ev.TurnEnded(running.decision.attempt, ev.End.CANCELLED))

    def cancel(self, session: str) -> None:
        """The client goes away while the dispatch waits."""
        self.talks.pop(session).generator.close()


class Mesh:
    """Engines by life, and the two routers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.engines: dict[WorkerRef, ModelEngine] = {}
        self.routers = {name: Router(name) for name in "AB"}
        for name in ("D0", "D1", "D2"):
            self.join(WorkerRef(name, 1), Role.DECODE)
        self.tell(ev.WorkerJoined(worker("P0", role=Role.PREFILL, block_tokens=BLOCK)))

    def tell(self, event: ev.Event) -> None:
        """Both routers learn it."""
        for router in self.routers.values():
            router.sigma.apply(event)

    def join(self, ref: WorkerRef, role: Role) -> None:
        self.engines[ref] = ModelEngine(PARAMS, CAPACITY)
        self.tell(ev.WorkerJoined(worker(ref.worker_id, ref.epoch, role=role, capacity_tokens=CAPACITY, block_tokens=BLOCK)))
        self.resync(ref)

    def resync(self, ref: WorkerRef) -> None:
        """A snapshot of a worker's residency to both routers."""
        for router in self.routers.values():
            router.told[ref] = set(self.engines[ref].cache)
            router.sigma.apply(ev.ResidencyReset(ref, tuple(self.engines[ref].cache)))

    def living(self) -> list[WorkerRef]:
        """Lives that are now."""
        return [member.ref for member in self.routers["A"].sigma.decode_workers()]

    def follow(self, router: Router) -> None:
        """The router catches up with every worker's events."""
        for ref in self.living():
            engine = self.engines[ref]
            before, now = router.told[ref], set(engine.cache)
            stored = tuple(block for block in engine.cache if block not in before)
            router.sigma.apply(ev.ResidencyChanged(ref, stored, tuple(sorted(before - now))))
            router.told[ref] = now

    def ask(self, effect: Ask) -> Answer:
        """The worker's answer; a life that is over does not answer."""
        engine = self.engines.get(effect.worker)
        if engine is None or effect.worker not in self.living():
            return Unreachable("connection refused", gone=True)
        outcome = engine.admit(effect.attempt, effect.turn, self.now_s, effect.offer)
        facts = engine.facts(effect.turn)
        return Refused(outcome, facts) if isinstance(outcome, Rejection) else Admitted(outcome, facts)

    def restart(self, name: str) -> None:
        """A kill -9 and a new epoch: what ran there is gone."""
        ref = next(ref for ref in self.living() if ref.worker_id == name)
        for router in self.routers.values():
            for running in router.running.values():
                if running.decision.decode == ref:
                    running.on_engine = False
        del self.engines[ref]
        self.join(WorkerRef(name, ref.epoch + 1), Role.DECODE)

    def start(self, running: Running) -> bool:
        """The turn reaches its engine. False: there is no such life, or the ticket is gone."""
        engine = self.engines.get(running.decision.decode)
        if engine is None:
            return False
        if running.decision.admission is not None:
            running.on_engine = engine.arrive(running.decision.attempt)
            return running.on_engine
        running.on_engine = engine.start_without_ticket(running.decision.attempt, running.turn)
        return True

    def stop(self, router: Router, session: str, end: ev.End) -> None:
        """A turn ends wherever it is."""
        running = router.running[session]
        engine = self.engines.get(running.decision.decode)
        if engine is not None and running.on_engine:
            engine.finish(running.decision.attempt, keep=end is ev.End.COMPLETED)
        elif engine is not None:
            engine.release(running.decision.attempt)
        router.end(session, end)
