"""All that a router computes for one turn: a session of 100,000 tokens comes back with 2,000 more, and runs Direct.

In order, as the router does it: copy of the old chain, digest of the old prompt, hashes of the new blocks; TurnArrived; the Turn; the
dispatch generator with Route and an Admit that answers at once; TurnEnded; the worker's residency delta. The baseline does the same with
the whole prompt hashed anew and Route by set intersection.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from bench.report import Row
from bench.route import by_sets
from bench.timing import MICRO, time_calls
from bench.world import BLOCK_TOKENS, RESERVE_TOKENS, Mesh, MeshSize
from kvc.core import events as ev
from kvc.core.admit import admit
from kvc.core.blocks import PrefixDigests, hash_chain
from kvc.core.dispatch import Admitted, Ask, dispatch
from kvc.core.types import Admission, Decision, Facts, Mode

if TYPE_CHECKING:
    from kvc.core.blocks import Chain
    from kvc.core.types import Turn

NAME = "turn"
SEED = 7
STAGES = ("chain of the new prompt", "TurnArrived, Turn", "Dispatch: Route, Admit, Started", "TurnEnded", "residency delta")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    mesh: MeshSize = field(default_factory=MeshSize)
    prompt_tokens: int = 100_000
    append_tokens: int = 2_000
    calls: int = 200
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class _Session:
    """A session between two turns; `old` and `new` are its prompts, packed."""

    name: str
    old: bytes
    new: bytes
    chain: Chain

    @property
    def tokens(self) -> int:
        return len(self.new) // 4


class Router:
    """The router's computing, without its sockets."""

    def __init__(self, size: Size) -> None:
        """Sessions that were served once, each at home on one worker."""
        rng = random.Random(SEED)
        self.mesh = Mesh(size.mesh, rng)
        self.sigma = self.mesh.sigma
        self.digests = PrefixDigests(BLOCK_TOKENS, SEED)
        self.sessions: list[_Session] = []
        self._requests = 0
        shared = rng.randbytes(4 * BLOCK_TOKENS * size.mesh.shared_blocks)[: 4 * size.prompt_tokens]
        for number in range(size.mesh.sessions_each * size.mesh.decoders):
            old = shared + rng.randbytes(4 * size.prompt_tokens - len(shared))
            new = old + rng.randbytes(4 * size.append_tokens)
            session = _Session(f"session-{number}", old, new, hash_chain(old, BLOCK_TOKENS, SEED))
            home = number % size.mesh.decoders
            self.mesh.hold(home, session.chain, len(session.chain))
            self.mesh.serve(session.name, session.chain, self.mesh.decoders[home])
            self.sessions.append(session)
        self.mesh.fill()

    def rewind(self, session: _Session) -> None:
        """Back to the session before its last turn."""
        new = self.sigma.forest.chain(session.name) or session.chain
        self.digests.forget(session.name)
        chain = self.digests.chain(session.name, session.old, None)
        self.sigma.apply(ev.TurnArrived(session.name, chain, len(session.old) // 4))
        pin = self.sigma.sessions[session.name].pin
        assert pin is not None, "the session was served"
        self.sigma.apply(ev.ResidencyChanged(pin, removed=tuple(new[len(chain) :])))

    def turn(self, session: _Session, laps: list[list[float]] | None = None) -> Decision:
        """One turn; `laps` collects the time of each stage, nanoseconds."""
        marks = [time.perf_counter_ns()]
        chain = self.digests.chain(session.name, session.new, self.sigma.forest.chain(session.name))
        marks.append(time.perf_counter_ns())
        self.sigma.apply(ev.TurnArrived(session.name, chain, session.tokens))
        turn = self.sigma.turn(session.name, chain, session.tokens, RESERVE_TOKENS)
        marks.append(time.perf_counter_ns())
        decision = self._dispatch(turn)
        marks.append(time.perf_counter_ns())
        self.sigma.apply(ev.TurnEnded(decision.attempt, ev.End.COMPLETED, session.tokens, 100))
        marks.append(time.perf_counter_ns())
        self.sigma.apply(ev.ResidencyChanged(decision.decode, stored=tuple(chain[decision.overlap_blocks + turn.shared_blocks :])))
        marks.append(time.perf_counter_ns())
        if laps is not None:
            for lap, begin, end in zip(laps, marks, marks[1:], strict=False):
                lap.append(end - begin)
        return decision

    def _dispatch(self, turn: Turn) -> Decision:
        self._requests += 1
        steps = dispatch(turn, self.sigma, f"request-{self._requests}")
        ask = next(steps)
        assert isinstance(ask, Ask), "the first worker is asked at once"
        matched = len(turn.chain) * BLOCK_TOKENS - RESERVE_TOKENS
        facts = Facts(self.mesh.size.capacity_tokens, matched_tokens=matched, matched_held_tokens=0, session_resident=True)
        outcome = admit(facts, ask.turn, self.sigma.params, ask.offer)
        assert isinstance(outcome, Admission), f"an empty worker takes the turn: {outcome}"
        try:
            steps.send(Admitted(outcome, facts))
        except StopIteration as stop:
            decision: Decision = stop.value
            return decision
        raise AssertionError("an admission ends the dispatch")


def measure(size: Size | None = None) -> list[Row]:
    """All rows."""
    size = size or Size()
    router = Router(size)
    decision = router.turn(router.sessions[0])
    assert decision.mode is Mode.DIRECT, decision.mode
    router.rewind(router.sessions[0])

    def ready(index: int) -> partial[Decision]:
        session = router.sessions[index % len(router.sessions)]
        router.rewind(session)
        return partial(router.turn, session)

    timing = time_calls(ready, size.calls, size.rounds)
    laps: list[list[float]] = [[] for _ in STAGES]
    for index in range(size.calls):
        session = router.sessions[index % len(router.sessions)]
        router.rewind(session)
        router.turn(session, laps)
    naive = time_calls(lambda index: partial(_naive, router, router.sessions[index % len(router.sessions)]), max(1, size.calls // 10), 1)
    whole = f"|D| = {size.mesh.decoders}, {size.append_tokens:,} tokens on {size.prompt_tokens:,}"
    return [
        Row(
            NAME,
            f"{whole}, p50",
            timing.p50_us,
            "µs",
            baseline=naive.cpu_p50_us,
            baseline_name="hash all, intersect sets",
            cpu=timing.cpu_p50_us,
        ),
        Row(NAME, f"{whole}, p99", timing.p99_us, "µs", cpu=timing.cpu_p99_us, detail=timing.detail),
        *(
            Row(NAME, f"  {stage}, p50", statistics.median(lap) * MICRO, "µs", baseline=timing.p50_us, baseline_name="the whole turn")
            for stage, lap in zip(STAGES, laps, strict=True)
        ),
    ]


def _naive(router: Router, session: _Session) -> None:
    chain = hash_chain(session.new, BLOCK_TOKENS, SEED)
    by_sets(router.sigma.preview(session.name, chain, session.tokens), router.sigma)
