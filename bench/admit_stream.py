"""Admit on AdmitStream, both ends: a router's side in this process, agents whose engine says yes to everything in processes of their own.

What a question costs is CPU time of the processes, not wall time: other work on the machine does not count. The router's side is what
its process spends beyond the same loop with a question that is answered at once. Between two questions of one chain of requests there
is work as on a router's own path, and a pause as for an engine: questions come one by one, as they do in a mesh, not in bursts.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bench.peers.processes import cpu_s, free_ports, spent_s
from bench.report import Row
from bench.timing import percentile
from bench.world import BLOCK_TOKENS, RESERVE_TOKENS, random_chain
from kvc.core.dispatch import Admitted, Ask
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, Turn, WorkerRef
from kvc.runtime.service import loop_factory
from services.router.adapters.admit_stream import StreamAdmission
from services.router.adapters.agents import Agents
from services.router.config import AgentsConfig
from services.router.follower import Follower

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvc.core.dispatch import Answer
    from services.router.door.admission import Asking

NAME = "stream"
TIMEOUT_S = 5.0
START_S = 20.0
MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        agents: processes.
        inflight: chains of requests in flight at once.
        questions: asked a round.
        rounds: rounds; medians are reported.
        work_us: CPU time a request costs the router beside the question.
        engine_s: longest pause as for an engine; drawn evenly.
        blocks: hashes a question carries.
        idle_s: how long nothing is asked, to see what that costs.
    """

    agents: int = 4
    inflight: int = 32
    questions: int = 10_000
    rounds: int = 3
    work_us: float = 90.0
    engine_s: float = 0.002
    blocks: int = 24
    idle_s: float = 3.0


class Cost(NamedTuple):
    """Microseconds a question."""

    router_us: float
    agents_us: float
    wall_us: float


class AtOnce:
    """The other side of the comparison: the answer is there in the next turn of the loop, and nobody was asked."""

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:  # noqa: ARG002 - as Asking.ask
        """Answers."""
        yes = Admission(Mode.DIRECT, Executor.LOCAL, 0, 1, "kvc-1", 5.0)
        asyncio.get_running_loop().call_soon(answered, Admitted(yes, Facts(ask.turn.input_tokens)))


class Chains:
    """Chains of requests, each asking again when it was answered and served."""

    def __init__(self, asking: Asking, workers: list[WorkerRef], size: Size, questions: int, inflight: int) -> None:
        """Asks nothing yet."""
        self._asking = asking
        self._workers = workers
        self._size = size
        self._left = questions
        self._open = inflight
        self._random = random.Random(1)
        tokens = size.blocks * BLOCK_TOKENS + BLOCK_TOKENS // 2
        self._turns = [Turn(f"session-{n}", 3, random_chain(self._random, size.blocks), tokens, RESERVE_TOKENS) for n in range(inflight)]
        self._done = asyncio.get_running_loop().create_future()
        self.waited_us: list[float] = []

    async def run(self) -> None:
        """Until all are answered."""
        loop = asyncio.get_running_loop()
        for chain in range(len(self._turns)):
            loop.call_later(self._random.uniform(0.0, self._size.engine_s), self._ask, chain)
        await self._done

    def _ask(self, chain: int) -> None:
        self._left -= 1
        if self._left < 0:
            self._open -= 1
            if self._open == 0:
                self._done.set_result(None)
            return
        _work(self._size.work_us / 2)
        started = time.perf_counter()
        ask = Ask(
            self._workers[self._left % len(self._workers)], Attempt(f"{self._random.getrandbits(128):032x}", 0), self._turns[chain], None
        )

        def answered(answer: Answer) -> None:
            assert isinstance(answer, Admitted), answer
            self.waited_us.append((time.perf_counter() - started) * MICRO)
            _work(self._size.work_us / 2)
            asyncio.get_running_loop().call_later(self._random.uniform(0.0, self._size.engine_s), self._ask, chain)

        self._asking.ask(ask, answered)


def _work(work_us: float) -> None:
    ends_s = time.thread_time() + work_us / MICRO
    while time.thread_time() < ends_s:
        pass


