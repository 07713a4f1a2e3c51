"""Following agents over real sockets: what Σ believes of a worker, whatever its agent says or fails to say (R18)."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvc.core import events as ev
from kvc.core.route import route
from kvc.core.types import Facts, Role, WorkerRef
from kvc.errors import Unavailable
from kvc.runtime.logs import JsonFormatter
from services.router.adapters.agents import Agents
from services.router.config import AgentsConfig
from services.router.follower import Follower
from tests.support.builders import run, turn, worker
from tests.support.fake_agent import FakeAgent, agent
from tests.support.fake_ports import World, world
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncIterator

    from kvc.core.members import WorkerState

CHAIN = run("a", 10)
CAPABLE = ("admit", "residency")


class Following:
    """A router that follows fake agents."""

    def __init__(self, made: World, agents: Agents, config: AgentsConfig) -> None:
        self.world = made
        self.agents = agents
        self.config = config
        self.followers: list[Follower] = []
        self.tasks: list[asyncio.Task[None]] = []

    def follow(self, one: FakeAgent, block_tokens: int = 24) -> Follower:
        router = self.world.router
        made = Follower(one.target, self.agents, self.config, block_tokens, router.apply, router.loads.__setitem__)
        self.followers.append(made)
        self.tasks.append(asyncio.create_task(made.run()))
        return made

    async def followed(self, one: FakeAgent) -> Follower:
        made = self.follow(one)
        await asyncio.wait_for(made.followed.wait(), 10)
        return made

    def state(self, worker_id: str = "d0") -> WorkerState:
        return self.world.router.sigma.workers[worker_id]

    def resident(self, worker_id: str = "d0") -> set[int]:
        return self.state(worker_id).resident


@asynccontextmanager
async def following(**fields: Any) -> AsyncIterator[Following]:
    config = AgentsConfig(**({"backoff_base_s": 0.01, "backoff_cap_s": 0.05, "silence_s": 60.0} | fields))
    async with world() as made, Agents(config) as agents:
        one = Following(made, agents, config)
        try:
            yield one
        finally:
            for task in one.tasks:
                task.cancel()
            await asyncio.gather(*one.tasks, return_exceptions=True)


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(JsonFormatter("router").format(record)) for record in caplog.records if hasattr(record, "kvc_fields")]
    return [line for line in lines if line["event"] == name]


async def test_snapshot_then_deltas() -> None:
    async with agent(chain=CHAIN[:5]) as one, following() as made:
        follower = await made.followed(one)
        assert made.resident() == set(CHAIN[:5])
        assert (made.state().fresh, made.state().why_not, follower.why_not) == (True, "", "")
        one.delta(stored=CHAIN[5:])
        await until(lambda: made.resident() == set(CHAIN))
        one.delta(removed=CHAIN[7:])
        await until(lambda: made.resident() == set(CHAIN[:7]))
        one.delta(stored=run("b", 3), cleared=True)
        await until(lambda: made.resident() == set(run("b", 3)))
        assert one.described == 1


async def test_clear() -> None:
    """F41: after a clear, Route sees no overlap."""
    async with agent(chain=CHAIN) as one, following() as made:
        await made.followed(one)
        sigma = made.world.router.sigma
        assert route(turn("s", CHAIN), sigma).overlap_blocks == 10
        one.delta(cleared=True)
        await until(lambda: not made.resident())
        assert route(turn("s", CHAIN), sigma).overlap_blocks == 0


async def test_a_snapshot_in_parts_counts_when_it_is_whole() -> None:
    async with agent() as one, following() as made:
        one.greet = False
        follower = made.follow(one)
        await until(lambda: len(one.followers) == 1)
        one.snapshot(None, more=True)
        one.snapshot(CHAIN[:4], more=True)
        one.snapshot(CHAIN[4:8], more=True)
        one.load(held_tokens=1)
        await until(lambda: "d0" in made.world.router.sigma.workers)
        assert (made.resident(), made.state().why_not, follower.followed.is_set()) == (set(), "unhealthy", False)
        one.snapshot(CHAIN[8:])
        await asyncio.wait_for(follower.followed.wait(), 10)
        assert made.resident() == set(CHAIN)
        assert made.state().why_not == ""


async def test_another_snapshot_replaces_everything() -> None:
    async with agent(chain=CHAIN) as one, following() as made:
        await made.followed(one)
        one.sequence = 100
        one.snapshot(run("b", 2))
        await until(lambda: made.resident() == set(run("b", 2)))
        one.delta(stored=run("b", 4)[2:])
        await until(lambda: made.resident() == set(run("b", 4)))
        assert one.described == 1


async def test_a_gap_starts_over_from_a_snapshot() -> None:
    async with agent(chain=CHAIN[:2]) as one, following() as made:
        await made.followed(one)
        one.chain = CHAIN[:6]
        one.delta(stored=CHAIN[8:], skip=1)
        await until(lambda: made.resident() == set(CHAIN[:6]))
        assert one.described == 2


@pytest.mark.parametrize("odd", ["delta first", "delta inside parts", "torn hashes", "another worker", "no worker id", "repeated delta"])
async def test_messages_out_of_order_start_over(odd: str) -> None:
    async with agent() as one, following() as made:
        one.greet = odd not in {"delta first", "delta inside parts"}
        made.follow(one)
        await until(lambda: len(one.followers) == 1)
        if odd == "delta inside parts":
            one.snapshot(CHAIN, more=True)
        if odd == "torn hashes":
            one.say(one.message(snapshot={"block_hashes": b"123"}))
        elif odd == "another worker":
            one.say(one.message(WorkerRef("d9", 1), snapshot={}))
        elif odd == "no worker id":
            one.say(one.message(WorkerRef("", 1), snapshot={}))
        else:
            one.sequence = 0
            one.delta(stored=CHAIN)
        one.greet = True
        one.chain = CHAIN[:3]
        await until(lambda: one.described >= 2 and made.resident() == set(CHAIN[:3]))


async def test_a_new_epoch_voids_what_was_known() -> None:
    """F40: same address, new life: nothing of the old one is credited before the next Route."""
    async with agent(chain=CHAIN) as one, following() as made:
        await made.followed(one)
        old = made.state()
        one.greet = False
        one.restart_as(ref=WorkerRef("d0", 2))
        await until(lambda: made.state().ref.epoch == 2)
        assert made.state() is not old
        assert made.resident() == set()
        sigma = made.world.router.sigma
        assert route(turn("s", CHAIN), sigma).ref is None, "not routed to before its residency is known"
        await until(lambda: len(one.followers) == 1)
        one.snapshot(CHAIN[:1])
        await until(lambda: made.state().why_not == "")
        assert route(turn("s", CHAIN), sigma).overlap_blocks == 1
        made.world.router.apply(ev.ResidencyReset(WorkerRef("d0", 1), tuple(CHAIN)))
        assert made.resident() == set(CHAIN[:1]), "late news of the old life"


async def test_the_epoch_changes_between_description_and_stream() -> None:
    async with agent(chain=CHAIN) as one, following() as made:
        await made.followed(one)
        one.say(one.message(WorkerRef("d0", 3), snapshot={}))
        one.info = replace(one.info, ref=WorkerRef("d0", 3))
        await until(lambda: made.state().ref.epoch == 3 and made.state().fresh)


async def test_another_worker_at_the_same_address() -> None:
    """F60: the old worker is gone, with its turns' accounts; the new one starts from nothing."""
    async with agent(chain=CHAIN) as one, following() as made:
        follower = await made.followed(one)
        one.load()
        await until(lambda: made.world.router.loads["d0"].sessions == 3)
        one.chain = None
        one.restart_as(ref=WorkerRef("e5", 1))
        await until(lambda: "e5" in made.world.router.sigma.workers and not made.state("e5").why_not)
        assert set(made.world.router.sigma.workers) == {"e5"}
        assert follower.worker_id == "e5"
        assert "d0" not in made.world.router.loads
        assert made.agents.stub_of("d0") is None
        assert made.agents.stub_of("e5") is not None


