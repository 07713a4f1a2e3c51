"""A small mesh told in commands: one router's Σ and Dispatch over model engines. Each command returns the lines it prints.

params [paper] [name=value ...]          a new world under these rulings
worker D0 [prefill|decode|monolithic] [capacity=1000]    a worker joins, epoch 1
restart D0 / left D0                     a new epoch with an empty pool / gone for good
down D0 [slow] / up D0                   Admit has no answer (connection refused, or too slow) / answers again
drain D0 on|off                          the operator drains it
busy D0 900 / free D0                    other turns hold that much of its pool / end
transfers D0 4                           KV transfers pending towards it
report                                   every worker reports its load
turn s PROMPT [reserve=N] [tail=N] [wait=WORD,...] [end=completed]
                                         a dispatch; PROMPT is name:blocks,name:blocks; WORD is what happens at each wait:
                                         room, waited, full, deadline, or free:D0 (D0's other turns end, then room)
end s [completed|failed|cancelled]       its running turn ends
close s                                  the session is over
sessions 52 PROMPT                       that many sessions s0, s1 ... with one completed turn each; prints bindings
explain s PROMPT                         the scores Route sees
sigma                                    workers and sessions as Σ knows them
modes                                    how many turns ran in which mode
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Ask, Pause, Refused, Resumed, Unreachable, WaitForRoom, dispatch
from kvc.core.params import Params, params_for
from kvc.core.route import explain
from kvc.core.state import Sigma
from kvc.core.types import Attempt, Decision, Rejection, Role, WorkerRef
from tests.support.builders import run, turn, worker
from tests.support.driver import drive
from tests.support.model_engine import ModelEngine

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterator

    from kvc.core.dispatch import Answer, Effect
    from kvc.core.types import Turn

BLOCK = 10
CAPACITY = 1000


class World:
    """The state behind one scenario file."""

    def __init__(self) -> None:
        list(self.do_params())

    def reset(self, params: Params) -> None:
        """Forgets everything."""
        self.params = params
        self.sigma = Sigma(params)
        self.engines: dict[WorkerRef, ModelEngine] = {}
        self.told: dict[WorkerRef, set[int]] = {}
        self.down: dict[str, bool] = {}
        self.running: dict[str, tuple[Attempt, Turn, Decision]] = {}
        self.requests = 0
        self.notes: list[str] = []
        self.modes: Counter[str] = Counter()

    def run(self, line: str) -> str:
        """Runs one command line; returns what it prints, with a newline after each line."""
        words = [word for word in line.split() if "=" not in word or ":" in word.split("=")[0]]
        options = dict(word.split("=", 1) for word in line.split() if word not in words)
        command: Callable[..., Iterator[str]] = getattr(self, f"do_{words[0]}")
        return "".join(f"{text}\n" for text in command(*words[1:], **options)) or "ok\n"

    # ---- the mesh ----

    def do_params(self, profile: str = "default", **options: str) -> Iterator[str]:
        """A new world; blocks are 10 tokens and appends up to 100 run Direct unless told."""
        kinds = {item.name: item for item in fields(Params)}
        values: dict[str, Any] = {"block_tokens": BLOCK, "tau_append_tokens": 100}
        for name, text in options.items():
            default: Any = kinds[name].default
            kind: Any = int if default is None else type(default)
            values[name] = text == "yes" if kind is bool else kind(text)
        self.reset(params_for(cast("Any", profile), **values))
        return iter(())

    def do_worker(self, name: str, role: str = "decode", capacity: str = str(CAPACITY)) -> Iterator[str]:
        self.join(WorkerRef(name, 1), Role(role), int(capacity))
        return iter(())

    def join(self, ref: WorkerRef, role: Role, capacity: int) -> None:
        info = worker(ref.worker_id, ref.epoch, role=role, capacity_tokens=capacity, block_tokens=BLOCK)
        self.sigma.apply(ev.WorkerJoined(replace(info, prefill_tokens_per_s=100.0, transfer_tokens_per_s=1000.0)))
        self.engines[ref] = ModelEngine(self.params, capacity)
        self.told[ref] = set()
        self.sigma.apply(ev.ResidencyReset(ref, ()))

    def ref(self, name: str) -> WorkerRef:
        return self.sigma.workers[name].ref

    def do_restart(self, name: str) -> Iterator[str]:
        info = self.sigma.workers[name].info
        self.join(WorkerRef(name, info.ref.epoch + 1), info.role, info.capacity_tokens)
        yield f"{name} epoch {info.ref.epoch + 1}"

    def do_left(self, name: str) -> Iterator[str]:
        self.sigma.apply(ev.WorkerLeft(name))
        return iter(())

    def do_down(self, name: str, how: str = "gone") -> Iterator[str]:
        self.down[name] = how == "gone"
        return iter(())

    def do_up(self, name: str) -> Iterator[str]:
        del self.down[name]
        self.sigma.apply(ev.WorkerHealth(self.ref(name), healthy=True))
        return iter(())

    def do_drain(self, name: str, switch: str) -> Iterator[str]:
        self.sigma.apply(ev.WorkerDraining(name, switch == "on"))
        self.engines[self.ref(name)].draining = switch == "on"
        return iter(())

    def do_busy(self, name: str, tokens: str) -> Iterator[str]:
        self.engines[self.ref(name)].occupy(int(tokens))
        self.tell_residency()
        return iter(())

    def do_free(self, name: str) -> Iterator[str]:
        self.engines[self.ref(name)].transfers = 0
        return self.do_busy(name, "0")

    def do_transfers(self, name: str, count: str) -> Iterator[str]:
        self.engines[self.ref(name)].transfers = int(count)
        return iter(())

    def do_report(self) -> Iterator[str]:
        for state in self.sigma.decode_workers():
            self.sigma.apply(ev.LoadReported(state.ref, self.engines[state.ref].facts(turn())))
        return iter(())

    # ---- turns ----

    def prompt(self, text: str, session: str = "") -> array[int]:
        """A chain from name:blocks,name:blocks; "own" is a name of the session's own."""
        chain = run("", 0)
        for part in text.split(","):
            name, count = part.split(":")
            chain = run(f"{session}/own" if name == "own" else name, int(count), chain)
        return chain

    def do_turn(
        self, session: str, text: str, reserve: str = "10", tail: str = "0", wait: str = "deadline", end: str = ""
    ) -> Iterator[str]:
        chain = self.prompt(text, session)
        tokens = len(chain) * BLOCK + int(tail)
        self.sigma.apply(ev.TurnArrived(session, chain, tokens))
        asked = self.sigma.turn(session, chain, tokens, int(reserve))
        self.requests += 1
        waits = iter(wait.split(","))
        self.notes = []
        conversation = drive(dispatch(asked, self.sigma, f"r{self.requests}"), lambda effect: self.answer(effect, asked, waits))
        yield from self.notes
        result = conversation.result
        if not isinstance(result, Decision):
            assert result is not None
            yield f"gave up: {result.why.value}" + (f", retry after {result.retry_after_s:g} s" if result.retry_after_s else "")
            return
        engine = self.engines[result.decode]
        started = engine.arrive(result.attempt) if result.admission is not None else engine.start_without_ticket(result.attempt, asked)
        self.running[session] = (result.attempt, asked, result)
        self.modes[result.mode.value] += 1
        prefill = result.prefill.worker_id if result.prefill is not None else "itself"
        yield f"{result.mode.value} on {result.decode.worker_id}, prefilled by {prefill}" + ("" if started else ", queued there")
        if end:
            yield from self.do_end(session, end)

    def answer(self, effect: Effect, asked: Turn, waits: Iterator[str]) -> Answer:
        """Plays the worker, the queue and the clock."""
        if isinstance(effect, WaitForRoom | Pause):
            word = next(waits, "deadline")
            kind = "wait" if isinstance(effect, WaitForRoom) else f"pause for {effect.worker.worker_id}"
            self.notes.append(f"{kind}: {word}")
            if word.startswith("free:"):
                list(self.do_free(word.removeprefix("free:")))
                word = "room"
            return Resumed(cast("Any", word), waited_s=1.0)
        assert isinstance(effect, Ask)
        name = effect.worker.worker_id
        if name in self.down:
            self.notes.append(f"ask {name}: no answer")
            return Unreachable("unavailable", gone=self.down[name])
        engine = self.engines[effect.worker]
        outcome = engine.admit(effect.attempt, asked, offer=effect.offer)
        facts = engine.facts(asked)
        if isinstance(outcome, Rejection):
            self.notes.append(f"ask {name}: {outcome.reason.value}")
            return Refused(outcome, facts)
        self.notes.append(f"ask {name}: {outcome.mode.value}, append {outcome.append_tokens}, need {outcome.need_tokens}")
        return Admitted(outcome, facts)

    def do_end(self, session: str, how: str = "completed") -> Iterator[str]:
        attempt, asked, decision = self.running[session]
        engine = self.engines[decision.decode]
        if how == "completed" and attempt not in engine.running and not engine.start_without_ticket(attempt, asked):
            yield "still queued there"
            return
        del self.running[session]
        if attempt in engine.running:
            engine.finish(attempt, keep=how == "completed")
        if decision.prefill is not None:
            self.sigma.apply(ev.PrefillDone(attempt))
        self.tell_residency()
        self.sigma.apply(ev.TurnEnded(attempt, ev.End(how), asked.input_tokens, asked.output_reserve_tokens))
        self.sigma.check_integrity()

    def tell_residency(self) -> None:
        """Every engine's deltas."""
        for ref, engine in self.engines.items():
            before, now = self.told[ref], set(engine.cache)
            if before != now:
                stored = tuple(block for block in engine.cache if block not in before)
                self.sigma.apply(ev.ResidencyChanged(ref, stored, tuple(before - now)))
                self.told[ref] = now

    def do_close(self, session: str) -> Iterator[str]:
        self.sigma.apply(ev.SessionClosed(session))
        return iter(())

    def do_sessions(self, count: str, text: str) -> Iterator[str]:
        bindings: Counter[str] = Counter()
        for number in range(int(count)):
            list(self.do_turn(f"s{number}", text, end="completed"))
            pin = self.sigma.sessions[f"s{number}"].pin
            bindings[pin.worker_id if pin is not None else "nowhere"] += 1
        yield ", ".join(f"{name} {bindings[name]}" for name in sorted(bindings))

    # ---- looking ----

    def do_explain(self, session: str, text: str) -> Iterator[str]:
        chain = self.prompt(text, session)
        self.sigma.apply(ev.TurnArrived(session, chain, len(chain) * BLOCK))
        for row in explain(self.sigma.turn(session, chain, len(chain) * BLOCK, 0), self.sigma):
            score = ", ".join(f"{number:g}" for number in row.score)
            yield f"{row.ref.worker_id}: ({score})" + (f" {row.excluded}" if row.excluded else "")

    def do_sigma(self) -> Iterator[str]:
        for state in self.sigma.workers.values():
            why = f" {state.why_not}" if state.why_not else ""
            yield (
                f"{state.ref.worker_id}/{state.ref.epoch}: inflight {state.inflight}, assigned {state.assigned}, "
                f"placed {state.placed_tokens}, resident {len(state.resident)}{why}"
            )
        for name, session in self.sigma.sessions.items():
            pin = session.pin.worker_id if session.pin is not None else "-"
            rejects = ", ".join(f"{worker_id} {count}" for worker_id, count in sorted(session.rejects.items())) or "none"
            yield f"{name}: turns {session.turns}, pin {pin}, rejects {rejects}"

    def do_modes(self) -> Iterator[str]:
        yield ", ".join(f"{mode} {count}" for mode, count in sorted(self.modes.items()))
