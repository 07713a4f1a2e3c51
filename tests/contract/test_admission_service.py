"""kvc.v1.AdmissionService over real sockets, with an engine that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]  # no types published
from prometheus_client.parser import text_string_to_metric_families

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.engine import link
from kvc.errors import DeadlineExceeded, Exhausted, InvalidField, KvcError, TooLarge, Unauthenticated, Unavailable, from_rpc_error
from kvc.runtime.channel import channel
from kvc.runtime.server import ServerConfig
from kvc.v1 import admission_pb2, admission_pb2_grpc, types_pb2
from services.admission_agent.config import AdmitConfig, AgentConfig, EngineConfig, ResidencyConfig
from services.admission_agent.main import SERVICE, RunningAgent, running_agent
from tests.support.fake_engine import SEED, FakeEngine, facts
from tests.support.follower_model import FollowerModel
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator
    from pathlib import Path

    Stub = admission_pb2_grpc.AdmissionServiceAsyncStub

PROMPT = list(range(1, 241))
WAIT_S = 5.0
HERE = types_pb2.WorkerRef(worker_id="d0", epoch=1)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Rig:
    """A running agent, its engine and a stub."""

    def __init__(self, engine: FakeEngine, agent: RunningAgent, stub: Stub) -> None:
        self.engine = engine
        self.agent = agent
        self.stub = stub

    async def ready(self) -> Rig:
        await self.agent.wait_ready(WAIT_S)
        return self

    async def health(self) -> int:
        async with channel(self.agent.target) as one:
            stub = health_pb2_grpc.HealthStub(one)
            response = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_S)
            return int(response.status)

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.agent.ops_port}{path}") as response:
            return response.status, await response.text()

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Samples by name and label values."""
        _, text = await self.get("/metrics")
        families = text_string_to_metric_families(text)
        return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@contextlib.asynccontextmanager
