"""kvc.v1.AdmissionService over real sockets: Admit, Release, sessions, the worker; with an engine that does what the test says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvc.engine import link
from kvc.errors import DeadlineExceeded, Exhausted, InvalidField, TooLarge
from kvc.runtime.channel import channel
from kvc.v1 import admission_pb2, types_pb2
from services.admission_agent.config import AdmitConfig
from services.admission_agent.main import SERVICE
from tests.support.agent_rig import HERE, TRACE, WAIT_S, Rig, admit_request, error_of, rig_of
from tests.support.fake_engine import SEED, facts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with rig_of() as one:
        yield await one.ready()


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