async def test_a_worker_that_moves_to_another_agent() -> None:
    """Its old agent then answers for another one; what the first agent loses is not the worker's any more."""
    async with agent(chain=CHAIN) as one, agent(worker("e5", capabilities=CAPABLE)) as two, following() as made:
        await made.followed(one)
        one.restart_as(ref=WorkerRef("x1", 1))
        await until(lambda: set(made.world.router.sigma.workers) == {"x1"})
        two.info = worker("d0", 2, capabilities=CAPABLE)
        two.chain = CHAIN[:2]
        await made.followed(two)
        assert made.resident() == set(CHAIN[:2])
        one.restart_as(ref=WorkerRef("x2", 1))
        await until(lambda: set(made.world.router.sigma.workers) == {"d0", "x2"})
        assert made.resident() == set(CHAIN[:2])


async def test_two_agents_for_one_worker(caplog: pytest.LogCaptureFixture) -> None:
    """The second is refused while the first is followed, and takes over when that one is gone."""
    async with agent(chain=CHAIN) as one, agent(chain=CHAIN[:1]) as two, following() as made:
        first = await made.followed(one)
        second = made.follow(two)
        await until(lambda: "answers for worker d0 already" in second.why_not)
        assert made.resident() == set(CHAIN)
        assert logged(caplog, "agent_refused")[0]["level"] == "error"
        await one.stop()
        await asyncio.wait_for(second.followed.wait(), 10)
        lost = first._lost
        tries: list[str] = []

        def counted(problem: str, *, refused: bool) -> None:
            tries.append(problem)
            lost(problem, refused=refused)

        first._lost = counted  # type: ignore[method-assign]  # counts the tries
        await until(lambda: len(tries) == 2)
        assert made.resident() == set(CHAIN[:1])
        assert made.state().why_not == "", "what the first agent still loses is not its worker any more"
        one.info = worker("x1", capabilities=CAPABLE)
        await one.start()
        await asyncio.wait_for(first.followed.wait(), 10)
        assert made.state().why_not == ""
        assert made.resident() == set(CHAIN[:1])


