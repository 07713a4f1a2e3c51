"""kvc.v1.RouterService over a real server: what streams look like, what reads show, what bad input gets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvc.checks import MAX_HASHES_BYTES
from kvc.core import events as ev
from kvc.core.blocks import hash_chain, pack_hashes, pack_tokens
from kvc.core.types import Executor, Facts, Reason, WorkerRef
from kvc.v1 import router_pb2, types_pb2
from kvc.wire import load_to_pb
from services.router.ports import EngineChunk, EngineError
from tests.support.fake_ports import no, ok
from tests.support.mesh_server import until
from tests.support.router_server import request, rpc_failure, served

SessionStatus = router_pb2.RouterServiceGetSessionStatusRequest
IDS = router_pb2.TokenIds


def kinds(responses: list[router_pb2.DispatchResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


class TestDispatch:
    async def test_the_stream(self) -> None:
        """One decision with the first chunk, chunks, one end."""
        async with served() as made:
            made.world.prefill()
            made.world.admission.executor = Executor.PREFILL
            made.world.admission.answer = lambda ask: no(Reason.SESSION_BUSY) if ask.attempt.attempt_number == 0 else None
            responses = await made.dispatch(request_id="mine")
            assert kinds(responses)[:2] == ["decision", "chunk"]
            assert kinds(responses)[-1] == "finished"
            assert set(kinds(responses)[1:-1]) == {"chunk"}
            decision = responses[0].decision
            assert decision.request_id == "mine"
            assert (decision.mode, decision.executor) == (types_pb2.MODE_SEED, types_pb2.EXECUTOR_PREFILL)
            assert (decision.decode.worker_id, decision.prefill.worker_id) == ("d0", "p0")
            assert [(probe.admitted, probe.reason) for probe in decision.probes] == [(False, types_pb2.REASON_SESSION_BUSY), (True, 0)]
            assert [token for response in responses for token in response.chunk.output_ids] == [0, 1, 2]
            assert "".join(response.chunk.text for response in responses) == "abc"
            finished = responses[-1].finished
            assert (finished.finish_reason, finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens) == (
                "length",
                48,
                3,
                24,
            )
            assert 0 < decision.queued_s <= decision.decide_s <= finished.ttft_s <= finished.latency_s
            assert finished.mesh_s < finished.ttft_s
            assert finished.decision == decision
            await made.world.check()

    async def test_decide_s_is_not_the_engines_time(self) -> None:
        async with served() as made:
            made.world.engines.streams["http://d0"] = ["slow", *ok()]
            made.world.engines.steps.hold("slow")
            task = asyncio.create_task(made.dispatch())
            await made.world.engines.steps.reached("slow")
            await asyncio.sleep(0.2)  # what the engine takes
            made.world.engines.steps.go("slow")
            responses = await task
            assert responses[0].decision.decide_s < 0.15
            assert responses[-1].finished.ttft_s >= 0.2
            assert responses[-1].finished.mesh_s < 0.15

    async def test_the_first_chunk_is_never_held_back(self) -> None:
        async with served(engines={"coalesce_s": 1.0}) as made:
            made.world.engines.streams["http://d0"] = [EngineChunk("a", (7,)), "later", *ok()]
            made.world.engines.steps.hold("later")
            call = made.stub.Dispatch(request(), timeout=20.0)
            assert (await asyncio.wait_for(anext(aiter(call)), 5)).WhichOneof("event") == "decision"
            assert list((await asyncio.wait_for(anext(aiter(call)), 0.9)).chunk.output_ids) == [7]
            made.world.engines.steps.go("later")
            rest = [response async for response in call]
            assert kinds(rest) == ["chunk", "finished"]
            assert list(rest[0].chunk.output_ids) == [0, 1, 2]

    async def test_chunks_travel_together(self) -> None:
        async with served(engines={"coalesce_s": 0.5}) as made:
            many = [EngineChunk(str(number % 10), (number,)) for number in range(500)]
            made.world.engines.streams["http://d0"] = [*many, ok()[-1]]
            responses = await made.dispatch()
            assert [token for response in responses for token in response.chunk.output_ids] == list(range(500))
            assert len(responses) <= 4

    async def test_an_id_is_made_when_none_is_given(self) -> None:
        async with served() as made:
            ids = {(await made.dispatch())[0].decision.request_id for _ in range(3)}
            assert len(ids) == 3
            assert all(len(one) == 32 for one in ids)

    @pytest.mark.parametrize("prompt", [{"text": "höl"}, {"input_ids": IDS(ids=[1, 2, 3])}, {"packed_input_ids": pack_tokens([1, 2, 3])}])
    async def test_prompts(self, prompt: dict[str, Any]) -> None:
        async with served() as made:
            await made.dispatch(**prompt, max_new_tokens=0, temperature=2.0)
            (call,) = made.world.engines.calls
            assert call.text == prompt.get("text")
            assert call.max_new_tokens == 128
            assert call.temperature == 2.0
            (asked,) = made.world.admission.asked
            assert asked.turn.input_tokens == (4 if "text" in prompt else 3)

    async def test_a_client_that_goes_away(self) -> None:
        """F5, F58: the call is over when the turn is."""
        async with served() as made:
            made.world.engines.streams["http://d0"] = [EngineChunk("a"), "later", *ok()]
            made.world.engines.steps.hold("later")
            calls = [made.stub.Dispatch(request(session_id=f"s{number}"), timeout=60.0) for number in range(50)]
            for call in calls:
                await anext(aiter(call))
            assert made.world.engines.live == 50
            assert made.metric("kvc_router_inflight", worker="d0", role="decode") == 50
            for call in calls:
                call.cancel()
            await until(lambda: made.world.left() == {})
            await made.world.check()
            assert made.metric("kvc_router_turns_total", mode="seed", end="cancelled") == 50

    async def test_deadlines_of_callers(self) -> None:
        """F5: 400 calls with 50 ms on an engine that takes longer leave nothing."""
        async with served() as made:
            made.world.engines.streams["http://d0"] = ["slow", *ok()]
            made.world.engines.steps.hold("slow")
            calls = [made.stub.Dispatch(request(session_id=f"s{number}"), timeout=0.05) for number in range(400)]
            errors = await asyncio.gather(*(rpc_failure(anext(aiter(call))) for call in calls))
            assert {error.code for error in errors} == {"DEADLINE_EXCEEDED"}
            await until(lambda: made.world.left() == {})
            await made.world.check()

    async def test_a_request_that_comes_after_its_deadline(self) -> None:
        async with served() as made:
            error = await rpc_failure(anext(aiter(made.stub.Dispatch(request(), timeout=-1.0))))
            assert error.code == "DEADLINE_EXCEEDED"
            await until(lambda: made.world.left() == {})

    async def test_engine_failures_are_typed(self) -> None:
        async with served(engines={"retries": 0}) as made:
            made.world.engines.streams["http://d0"] = [EngineError(503, "queue-full", "too many wait", retry_after_s=2.0)]
            error = await rpc_failure(made.dispatch())
            assert (error.code, error.reason, error.retry_after_s) == ("RESOURCE_EXHAUSTED", "ENGINE_BUSY", 2.0)

    async def test_a_taken_id(self) -> None:
        """F8."""
        async with served() as made:
            made.world.engines.steps.hold("connect")
            task = asyncio.create_task(made.dispatch(request_id="same"))
            await made.world.engines.steps.reached("connect")
            error = await rpc_failure(made.dispatch(request_id="same", session_id="other"))
            assert (error.code, error.reason, error.field) == ("ALREADY_EXISTS", "REQUEST_IN_FLIGHT", "request_id")
            made.world.engines.steps.go("connect")
            await task
            await made.world.check()


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"session_id": ""}, "INVALID_ARGUMENT", "session_id"),
        ({"session_id": "x" * 257}, "INVALID_ARGUMENT", "session_id"),
        ({"session_id": "é" * 129}, "INVALID_ARGUMENT", "session_id"),
        ({"request_id": "x" * 129}, "INVALID_ARGUMENT", "request_id"),
        ({"request_id": "line\nbreak"}, "INVALID_ARGUMENT", "request_id"),
        ({"request_id": "é"}, "INVALID_ARGUMENT", "request_id"),
        ({"packed_input_ids": b""}, "INVALID_ARGUMENT", "packed_input_ids"),
        ({"packed_input_ids": b"123"}, "INVALID_ARGUMENT", "packed_input_ids"),
        ({"packed_input_ids": (2**31).to_bytes(4, "little")}, "INVALID_ARGUMENT", "packed_input_ids"),
        ({"packed_input_ids": bytes(8) + (2**32 - 1).to_bytes(4, "little") + bytes(8)}, "INVALID_ARGUMENT", "packed_input_ids"),
        ({"packed_input_ids": bytes(4 * 1001)}, "OUT_OF_RANGE", "packed_input_ids"),
        ({"input_ids": IDS()}, "INVALID_ARGUMENT", "input_ids"),
        ({"input_ids": IDS(ids=[2**31])}, "INVALID_ARGUMENT", "input_ids.ids"),
        ({"input_ids": IDS(ids=[0] * 1001)}, "OUT_OF_RANGE", "input_ids"),
        ({"text": ""}, "INVALID_ARGUMENT", "text"),
        ({"text": "x" * 1001}, "OUT_OF_RANGE", "text"),
        ({"text": "é" * 501}, "OUT_OF_RANGE", "text"),
        ({"packed_input_ids": None}, "INVALID_ARGUMENT", "prompt"),
        ({"max_new_tokens": 2**32 - 1}, "INVALID_ARGUMENT", "max_new_tokens"),
        ({"max_new_tokens": 1_048_577}, "INVALID_ARGUMENT", "max_new_tokens"),
        ({"temperature": -0.1}, "INVALID_ARGUMENT", "temperature"),
        ({"temperature": 2.1}, "INVALID_ARGUMENT", "temperature"),
        ({"temperature": float("nan")}, "INVALID_ARGUMENT", "temperature"),
        ({"temperature": float("inf")}, "INVALID_ARGUMENT", "temperature"),
        ({"temperature": float("-inf")}, "INVALID_ARGUMENT", "temperature"),
    ],
)
async def test_bad_dispatch(fields: dict[str, Any], code: str, field: str) -> None:
    """F76: the field is named, nothing is started, and the next request is served."""
    async with served(requests={"max_prompt_tokens": 1000}) as made:
        error = await rpc_failure(made.dispatch(**fields))
        assert (error.code, error.field) == (code, field)
        assert made.world.router.sigma.sessions == {}
        assert (await made.dispatch())[-1].HasField("finished")
        await made.world.check()


@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\xff\xfe", b"[1,2]", b"\x08\x01\x1a"])
async def test_bytes_that_are_no_message(raw: bytes) -> None:
    """F76."""
    async with served() as made:
        stream: Any = made.channel.unary_stream("/kvc.v1.RouterService/Dispatch")
        unary: Any = made.channel.unary_unary("/kvc.v1.RouterService/Route")
        for doing in (anext(aiter(stream(raw, timeout=10.0))), unary(raw, timeout=10.0)):
            error = await rpc_failure(doing)
            assert (error.code, error.field) == ("INVALID_ARGUMENT", "request")


class TestRoute:
    async def test_no_effect(self) -> None:
        async with served() as made:
            await made.dispatch(session_id="s")
            sigma = made.world.router.sigma
            before = (repr(sigma.workers), repr(sigma.sessions), list(sigma.forest.sessions()), len(sigma.open))
            for _ in range(3):
                await made.stub.Route(router_pb2.RouteRequest(session_id="s", text="hello"))
                await made.stub.Route(router_pb2.RouteRequest(session_id="new", packed_input_ids=bytes(400)))
            assert (repr(sigma.workers), repr(sigma.sessions), list(sigma.forest.sessions()), len(sigma.open)) == before

    async def test_explain(self) -> None:
        async with served() as made:
            world = made.world
            d1, d2 = world.join("d1"), world.join("d2")
            world.join("d3")
            prompt = pack_tokens(list(range(240)))
            chain = hash_chain(prompt, 24, 0)
            world.router.apply(ev.ResidencyReset(d1, tuple(chain[:6])))
            world.router.apply(ev.WorkerDraining("d3", draining=True))
            world.router.sigma.apply(ev.TurnArrived("s", chain, 240))
            for _ in range(3):
                world.router.sigma.apply(ev.Refused("s", d2, Reason.NO_D_CAPACITY))
            for fields in ({"packed_input_ids": prompt}, {"block_hashes": pack_hashes(chain)}, {"input_ids": IDS(ids=range(240))}):
                response = await made.stub.Route(router_pb2.RouteRequest(session_id="s", **fields))
                assert response.worker.worker_id == "d1"
                assert (response.prompt_blocks, response.shared_blocks, response.degenerate) == (10, 0, False)
                rows = {row.worker.worker_id: row for row in response.candidates}
                assert response.candidates[0].worker == response.worker
                assert (rows["d1"].overlap_blocks, rows["d1"].resident_blocks) == (6, 6)
                assert (rows["d2"].excluded, rows["d2"].rejects) == ("blacklisted", 3)
                assert rows["d3"].excluded == "draining"
                assert rows["d0"].excluded == ""
                assert rows["d1"].score[0] == 6.0

    async def test_no_worker(self) -> None:
        async with served() as made:
            made.world.router.apply(ev.WorkerHealth(WorkerRef("d0", 1), healthy=False))
            response = await made.stub.Route(router_pb2.RouteRequest(session_id="s", text="x"))
            assert not response.HasField("worker")
            assert [row.excluded for row in response.candidates] == ["unhealthy"]

    async def test_a_million_hashes(self) -> None:
        """F78: 8 MB work; more is one clear error, whether the router or gRPC itself refuses it."""
        async with served() as made:
            most = MAX_HASHES_BYTES
            response = await made.stub.Route(router_pb2.RouteRequest(session_id="s", block_hashes=bytes(8 * 1_000_000)))
            assert response.prompt_blocks == 1_000_000
            await made.stub.Route(router_pb2.RouteRequest(session_id="s", block_hashes=bytes(most)))
            for size in (most + 8, 17 * 1024 * 1024):
                start_s = time.monotonic()
                error = await rpc_failure(made.stub.Route(router_pb2.RouteRequest(session_id="s", block_hashes=bytes(size))))
                assert error.code == "OUT_OF_RANGE"
                assert time.monotonic() - start_s < 5

    @pytest.mark.parametrize(
        ("fields", "code", "field"),
        [
            ({"session_id": "", "text": "x"}, "INVALID_ARGUMENT", "session_id"),
            ({"session_id": "s"}, "INVALID_ARGUMENT", "prompt"),
            ({"session_id": "s", "block_hashes": b""}, "INVALID_ARGUMENT", "block_hashes"),
            ({"session_id": "s", "block_hashes": b"1234567"}, "INVALID_ARGUMENT", "block_hashes"),
            ({"session_id": "s", "input_ids": IDS(ids=[2**32 - 1])}, "INVALID_ARGUMENT", "input_ids.ids"),
            ({"session_id": "s", "text": "x" * 1001}, "OUT_OF_RANGE", "text"),
        ],
    )
    async def test_bad_input(self, fields: dict[str, Any], code: str, field: str) -> None:
        async with served(requests={"max_prompt_tokens": 1000}) as made:
            error = await rpc_failure(made.stub.Route(router_pb2.RouteRequest(**fields)))
            assert (error.code, error.field) == (code, field)


class TestReads:
    async def test_session_status(self) -> None:
        async with served() as made:
            assert not (await made.stub.GetSessionStatus(SessionStatus(session_id="s"))).known
            await made.dispatch(session_id="s")
            d0 = WorkerRef("d0", 1)
            made.world.router.apply(ev.ResidencyReset(d0, tuple(hash_chain(bytes(4 * 48), 24, 0))))
            made.world.router.sigma.apply(ev.Refused("s", d0, Reason.NO_D_CAPACITY))
            made.world.engines.steps.hold("connect")
            task = asyncio.create_task(made.dispatch(session_id="s"))
            await made.world.engines.steps.reached("connect")
            status = await made.stub.GetSessionStatus(SessionStatus(session_id="s"))
            assert (status.known, status.pin.worker_id, status.turns, status.context_tokens, status.busy) == (True, "d0", 1, 51, True)
            assert [(entry.worker_id, entry.resident_blocks) for entry in status.residency] == [("d0", 2)]
            assert not (await made.stub.GetSessionStatus(SessionStatus(session_id="s1"))).known
            made.world.engines.steps.go("connect")
            await task
            assert not (await made.stub.GetSessionStatus(SessionStatus(session_id="s"))).busy

    async def test_rejects_of_a_session(self) -> None:
        async with served() as made:
            made.world.router.sigma.apply(ev.TurnArrived("s", hash_chain(bytes(96), 24, 0), 24))
            made.world.router.sigma.apply(ev.Refused("s", WorkerRef("d0", 1), Reason.NO_D_CAPACITY))
            status = await made.stub.GetSessionStatus(SessionStatus(session_id="s"))
            assert [(entry.worker_id, entry.rejects) for entry in status.rejects] == [("d0", 1)]
            assert not status.HasField("pin")

    async def test_workers(self) -> None:
        async with served() as made:
            world = made.world
            world.prefill("p0")
            d1 = world.join("d1")
            await made.dispatch()
            world.router.loads["d0"] = load_to_pb(Facts(92_104, held_tokens=5), sessions=1, open_tickets=2, evicted_tokens=3, peak_use=0.5)
            world.router.apply(ev.WorkerHealth(d1, healthy=False))
            made.problems |= {"d0": "must not show: d0 is fine", "d1": "silent for 3.0 s"}
            listed = {
                status.info.worker.worker_id: status for status in (await made.stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
            }
            assert list(listed) == ["d0", "d1", "p0"]
            assert (listed["d0"].eligible, listed["d0"].why_not) == (True, "")
            assert (listed["d0"].load.facts.held_tokens, listed["d0"].load.open_tickets) == (5, 2)
            assert listed["d0"].assigned == 1
            assert [(entry.mode, entry.turns) for entry in listed["d0"].modes] == [(types_pb2.MODE_SEED, 1)]
            assert listed["d0"].residency_fresh
            assert (listed["d1"].eligible, listed["d1"].why_not) == (False, "unhealthy: silent for 3.0 s")
            assert listed["p0"].info.role == types_pb2.ROLE_PREFILL

    async def test_drain(self) -> None:
        """F31: turns in flight finish, new ones go elsewhere, and the drain can be taken back."""
        async with served() as made:
            made.world.engines.steps.hold("connect")
            task = asyncio.create_task(made.dispatch(session_id="s"))
            await made.world.engines.steps.reached("connect")
            response = await made.stub.DrainWorker(router_pb2.DrainWorkerRequest(worker_id="d0", drain=True))
            assert response.inflight == 1
            made.world.join("d1")
            made.world.engines.steps.go("connect")
            assert (await task)[-1].finished.decision.decode.worker_id == "d0"
            assert (await made.dispatch(session_id="s"))[0].decision.decode.worker_id == "d1"
            listed = await made.stub.ListWorkers(router_pb2.ListWorkersRequest())
            assert [(status.why_not, status.info.draining) for status in listed.workers] == [("draining", True), ("", False)]
            made.world.join("d0", epoch=2)
            assert made.world.router.sigma.workers["d0"].why_not == "draining", "a restart does not take a drain back"
            await made.stub.DrainWorker(router_pb2.DrainWorkerRequest(worker_id="d0", drain=False))
            assert made.world.router.sigma.workers["d0"].why_not == ""

    @pytest.mark.parametrize(("worker_id", "code"), [("nobody", "NOT_FOUND"), ("", "INVALID_ARGUMENT"), ("x" * 129, "INVALID_ARGUMENT")])
    async def test_drain_of_nobody(self, worker_id: str, code: str) -> None:
        async with served() as made:
            error = await rpc_failure(made.stub.DrainWorker(router_pb2.DrainWorkerRequest(worker_id=worker_id, drain=True)))
            assert (error.code, error.field) == (code, "worker_id")

    async def test_bad_session_status(self) -> None:
        async with served() as made:
            for session_id in ("", "x" * 257):
                error = await rpc_failure(made.stub.GetSessionStatus(SessionStatus(session_id=session_id)))
                assert (error.code, error.field) == ("INVALID_ARGUMENT", "session_id")
