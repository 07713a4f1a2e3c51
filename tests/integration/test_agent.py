"""The admission agent beside a real reference engine: in one process on real sockets, and as real processes that are killed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kvc import wire
from kvc.core.blocks import chain_seed, hash_chain, pack_tokens, resident_blocks
from kvc.core.params import params_for
from kvc.core.types import Admission, Attempt, Mode, Reason, Rejection, Turn, WorkerRef
from kvc.engine.reference.config import EngineConfig as ReferenceConfig
from kvc.errors import Unavailable, from_rpc_error
from kvc.runtime.channel import channel
from kvc.runtime.telemetry import Telemetry
from kvc.v1 import admission_pb2, admission_pb2_grpc
from services.admission_agent.config import AdmitConfig, AgentConfig, EngineConfig, ResidencyConfig
from services.admission_agent.main import main, running_agent
from tests.support import engines
from tests.support.follower_model import FollowerModel
from tests.support.waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.admission_agent.main import RunningAgent
    from tests.support.engines import EngineUnderTest

ROOT = Path(__file__).resolve().parents[2]
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


class Watch:
    """A follower that reads for as long as the block lasts."""

    def __init__(self, stub: admission_pb2_grpc.AdmissionServiceAsyncStub) -> None:
        self.model = FollowerModel()
        self.error: grpc.aio.AioRpcError | None = None
        self._call = stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="test"))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.model.apply(message)
        except grpc.aio.AioRpcError as error:
            self.error = error

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Watch]:
        task = asyncio.create_task(self._read())
        try:
            await until(lambda: bool(self.model.snapshots or self.error), WAIT_S, "the snapshot")
            yield self
        finally:
            self._call.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise AssertionError("the stream broke its rules") from task.exception()


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


# ---- real processes ----


class Child:
    """A `kvc` process whose log lines are kept."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, *arguments: str) -> Child:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.cli",
                *arguments,
                stderr=asyncio.subprocess.PIPE,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": "."},
            )
        )

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            with contextlib.suppress(json.JSONDecodeError):
                self.lines.append(json.loads(line))

    def said(self, name: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line.get("event") == name), None)

    async def says(self, name: str) -> dict[str, Any]:
        await until(lambda: self.said(name) is not None or self.process.returncode is not None, WAIT_S, f"{name} in the log")
        found = self.said(name)
        assert found is not None, f"ended with {self.process.returncode}: {self.lines}"
        return found

    async def end(self, number: int) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), WAIT_S)
        await asyncio.wait_for(self._reader, WAIT_S)
        return code