async def rig_of(
    engine: FakeEngine | None = None,
    admit: AdmitConfig | None = None,
    residency: ResidencyConfig | None = None,
    server: ServerConfig | None = None,
    token: str | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    engine = engine or FakeEngine()
    values: dict[str, Any] = {"backoff_base_s": 0.001, "backoff_cap_s": 0.004} | settings
    grace_s = values.pop("grace_s", 5.0)
    config = AgentConfig(
        engine=EngineConfig(socket=cast("Path", "unused.sock"), **values),
        admit=admit or AdmitConfig(),
        residency=residency or ResidencyConfig(load_interval_s=0.02, coalesce_s=0.0),
        server=server or ServerConfig(),
        grace_s=grace_s,
    )
    async with running_agent(config, engine) as agent, channel(agent.target, token=token) as one:
        yield Rig(engine, agent, admission_pb2_grpc.AdmissionServiceStub(one))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rig_of() as one:
        yield await one.ready()


def admit_request(request_id: str = "r1", **fields: Any) -> admission_pb2.AdmitRequest:
    values: dict[str, Any] = {
        "attempt": types_pb2.Attempt(request_id=request_id, attempt_number=1),
        "worker": HERE,
        "turn": types_pb2.Turn(
            session_id="s", turn_index=1, input_tokens=240, block_hashes=hash_chain(pack_tokens(PROMPT), 24, SEED).tobytes()
        ),
    } | fields
    return admission_pb2.AdmitRequest(**values)


async def error_of(call: Awaitable[Any]) -> KvcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def read_one(call: grpc.aio.UnaryStreamCall[Any, Any]) -> admission_pb2.WatchResidencyResponse:
    message = await asyncio.wait_for(call.read(), WAIT_S)
    assert isinstance(message, admission_pb2.WatchResidencyResponse), "the stream has ended"
    return message


async def read_all(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Reads until the stream fails."""
    while True:
        await read_one(call)


# ---- Admit ----


async def test_admit_yes(rig: Rig) -> None:
    response = await rig.stub.Admit(admit_request(), timeout=WAIT_S)
    assert response.attempt == types_pb2.Attempt(request_id="r1", attempt_number=1)
    assert response.worker == HERE
    assert response.admission == types_pb2.Admission(
        mode=types_pb2.MODE_DIRECT, executor=types_pb2.EXECUTOR_LOCAL, ticket="r1-1", ttl_s=5.0, append_tokens=7, need_tokens=240
    )
    assert (response.facts.capacity_tokens, response.facts.matched_tokens) == (100_000, 24)


async def test_admit_no_is_an_answer(rig: Rig) -> None:
    async def refuse(_: link.Admit) -> link.ReplyBody:
        return link.Refused("session-not-resident-no-capacity", 0.05, terminal=False, facts=facts())

    rig.engine.on_admit = refuse
    response = await rig.stub.Admit(admit_request(), timeout=WAIT_S)
    assert response.rejection.reason == types_pb2.REASON_SESSION_NOT_RESIDENT_NO_CAPACITY
    assert response.rejection.retry_after_s == 0.05
    assert response.facts.held_tokens == 20_000


async def test_f40_f60_stale_epochs_and_other_identities_are_refused_as_answers(rig: Rig) -> None:
    """F40, F60: another life or another worker at this address: an answer that names who lives here, and no question to the engine."""
    for worker in (types_pb2.WorkerRef(worker_id="d0", epoch=2), types_pb2.WorkerRef(worker_id="d1", epoch=1)):
        response = await rig.stub.Admit(admit_request(worker=worker), timeout=WAIT_S)
        assert response.rejection.reason == types_pb2.REASON_STALE_EPOCH
        assert not response.rejection.terminal
        assert response.worker == HERE
    assert not [call for call in rig.engine.calls if isinstance(call, link.Admit)]
    current = await rig.stub.Admit(admit_request(worker=types_pb2.WorkerRef(worker_id="d0")), timeout=WAIT_S)
    assert current.HasField("admission")


BAD = [
    ("attempt", {"attempt": None}),
    ("attempt.request_id", {"attempt": types_pb2.Attempt()}),
    ("attempt.request_id", {"attempt": types_pb2.Attempt(request_id="x" * 129)}),
    ("attempt.request_id", {"attempt": types_pb2.Attempt(request_id="zeile\n")}),
    ("worker", {"worker": None}),
    ("worker.worker_id", {"worker": types_pb2.WorkerRef(epoch=1)}),
    ("turn", {"turn": None}),
    ("turn.session_id", {"turn": types_pb2.Turn(input_tokens=1)}),
    ("turn.session_id", {"turn": types_pb2.Turn(session_id="x" * 257, input_tokens=1)}),
    ("turn.input_tokens", {"turn": types_pb2.Turn(session_id="s")}),
    ("turn.input_tokens", {"turn": types_pb2.Turn(session_id="s", input_tokens=2**31)}),
    ("turn.output_reserve_tokens", {"turn": types_pb2.Turn(session_id="s", input_tokens=1, output_reserve_tokens=2**32 - 1)}),
    ("turn.block_hashes", {"turn": types_pb2.Turn(session_id="s", input_tokens=240, block_hashes=b"1234567")}),
    ("turn.block_hashes", {"turn": types_pb2.Turn(session_id="s", input_tokens=23, block_hashes=b"12345678")}),
    ("turn.new_tokens", {"turn": types_pb2.Turn(session_id="s", input_tokens=1, new_tokens=2)}),
    ("offer.backlog_s", {"offer": types_pb2.PrefillOffer(backlog_s=float("nan"), prefill_tokens_per_s=1, transfer_tokens_per_s=1)}),
    ("offer.backlog_s", {"offer": types_pb2.PrefillOffer(backlog_s=-1, prefill_tokens_per_s=1, transfer_tokens_per_s=1)}),
    ("offer.prefill_tokens_per_s", {"offer": types_pb2.PrefillOffer(transfer_tokens_per_s=1)}),
    ("offer.transfer_tokens_per_s", {"offer": types_pb2.PrefillOffer(prefill_tokens_per_s=1, transfer_tokens_per_s=float("inf"))}),
    ("deadline_ms", {"deadline_ms": 60_001}),
    ("traceparent", {"traceparent": "x" * 65}),
]


@pytest.mark.parametrize(("field", "fields"), BAD)
async def test_f76_a_bad_field_is_named_on_both_paths(rig: Rig, field: str, fields: dict[str, Any]) -> None:
    """F76: malformed, missing and out-of-range fields: INVALID_ARGUMENT that names the field; a good call next works."""
    request = admit_request(**fields)
    error = await error_of(rig.stub.Admit(request, timeout=WAIT_S))
    assert isinstance(error, InvalidField)
    assert (error.reason, error.field) == ("INVALID_FIELD", field)
    batch = admission_pb2.AdmitStreamRequest(admits=[request, admit_request("good")])
    results = [result async for response in rig.stub.AdmitStream(iter([batch]), timeout=WAIT_S) for result in response.results]
    assert len(results) == 2
    assert {result.error.field for result in results} == {"", f"admits[0].{field}"}
    assert [result.attempt.request_id for result in results if result.HasField("response")] == ["good"]


@pytest.mark.parametrize("body", [b"[1,2]", b"null", b"\x0a\x7f", b"\x0a\x02\xff\xfe", b"\x00" * 64])
async def test_f76_bytes_that_are_no_message_are_an_invalid_argument(rig: Rig, body: bytes) -> None:
    """F76: what is no protobuf ends in INVALID_ARGUMENT, and the agent lives."""
    async with channel(rig.agent.target) as one:
        raw: Any = one.unary_unary(f"/{SERVICE}/Admit")
        assert isinstance(await error_of(raw(body, timeout=WAIT_S)), InvalidField)
    assert (await rig.stub.Admit(admit_request(), timeout=WAIT_S)).HasField("admission")


async def test_f78_a_million_hashes_work_and_one_more_is_one_clear_error(rig: Rig) -> None:
    """F78: 8 MiB of block hashes pass; beyond the field's limit the field is named; beyond the message's limit it is TooLarge."""
    limit = 8 * 1024 * 1024 + 64
    for size, expected in ((1_000_000 * 8, None), (limit, None), (limit + 8, InvalidField), (17 * 1024 * 1024, TooLarge)):
        turn = types_pb2.Turn(session_id="s", input_tokens=2**31 - 1, block_hashes=bytes(size))
        call = rig.stub.Admit(admit_request(turn=turn), timeout=30.0)
        if expected is None:
            assert (await call).HasField("admission")
        else:
            error = await error_of(call)
            assert isinstance(error, expected)
            assert error.field == ("turn.block_hashes" if expected is InvalidField else "")


async def test_the_callers_deadline_reaches_the_engine_call(rig: Rig) -> None:
    async def never(_: link.Admit) -> link.ReplyBody:
        await asyncio.Event().wait()
        raise AssertionError

    rig.engine.on_admit = never
    loop = asyncio.get_running_loop()
    for deadline_ms, timeout_s in ((40, WAIT_S), (0, 0.06)):
        started_s = loop.time()
        error = await error_of(rig.stub.Admit(admit_request(deadline_ms=deadline_ms), timeout=timeout_s))
        assert isinstance(error, DeadlineExceeded)
        assert loop.time() - started_s < 0.5
    await until(lambda: rig.agent.agent.inflight == rig.engine.pending == 0, WAIT_S, "nothing in flight")


async def test_the_agents_own_limit_holds_without_a_deadline() -> None:
    async with rig_of(admit=AdmitConfig(timeout_s=0.05)) as rig:
        await rig.ready()

        async def never(_: link.Admit) -> link.ReplyBody:
            await asyncio.Event().wait()
            raise AssertionError

        rig.engine.on_admit = never
        error = await error_of(rig.stub.Admit(admit_request()))
        assert (error.code, error.reason) == ("DEADLINE_EXCEEDED", "ENGINE_TIMEOUT")


async def test_f5_expired_callers_leave_nothing_behind(rig: Rig) -> None:
    """F5: 400 calls with a deadline of 50 ms against an engine that takes 500 ms: nothing in flight, nothing pending."""

    async def slow(body: link.Admit) -> link.ReplyBody:
        await asyncio.sleep(0.5)
        return await rig.engine._admit(body)

    rig.engine.on_admit = slow
    calls = [error_of(rig.stub.Admit(admit_request(f"r{index}"), timeout=0.05)) for index in range(400)]
    errors = await asyncio.gather(*calls)
    assert {error.code for error in errors} == {"DEADLINE_EXCEEDED"}
    await until(lambda: rig.agent.agent.inflight == rig.engine.pending == 0, WAIT_S, "nothing in flight")


async def test_more_calls_than_the_bound_are_told_to_come_later() -> None:
    async with rig_of(admit=AdmitConfig(max_inflight=2)) as rig:
        await rig.ready()
        gate = asyncio.Event()

        async def slow(body: link.Admit) -> link.ReplyBody:
            await gate.wait()
            return await rig.engine._admit(body)

        rig.engine.on_admit = slow
        waiting = [asyncio.ensure_future(_admit(rig, f"r{index}")) for index in range(2)]
        await until(lambda: rig.agent.agent.inflight == 2, WAIT_S, "two in flight")
        error = await error_of(rig.stub.Admit(admit_request("r3"), timeout=WAIT_S))
        assert isinstance(error, Exhausted)
        assert (error.reason, error.retry_after_s) == ("AGENT_OVERLOADED", 0.05)
        gate.set()
        await asyncio.gather(*waiting)


async def _admit(rig: Rig, name: str) -> admission_pb2.AdmitResponse:
    return await rig.stub.Admit(admit_request(name), timeout=WAIT_S)


@pytest.mark.parametrize("fields", [{}, {"traceparent": TRACE}])
async def test_the_trace_context_is_passed_on(rig: Rig, fields: dict[str, Any]) -> None:
    metadata = () if fields else (("traceparent", TRACE),)
    await rig.stub.Admit(admit_request(**fields), timeout=WAIT_S, metadata=metadata)
    assert [call.traceparent for call in rig.engine.calls if isinstance(call, link.Admit)] == [TRACE]


# ---- AdmitStream ----


class Stream:
    """An open AdmitStream: results by request id."""

    def __init__(self, stub: Stub) -> None:
        self.call = stub.AdmitStream()
        self.results: dict[str, admission_pb2.AdmitStreamResult] = {}

    async def send(self, *requests: admission_pb2.AdmitRequest, tickets: tuple[str, ...] = ()) -> None:
        releases = [admission_pb2.ReleaseRequest(worker=HERE, ticket=ticket) for ticket in tickets]
        await self.call.write(admission_pb2.AdmitStreamRequest(admits=requests, releases=releases))

    async def read(self) -> None:
        response = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert isinstance(response, admission_pb2.AdmitStreamResponse), "the stream has ended"
        self.results.update({result.attempt.request_id: result for result in response.results})

    async def read_until(self, *names: str) -> None:
        while not self.results.keys() >= set(names):
            await self.read()

    async def code(self) -> grpc.StatusCode:
        """The status after the last answer."""
        while await asyncio.wait_for(self.call.read(), WAIT_S) is not grpc.aio.EOF:
            pass
        return await self.call.code()


async def test_stream_answers_in_any_order_with_a_deadline_each(rig: Rig) -> None:
    gate = asyncio.Event()

    async def chosen(body: link.Admit) -> link.ReplyBody:
        if body.request_id.startswith("slow"):
            await gate.wait()
        return await rig.engine._admit(body)

    rig.engine.on_admit = chosen
    stream = Stream(rig.stub)
    await stream.send(admit_request("slow-1"), admit_request("slow-2", deadline_ms=50), admit_request("a"), admit_request("b"))
    await stream.read_until("a", "b", "slow-2")
    assert stream.results["a"].response.admission.ticket == "a-1"
    assert stream.results["slow-2"].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert "slow-1" not in stream.results
    await stream.send(admit_request("c", worker=types_pb2.WorkerRef(worker_id="d0", epoch=9)))
    await stream.read_until("c")
    assert stream.results["c"].response.rejection.reason == types_pb2.REASON_STALE_EPOCH
    gate.set()
    await stream.read_until("slow-1")
    await stream.call.done_writing()
    assert await stream.code() is grpc.StatusCode.OK


async def test_stream_half_close_waits_for_answers(rig: Rig) -> None:
    gate = asyncio.Event()

    async def slow(body: link.Admit) -> link.ReplyBody:
        await gate.wait()
        return await rig.engine._admit(body)

    rig.engine.on_admit = slow
    stream = Stream(rig.stub)
    await stream.send(admit_request("a"))
    await stream.call.done_writing()
    await until(lambda: rig.engine.pending == 1, WAIT_S, "it waits")
    gate.set()
    await stream.read_until("a")
    assert await stream.code() is grpc.StatusCode.OK


async def test_stream_releases_tickets(rig: Rig) -> None:
    stream = Stream(rig.stub)
    await stream.send(admit_request("a"), admit_request("b"))
    await stream.read_until("a", "b")
    await stream.send(tickets=("a-1", "unknown"))
    await until(lambda: rig.engine.open_tickets == {"b-1"}, WAIT_S, "one ticket left")
    await stream.call.done_writing()
    assert await stream.code() is grpc.StatusCode.OK
    assert set(stream.results) == {"a", "b"}


@pytest.mark.parametrize("field", ["admits", "releases"])
async def test_stream_batches_are_bounded(rig: Rig, field: str) -> None:
    stream = Stream(rig.stub)
    if field == "admits":
        await stream.send(*[admit_request()] * 1025)
    else:
        await stream.send(tickets=("t",) * 1025)
    error = await error_of(stream.call.read())
    assert isinstance(error, InvalidField)
    assert error.field == field


async def test_f58_a_cancelled_stream_leaves_nothing_behind(rig: Rig) -> None:
    """F58: streams cancelled with elements in flight: inflight and pending return to 0."""

    async def never(_: link.Admit) -> link.ReplyBody:
        await asyncio.Event().wait()
        raise AssertionError

    rig.engine.on_admit = never
    for _ in range(10):
        stream = Stream(rig.stub)
        await stream.send(*[admit_request(f"r{index}") for index in range(20)])
        await until(lambda: rig.agent.agent.inflight == 20, WAIT_S, "20 in flight")
        stream.call.cancel()
        await until(lambda: rig.agent.agent.inflight == rig.engine.pending == 0, WAIT_S, "nothing in flight")


async def test_stream_elements_fail_one_by_one_while_the_engine_is_away(rig: Rig) -> None:
    stream = Stream(rig.stub)
    await stream.send(admit_request("a"))
    await stream.read_until("a")
    rig.engine.die()
    await until(lambda: rig.agent.connection.life is None, WAIT_S, "no life")
    await stream.send(admit_request("b"))
    await stream.read_until("b")
    assert stream.results["b"].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert stream.results["b"].error.reason == "ENGINE_AWAY"
    rig.engine.restart()
    await until(lambda: rig.agent.connection.life is not None, WAIT_S, "the next life")
    await stream.send(admit_request("c", worker=types_pb2.WorkerRef(worker_id="d0", epoch=2)))
    await stream.read_until("c")
    assert stream.results["c"].HasField("response")
    stream.call.cancel()


async def test_five_hundred_at_once_on_one_stream(rig: Rig) -> None:
    stream = Stream(rig.stub)
    names = [f"r{index}" for index in range(500)]
    for start in range(0, 500, 50):
        await stream.send(*[admit_request(name) for name in names[start : start + 50]])
    await stream.call.done_writing()
    await stream.read_until(*names)
    assert all(result.response.admission.ticket == f"{name}-1" for name, result in stream.results.items())
    assert await stream.code() is grpc.StatusCode.OK


# ---- Release, sessions, worker ----


async def test_release(rig: Rig) -> None:
    ticket = (await rig.stub.Admit(admit_request(), timeout=WAIT_S)).admission.ticket
    request = admission_pb2.ReleaseRequest(attempt=types_pb2.Attempt(request_id="r1"), worker=HERE, ticket=ticket)
    assert (await rig.stub.Release(request, timeout=WAIT_S)).released
    assert not (await rig.stub.Release(request, timeout=WAIT_S)).released
    request.worker.epoch = 7
    assert not (await rig.stub.Release(request, timeout=WAIT_S)).released


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("ticket", admission_pb2.ReleaseRequest(worker=HERE)),
        ("ticket", admission_pb2.ReleaseRequest(worker=HERE, ticket="\x00")),
        ("worker.worker_id", admission_pb2.ReleaseRequest(ticket="t")),
        ("attempt.request_id", admission_pb2.ReleaseRequest(worker=HERE, ticket="t", attempt=types_pb2.Attempt(attempt_number=1))),
    ],
)
async def test_release_names_the_bad_field(rig: Rig, field: str, request_: admission_pb2.ReleaseRequest) -> None:
    error = await error_of(rig.stub.Release(request_, timeout=WAIT_S))
    assert isinstance(error, InvalidField)
    assert error.field == field


async def test_f66_session_status_is_of_exactly_that_session(rig: Rig) -> None:
    """F66: "session-1" and "session-12" are two sessions."""
    rig.engine.sessions = {
        "session-12": link.SessionRecord("session-12", 700, 600, 3, busy=True),
        "session-1": link.SessionRecord("session-1", 70, 60, 1, busy=False),
    }
    get = admission_pb2.AdmissionServiceGetSessionStatusRequest
    twelve = await rig.stub.GetSessionStatus(get(session_id="session-12"), timeout=WAIT_S)
    assert (twelve.known, twelve.session.committed_tokens, twelve.session.busy) == (True, 700, True)
    one = await rig.stub.GetSessionStatus(get(session_id="session-1"), timeout=WAIT_S)
    assert (one.known, one.session.resident_tokens, one.session.generation, one.worker) == (True, 60, 1, HERE)
    none = await rig.stub.GetSessionStatus(get(session_id="session"), timeout=WAIT_S)
    assert none.known is False
    assert none.session == admission_pb2.SessionResidency(session_id="session")
    error = await error_of(rig.stub.GetSessionStatus(get(), timeout=WAIT_S))
    assert error.field == "session_id"


async def test_list_sessions_obeys_its_limit(rig: Rig) -> None:
    rig.engine.sessions = {f"s{index}": link.SessionRecord(f"s{index}", index, 0, 0, busy=False) for index in range(1500)}
    for limit, expected in ((0, 1000), (1, 1), (1500, 1500), (10_000, 1500)):
        response = await rig.stub.ListSessions(admission_pb2.ListSessionsRequest(limit=limit), timeout=WAIT_S)
        assert (len(response.sessions), response.total, response.worker) == (expected, 1500, HERE)
    error = await error_of(rig.stub.ListSessions(admission_pb2.ListSessionsRequest(limit=10_001), timeout=WAIT_S))
    assert isinstance(error, InvalidField)
    assert error.field == "limit"


async def test_get_worker(rig: Rig) -> None:
    response = await rig.stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=WAIT_S)
    info = response.info
    assert (info.worker, info.role, info.model) == (HERE, types_pb2.ROLE_DECODE, "m")
    assert (info.capacity_tokens, info.page_tokens, info.block_tokens, info.max_input_tokens) == (100_000, 4, 24, 90_000)
    assert (info.engine_url, info.hash_seed, info.draining) == ("http://127.0.0.1:30000", SEED, False)
    assert list(info.capabilities) == ["admit", "residency"]
    assert (response.load.facts.held_tokens, response.load.evicted_tokens, response.load.peak_use) == (20_000, 9, 0.5)


# ---- WatchResidency ----


async def test_watch_residency(rig: Rig) -> None:
    rig.engine.store(PROMPT[:96])
    await until(lambda: rig.agent.residency.resident_blocks == 4, WAIT_S, "four blocks")
    call, model = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="r")), FollowerModel()
    model.apply(await read_one(call))
    assert model.blocks == rig.engine.pages.blocks(24)
    rig.engine.store(PROMPT)
    while len(model.blocks) < 10:
        model.apply(await read_one(call))
    rig.engine.publish(rig.engine.pages.clear())
    while model.blocks:
        model.apply(await read_one(call))
    while model.loads < 3:
        model.apply(await read_one(call))
    assert model.snapshots == 1
    call.cancel()
    await until(lambda: rig.agent.residency.followers == 0, WAIT_S, "nobody follows")


async def test_load_comes_at_least_every_second() -> None:
    async with rig_of(residency=ResidencyConfig()) as rig:
        await rig.ready()
        call, model, loop = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()), FollowerModel(), asyncio.get_running_loop()
        model.apply(await read_one(call))
        model.apply(await read_one(call))
        last_s = loop.time()
        for _ in range(3):
            model.apply(await read_one(call))
            assert loop.time() - last_s < 1.0
            last_s = loop.time()
        assert model.loads == 4
        call.cancel()


async def test_f40_watch_ends_with_the_life_and_starts_anew_with_the_next(rig: Rig) -> None:
    """F40: the engine restarts under the same address: the stream ends, the next one starts with the new epoch, empty."""
    rig.engine.store(PROMPT)
    await until(lambda: rig.agent.residency.resident_blocks == 10, WAIT_S, "ten blocks")
    call, model = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()), FollowerModel()
    model.apply(await read_one(call))
    assert len(model.blocks) == 10
    rig.engine.restart()
    error = await error_of(read_all(call))
    assert isinstance(error, Unavailable)
    assert error.reason == "ENGINE_AWAY"
    await rig.ready()
    call = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest())
    model.apply(await read_one(call))
    assert (model.epoch, model.blocks) == (2, set())
    call.cancel()


async def test_several_followers_and_a_bound() -> None:
    residency = ResidencyConfig(load_interval_s=0.02, coalesce_s=0.0, max_followers=3)
    async with rig_of(residency=residency) as rig:
        await rig.ready()
        calls = [rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower=f"r{index}")) for index in range(3)]
        models = [FollowerModel() for _ in calls]
        for call, model in zip(calls, models, strict=True):
            model.apply(await read_one(call))
        error = await error_of(rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()).read())
        assert isinstance(error, Exhausted)
        assert error.reason == "TOO_MANY_FOLLOWERS"
        rig.engine.store(PROMPT)
        for call, model in zip(calls, models, strict=True):
            while len(model.blocks) < 10:
                model.apply(await read_one(call))
            call.cancel()
        await until(lambda: rig.agent.residency.followers == 0, WAIT_S, "nobody follows")


async def test_a_follower_that_does_not_read_is_bounded_and_resynchronised() -> None:
    residency = ResidencyConfig(load_interval_s=0.02, coalesce_s=0.0, buffer_bytes=100_000)
    async with rig_of(FakeEngine(page_tokens=24), residency=residency) as rig:
        await rig.ready()
        call, model = rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest()), FollowerModel()
        model.apply(await read_one(call))
        first, tokens = 1, b""
        while not rig.agent.residency.resyncs["overflow"]:
            assert first < 5_000_000, "the sockets swallow everything"
            pages = list(range(first, first + 5000))
            tokens = pack_tokens(list(range(first, first + 24 * len(pages))))
            rig.engine.publish(link.AllCleared(), link.PageStored(pages, 0, tokens))
            sequence = rig.engine.sequence
            await until(lambda now=sequence: rig.agent.residency._engine_sequence == now, WAIT_S, "taken in", poll_s=0)  # type: ignore[misc]
            rig.agent.residency.flush()
            first += len(pages)
        expected = set(hash_chain(tokens, 24, SEED))
        while model.blocks != expected:
            model.apply(await read_one(call))
        assert model.snapshots == 2
        call.cancel()


async def test_follower_names_are_bounded(rig: Rig) -> None:
    error = await error_of(rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(follower="x" * 129)).read())
    assert isinstance(error, InvalidField)
    assert error.field == "follower"


# ---- the service around it ----


async def test_out_of_service_while_the_engine_is_away() -> None:
    engine = FakeEngine()
    engine.up = False
    async with rig_of(engine) as rig:
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        status, body = await rig.get("/ready")
        assert status == 503
        assert "ENGINE_AWAY" in body
        assert (await rig.get("/health"))[0] == 200
        calls: list[Awaitable[Any]] = [
            rig.stub.Admit(admit_request(), timeout=WAIT_S),
            rig.stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=WAIT_S),
            rig.stub.ListSessions(admission_pb2.ListSessionsRequest(), timeout=WAIT_S),
            rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest(), timeout=WAIT_S).read(),
        ]
        for call in calls:
            error = await error_of(call)
            assert isinstance(error, Unavailable)
            assert error.reason == "ENGINE_AWAY"
        engine.up = True
        await rig.ready()
        assert await rig.health() == health_pb2.HealthCheckResponse.SERVING
        assert (await rig.get("/ready"))[0] == 200
        engine.die()
        await until(lambda: rig.agent.connection.life is None, WAIT_S, "no life")
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_f73_a_capability_that_is_missing_keeps_it_out_of_service() -> None:
    """F73: an engine without residency events: NOT_SERVING, /ready says why, and every call says why."""
    async with rig_of(FakeEngine(capabilities=["admit"])) as rig:
        await until(lambda: "CAPABILITY" in (rig.agent.agent.why_not() or ""), WAIT_S, "refused")
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        status, body = await rig.get("/ready")
        assert status == 503
        assert "ENGINE_CAPABILITY_MISSING" in body
        assert "residency" in body
        error = await error_of(rig.stub.Admit(admit_request(), timeout=WAIT_S))
        assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_CAPABILITY_MISSING")


async def test_stopping_refuses_turns_answers_what_waits_and_ends_the_streams() -> None:
    gate = asyncio.Event()
    engine = FakeEngine()

    async def slow(body: link.Admit) -> link.ReplyBody:
        if body.request_id.startswith("slow"):
            await gate.wait()
        return await engine._admit(body)

    engine.on_admit = slow
    async with rig_of(engine) as rig:
        await rig.ready()
        stream, watch = Stream(rig.stub), rig.stub.WatchResidency(admission_pb2.WatchResidencyRequest())
        await read_one(watch)
        await stream.send(admit_request("slow-1"))
        await until(lambda: rig.agent.agent.inflight == 1, WAIT_S, "one in flight")
        stopping = asyncio.ensure_future(rig.agent.stop())
        await until(lambda: rig.agent.agent.draining, WAIT_S, "draining")
        assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        response = await rig.stub.Admit(admit_request("late"), timeout=WAIT_S)
        assert response.rejection.reason == types_pb2.REASON_DRAINING
        worker = await rig.stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=WAIT_S)
        assert worker.info.draining
        assert not stopping.done()
        gate.set()
        await stream.read_until("slow-1")
        assert stream.results["slow-1"].HasField("response")
        assert await stream.code() is grpc.StatusCode.OK
        assert (await error_of(read_all(watch))).reason == "SHUTTING_DOWN"
        await asyncio.wait_for(stopping, WAIT_S)


async def test_the_grace_is_bounded() -> None:
    engine = FakeEngine()

    async def never(_: link.Admit) -> link.ReplyBody:
        await asyncio.Event().wait()
        raise AssertionError

    engine.on_admit = never
    async with rig_of(engine, admit=AdmitConfig(timeout_s=60.0), grace_s=0.2) as rig:
        await rig.ready()
        call = asyncio.ensure_future(error_of(rig.stub.Admit(admit_request())))
        await until(lambda: rig.agent.agent.inflight == 1, WAIT_S, "one in flight")
        started_s = asyncio.get_running_loop().time()
        await rig.agent.stop()
        assert asyncio.get_running_loop().time() - started_s < 2.0
        assert (await call).code in {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}
        assert engine.pending == 0


async def test_metrics(rig: Rig) -> None:
    outcomes: Iterator[link.ReplyBody] = iter(
        [
            link.Admitted("direct", "local", "t", 5.0, 1, 1, facts()),
            link.Refused("no-d-capacity", 0.0, terminal=False, facts=facts()),
            link.Failed("INTERNAL", "broken"),
        ]
    )

    async def next_one(_: link.Admit) -> link.ReplyBody:
        return next(outcomes)

    rig.engine.on_admit = next_one
    rig.engine.store(PROMPT)
    await until(lambda: rig.agent.residency.resident_blocks == 10 and rig.agent.residency.load is not None, WAIT_S, "events and load")
    await rig.stub.Admit(admit_request(), timeout=WAIT_S)
    await rig.stub.Admit(admit_request(), timeout=WAIT_S)
    await rig.stub.Admit(admit_request(worker=types_pb2.WorkerRef(worker_id="d0", epoch=5)), timeout=WAIT_S)
    await error_of(rig.stub.Admit(admit_request(), timeout=WAIT_S))
    values = await rig.metrics()
    assert values["kvc_agent_admits_total", "admitted", "direct"] == 1
    assert values["kvc_agent_admits_total", "refused", "no-d-capacity"] == 1
    assert values["kvc_agent_admits_total", "refused", "stale-epoch"] == 1
    assert values["kvc_agent_admits_total", "error", "INTERNAL"] == 1
    assert values["kvc_agent_admits_total", "admitted", "seed"] == 0
    assert values["kvc_agent_admit_seconds_count",] == 4
    assert values["kvc_agent_link_call_seconds_count", "Admit"] == 3
    assert values["kvc_agent_link_call_seconds_count", "Load"] >= 1
    expected = {
        "engine_connected": 1,
        "inflight_calls": 0,
        "draining": 0,
        "followers": 0,
        "resident_blocks": 10,
        "engine_lives_total": 1,
        "engine_failures_total": 0,
        "capacity_tokens": 100_000,
        "held_tokens": 20_000,
        "reserved_tokens": 0,
        "evictable_tokens": 30_000,
        "open_tickets": 0,
        "evicted_tokens_total": 9,
        "peak_use": 0.5,
    }
    assert {name: values[f"kvc_agent_{name}",] for name in expected} == expected
    assert values["kvc_agent_residency_events_total", "snapshot"] == 1
    assert values["kvc_agent_residency_events_total", "delta"] == 1
    rig.engine.die()
    await until(lambda: rig.agent.connection.life is None, WAIT_S, "no life")
    values = await rig.metrics()
    assert values["kvc_agent_engine_connected",] == 0
    assert values["kvc_agent_engine_failures_total",] >= 1
    assert ("kvc_agent_held_tokens",) not in values, "no life, no numbers of it"


async def test_reflection_describes_the_service(rig: Rig) -> None:
    async with channel(rig.agent.target) as one:
        stub = reflection_pb2_grpc.ServerReflectionStub(one)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        responses = [response async for response in stub.ServerReflectionInfo(requests, timeout=WAIT_S)]
    names = {service.name for service in responses[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_the_token_is_asked_for() -> None:
    async with rig_of(server=ServerConfig(auth_token="s3cret"), token="s3cret") as rig:
        await rig.ready()
        assert (await rig.stub.Admit(admit_request(), timeout=WAIT_S)).HasField("admission")
        async with channel(rig.agent.target) as one:
            stub = admission_pb2_grpc.AdmissionServiceStub(one)
            assert isinstance(await error_of(stub.Admit(admit_request(), timeout=WAIT_S)), Unauthenticated)
            assert isinstance(await error_of(stub.WatchResidency(admission_pb2.WatchResidencyRequest()).read()), Unauthenticated)
            assert isinstance(await error_of(stub.AdmitStream(iter([admission_pb2.AdmitStreamRequest()])).read()), Unauthenticated)
