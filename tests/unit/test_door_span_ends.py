"""The trace of a request over HTTP that fails, is refused or is given up: whose error it is, and that every span ends."""

from __future__ import annotations

import asyncio
import re

import pytest

from kvc.core.dispatch import Unreachable
from kvc.core.types import Reason
from tests.support.door_engine import CHUNKED, Asked, answers, breaks, chunk, good, hangs, head
from tests.support.fake_ports import no
from tests.support.front import DEADLINE_S, HI, get, post
from tests.support.span_recorder import ADMIT, PARENT, UNSAMPLED, attributes, error, noted, traced
from tests.support.waiting import until


async def test_a_worker_that_fails_is_a_span_and_its_successor_another() -> None:
    async with traced() as (door, recorder):
        await door.worker("d0", breaks)
        await door.worker("d1", breaks)
        door.join("d2", (await door.worker("d2")).url)
        first = await door.ask(x_session_id="s")
        assert first.status == 200
        (root,) = await recorder.roots()
        failed = [span for span in recorder.spans if span.name == "engine.generate" and error(span)]
        assert {error(span) for span in failed} <= {"connection-lost"}
        assert {noted(span).get("error.type") for span in failed} <= {"connection-lost"}
        retried = [event for event in root.events if event.name == "retried"]
        assert len(retried) == len(failed) == len(door.observer.retries)
        assert error(root) is None
        last = [span for span in recorder.spans if span.name == "engine.generate"][-1]
        assert attributes(last, "worker_id", "cached_tokens") == {"worker_id": "d2", "cached_tokens": 24}
        await door.check(1)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(503, b"{}", "http-503"), (409, b'{"error":{"type":"ticket-expired"}}', "ticket-expired"), (500, b'{"type":"oom"}', "oom")],
)
async def test_an_engines_refusal_is_its_reason(status: int, body: bytes, said: str) -> None:
    async with traced() as (door, recorder):
        await door.worker("d0", answers(status, body), good)
        assert (await door.ask()).status == 200
        names = [ADMIT, "engine.generate", ADMIT, "engine.generate", "kvc.stream"]
        assert await recorder.told() == [(name, said if index == 1 else None) for index, name in enumerate(names)]
        first = next(span for span in recorder.spans if span.name == "engine.generate")
        assert noted(first)["http.response.status_code"] == status
        (root,) = await recorder.roots()
        (retried,) = [event for event in root.events if event.name == "retried"]
        assert noted(retried) == {"error.type": said, "kvc.worker_id": "d0"}


@pytest.mark.parametrize(("status", "failed"), [(400, None), (503, "HTTP 503")])
async def test_an_engines_last_error_reaches_the_client_and_the_trace(status: int, failed: str | None) -> None:
    """The client's mistake is an error of the call to the engine, and none of the server."""
    async with traced(engines={"retries": 0}) as (door, recorder):
        await door.worker("d0", answers(status))
        assert (await door.ask()).status == status
        assert await recorder.told() == [(ADMIT, None), ("engine.generate", f"http-{status}"), ("kvc.stream", None)]
        (root,) = await recorder.roots()
        assert (noted(root)["http.response.status_code"], attributes(root, "end"), error(root)) == (
            status,
            {"end": "failed"},
            failed,
        )


async def test_a_prefill_worker_that_fails_is_the_one_with_the_error() -> None:
    """F32: the decode worker's call is given up, and did not fail."""
    async with traced(engines={"retries": 0}) as (door, recorder):
        await door.pair(answers(500), hangs)
        answer = await door.ask()
        assert (answer.status, answer.kind) == (503, "ENGINE_FAILED")
        assert await recorder.told() == [(ADMIT, None), ("engine.prefill", "prefill-failed"), ("engine.generate", None)]
        (root,) = await recorder.roots()
        assert (error(root), attributes(root, "reason")) == ("UNAVAILABLE: prefill-failed: prefill: HTTP 500", {"reason": "ENGINE_FAILED"})


async def test_a_reply_that_breaks_off() -> None:
    """The status has gone out already; the request failed all the same."""

    async def breaks_off(asked: Asked) -> None:
        await asked.send(head(200, CHUNKED) + chunk(b"1"))
        asked.reset()

    async with traced() as (door, recorder):
        await door.worker("d0", breaks_off)
        wire = await door.client()
        await wire.send(post(HI))
        await wire.head()
        await wire.rest()
        assert await recorder.told() == [(ADMIT, None), ("engine.generate", "connection-lost"), ("kvc.stream", None)]
        (root,) = await recorder.roots()
        assert noted(root)["http.response.status_code"] == 200
        assert re.match(r"UNAVAILABLE: the engine failed in mid-reply", error(root) or "")
        await door.check(1)