def measure(size: Size | None = None) -> list[Row]:
    """All rows."""
    size = size or Size()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_measure(size))


async def _measure(size: Size) -> list[Row]:
    async with _agents(size.agents) as (pids, targets), Agents(AgentsConfig(targets=targets)) as agents:
        stream = StreamAdmission(agents, _Never(), TIMEOUT_S)
        followers = [Follower(target, agents, AgentsConfig(), BLOCK_TOKENS, lambda _: None, lambda *_: None) for target in targets]
        running = [asyncio.create_task(follower.run()) for follower in followers]
        try:
            async with asyncio.timeout(START_S):
                for follower in followers:
                    await follower.followed.wait()
                running.append(asyncio.create_task(stream.run(targets)))
                while not all(stream.is_up(target) for target in targets):  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            workers = [WorkerRef(follower.worker_id, 1) for follower in followers]
            many = await _cost(stream, workers, size, pids, size.inflight)
            alone = await _cost(stream, workers, size, pids, 1)
            router_idle_ms, agent_idle_ms = await _idle(pids, size.idle_s)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    rows = []
    for cost, name in ((many, f"{size.inflight} in flight, {size.agents} agents"), (alone, "1 in flight")):
        both = cost.router_us + cost.agents_us
        rows += [
            Row(NAME, f"{name}: CPU of both ends", both, "µs", detail=f"answered after {cost.wall_us:.0f} µs (p10)"),
            Row(NAME, f"{name}: the router's end", cost.router_us, "µs", baseline=both, baseline_name="both ends"),
            Row(NAME, f"{name}: the agents' end", cost.agents_us, "µs", baseline=both, baseline_name="both ends"),
        ]
    return [
        *rows,
        Row(NAME, "CPU of an agent that nobody asks", agent_idle_ms, "ms/s"),
        Row(NAME, f"CPU of following {size.agents} of them", router_idle_ms, "ms/s"),
    ]


class _Never:
    """No fallback: a question that needs it would be measured as what it is not."""

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:  # noqa: ARG002 - as Asking.ask
        raise RuntimeError(f"the stream to {ask.worker.worker_id} is down")


async def _cost(stream: Asking, workers: list[WorkerRef], size: Size, pids: list[int], inflight: int) -> Cost:
    questions = size.questions if inflight > 1 else max(1, size.questions // 10)
    await Chains(stream, workers, size, max(1, questions // 10), inflight).run()
    costs = []
    for _ in range(size.rounds):
        base_us, _, _ = await _round(AtOnce(), workers, size, pids, questions, inflight)
        router_us, agents_us, wall_us = await _round(stream, workers, size, pids, questions, inflight)
        costs.append(Cost(router_us - base_us, agents_us, wall_us))
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


async def _round(asking: Asking, workers: list[WorkerRef], size: Size, pids: list[int], questions: int, inflight: int) -> Cost:
    chains = Chains(asking, workers, size, questions, inflight)
    before, mine = cpu_s(pids), time.process_time()
    await chains.run()
    mine = time.process_time() - mine
    theirs = spent_s(before, cpu_s(pids))
    return Cost(mine / questions * MICRO, theirs / questions * MICRO, percentile(sorted(chains.waited_us), 10))


async def _idle(pids: list[int], seconds: float) -> tuple[float, float]:
    """Milliseconds a second: of this process, and of one agent."""
    before, mine = cpu_s(pids), time.process_time()
    await asyncio.sleep(seconds)
    mine = time.process_time() - mine
    theirs = spent_s(before, cpu_s(pids))
    return mine / seconds * 1e3, theirs / len(pids) / seconds * 1e3


@asynccontextmanager
async def _agents(count: int) -> AsyncIterator[tuple[list[int], tuple[str, ...]]]:
    ports = free_ports(count)
    children = [
        subprocess.Popen(  # noqa: ASYNC220 - starting takes no time
            [sys.executable, "-m", "bench.peers.always", "--port", str(port), "--worker-id", f"d{number}", "--url", "http://127.0.0.1:1"]
        )
        for number, port in enumerate(ports)
    ]
    try:
        yield [child.pid for child in children], tuple(f"127.0.0.1:{port}" for port in ports)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
