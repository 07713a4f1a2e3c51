"""Spans that are written afterwards: they look like live ones, and the decision to record is the SDK's."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from kvc.runtime.spans import Noted, SpanLog
from kvc.runtime.telemetry import Telemetry

RESOURCE = Resource.create({"service.name": "test"})


def log(ratio: float = 1.0) -> tuple[SpanLog, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return SpanLog(SimpleSpanProcessor(exporter), RESOURCE, ratio), exporter


def test_a_span_looks_like_a_live_one() -> None:
    """Everything a reader of spans can see, next to a span that the SDK made."""
    spans, exporter = log()
    provider = TracerProvider(resource=RESOURCE, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("kvc")
    before_ns = time.time_ns()
    with tracer.start_as_current_span("one", kind=SpanKind.CLIENT, attributes={"a": 1}) as live:
        live.add_event("happened", {"b": "x"})
    noted = Noted("one", SpanKind.CLIENT, 0, {"a": 1})
    noted.event("happened", {"b": "x"})
    noted.end()
    spans.write(7, [noted])
    first, second = exporter.get_finished_spans()
    for span in (first, second):
        assert (span.name, span.kind, dict(span.attributes or {}), span.parent) == ("one", SpanKind.CLIENT, {"a": 1}, None)
        assert span.status.status_code is StatusCode.UNSET
        assert span.resource == RESOURCE
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "kvc"
        (event,) = span.events
        assert (event.name, dict(event.attributes or {})) == ("happened", {"b": "x"})
        assert span.start_time is not None
        assert span.end_time is not None
        assert before_ns <= span.start_time <= event.timestamp <= span.end_time
    assert second.context is not None
    assert (second.context.trace_id, second.context.trace_flags.sampled, second.context.is_remote) == (7, True, False)


def test_parents_errors_and_ends() -> None:
    spans, exporter = log()
    root = Noted("root", SpanKind.SERVER, 99, {})
    child = Noted("child", SpanKind.INTERNAL, root.span_id, {})
    child.error = "no"
    child.end()
    ended_ns = child.end_ns
    child.end()
    spans.write(7, [root, child], remote_id=99)
    first, second = exporter.get_finished_spans()
    assert first.parent is not None
    assert second.parent is not None
    assert (first.parent.span_id, first.parent.is_remote, first.parent.trace_id) == (99, True, 7)
    assert (second.parent.span_id, second.parent.is_remote) == (root.span_id, False)
    assert (second.status.status_code, second.status.description) == (StatusCode.ERROR, "no")
    assert second.end_time == ended_ns
    assert first.end_time is not None
    assert first.end_time >= ended_ns


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
@given(low=st.integers(0, 2**64 - 1), high=st.integers(0, 2**64 - 1))
def test_the_decision_is_the_sdks(ratio: float, low: int, high: int) -> None:
    """A trace that begins over HTTP and one that begins over gRPC are recorded alike."""
    trace_id = high << 64 | low
    decided = TraceIdRatioBased(ratio).should_sample(None, trace_id, "name").decision
    assert SpanLog(SimpleSpanProcessor(InMemorySpanExporter()), RESOURCE, ratio).records(trace_id) is (
        decided is Decision.RECORD_AND_SAMPLE
    )


def test_who_exports_has_a_log_of_the_same_service_and_ratio() -> None:
    random.seed(3)
    assert Telemetry.start("x", None).log is None
    for ratio in (0.0, 1.0):
        telemetry = Telemetry.start("kvc-test", "127.0.0.1:1", sample_ratio=ratio)
        assert telemetry.log is not None
        assert telemetry.log.records(random.getrandbits(128)) is bool(ratio)
        assert telemetry.log._resource.attributes["service.name"] == "kvc-test"
        telemetry.shutdown()