async def test_agents_without_an_answer() -> None:
    async with traced(params={"queue_wait_s": 0.05}) as (door, recorder):
        await door.worker()
        door.admission.answer = lambda _ask: Unreachable("UNAVAILABLE", gone=True)
        assert (await door.ask()).status == 503
        assert (await recorder.told())[0] == (ADMIT, "UNAVAILABLE")
        assert (recorder.one(ADMIT).attributes or {})["rpc.grpc.status_code"] == 14
        (root,) = await recorder.roots()
        assert (attributes(root, "end", "reason"), error(root)) == (
            {"end": "failed", "reason": "NO_WORKER"},
            "UNAVAILABLE: no decode worker is available",
        )
        (decided,) = root.events
        assert noted(decided)["kvc.gave_up"] == "no-worker"


@pytest.mark.parametrize("where", ["gate", "queue", "agent", "engine"])
async def test_a_client_that_goes_is_no_error(where: str) -> None:
    """What was under way ends with the request, wherever that was."""
    async with traced() as (door, recorder):
        await door.worker("d0", hangs)
        before = await door.client()
        if where == "gate":
            await before.send(post(HI, x_session_id="s", Traceparent=UNSAMPLED))
            await until(lambda: len(door.engines["d0"].requests) == 1, DEADLINE_S, "the other turn")
        elif where == "queue":
            door.admission.answer = lambda _ask: no(Reason.NO_D_CAPACITY)
        elif where == "agent":
            door.asking.hold = True
        wire = await door.client()
        count = len(door.door.exchanges) + 1
        await wire.send(post(HI, x_session_id="s"))
        await until(lambda: len(door.door.exchanges) == count, DEADLINE_S, "the exchange")
        await asyncio.sleep(0.05)
        wire.writer.transport.abort()
        last = {"gate": "kvc.wait", "queue": "kvc.wait", "agent": ADMIT, "engine": "engine.generate"}[where]
        assert (await recorder.told())[-1] == (last, None)
        (root,) = await recorder.roots()
        assert (attributes(root, "end"), error(root)) == ({"end": "cancelled"}, None)
        assert "http.response.status_code" not in noted(root)
        door.asking.go()
        await before.close()
        await door.check()


async def test_a_deadline_is_an_error() -> None:
    async with traced(requests={"timeout_s": 0.2}) as (door, recorder):
        await door.worker("d0", hangs)
        assert (await door.ask()).status == 504
        assert await recorder.told() == [(ADMIT, None), ("engine.generate", None)]
        (root,) = await recorder.roots()
        assert error(root) == "DEADLINE_EXCEEDED: the request took more than 0.2 s"


async def test_a_request_that_is_wrong_ends_at_the_root() -> None:
    async with traced(token="secret") as (door, recorder):
        await door.worker()
        assert (await door.ask(b"[]", authorization="Bearer secret", Traceparent=PARENT)).status == 400
        assert (await door.ask(Traceparent=PARENT)).status == 401
        wire = await door.client()
        await wire.send(get("/v1/completions", authorization="Bearer secret", Traceparent=PARENT))
        assert (await wire.response(method="GET")).status == 405
        roots = await recorder.roots(3)
        assert [noted(root)["http.response.status_code"] for root in roots] == [400, 401, 405]
        assert [attributes(root, "reason")["reason"] for root in roots] == ["INVALID_FIELD", "UNAUTHENTICATED", None]
        assert [error(root) for root in roots] == [None] * 3
        assert len(recorder.spans) == 3


async def test_a_request_refused_for_lack_of_a_worker_is_an_error() -> None:
    async with traced() as (door, recorder):
        assert (await door.ask()).status == 503
        (root,) = await recorder.roots()
        assert error(root) == "UNAVAILABLE: no worker is known yet"


async def test_requests_that_come_at_once_have_their_own_traces() -> None:
    """Refused and served ones on one connection: each trace has its own status."""
    async with traced() as (door, recorder):
        await door.worker()
        wire = await door.client()
        await wire.send(post(b"[]") + post(HI) + post(b"{}") + get("/v1/messages"))
        statuses = [(await wire.response()).status for _ in range(4)]
        assert statuses == [400, 200, 400, 405]
        roots = await recorder.roots(4)
        assert [noted(root)["http.response.status_code"] for root in roots] == statuses
        assert len({root.context.trace_id for root in roots if root.context}) == 4
