"""What the router does when workers, engines or time fail a turn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Ask, Refused, Unreachable
from kvc.core.types import Attempt, Decision, Executor, Facts, Mode, Reason, WorkerRef
from kvc.errors import DeadlineExceeded, Exhausted, InvalidField, KvcError, Precondition, TooLarge, Unavailable
from services.router.failures import guilty, typed
from services.router.ports import EngineChunk, EngineError
from services.router.runner import PrefillFailedError
from tests.support.fake_ports import kinds, no, ok, refusal, world
from tests.support.mesh_server import until

if TYPE_CHECKING:
    from services.router.ports import Output

REFUSED = EngineError(0, "connection-refused", "nobody listens", gone=True)
LOST = EngineError(0, "connection-lost", "reset", gone=True)
EXPIRED = EngineError(409, "ticket-expired", "the ticket is unknown or expired", field="rid")


async def test_a_dead_engine_is_replaced_before_the_first_token() -> None:
    """F38: the client sees one stream from another worker; the dead one is not used until its agent is heard again (F2)."""
    async with world() as made:
        d0 = made.join("d0")
        made.engines.streams["http://d0"] = [REFUSED]
        d1 = made.join("d1")
        made.router.sigma.workers["d1"].assigned = 1  # d0 is asked first
        outputs = await made.run()
        assert kinds(outputs) == "SccccR"
        assert [call.url for call in made.engines.calls] == ["http://d0", "http://d1"]
        assert made.seen.retries == [REFUSED]
        assert [end for _, end, _, _ in made.seen.ends] == [ev.End.COMPLETED]
        assert made.router.sigma.workers["d0"].why_not == "unhealthy"
        assert (await made.result()).decision.decode == d1
        made.router.apply(ev.WorkerHealth(d0, healthy=True))
        assert not made.router.sigma.workers["d0"].why_not
        await made.check()


@pytest.mark.parametrize("error", [REFUSED, LOST, EngineError(500, "http-500", "oops"), EngineError(0, "bad-reply", "not an engine event")])
async def test_nothing_is_repeated_after_the_first_token(error: EngineError) -> None:
    async with world() as made:
        for name in ("d0", "d1"):
            made.join(name)
            made.engines.streams[f"http://{name}"] = [EngineChunk("a", (1,)), error]
        before: list[Output] = []
        failure = await refusal(Unavailable, made.run(before=before))
        assert kinds(before) == "Sc"
        assert failure.reason == "ENGINE_FAILED"
        assert error.reason in failure.message
        assert len(made.engines.calls) == 1
        unhealthy = [name for name, state in made.router.sigma.workers.items() if state.why_not]
        assert len(unhealthy) == error.gone
        await made.check()


async def test_an_expired_ticket_is_nobodys_fault() -> None:
    """F27: the turn is admitted again, on the same worker, under a new attempt."""
    async with world() as made:
        d0 = made.join("d0")
        expired = [True]

        def once(ask: Ask) -> Admitted:
            answer = made.admission.yes(ask)
            if expired.pop() if expired else False:
                made.admission.open.clear()
            return answer

        made.admission.answer = once
        result = await made.result()
        assert result.decision.decode == d0
        assert result.decision.attempt.attempt_number == 1
        assert [error.reason for error in made.seen.retries] == ["ticket-expired"]
        assert not made.router.sigma.workers["d0"].why_not
        await made.check()


async def test_tries_are_counted() -> None:
    async with world(engines={"retries": 2}) as made:
        for number in range(6):
            made.join(f"d{number}")
            made.engines.streams[f"http://d{number}"] = [EngineError(503, "queue-full", "too many wait", retry_after_s=3.0)]
        error = await refusal(Exhausted, made.run())
        assert (error.reason, error.retry_after_s) == ("ENGINE_BUSY", 3.0)
        assert len({call.url for call in made.engines.calls}) == 3
        await made.check()


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidField), (422, InvalidField), (413, TooLarge), (404, Precondition)])
async def test_a_request_that_is_wrong_everywhere_is_not_repeated(status: int, kind: type[KvcError]) -> None:
    async with world() as made:
        for name in ("d0", "d1"):
            made.join(name)
            made.engines.streams[f"http://{name}"] = [EngineError(status, "invalid-field", "no", field="sampling_params.temperature")]
        await refusal(kind, made.run())
        assert len(made.engines.calls) == 1
        await made.check()


def test_engine_errors_name_the_fields_of_the_request() -> None:
    fields = {"sampling_params.max_new_tokens": "max_new_tokens", "input_ids": "prompt", "text": "text", "": ""}
    for theirs, ours in fields.items():
        assert typed(EngineError(400, "invalid-field", "no", field=theirs)).field == ours


async def test_a_dead_prefill_is_replaced_and_decode_is_not_blamed() -> None:
    async with world() as made:
        d0 = made.join("d0")
        made.prefill("p0")
        made.engines.prefills["http://p0"] = [REFUSED]
        made.engines.streams["http://d0"] = ["waits for KV", *ok()]
        made.admission.executor = Executor.PREFILL
        made.engines.steps.hold("waits for KV")
        task = asyncio.create_task(made.result())
        await until(lambda: len(made.seen.retries) == 1)
        made.engines.steps.go("waits for KV")
        result = await task
        assert result.decision.decode == d0
        assert result.decision.prefill is None  # |P| = 0 now (R25)
        workers = made.router.sigma.workers
        assert (workers["p0"].why_not, workers["d0"].why_not) == ("unhealthy", "")
        await made.check()


async def test_a_prefill_that_fails_reaches_the_client_with_its_reason() -> None:
    """F32."""
    async with world(engines={"retries": 0}) as made:
        made.join("d0")
        made.prefill("p0")
        made.admission.executor = Executor.PREFILL
        made.engines.prefills["http://p0"] = [EngineError(500, "cuda-error", "out of memory")]
        made.engines.streams["http://d0"] = ["waits for KV", *ok()]
        made.engines.steps.hold("waits for KV")
        async with asyncio.timeout(1.0):
            error = await refusal(Unavailable, made.run())
        assert error.reason == "PREFILL_FAILED"
        assert "cuda-error" in error.message
        await made.check()


@pytest.mark.parametrize(
    ("said_by_prefill", "reason", "expected"),
    [
        (False, "http-500", "d0"),
        (False, "prefill-failed", "p0"),
        (False, "unknown-room", "p0"),
        (True, "http-500", "p0"),
        (True, "bootstrap-timeout", "d0"),
        (True, "decode-gone", "d0"),
        (False, "ticket-used", None),
        (True, "room-in-use", None),
    ],
)
def test_who_is_guilty(said_by_prefill: bool, reason: str, expected: str | None) -> None:  # noqa: FBT001 - a table
    d0, p0 = WorkerRef("d0", 1), WorkerRef("p0", 1)
    decision = Decision(Mode.FALLBACK, Executor.PREFILL, d0, p0, Attempt("r", 0), None)
    error = (PrefillFailedError if said_by_prefill else EngineError)(500, reason, "")
    found = guilty(decision, error)
    assert (found.worker_id if found else None) == expected
    local = Decision(Mode.FALLBACK, Executor.LOCAL, d0, None, Attempt("r", 0), None)
    assert guilty(local, error) == (None if expected is None else d0)


@pytest.mark.parametrize("who", ["d0", "p0"])
async def test_a_worker_that_leaves_between_decision_and_start(who: str) -> None:
    """A worker whose life ended is not called under its old address, and only the one that left is blamed."""
    async with world(policy="round_robin") as made:
        made.join("d0")
        made.join("d1")
        made.prefill("p0")
        seen = made.seen.decided

        def restarts(decision: object, decide_s: float) -> None:
            seen(decision, decide_s)  # type: ignore[arg-type]  # passes what it is given
            if len(made.seen.decisions) == 1:
                made.join(who, epoch=2) if who == "d0" else made.prefill("p0", epoch=2)

        made.seen.decided = restarts  # type: ignore[method-assign]  # the world changes in this moment
        result = await made.result()
        assert [error.reason for error in made.seen.retries] == ["worker-left"]
        assert len(made.engines.calls) == 1
        assert result.decision.attempt.attempt_number == 1
        assert not any(state.why_not for state in made.router.sigma.workers.values())
        await made.check()


class TestDeadlines:
    async def test_the_engine_is_too_slow(self) -> None:
        async with world() as made:
            made.join("d0")
            made.engines.streams["http://d0"] = [EngineChunk("a"), "slow", *ok()]
            made.engines.steps.hold("slow")
            error = await refusal(DeadlineExceeded, made.run(made.request(timeout_s=0.1)))
            assert "engine" in error.message
            assert made.engines.closed == 1
            assert made.seen.ends[-1][1] is ev.End.FAILED
            await made.check()

    async def test_a_short_deadline_is_no_workers_fault(self) -> None:
        """R13: a caller with little time must not make workers look dead."""
        async with world() as made:
            made.join("d0")
            made.admission.answer = lambda _ask: Unreachable("DEADLINE_EXCEEDED", gone=False)
            for timeout_s in (0.05, 0.05, 0.05, 0.05, -1.0):
                await refusal(DeadlineExceeded, made.run(made.request(timeout_s=timeout_s)))
            state = made.router.sigma.workers["d0"]
            assert (state.why_not, state.failures) == ("", 0)
            await made.check()

    async def test_an_agent_that_does_not_answer_is_the_workers_fault(self) -> None:
        async with world() as made:
            made.join("d0")
            d1 = made.join("d1")
            answer = Unreachable("DEADLINE_EXCEEDED", gone=False)
            made.admission.answer = lambda ask: answer if ask.worker.worker_id == "d0" else None
            for _ in range(4):
                assert (await made.result()).decision.decode == d1
            assert made.router.sigma.session("s").rejects == {}  # type: ignore[union-attr]  # it was served
            await made.check()

    async def test_while_waiting_for_room(self) -> None:
        async with world() as made:
            d0 = made.join("d0")
            made.router.apply(ev.LoadReported(d0, Facts(92_104, held_tokens=92_104)))
            made.admission.answer = lambda _ask: Refused(no(Reason.NO_D_CAPACITY).rejection, Facts(92_104, held_tokens=92_104))
            await refusal(DeadlineExceeded, made.run(made.request(timeout_s=0.1)))
            await made.check()

    async def test_while_the_worker_is_busy_with_the_session(self) -> None:
        async with world() as made:
            made.join("d0")
            made.admission.answer = lambda _ask: no(Reason.SESSION_BUSY, retry_after_s=0.02)
            await refusal(DeadlineExceeded, made.run(made.request(timeout_s=0.2)))
            assert len(made.admission.asked) > 1
            await made.check()

    async def test_behind_the_sessions_previous_turn(self) -> None:
        async with world() as made:
            made.join("d0")
            made.engines.steps.hold("connect")
            first = asyncio.create_task(made.run(made.request("s")))
            await made.engines.steps.reached("connect")
            error = await refusal(DeadlineExceeded, made.run(made.request("s", timeout_s=0.05)))
            assert error.field == "session_id"
            made.engines.steps.go("connect")
            await first
            await made.check()


class TestNoWorker:
    async def test_none_was_ever_there(self) -> None:
        async with world(params={"queue_wait_s": 0.05}) as made:
            error = await refusal(Unavailable, made.run())
            assert error.reason == "NO_WORKER"
            assert error.retry_after_s > 0
            await made.check()

    async def test_turns_that_came_before_the_first_worker_know_their_chain(self) -> None:
        async with world() as made:
            tasks = [asyncio.create_task(made.result(made.request(f"s{number}", tokens=240))) for number in range(20)]
            await until(lambda: len(made.router.room) == 20)
            made.join("d0", hash_seed=7)
            results = await asyncio.wait_for(asyncio.gather(*tasks), 10)
            assert {len(ask.turn.chain) for ask in made.admission.asked} == {10}
            assert len(results) == 20
            await made.check()

    async def test_all_die_and_come_back(self) -> None:
        """F62: under new epochs, while turns wait; all of them are served, the old lives hold nothing."""
        async with world() as made:
            old = [made.join(f"d{number}") for number in range(3)]
            await made.run(made.request("s"))
            for ref in old:
                made.engines.streams[f"http://{ref.worker_id}"] = [LOST]
            tasks = [asyncio.create_task(made.result(made.request(f"s{number}"))) for number in range(30)]
            await until(lambda: len(made.router.room) == 30)
            assert all(state.why_not for state in made.router.sigma.workers.values())
            made.engines.streams.clear()
            for ref in old:
                made.join(ref.worker_id, epoch=2)
            results = await asyncio.wait_for(asyncio.gather(*tasks), 10)
            assert {result.decision.decode.epoch for result in results} == {2}
            assert (await made.result(made.request("s"))).decision.decode.epoch == 2
            await made.check()

    async def test_a_drained_worker_takes_nothing_until_it_is_back(self) -> None:
        """F31."""
        async with world() as made:
            made.join("d0")
            made.router.apply(ev.WorkerDraining("d0", draining=True))
            task = asyncio.create_task(made.result())
            await until(lambda: len(made.router.room) == 1)
            made.router.apply(ev.WorkerDraining("d0", draining=False))
            assert (await asyncio.wait_for(task, 10)).decision.decode.worker_id == "d0"
            await made.check()


async def test_an_abort_by_the_operator_is_no_success() -> None:
    """R4, F70: the client gets what was generated; the session stays as it was."""
    async with world() as made:
        made.join("d0")
        await made.run(made.request("s"))
        made.engines.streams["http://d0"] = [
            EngineChunk("a", (1,)),
            EngineChunk(finish_reason="abort", prompt_tokens=48, completion_tokens=1),
        ]
        result = await made.result(made.request("s"))
        assert result.last.finish_reason == "abort"
        session = made.router.sigma.session("s")
        assert session is not None
        assert (session.turns, session.context_tokens) == (1, 51)
        assert [end for _, end, _, _ in made.seen.ends] == [ev.End.COMPLETED, ev.End.CANCELLED]
        await made.check()


async def test_a_fault_of_the_router_is_a_failure_and_leaves_nothing() -> None:
    async with world() as made:
        made.join("d0")
        made.engines.streams["http://d0"] = [EngineChunk("a"), RuntimeError("oops")]
        with pytest.raises(RuntimeError):
            await made.run()
        assert made.seen.ends[0][1] is ev.End.FAILED
        await made.check()
