"""The trace of a request over HTTP: what is recorded of it, whoever ends it, and that nothing is recorded of the others."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvc.core import events as ev
from kvc.core.dispatch import Unreachable
from kvc.core.types import Facts, Reason
from kvc.engine.hop import HOP_CAPABILITY
from kvc.runtime.spans import SpanLog
from services.router.door.admission import LocalAdmission
from services.router.door.client import Client
from services.router.door.spans import Tracing
from services.router.door.traced import TracedExchange
from tests.support.door_engine import CHUNKED, Asked, Gate, answers, breaks, chunk, good, hangs, head, streams
from tests.support.fake_ports import no
from tests.support.front import DEADLINE_S, HI, Front, front, get, post
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from opentelemetry.sdk.trace import Event, ReadableSpan

    from services.router.door.exchange import Exchange

TRACE = "0123456789abcdef0123456789abcdef"
PARENT = f"00-{TRACE}-0123456789abcdef-01"
UNSAMPLED = PARENT[:-1] + "0"
ADMIT = "kvc.v1.AdmissionService/Admit"
SECRET = "the-prompt-that-nobody-may-see"


class Recorder:
    """What was written."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.processor = SimpleSpanProcessor(self.exporter)

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    async def roots(self, count: int = 1) -> list[ReadableSpan]:
        """The root spans, once there are that many."""

        def found() -> list[ReadableSpan]:
            return [span for span in self.spans if span.name == "kvc.http"]

        await until(lambda: len(found()) == count, DEADLINE_S, f"{count} traces")
        return found()

    async def children(self) -> list[ReadableSpan]:
        """The spans under the only root, which they lie in."""
        (root,) = await self.roots()
        children = [span for span in self.spans if span is not root]
        for span in children:
            assert span.parent is not None
            assert root.context is not None
            assert (span.parent.span_id, span.parent.trace_id) == (root.context.span_id, root.context.trace_id)
            assert root.start_time is not None
            assert span.start_time is not None
            assert span.end_time is not None
            assert root.end_time is not None
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time
        return children

    async def told(self) -> list[tuple[str, str | None]]:
        """Names of the children with their errors, in the order in which they began."""
        return [(span.name, error(span)) for span in await self.children()]

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


def error(span: ReadableSpan) -> str | None:
    return span.status.description if span.status.status_code is StatusCode.ERROR else None


def noted(of: ReadableSpan | Event) -> dict[str, Any]:
    """All attributes."""
    return dict(of.attributes or {})


def attributes(span: ReadableSpan, *names: str) -> dict[str, Any]:
    """The attributes of these names, without their `kvc.`."""
    return {name: noted(span).get(f"kvc.{name}") for name in names}


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


@asynccontextmanager
async def traced(*, ratio: float = 1.0, **fields: Any) -> AsyncIterator[tuple[Front, Recorder]]:
    """A door whose requests are recorded."""
    recorder = Recorder()
    tracing = Tracing(SpanLog(recorder.processor, Resource.create({"service.name": "door"}), ratio))
    async with front(tracing=tracing, **fields) as door:
        yield door, recorder


# ---- what is recorded ----


