"""The admission agent beside a real reference engine, in one process on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kvc import wire
from kvc.core.blocks import hash_chain, pack_tokens, resident_blocks
from kvc.core.params import params_for
from kvc.core.types import Admission, Attempt, Mode, Reason, Rejection, Turn, WorkerRef
from kvc.runtime.channel import channel
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2, admission_pb2_grpc
from services.admission_agent.config import AdmitConfig, AgentConfig, EngineConfig, ResidencyConfig
from services.admission_agent.main import running_agent
from tests.support import engines
from tests.support.waiting import eventually, until
from tests.support.watch import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.admission_agent.main import RunningAgent
    from tests.support.engines import EngineUnderTest

WAIT_S = 20.0
TTL_S = 0.5
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Mesh:
    """An engine, its agent, and a router's view of them."""

    def __init__(self, engine: EngineUnderTest, agent: RunningAgent, stub: admission_pb2_grpc.AdmissionServiceAsyncStub) -> None:
        self.engine = engine
        self.agent = agent
        self.stub = stub
        self.ref = WorkerRef("d0", engine.engine.identity.epoch)
        self._requests = 0

    def request(self, session_id: str, ids: list[int], **fields: Any) -> admission_pb2.AdmitRequest:
        """The next request's Admit."""
        self._requests += 1
        chain = hash_chain(pack_tokens(ids), 24, self.engine.engine.hash_seed)
        index = fields.pop("turn_index", 0)
        turn = Turn(session_id, index, chain, len(ids), 8, known_session=index > 0)
        return wire.admit_request_to_pb(Attempt(f"r{self._requests}", 0), fields.pop("worker", self.ref), turn, None, **fields)

    async def admit(self, session_id: str, ids: list[int], **fields: Any) -> Admission | Rejection:
        return wire.outcome_from_pb(await self.stub.Admit(self.request(session_id, ids, **fields), timeout=WAIT_S))

    async def turn(self, session_id: str, ids: list[int], **fields: Any) -> Admission:
        """Admits and runs one turn; its reply is checked."""
        outcome = await self.admit(session_id, ids, **fields)
        assert isinstance(outcome, Admission), outcome
        await self.engine.checked(ids, 4, rid=outcome.ticket, session_id=session_id)
        return outcome

    def chain(self, ids: list[int]) -> Any:
        return hash_chain(pack_tokens(ids), 24, self.engine.engine.hash_seed)

    async def at_rest(self) -> None:
        """Nothing in flight in the agent, no ticket in the engine."""
        await until(lambda: self.agent.agent.inflight == 0, WAIT_S, "nothing in flight")
        await until(lambda: not self.engine.engine.desk.tickets, WAIT_S, "no ticket")
        await self.engine.idle()


@contextlib.asynccontextmanager
async def mesh_of(tmp_path: Path, telemetry: Telemetry | None = None, **engine: Any) -> AsyncIterator[Mesh]:
    socket = tmp_path / "link.sock"
    settings = engines.config(**({"worker_id": "d0", "role": "decode", "link_path": socket} | engine))
    config = AgentConfig(
        engine=EngineConfig(socket=socket, backoff_base_s=0.01),
        admit=AdmitConfig(timeout_s=5.0),
        residency=ResidencyConfig(load_interval_s=0.05),
    )
    params = params_for("default", ticket_ttl_s=TTL_S)
    async with engines.serving(settings, params) as subject, running_agent(config, telemetry=telemetry) as agent:
        await agent.wait_ready(WAIT_S)
        async with channel(agent.target, telemetry=telemetry) as one:
            yield Mesh(subject, agent, admission_pb2_grpc.AdmissionServiceStub(one))


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh_of(tmp_path) as one:
        yield one


