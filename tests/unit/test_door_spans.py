"""The trace of a request over HTTP: what is recorded of it, and that nothing is recorded of the others."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from kvc.core import events as ev
from kvc.core.types import Facts, Reason
from kvc.engine.hop import HOP_CAPABILITY
from services.router.door.admission import LocalAdmission
from services.router.door.client import Client
from services.router.door.traced import TracedExchange
from tests.support.door_engine import CHUNKED, Gate, answers, chunk, good, head, streams
from tests.support.fake_ports import no
from tests.support.front import DEADLINE_S, get
from tests.support.span_recorder import ADMIT, PARENT, TRACE, UNSAMPLED, attributes, error, noted, traced, traceparent
from tests.support.waiting import until

if TYPE_CHECKING:
    import pytest

    from services.router.door.exchange import Exchange

SECRET = "the-prompt-that-nobody-may-see"


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