async def test_a_worker_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    """One router serves one model; the whole mesh may change it."""
    other = worker("d1", model="other", hash_seed=99, capabilities=CAPABLE)
    async with agent() as one, agent(other) as two, following() as made:
        await made.followed(one)
        second = made.follow(two)
        await until(lambda: "serves another model" in second.why_not)
        assert "'other' here, 'm' on worker d0" in second.why_not
        assert set(made.world.router.sigma.workers) == {"d0"}
        assert len(logged(caplog, "agent_refused")) == 1, "said once, not at every try"
        await one.stop()
        await asyncio.wait_for(second.followed.wait(), 10)
        assert made.world.router.chains.fresh(bytes(24 * 4))[0] != 0


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (worker("d0", block_tokens=32, capabilities=CAPABLE), "blocks of 32 tokens, this router of 24"),
        (worker("d0", capabilities=("admit",)), "the engine lacks residency"),
        (worker("d0"), "the engine lacks admit, residency"),
        (worker("d0", 0, capabilities=CAPABLE), "info.worker.epoch"),
        (worker("d0", engine_url="ftp://x", capabilities=CAPABLE), "info.engine_url"),
        (worker("d0", prefill_tokens_per_s=float("nan"), capabilities=CAPABLE), "info.prefill_tokens_per_s"),
    ],
)
async def test_workers_that_cannot_be_used(info: Any, problem: str) -> None:
    """F73: refused with the reason, asked again later, and used once they are right."""
    async with agent(info) as one, following() as made:
        follower = made.follow(one)
        await until(lambda: problem in follower.why_not)
        assert made.world.router.sigma.workers == {}
        one.info = worker("d0", capabilities=CAPABLE)
        await asyncio.wait_for(follower.followed.wait(), 10)


async def test_a_prefill_worker_needs_no_capabilities() -> None:
    async with agent(worker("p0", role=Role.PREFILL)) as one, following() as made:
        await made.followed(one)
        assert [state.ref.worker_id for state in made.world.router.sigma.prefill_workers()] == ["p0"]