async def test_a_seed_on_two_workers() -> None:
    """The client, the agent and each engine get the span that is theirs; names and attributes are those of Dispatch."""
    async with traced() as (door, recorder):
        p0, d0 = await door.pair()
        answer = await door.ask(x_session_id="s", Traceparent=PARENT)
        assert await recorder.told() == [(ADMIT, None), ("engine.prefill", None), ("engine.generate", None), ("kvc.stream", None)]
        (root,) = await recorder.roots()
        assert root.parent is not None
        assert (f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}", root.parent.is_remote) == (PARENT[3:-3], True)
        assert root.kind is SpanKind.SERVER
        assert answer.header("traceparent") == traceparent(root)
        admit, prefill, generate = recorder.one(ADMIT), recorder.one("engine.prefill"), recorder.one("engine.generate")
        assert door.asking.traceparents == [traceparent(admit)]
        assert p0.requests[0].header("traceparent") == [traceparent(prefill)]
        assert d0.requests[0].header("traceparent") == [traceparent(generate)]
        assert attributes(admit, "worker_id", "attempt_number", "outcome", "mode", "executor") == {
            "worker_id": "d0",
            "attempt_number": 0,
            "outcome": "admitted",
            "mode": "seed",
            "executor": "prefill",
        }
        assert noted(admit)["rpc.method"] == "Admit"
        assert {span.kind for span in (admit, prefill, generate)} == {SpanKind.CLIENT}
        rid = d0.requests[0].json["rid"]
        assert noted(generate) == {
            "kvc.worker_id": "d0",
            "kvc.rid": rid,
            "kvc.session_id": "s",
            "kvc.mode": "seed",
            "kvc.executor": "prefill",
            "kvc.cached_tokens": 24,
            "kvc.output_tokens": 3,
            "url.full": f"{d0.url}/v1/chat/completions",
        }
        assert [event.name for event in generate.events] == ["first chunk"]
        told = noted(root)
        assert 0 < told.pop("kvc.mesh_s") <= told.pop("kvc.ttft_s")
        assert told == {
            "http.request.method": "POST",
            "url.path": "/v1/chat/completions",
            "http.response.status_code": 200,
            "kvc.request_id": door.observer.ends[0][0],
            "kvc.session_id": "s",
            "kvc.end": "completed",
            "kvc.input_tokens": door.admission.asked[0].turn.input_tokens,
            "kvc.mode": "seed",
            "kvc.executor": "prefill",
            "kvc.decode": "d0",
            "kvc.prefill": "p0",
            "kvc.overlap_blocks": 0,
            "kvc.cached_tokens": 24,
            "kvc.output_tokens": 3,
        }
        (decided,) = [event for event in root.events if event.name == "decided"]
        assert noted(decided)["kvc.probes"] == 1
        assert error(root) is None
        await door.check(1)


async def test_a_stream_lasts_from_its_first_byte_to_its_last() -> None:
    async with traced() as (door, recorder):
        await door.worker("d0", streams(head(200, CHUNKED), chunk(b"1"), chunk(b"2"), b"0\r\n\r\n", gap_s=0.03))
        await door.ask()
        await recorder.roots()
        generate, stream = recorder.one("engine.generate"), recorder.one("kvc.stream")
        assert stream.start_time is not None
        assert stream.end_time is not None
        assert generate.start_time is not None
        assert stream.start_time - generate.start_time > 0.02e9
        assert stream.end_time - stream.start_time > 0.04e9
        assert [event.name for event in generate.events] == ["first chunk"]


async def test_a_turn_in_one_hop_and_one_that_is_refused() -> None:
    """A hop asks nobody; a refused one is an answer, no error, and the question follows."""
    refused = answers(409, json.dumps({"error": {"type": "hop-refused", "code": 409}, "kvc": {"reason": "session-busy"}}).encode())
    body = {"messages": [{"role": "user", "content": "a prompt of a few blocks, so that there is something " * 3}], "max_tokens": 8}
    async with traced() as (door, recorder):
        await door.worker("d0", good, good, refused, good, capabilities=(HOP_CAPABILITY,))
        ref = door.router.sigma.workers["d0"].ref
        await door.ask(body, x_session_id="s")
        door.router.apply(ev.ResidencyReset(ref, tuple(door.router.sigma.forest.chain("s") or ())))
        door.router.apply(ev.LoadReported(ref, Facts(100_000)))
        await recorder.roots()
        recorder.exporter.clear()
        await door.ask(body, x_session_id="s")
        assert await recorder.told() == [("engine.generate", None), ("kvc.stream", None)]
        generate = recorder.one("engine.generate")
        assert attributes(generate, "hop", "mode", "executor") == {"hop": "landed", "mode": "direct", "executor": "local"}
        assert str(noted(generate)["kvc.rid"]).startswith("kvc-hop-")
        recorder.exporter.clear()
        await door.ask(body, x_session_id="s")
        assert await recorder.told() == [("engine.generate", None), (ADMIT, None), ("engine.generate", None), ("kvc.stream", None)]
        first, second = [span for span in recorder.spans if span.name == "engine.generate"]
        assert noted(first)["http.response.status_code"] == 409
        assert (attributes(first, "hop"), attributes(second, "hop")) == ({"hop": "refused"}, {"hop": None})
        await door.check(3)


