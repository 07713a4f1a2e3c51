"""What is recorded of an Admit: metrics, one debug line, a span when somebody traces; never hashes."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from kvc.core.types import Attempt, Reason, WorkerRef
from kvc.engine import link
from kvc.engine.convert import admit_to_link
from kvc.errors import Exhausted, KvcError
from kvc.runtime.asking import answer_of
from kvc.runtime.telemetry import Telemetry, traceparent
from services.admission_agent.metrics import AdmitMetrics
from services.admission_agent.observed import ObservedAdmitter
from services.admission_agent.translation import Answer, Ask
from tests.support.builders import run, turn
from tests.support.fake_engine import facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.runtime.asking import Pending

Reply = link.Admitted | link.Refused | Reason

HERE = WorkerRef("d0", 1)
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
YES = link.Admitted("reseed", "prefill", "t", 5.0, 40, 100, facts())
NO = link.Refused("seed-budget", 0.05, terminal=False, facts=facts())
CHAIN = run("p", 4)


def question(parent: str) -> Ask:
    return Ask(HERE, admit_to_link(Attempt("r", 1), turn("s", CHAIN, turn_index=2), None, parent), 1.0)


ASK, UNTRACED = question(PARENT), question("")


class Scripted:
    """Answers what it is told, at once or later, and notes the trace context it was asked under."""

    def __init__(self, result: Reply | KvcError, *, later: bool = False) -> None:
        self.result = result
        self.context = self.parent = ""
        self.later = later
        self.answered: Callable[[Answer | KvcError], None] | None = None
        self.cancelled = False

    def ask(self, ask: Ask, answered: Callable[[Answer | KvcError], None]) -> Pending | None:
        self.context, self.parent = traceparent(), ask.message.traceparent
        self.answered = answered
        if self.later:
            return self
        self.answer()
        return None

    def answer(self) -> None:
        assert self.answered is not None
        self.answered(self.result if isinstance(self.result, KvcError) else Answer(HERE, self.result))

    def cancel(self) -> None:
        self.cancelled = True


def recording() -> tuple[Telemetry, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider), exporter


@pytest.mark.parametrize(
    ("result", "labels", "fields"),
    [
        (YES, ("admitted", "reseed"), {"outcome": "admitted", "mode": "reseed", "executor": "prefill", "append_tokens": 40}),
        (NO, ("refused", "seed-budget"), {"outcome": "refused", "reason": "seed-budget", "terminal": False}),
        (Reason.DRAINING, ("refused", "draining"), {"outcome": "refused", "reason": "draining", "terminal": False}),
        (Exhausted("x", reason="AGENT_OVERLOADED"), ("error", "AGENT_OVERLOADED"), {"outcome": "error", "reason": "AGENT_OVERLOADED"}),
    ],
)
async def test_one_line_at_debug_and_one_count(
    result: Reply | KvcError, labels: tuple[str, str], fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    admitter = ObservedAdmitter(Scripted(result), AdmitMetrics(registry), Telemetry(None))
    for level, lines in ((logging.INFO, 0), (logging.DEBUG, 1)):
        caplog.clear()
        caplog.set_level(level)
        if isinstance(result, KvcError):
            with pytest.raises(KvcError):
                await answer_of(partial(admitter.ask, ASK))
        else:
            assert (await answer_of(partial(admitter.ask, ASK))).reply == result
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
    await answer_of(partial(ObservedAdmitter(scripted, AdmitMetrics(CollectorRegistry()), telemetry).ask, ASK))
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert scripted.context == scripted.parent == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"
    assert dict(span.attributes or {})["kvc.mode"] == "reseed"
    assert not any(str(block) in str(dict(span.attributes or {})) for block in CHAIN)


async def test_a_failure_is_a_failed_span() -> None:
    telemetry, exporter = recording()
    admitter = ObservedAdmitter(Scripted(Exhausted("x")), AdmitMetrics(CollectorRegistry()), telemetry)
    with pytest.raises(Exhausted):
        await answer_of(partial(admitter.ask, ASK))
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


async def test_without_a_callers_trace_there_is_no_span() -> None:
    telemetry, exporter = recording()
    await answer_of(partial(ObservedAdmitter(Scripted(YES), AdmitMetrics(CollectorRegistry()), telemetry).ask, UNTRACED))
    assert exporter.get_finished_spans() == ()


async def test_an_unsampled_caller_stays_unsampled() -> None:
    telemetry, exporter = recording()
    scripted = Scripted(YES)
    unsampled = PARENT.removesuffix("01") + "00"
    ask = question(unsampled)
    await answer_of(partial(ObservedAdmitter(scripted, AdmitMetrics(CollectorRegistry()), telemetry).ask, ask))
    assert exporter.get_finished_spans() == ()
    assert scripted.context == ""
    assert scripted.parent == unsampled


async def test_the_span_of_an_answer_that_comes_later_ends_with_it() -> None:
    telemetry, exporter = recording()
    scripted = Scripted(YES, later=True)
    answers: list[Answer | KvcError] = []
    pending = ObservedAdmitter(scripted, AdmitMetrics(CollectorRegistry()), telemetry).ask(ASK, answers.append)
    assert pending is not None
    assert exporter.get_finished_spans() == ()
    scripted.answer()
    assert answers == [Answer(HERE, YES)]
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes or {})["kvc.mode"] == "reseed"
    assert traceparent() == "", "the span is nobody's context afterwards"


async def test_f58_a_span_that_nobody_waits_for_ends_too() -> None:
    telemetry, exporter = recording()
    scripted = Scripted(YES, later=True)
    pending = ObservedAdmitter(scripted, AdmitMetrics(CollectorRegistry()), telemetry).ask(ASK, lambda _: None)
    assert pending is not None
    pending.cancel()
    assert scripted.cancelled
    assert len(exporter.get_finished_spans()) == 1