async def test_an_agent_that_dies_and_comes_back() -> None:
    async with agent(chain=CHAIN) as one, following() as made:
        follower = await made.followed(one)
        await one.stop()
        await until(lambda: made.state().why_not == "unhealthy")
        assert not made.state().fresh
        assert follower.why_not
        await one.start()
        await asyncio.wait_for(follower.followed.wait(), 15)
        assert (made.state().why_not, made.state().fresh) == ("", True)
        assert made.resident() == set(CHAIN)


async def test_a_silent_agent() -> None:
    async with agent(chain=CHAIN) as one, following(silence_s=0.3) as made:
        follower = await made.followed(one)
        one.greet = False
        await until(lambda: made.state().why_not == "unhealthy")
        assert "silent for 0.3 s" in follower.why_not


async def test_load_reports_keep_it_alive_and_make_it_healthy_again() -> None:
    """F1, F2: one strike of a turn is over as soon as the agent is heard, because the engine answers it."""
    async with agent(chain=CHAIN) as one, following(silence_s=0.5) as made:
        await made.followed(one)
        for number in range(4):
            made.world.router.apply(ev.WorkerUnreachable(one.ref, gone=True))
            assert made.state().why_not == "unhealthy"
            one.load(held_tokens=number + 1)
            await until(lambda number=number: made.state().facts == Facts(1000, held_tokens=number + 1))  # type: ignore[misc]  # bound now
            assert made.state().why_not == ""
        assert one.described == 1


async def test_an_agent_that_ends_the_stream() -> None:
    async with agent(chain=CHAIN) as one, following() as made:
        follower = await made.followed(one)
        one.say(Unavailable("the engine is away", reason="ENGINE_AWAY"))
        await until(lambda: one.described == 2)
        await asyncio.wait_for(follower.followed.wait(), 10)
        one.say(None)
        await until(lambda: one.described == 3)


async def test_nobody_there() -> None:
    async with agent() as one, following() as made:
        await one.stop()
        follower = made.follow(one)
        await until(lambda: follower.why_not not in {"", "connecting"})
        assert made.world.router.sigma.workers == {}
        await one.start()
        await asyncio.wait_for(follower.followed.wait(), 15)


async def test_pauses_grow() -> None:
    """Never shorter than a quarter of a bound that doubles up to the cap: 10, 20, 40, 50, 50 ... ms."""
    async with agent(worker("d0")) as one, following(backoff_base_s=0.02, backoff_cap_s=0.2) as made:
        start_s = time.monotonic()
        made.follow(one)
        await until(lambda: one.described == 9)
        assert time.monotonic() - start_s >= 0.01 + 0.02 + 0.04 + 5 * 0.05


async def test_pauses_grow_also_when_every_stream_ends_at_once() -> None:
    """An agent that greets and hangs up costs a snapshot each time."""
    async with agent(chain=CHAIN) as one, following(backoff_base_s=0.02, backoff_cap_s=0.2) as made:
        start_s = time.monotonic()
        made.follow(one)
        for number in range(1, 8):
            await until(lambda number=number: one.described == number and len(one.followers) == 1)  # type: ignore[misc]  # bound now
            one.say(None)
        await until(lambda: one.described == 8)
        assert time.monotonic() - start_s >= 0.01 + 0.02 + 0.04 + 4 * 0.05


async def test_a_fault_in_one_follower_is_contained(caplog: pytest.LogCaptureFixture) -> None:
    async with agent(chain=CHAIN) as one, following() as made:
        follower = await made.followed(one)
        apply = follower._apply
        faults = [RuntimeError("oops")]

        def broken(event: ev.Event) -> None:
            if faults:
                raise faults.pop()
            apply(event)

        follower._apply = broken
        one.delta(stored=CHAIN)
        await until(lambda: one.described == 2)
        await asyncio.wait_for(follower.followed.wait(), 10)
        assert logged(caplog, "follower_fault")


async def test_many_blocks() -> None:
    big: array[int] = run("big", 50_000)
    async with agent(chain=big) as one, following() as made:
        await made.followed(one)
        assert len(made.resident()) == 50_000