async def test_waiting_is_recorded() -> None:
    """For the session's previous turn, for a worker that is busy with the session, and for room."""
    async with traced() as (door, recorder):
        gate = Gate()
        await door.worker("d0", gate, good)
        first = asyncio.create_task(door.ask(x_session_id="s", Traceparent=UNSAMPLED))
        await until(lambda: len(door.engines["d0"].requests) == 1, DEADLINE_S, "the first turn")
        refusals = [no(Reason.SESSION_BUSY, retry_after_s=0.01), no(Reason.NO_D_CAPACITY)]
        door.admission.answer = lambda _ask: refusals.pop(0) if refusals else None
        second = asyncio.create_task(door.ask(x_session_id="s"))
        await until(lambda: len(door.door.exchanges) == 2, DEADLINE_S, "the second turn")
        gate.go.set()
        await until(lambda: len(door.router.room) == 1, DEADLINE_S, "it waits for room")
        door.router.room.notify()
        await asyncio.gather(first, second)
        wait = "kvc.wait"
        names = [wait, ADMIT, wait, ADMIT, wait, ADMIT, "engine.generate", "kvc.stream"]
        assert await recorder.told() == [(name, None) for name in names]
        waits = [attributes(span, "for", "resumed", "worker_id") for span in recorder.spans if span.name == wait]
        assert waits == [
            {"for": "session", "resumed": None, "worker_id": None},
            {"for": "worker", "resumed": "room", "worker_id": "d0"},
            {"for": "room", "resumed": "room", "worker_id": None},
        ]
        said = [attributes(span, "outcome", "reason") for span in recorder.spans if span.name == ADMIT]
        assert said == [
            {"outcome": "refused", "reason": "session-busy"},
            {"outcome": "refused", "reason": "no-d-capacity"},
            {"outcome": "admitted", "reason": None},
        ]
        await door.check(2)


async def test_the_routers_own_copy_is_not_asked() -> None:
    async with traced(http={"admission": "off"}) as (door, recorder):
        door.door.admission = LocalAdmission(door.router.sigma)
        await door.worker()
        assert (await door.ask()).status == 200
        assert await recorder.told() == [("engine.generate", None), ("kvc.stream", None)]


async def test_no_span_carries_a_prompt() -> None:
    async with traced() as (door, recorder):
        await door.worker("d0", good, answers(400, b'{"error":{"message":"no"}}'), good)
        for body in ({"messages": [{"role": "user", "content": SECRET}]}, {"messages": SECRET}, {"prompt": SECRET}):
            await door.ask(body, "/v1/chat/completions?" + SECRET)
        await recorder.roots(3)
        written = "".join(span.to_json() for span in recorder.spans)
        assert "kvc.http" in written
        assert SECRET not in written


# ---- failures and ends ----


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


# ---- whose request is recorded ----


async def test_the_clients_decision_holds() -> None:
    """Its flag counts, whatever the ratio is; what nobody records is passed on as it came, and asks agents for no spans."""
    for ratio in (0.0, 1.0):
        async with traced(ratio=ratio) as (door, recorder):
            await door.worker()
            unsampled = await door.ask(Traceparent=UNSAMPLED)
            assert unsampled.header("traceparent") == UNSAMPLED
            assert door.engines["d0"].requests[0].header("traceparent") == [UNSAMPLED]
            assert door.asking.traceparents == [""]
            sampled = (await door.ask(Traceparent=PARENT[:-1] + "3")).header("traceparent") or ""
            assert sampled.startswith(f"00-{TRACE}-")
            assert sampled != PARENT
            assert sampled.endswith("-01")
            (root,) = await recorder.roots()
            assert sampled == traceparent(root)


async def test_without_a_clients_decision_the_ratio_holds() -> None:
    async with traced(ratio=0.5) as (door, recorder):
        await door.worker()
        sent = [(await door.ask()).header("traceparent") or "" for _ in range(60)]
        sampled = [one for one in sent if one.endswith("-01")]
        assert 10 < len(sampled) < 50
        assert all(one.endswith("-00") for one in sent if one not in sampled)
        assert {traceparent(root) for root in await recorder.roots(len(sampled))} == set(sampled)
        assert all(root.parent is None for root in recorder.spans if root.name == "kvc.http")


async def test_only_what_is_recorded_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange that is not recorded is the plain one; pages and probes are no requests."""
    made: list[type] = []
    run = Client.run

    def seen(client: Client, exchange: Exchange) -> None:
        made.append(type(exchange))
        run(client, exchange)

    monkeypatch.setattr(Client, "run", seen)
    async with traced() as (door, recorder):
        await door.worker()
        await door.ask(Traceparent=UNSAMPLED)
        assert TracedExchange not in made
        wire = await door.client()
        for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
            await wire.send(get(path, Traceparent=PARENT))
            await wire.response(method="GET")
        assert recorder.spans == []
        await door.ask(Traceparent=PARENT)
        assert made[-1] is TracedExchange
        await recorder.roots()
