"""What is recorded of an Admit: metrics, one debug line, a span when somebody traces; never hashes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from kvc.core.types import Admission, Attempt, Executor, Mode, Reason, Rejection, WorkerRef
from kvc.errors import Exhausted, KvcError
from kvc.runtime.telemetry import Telemetry, traceparent
from services.admission_agent.agent import Answer, Ask
from services.admission_agent.metrics import AdmitMetrics
from services.admission_agent.observed import ObservedAdmitter
from tests.support.builders import run, turn

if TYPE_CHECKING:
    from kvc.core.types import Outcome

HERE = WorkerRef("d0", 1)
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
YES = Admission(Mode.RESEED, Executor.PREFILL, 40, 100, "t", 5.0)
NO = Rejection(Reason.SEED_BUDGET, 0.05)
CHAIN = run("p", 4)
ASK = Ask(Attempt("r", 1), HERE, turn("s", CHAIN, turn_index=2), None, 1.0, PARENT)
UNTRACED = Ask(Attempt("r", 1), HERE, turn("s", CHAIN, turn_index=2), None, 1.0)


class Scripted:
    """Answers what it is told, and notes the trace context it was asked under."""

    def __init__(self, result: Outcome | Exception) -> None:
        self.result = result
        self.context = ""

    async def admit(self, ask: Ask) -> Answer:
        self.context = traceparent()
        if isinstance(self.result, Exception):
            raise self.result
        return Answer(HERE, self.result)


def recording() -> tuple[Telemetry, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider), exporter


@pytest.mark.parametrize(
    ("result", "labels", "fields"),
    [
        (YES, ("admitted", "reseed"), {"outcome": "admitted", "mode": "reseed", "executor": "prefill", "append_tokens": 40}),
        (NO, ("refused", "seed-budget"), {"outcome": "refused", "reason": "seed-budget", "terminal": False}),
        (Exhausted("x", reason="AGENT_OVERLOADED"), ("error", "AGENT_OVERLOADED"), {"outcome": "error", "reason": "AGENT_OVERLOADED"}),
    ],
)
async def test_one_line_at_debug_and_one_count(
    result: Outcome | KvcError, labels: tuple[str, str], fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    admitter = ObservedAdmitter(Scripted(result), AdmitMetrics(registry), Telemetry(None))
    for level, lines in ((logging.INFO, 0), (logging.DEBUG, 1)):
        caplog.clear()
        caplog.set_level(level)
        if isinstance(result, KvcError):
            with pytest.raises(KvcError):
                await admitter.admit(ASK)
        else:
            assert (await admitter.admit(ASK)).outcome == result
        assert len(caplog.records) == lines
    record = caplog.records[0]
    line: dict[str, Any] = record.kvc_fields  # type: ignore[attr-defined]
    assert record.message == "admit"
    assert fields.items() <= line.items()
    assert (line["request_id"], line["attempt_number"], line["session_id"], line["turn_index"]) == ("r", 1, "s", 2)
    assert (line["worker_id"], line["epoch"], line["input_tokens"]) == ("d0", 1, 96)
    assert not any(str(block) in str(line) for block in CHAIN)
    assert registry.get_sample_value("kvc_agent_admits_total", dict(zip(("outcome", "reason"), labels, strict=True))) == 2
    assert registry.get_sample_value("kvc_agent_admit_seconds_count") == 2


async def test_the_span_is_the_callers_child_and_the_engines_parent() -> None:
    telemetry, exporter = recording()
    scripted = Scripted(YES)
    await ObservedAdmitter(scripted, AdmitMetrics(CollectorRegistry()), telemetry).admit(ASK)
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert scripted.context == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
    assert dict(span.attributes or {})["kvc.mode"] == "reseed"
    assert not any(str(block) in str(dict(span.attributes or {})) for block in CHAIN)


async def test_a_failure_is_a_failed_span() -> None:
    telemetry, exporter = recording()
    admitter = ObservedAdmitter(Scripted(Exhausted("x")), AdmitMetrics(CollectorRegistry()), telemetry)
    with pytest.raises(Exhausted):
        await admitter.admit(ASK)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


async def test_without_a_callers_trace_there_is_no_span() -> None:
    telemetry, exporter = recording()
    await ObservedAdmitter(Scripted(YES), AdmitMetrics(CollectorRegistry()), telemetry).admit(UNTRACED)
    assert exporter.get_finished_spans() == ()


async def test_an_unsampled_caller_stays_unsampled() -> None:
    telemetry, exporter = recording()
    scripted = Scripted(YES)
    ask = Ask(ASK.attempt, HERE, ASK.turn, None, 1.0, PARENT.removesuffix("01") + "00")
    await ObservedAdmitter(scripted, AdmitMetrics(CollectorRegistry()), telemetry).admit(ask)
    assert exporter.get_finished_spans() == ()
    assert scripted.context == ""