class Pair:
    """An engine process and an agent process at fixed places, each replaceable."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "link.sock"
        self._children: list[Child] = []
        self.port = 0

    async def _child(self, *arguments: str) -> Child:
        child = await Child.start(*arguments)
        self._children.append(child)
        return child

    async def engine(self) -> tuple[Child, str]:
        """Starts the engine; its URL."""
        child = await self._child(
            *("engine", "--role", "decode", "--worker-id", "d0", "--link-path", str(self._socket)),
            *("--preset", "tiny", "--time-scale", "50", "--kv-tokens", "4800"),
        )
        return child, str((await child.says("engine_ready"))["url"])

    async def agent(self, *arguments: str) -> Child:
        """Starts the agent, on the port it had before if there was one."""
        child = await self._child(
            *("agent", "--engine-socket", str(self._socket), "--port", str(self.port), "--engine-call-timeout-s", "0.5"),
            *("--engine-backoff-cap-s", "0.1", "--residency-load-interval-s", "0.05", *arguments),
        )
        self.port = int((await child.says("listening"))["port"])
        return child

    async def stop(self) -> None:
        for child in self._children:
            if child.process.returncode is None:
                child.process.send_signal(signal.SIGCONT)
            await child.end(signal.SIGKILL)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    one = Pair(tmp_path)
    yield one
    await one.stop()


async def run_turn(stub: admission_pb2_grpc.AdmissionServiceAsyncStub, url: str, epoch: int, ids: list[int], request_id: str) -> None:
    """Admits through the agent and generates on the engine."""
    chain = hash_chain(pack_tokens(ids), 24, chain_seed(ReferenceConfig().model))
    request = wire.admit_request_to_pb(Attempt(request_id, 0), WorkerRef("d0", epoch), Turn("s", 0, chain, len(ids), 8), None)
    response = await stub.Admit(request, timeout=WAIT_S, wait_for_ready=True)
    outcome = wire.outcome_from_pb(response)
    assert isinstance(outcome, Admission), outcome
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "rid": outcome.ticket, "session_id": "s"}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def serving_epoch(stub: admission_pb2_grpc.AdmissionServiceAsyncStub) -> int:
    async def worker() -> int:
        try:
            response = await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=2.0)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(str(from_rpc_error(error))) from error
        return response.info.worker.epoch

    return await eventually(worker, WAIT_S)


async def test_f40_kill_9_of_the_engine_and_restart_under_the_same_address(pair: Pair) -> None:
    """F40: the follower is told at once, calls are UNAVAILABLE, and the next life starts with a later epoch and nothing resident."""
    agent = await pair.agent()
    assert agent.said("engine_connected") is None
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        engine, url = await pair.engine()
        first = await serving_epoch(stub)
        async with Watch(stub).reading() as watch:
            await run_turn(stub, url, first, prompt(1000, 480), "r1")
            await until(lambda: len(watch.model.blocks) == 20, WAIT_S, "resident")
            await engine.end(signal.SIGKILL)
            await until(lambda: watch.error is not None, WAIT_S, "the stream ends")
            assert watch.error is not None
            assert from_rpc_error(watch.error).reason == "ENGINE_AWAY"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=WAIT_S)
        assert isinstance(from_rpc_error(caught.value), Unavailable)
        await pair.engine()
        second = await serving_epoch(stub)
        assert second > first
        async with Watch(stub).reading() as watch:
            assert (watch.model.epoch, watch.model.blocks) == (second, set())
        stale = wire.admit_request_to_pb(Attempt("r2", 0), WorkerRef("d0", first), Turn("s", 1, hash_chain(b"", 24, 0), 480, 8), None)
        outcome = wire.outcome_from_pb(await stub.Admit(stale, timeout=WAIT_S))
        assert isinstance(outcome, Rejection)
        assert outcome.reason is Reason.STALE_EPOCH
    assert await agent.end(signal.SIGTERM) == 0


async def test_kill_9_of_the_agent_loses_nothing_but_the_streams(pair: Pair) -> None:
    """The next agent finds the same life and its residency; the engine and its sessions were never touched."""
    _, url = await pair.engine()
    agent = await pair.agent()
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        epoch = await serving_epoch(stub)
        async with Watch(stub).reading() as watch:
            await run_turn(stub, url, epoch, prompt(1000, 480), "r1")
            await until(lambda: len(watch.model.blocks) == 20, WAIT_S, "resident")
            await agent.end(signal.SIGKILL)
            await until(lambda: watch.error is not None, WAIT_S, "the stream ends")
            before = watch.model.blocks
        await pair.agent()
        assert await serving_epoch(stub) == epoch
        async with Watch(stub).reading() as watch:
            assert watch.model.blocks == before
        await run_turn(stub, url, epoch, prompt(1000, 480), "r2")


async def test_a_frozen_engine_is_away_until_it_moves_again(pair: Pair) -> None:
    """SIGSTOP keeps every socket open; the load poll notices within its timeout."""
    engine, _ = await pair.engine()
    agent = await pair.agent()
    await agent.says("engine_connected")
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        epoch = await serving_epoch(stub)
        engine.process.send_signal(signal.SIGSTOP)

        async def refused() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=2.0)
            assert from_rpc_error(caught.value).code == "UNAVAILABLE"

        async def noticed() -> None:
            try:
                await refused()
            except pytest.fail.Exception as error:
                raise AssertionError from error

        await eventually(noticed, WAIT_S)
        engine.process.send_signal(signal.SIGCONT)
        assert await serving_epoch(stub) == epoch


async def test_sigterm_ends_the_process_with_open_streams(pair: Pair) -> None:
    """SIGTERM: streams end with a reason, the exit code is 0 and it does not take the whole grace."""
    await pair.engine()
    agent = await pair.agent("--grace-s", "30")
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        await serving_epoch(stub)
        stream = stub.AdmitStream()
        await stream.write(admission_pb2.AdmitStreamRequest())
        async with Watch(stub).reading() as watch:
            await until(lambda: agent.said("follower_joined") is not None, WAIT_S, "it is followed")
            assert await agent.end(signal.SIGTERM) == 0
            await until(lambda: watch.error is not None, WAIT_S, "the stream ends")
            assert watch.error is not None
            assert from_rpc_error(watch.error).reason == "SHUTTING_DOWN"
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


# ---- the command line ----


def test_print_config_shows_values_and_origins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVC_RESIDENCY_BLOCK_TOKENS", "32")
    with pytest.raises(SystemExit) as caught:
        main(["--engine-socket", "e.sock", "--server-auth-token", "s3cret", "--print-config"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith('engine.socket = "e.sock"') and "flag --engine-socket" in line for line in lines)
    assert any(line.startswith("residency.block_tokens = 32") and "environment KVC_RESIDENCY_BLOCK_TOKENS" in line for line in lines)
    assert any(line.startswith("admit.timeout_s = 1.0") and "default" in line for line in lines)
    assert "s3cret" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "engine.socket"),
        (["--engine-socket", "e", "--admit-timeout-s", "nan"], "admit.timeout_s"),
        (["--engine-socket", "e", "--admit-timeout-s", "0"], "admit.timeout_s"),
        (["--engine-socket", "e", "--residency-block-tokens", "24.5"], "residency.block_tokens"),
        (["--engine-socket", "e", "--residency-load-interval-s", "1.5"], "residency.load_interval_s"),
        (["--engine-socket", "e", "--residency-part-bytes", "1048576"], "residency.part_bytes"),
        (["--engine-socket", "e", "--engine-backoff-base-s", "5", "--engine-backoff-cap-s", "1"], "backoff_base_s"),
        (["--engine-socket", "e", "--log-level", "loud"], "log_level"),
        (["--engine-socket", "e", "--no-such-thing"], "--no-such-thing"),
    ],
)
def test_f76_a_wrong_setting_is_one_line_and_exit_code_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """F76: the line names the setting."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert named in error