def prompt(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


async def test_turns_of_a_session_through_the_agent(mesh: Mesh) -> None:
    """Seed, then Direct on what is resident; the follower sees it, the session's status says it."""
    async with Watch(mesh.stub).reading() as watch:
        base = prompt(1000, 720)
        first = await mesh.turn("s", base)
        assert first.mode is Mode.SEED
        await until(lambda: resident_blocks(mesh.chain(base), watch.model.blocks) == 30, WAIT_S, "resident")
        longer = [*base, *prompt(9000, 240)]
        second = await mesh.turn("s", longer, turn_index=1)
        assert second.mode is Mode.DIRECT
        assert second.append_tokens < 300
        await until(lambda: resident_blocks(mesh.chain(longer), watch.model.blocks) == 40, WAIT_S, "the longer prompt is resident")
        status = await mesh.stub.GetSessionStatus(admission_pb2.AdmissionServiceGetSessionStatusRequest(session_id="s"))
        assert (status.known, status.session.generation, status.session.busy) == (True, 2, False)
        assert 960 <= status.session.committed_tokens <= 964
        listed = await mesh.stub.ListSessions(admission_pb2.ListSessionsRequest())
        assert [one.session_id for one in listed.sessions] == ["s"]
        worker = await mesh.stub.GetWorker(admission_pb2.GetWorkerRequest())
        assert wire.worker_info_from_pb(worker.info).ref == mesh.ref
        assert worker.load.sessions == 1
        assert worker.load.facts.evictable_tokens >= 960 - 16
    await mesh.at_rest()


async def test_f41_a_flushed_cache_is_forgotten_by_the_follower(mesh: Mesh) -> None:
    """F41: clear event, then Route: overlap 0."""
    async with Watch(mesh.stub).reading() as watch:
        await mesh.turn("s", prompt(1000, 720))
        await until(lambda: len(watch.model.blocks) == 30, WAIT_S, "resident")
        await mesh.engine.post("/flush_cache", {})
        await until(lambda: not watch.model.blocks, WAIT_S, "forgotten")
        assert (await mesh.turn("s", prompt(1000, 720), turn_index=1)).mode is Mode.RESEED


@pytest.mark.parametrize("page", [1, 16, 64])
async def test_followers_agree_with_the_engine_after_two_hundred_turns(tmp_path: Path, page: int) -> None:
    """Turns that fork, grow and evict one another: in the end the follower holds exactly the engine's blocks, and every reply was right."""
    rng = random.Random(page)
    async with mesh_of(tmp_path, page_tokens=page, kv_tokens=6400) as mesh, Watch(mesh.stub).reading() as watch:
        histories: dict[str, list[int]] = {f"s{index}": prompt(10, 24 * index) for index in range(6)}
        stream = mesh.stub.AdmitStream()
        for number in range(200):
            name = rng.choice(sorted(histories))
            histories[name] = [*histories[name], *[rng.randrange(3, 9000) for _ in range(rng.randrange(1, 120))]]
            if len(histories[name]) > 1500:
                histories[name] = histories[name][: rng.randrange(1, 600)]
            request = mesh.request(name, histories[name], turn_index=number)
            await stream.write(admission_pb2.AdmitStreamRequest(admits=[request]))
            answer = await stream.read()
            assert isinstance(answer, admission_pb2.AdmitStreamResponse)
            outcome = wire.outcome_from_pb(answer.results[0].response)
            assert isinstance(outcome, Admission), outcome
            await mesh.engine.checked(histories[name], rng.randrange(1, 30), rid=outcome.ticket, session_id=name)
        await stream.done_writing()
        blocks = mesh.engine.engine.residency._blocks

        async def same() -> None:
            assert watch.model.blocks == set(blocks.blocks())

        await eventually(same, WAIT_S)
        assert watch.model.snapshots == 1
        assert mesh.agent.residency.resident_blocks == len(blocks)
        assert (await mesh.engine.pool())["evictable_tokens"] > 0
        await mesh.at_rest()


async def test_f58_random_cancels_leave_no_ticket(mesh: Mesh) -> None:
    """F58, F5: 300 Admits cancelled or expired at random moments: nothing in flight, and every ticket is gone when its life is over."""
    rng = random.Random(5)

    async def one(number: int) -> None:
        call = mesh.stub.Admit(mesh.request(f"s{number}", prompt(1000 + number, 48)), timeout=rng.choice([0.002, 0.01, 5.0]))
        await asyncio.sleep(rng.random() * 0.02)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    for start in range(0, 300, 30):
        await asyncio.gather(*(one(start + index) for index in range(30)))
    await mesh.at_rest()


async def test_f40_f60_only_this_life_and_this_worker_are_answered_for(mesh: Mesh) -> None:
    """F40, F60: another epoch or another identity is refused, and no ticket is made."""
    for worker in (WorkerRef("d0", mesh.ref.epoch + 1), WorkerRef("d1", mesh.ref.epoch), WorkerRef("d1", 0)):
        outcome = await mesh.admit("s", prompt(1, 48), worker=worker)
        assert isinstance(outcome, Rejection)
        assert outcome.reason is Reason.STALE_EPOCH
    assert not mesh.engine.engine.desk.tickets


async def test_one_trace_from_the_caller_through_the_agent(tmp_path: Path) -> None:
    """The caller's client span, the agent's server span and its engine.admit span are one trace; on a stream the context is a field."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(provider)
    async with mesh_of(tmp_path, telemetry) as mesh:
        with telemetry.tracer.start_as_current_span("test") as root:
            await mesh.admit("s", prompt(1000, 48))
        stream = mesh.stub.AdmitStream()
        request = mesh.request("t", prompt(5000, 48), traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")
        untraced = mesh.request("u", prompt(9000, 48))
        await stream.write(admission_pb2.AdmitStreamRequest(admits=[request, untraced]))
        results = 0
        while results < 2:
            response = await stream.read()
            assert isinstance(response, admission_pb2.AdmitStreamResponse)
            results += len(response.results)
        stream.cancel()
    spans = {span.context.span_id: span for span in exporter.get_finished_spans() if span.context is not None}
    unary, streamed = (span for span in spans.values() if span.name == "engine.admit")
    assert unary.kind is SpanKind.CLIENT
    assert unary.parent is not None
    server = spans[unary.parent.span_id]
    assert (server.kind, server.name) == (SpanKind.SERVER, "kvc.v1.AdmissionService/Admit")
    assert server.parent is not None
    assert spans[server.parent.span_id].kind is SpanKind.CLIENT
    assert unary.context.trace_id == root.get_span_context().trace_id
    assert dict(unary.attributes or {})["kvc.mode"] == "seed"
    assert streamed.parent is not None
    assert f"{streamed.parent.trace_id:032x}-{streamed.parent.span_id:016x}" == f"{TRACE_ID}-{SPAN_ID}"
    assert not any("block" in key for span in (unary, streamed) for key in span.attributes or {})
