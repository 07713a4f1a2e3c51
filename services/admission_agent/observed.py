"""Metrics, the span and the log line of every Admit, around whatever answers it."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from kvc.core.types import Admission
from kvc.errors import KvcError
from kvc.runtime.logs import event
from kvc.runtime.telemetry import context_from

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from opentelemetry.trace import Span

    from kvc.runtime.telemetry import Telemetry
    from services.admission_agent.agent import Admitter, Answer, Ask
    from services.admission_agent.metrics import AdmitMetrics

logger = logging.getLogger(__name__)


class ObservedAdmitter:
    """An admitter that is watched."""

    def __init__(self, inner: Admitter, metrics: AdmitMetrics, telemetry: Telemetry) -> None:
        """Watches `inner`."""
        self._inner = inner
        self._metrics = metrics
        self._telemetry = telemetry

    async def admit(self, ask: Ask) -> Answer:
        """As the inner admitter."""
        started_s = time.perf_counter()
        with self._span(ask) as span:
            try:
                answer = await self._inner.admit(ask)
            except KvcError as error:
                self._metrics.failed(error.reason)
                self._note(ask, span, started_s, outcome="error", reason=error.reason)
                raise
            outcome = answer.outcome
            if isinstance(outcome, Admission):
                self._metrics.admitted[outcome.mode.value].inc()
                extra = {"mode": outcome.mode.value, "executor": outcome.executor.value, "append_tokens": outcome.append_tokens}
                self._note(ask, span, started_s, outcome="admitted", need_tokens=outcome.need_tokens, **extra)
            else:
                self._metrics.refused[outcome.reason.value].inc()
                self._note(ask, span, started_s, outcome="refused", reason=outcome.reason.value, terminal=outcome.terminal)
            return answer

    def _span(self, ask: Ask) -> AbstractContextManager[Span | None]:
        """A client span under the call's own span or, on a stream, under the caller's; none without either."""
        parented = trace.get_current_span().get_span_context().is_valid
        if not self._telemetry.enabled or not (parented or ask.traceparent):
            return contextlib.nullcontext()
        return self._telemetry.tracer.start_as_current_span(
            "engine.admit",
            context=None if parented else context_from(ask.traceparent),
            kind=SpanKind.CLIENT,
            attributes={
                "kvc.request_id": ask.attempt.request_id,
                "kvc.attempt_number": ask.attempt.attempt_number,
                "kvc.worker_id": ask.worker.worker_id,
                "kvc.input_tokens": ask.turn.input_tokens,
            },
        )

    def _note(self, ask: Ask, span: Span | None, started_s: float, **result: Any) -> None:
        """The canonical line, at debug level: never hashes, never a prompt."""
        elapsed_s = time.perf_counter() - started_s
        self._metrics.seconds.observe(elapsed_s)
        if span is not None:
            span.set_attributes({f"kvc.{key}": value for key, value in result.items()})
            if result["outcome"] == "error":
                span.set_status(Status(StatusCode.ERROR, str(result["reason"])))
        if logger.isEnabledFor(logging.DEBUG):
            event(
                logger,
                "admit",
                level=logging.DEBUG,
                request_id=ask.attempt.request_id,
                attempt_number=ask.attempt.attempt_number,
                session_id=ask.turn.session_id,
                turn_index=ask.turn.turn_index,
                worker_id=ask.worker.worker_id,
                epoch=ask.worker.epoch,
                input_tokens=ask.turn.input_tokens,
                elapsed_s=round(elapsed_s, 6),
                **result,
            )
