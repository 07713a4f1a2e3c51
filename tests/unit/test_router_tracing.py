"""Spans around the router's ports: they end with what they stand for, however that ends, and engines are handed their context."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from kvc.core import events as ev
from kvc.core.types import Attempt, Decision, Executor, GaveUp, Give, Mode, WorkerRef
from services.router.adapters.engine_http import HttpEngines
from services.router.config import RouterConfig
from services.router.main import running_router
from services.router.metrics import RouterMetrics
from services.router.ports import EngineCall, EngineError
from services.router.tracing import TracedDispatches, TracedEngines
from tests.support.fake_ports import FakeAdmission, FakeEngines, Seen, ok, world

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

SAMPLED = trace.TraceFlags.SAMPLED
CALL = EngineCall("http://d0", "r.0", "s", b"", None, 4, 0.0)
DECISION = Decision(Mode.RESEED, Executor.PREFILL, WorkerRef("d0", 1), WorkerRef("p0", 1), Attempt("r", 0), None)


class Bench:
    """Traced fake engines and what was recorded of them."""

    def __init__(self, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False, **settings)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.inner = FakeEngines(FakeAdmission())
        self.engines = TracedEngines(self.inner, self.tracer)

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return span


def header(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"


async def test_a_call_is_a_client_span_that_the_engine_continues() -> None:
    bench = Bench()
    with bench.tracer.start_as_current_span("request"):
        TracedDispatches(Seen()).decided(DECISION, 0.01)
        chunks = [chunk async for chunk in bench.engines.generate(CALL)]
        await bench.engines.prefill(CALL)
    generate, prefill, request = bench.one("engine.generate"), bench.one("engine.prefill"), bench.one("request")
    assert len(chunks) == 4
    assert generate.kind is prefill.kind is SpanKind.CLIENT
    assert generate.parent == prefill.parent == request.context
    assert bench.inner.calls[0].traceparent.startswith(header(generate))
    assert bench.inner.prefill_calls[0].traceparent.startswith(header(prefill))
    assert SAMPLED & int(bench.inner.calls[0].traceparent[-2:], 16)
    attributes = generate.attributes or {}
    told = {key: attributes[f"kvc.{key}"] for key in ("worker_id", "mode", "executor", "cached_tokens", "output_tokens", "finish_reason")}
    assert told == {
        "worker_id": "d0",
        "mode": "reseed",
        "executor": "prefill",
        "cached_tokens": 24,
        "output_tokens": 3,
        "finish_reason": "length",
    }
    assert (prefill.attributes or {})["kvc.worker_id"] == "p0"
    assert [event.name for event in generate.events] == ["first chunk"]


async def test_a_call_that_fails_is_an_error_with_the_engines_reason() -> None:
    bench = Bench()
    bench.inner.streams["http://d0"] = [*ok()[:1], EngineError(0, "connection-lost", "what the engine wrote", gone=True)]
    bench.inner.prefills["http://d0"] = [EngineError(503, "queue-full", "no room")]
    with pytest.raises(EngineError, match="connection-lost"):
        _ = [chunk async for chunk in bench.engines.generate(CALL)]
    with pytest.raises(EngineError, match="queue-full"):
        await bench.engines.prefill(CALL)
    generate, prefill = bench.one("engine.generate"), bench.one("engine.prefill")
    assert (generate.status.status_code, generate.status.description) == (StatusCode.ERROR, "connection-lost")
    assert (prefill.status.status_code, prefill.status.description) == (StatusCode.ERROR, "queue-full")
    assert (prefill.attributes or {})["http.response.status_code"] == 503
    assert not generate.events[1:], "no traceback, which could quote what was sent"


async def test_a_stream_that_is_left_ends_its_span_without_an_error() -> None:
    bench = Bench()
    async with aclosing(bench.engines.generate(CALL)) as chunks:
        await anext(chunks)
    span = bench.one("engine.generate")
    assert span.status.status_code is StatusCode.UNSET
    assert (span.attributes or {})["kvc.finish_reason"] == ""
    assert bench.inner.closed == 1


async def test_an_unsampled_request_tells_the_engine_so() -> None:
    """Without the flag the engine would take it for the start of a trace."""
    bench = Bench(sampler=ALWAYS_OFF)
    with bench.tracer.start_as_current_span("request"):
        _ = [chunk async for chunk in bench.engines.generate(CALL)]
    assert bench.exporter.get_finished_spans() == ()
    assert not SAMPLED & int(bench.inner.calls[0].traceparent[-2:], 16)


async def test_what_is_decided_and_how_it_ends_is_told_to_the_request_and_passed_on() -> None:
    bench, seen = Bench(), Seen()
    observer = TracedDispatches(seen)
    error = EngineError(0, "connection-refused", "port 1", gone=True)
    async with world() as made:
        request = made.request()
    with bench.tracer.start_as_current_span("request"):
        observer.decided(DECISION, 0.01)
        observer.retried(request, DECISION, error)
        observer.decided(GaveUp(Give.QUEUE_FULL), 0.02)
        observer.ended(request, None, ev.End.FAILED, None, None)
    span = bench.one("request")
    assert [event.name for event in span.events] == ["decided", "retried", "decided"]
    first, again, last = (event.attributes or {} for event in span.events)
    assert (first["kvc.mode"], first["kvc.prefill"], first["kvc.decide_s"]) == ("reseed", "p0", 0.01)
    assert again == {"error.type": "connection-refused", "kvc.worker_id": "d0"}
    assert last["kvc.gave_up"] == "queue-full"
    assert (span.attributes or {})["kvc.end"] == "failed"
    assert (len(seen.decisions), seen.retries, len(seen.ends)) == (2, [error], 1)


async def test_without_a_collector_nothing_is_wrapped() -> None:
    async with running_router(RouterConfig()) as running:
        assert type(running.router._runner._engines) is HttpEngines
        assert type(running.router._observer) is RouterMetrics


async def test_a_whole_dispatch_names_its_worker_in_the_spans_of_its_calls() -> None:
    """The decision reaches the span of the call through the router's own tasks."""
    bench = Bench()
    async with world() as made:
        made.join("d0")
        router = made.router
        router._observer = TracedDispatches(made.seen)
        router._runner._engines = TracedEngines(made.engines, bench.tracer)
        with bench.tracer.start_as_current_span("request"):
            await made.run()
        await made.check()
    request, generate = bench.one("request"), bench.one("engine.generate")
    assert generate.parent == request.context
    assert ((generate.attributes or {})["kvc.worker_id"], (generate.attributes or {})["kvc.mode"]) == ("d0", "seed")
    assert (request.attributes or {})["kvc.end"] == "completed"
    assert trace.get_current_span() is trace.INVALID_SPAN
