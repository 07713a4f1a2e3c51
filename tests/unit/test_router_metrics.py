"""What the router counts, and its one line a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvc.core.dispatch import Refused, Unreachable
from kvc.core.types import Facts, Reason, Rejection
from kvc.errors import KvcError
from kvc.runtime.logs import JsonFormatter
from services.router.ports import EngineChunk, EngineError
from tests.support.fake_ports import no, ok, refusal
from tests.support.mesh_server import until
from tests.support.router_server import served


def lines(caplog: pytest.LogCaptureFixture, name: str = "dispatch") -> list[dict[str, Any]]:
    found = [json.loads(JsonFormatter("router").format(record)) for record in caplog.records if hasattr(record, "kvc_fields")]
    return [line for line in found if line["event"] == name]


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "services.router")


async def test_a_turn(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as made:
        made.world.admission.answer = lambda ask: no(Reason.SESSION_BUSY) if ask.attempt.attempt_number == 0 else None
        await made.dispatch(session_id="s", request_id="r")
        (line,) = lines(caplog)
        assert (
            line.items()
            >= {
                "level": "info",
                "request_id": "r",
                "session_id": "s",
                "end": "completed",
                "mode": "seed",
                "executor": "local",
                "decode": "d0",
                "prefill": None,
                "probes": ["d0:session-busy", "d0:yes"],
                "input_tokens": 48,
                "cached_tokens": 24,
                "completion_tokens": 3,
                "finish_reason": "length",
                "reason": None,
                "problem": None,
            }.items()
        )
        assert made.metric("kvc_router_turns_total", mode="seed", end="completed") == 1
        assert made.metric("kvc_router_ttft_seconds_count", mode="seed") == 1
        assert made.metric("kvc_router_refusals_total", reason="session-busy") == 1
        assert made.metric("kvc_router_cached_tokens_total") == 24
        assert made.metric("kvc_router_prompt_tokens_total") == 48
        assert made.metric("kvc_router_queued_seconds_count") == 1
        assert made.metric("kvc_router_sessions") == 1
        assert made.metric("kvc_router_eligible", worker="d0", role="decode") == 1
        assert made.metric("kvc_router_inflight", worker="d0", role="decode") == 0


async def test_a_replaced_engine_is_one_line_more_and_the_request_still_has_one(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as made:
        made.world.engines.streams["http://d0"] = [EngineError(0, "connection-refused", "nobody listens", gone=True)]
        made.world.join("d1")
        made.world.router.sigma.workers["d1"].assigned = 1
        await made.dispatch()
        (line,) = lines(caplog)
        assert (line["end"], line["decode"]) == ("completed", "d1")
        (replaced,) = lines(caplog, "engine_replaced")
        assert replaced.items() >= {"level": "warning", "decode": "d0", "reason": "connection-refused"}.items()
        assert made.metric("kvc_router_retries_total") == 1
        assert made.metric("kvc_router_turns_total", mode="seed", end="failed") == 1
        assert made.metric("kvc_router_turns_total", mode="seed", end="completed") == 1
        assert made.metric("kvc_router_eligible", worker="d0", role="decode") == 0


async def test_a_failed_turn(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as made:
        made.world.engines.streams["http://d0"] = [EngineChunk("a"), EngineError(500, "http-500", "oops")]
        await refusal(KvcError, made.world.run())
        (line,) = lines(caplog)
        assert (
            line.items()
            >= {"level": "warning", "end": "failed", "reason": "ENGINE_FAILED", "problem": "http-500: oops", "mode": "seed"}.items()
        )
        assert made.metric("kvc_router_turns_total", mode="seed", end="failed") == 1


FULL = Facts(92_104, held_tokens=92_104)


@pytest.mark.parametrize(
    ("reason", "answer", "settings"),
    [
        ("NO_WORKER", Unreachable("UNAVAILABLE", gone=True), {"queue_wait_s": 0.01}),
        ("QUEUE_FULL", Refused(Rejection(Reason.NO_D_CAPACITY), FULL), {"queue_limit": 1}),
        ("EXCEEDS_CAPACITY", no(Reason.EXCEEDS_CAPACITY, terminal=True), {}),
        ("DEADLINE_EXCEEDED", no(Reason.SESSION_BUSY), {}),
    ],
)
async def test_a_request_without_a_turn(reason: str, answer: Any, settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async with served(params=settings) as made:
        made.world.admission.answer = lambda _ask: answer
        waiting = asyncio.create_task(made.world.run(made.world.request("waits"))) if reason == "QUEUE_FULL" else None
        if waiting is not None:
            await until(lambda: len(made.world.router.room) == 1)
        await refusal(KvcError, made.world.run(made.world.request(timeout_s=0.3)))
        (line,) = lines(caplog)
        assert (line["end"], line["reason"], "mode" in line) == ("failed", reason, False)
        assert made.metric("kvc_router_undecided_total", reason=reason) == 1
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_a_cancelled_request(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as made:
        made.world.engines.steps.hold("admit")
        task = asyncio.create_task(made.dispatch())
        await made.world.engines.steps.reached("admit")
        assert made.metric("kvc_router_requests") == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: bool(lines(caplog)))
        (line,) = lines(caplog)
        assert (line["end"], line["reason"], line["level"]) == ("cancelled", "CANCELLED", "info")
        assert made.metric("kvc_router_undecided_total", reason="CANCELLED") == 1
        assert made.metric("kvc_router_releases") == 1
        made.world.engines.steps.go("admit")
        await made.world.check()
        assert made.metric("kvc_router_releases") == 0


async def test_prompts_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as made:
        made.world.engines.streams["http://d0"] = ok("the answer to everything")
        await made.dispatch(text="my secret question")
        assert lines(caplog)
        everything = "".join(JsonFormatter("router").format(record) for record in caplog.records)
        assert "secret question" not in everything
        assert "answer to everything" not in everything
