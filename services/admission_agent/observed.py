"""Metrics, the span and the log line of every Admit, around whatever answers it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from kvc.core.types import Reason
from kvc.engine.link import Admitted, Refused
from kvc.errors import KvcError
from kvc.runtime.logs import event
from kvc.runtime.telemetry import context_from, traceparent

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Span

    from kvc.runtime.asking import Pending
    from kvc.runtime.telemetry import Telemetry
    from services.admission_agent.agent import Admitter
    from services.admission_agent.metrics import AdmitMetrics
    from services.admission_agent.translation import Answer, Ask

logger = logging.getLogger(__name__)


class ObservedAdmitter:
    """An admitter that is watched."""

    def __init__(self, inner: Admitter, metrics: AdmitMetrics, telemetry: Telemetry) -> None:
        """Watches `inner`."""
        self._inner = inner
        self._metrics = metrics
        self._telemetry = telemetry

    def ask(self, ask: Ask, answered: Callable[[Answer | KvcError], None]) -> Pending | None:
        """As the inner admitter."""
        watched = _Watched(self._metrics, ask, answered)
        span = self._start_span(ask) if self._telemetry.enabled else None
        if span is None:
            return self._inner.ask(ask, watched.answered)
        watched.span = span
        with trace.use_span(span, end_on_exit=False):
            message = msgspec.structs.replace(ask.message, traceparent=traceparent() or ask.message.traceparent)
            watched.pending = self._inner.ask(ask._replace(message=message), watched.answered)
        return watched if watched.pending is not None else None

    def _start_span(self, ask: Ask) -> Span | None:
        """A client span under the call's own span or, on a stream, under the caller's; none without either."""
        parented = trace.get_current_span().get_span_context().is_valid
        if not (parented or ask.message.traceparent):
            return None
        return self._telemetry.tracer.start_span(
            "engine.admit",
            context=None if parented else context_from(ask.message.traceparent),
            kind=SpanKind.CLIENT,
            attributes={
                "kvc.request_id": ask.message.request_id,
                "kvc.attempt_number": ask.message.attempt_number,
                "kvc.worker_id": ask.worker.worker_id,
                "kvc.input_tokens": ask.message.input_tokens,
            },
        )


class _Watched:
    """One Admit that is watched. Pending, when it has a span: one that is cancelled still ends."""

    __slots__ = ("_answered", "_ask", "_metrics", "_started_s", "pending", "span")

    def __init__(self, metrics: AdmitMetrics, ask: Ask, answered: Callable[[Answer | KvcError], None]) -> None:
        self._metrics = metrics
        self._ask = ask
        self._answered = answered
        self._started_s = time.perf_counter()
        self.span: Span | None = None
        self.pending: Pending | None = None

    def answered(self, result: Answer | KvcError) -> None:
        """Counts, notes, and passes the answer on."""
        metrics, elapsed_s = self._metrics, time.perf_counter() - self._started_s
        metrics.seconds.observe(elapsed_s)
        if isinstance(result, KvcError):
            metrics.failed(result.reason)
        elif isinstance(result.reply, Admitted):
            metrics.admitted[result.reply.mode].inc()
        else:
            metrics.refused[_reason(result.reply)].inc()
        if self.span is not None or logger.isEnabledFor(logging.DEBUG):
            self._note(elapsed_s, _told(result))
        self._answered(result)

    def cancel(self) -> None:
        """Nobody waits any more."""
        if self.pending is not None:
            self.pending.cancel()
        if self.span is not None:
            self.span.end()

    def _note(self, elapsed_s: float, told: dict[str, Any]) -> None:
        """The end of the span, and the canonical line at debug level: never hashes, never a prompt."""
        ask, span = self._ask, self.span
        if span is not None:
            span.set_attributes({f"kvc.{key}": value for key, value in told.items()})
            if told["outcome"] == "error":
                span.set_status(Status(StatusCode.ERROR, str(told["reason"])))
            span.end()
        if logger.isEnabledFor(logging.DEBUG):
            event(
                logger,
                "admit",
                level=logging.DEBUG,
                request_id=ask.message.request_id,
                attempt_number=ask.message.attempt_number,
                session_id=ask.message.session_id,
                turn_index=ask.message.turn_index,
                worker_id=ask.worker.worker_id,
                epoch=ask.worker.epoch,
                input_tokens=ask.message.input_tokens,
                elapsed_s=round(elapsed_s, 6),
                **told,
            )


def _reason(reply: Refused | Reason) -> str:
    return reply.value if isinstance(reply, Reason) else reply.reason


def _told(result: Answer | KvcError) -> dict[str, Any]:
    if isinstance(result, KvcError):
        return {"outcome": "error", "reason": result.reason}
    reply = result.reply
    if isinstance(reply, Admitted):
        return {
            "outcome": "admitted",
            "need_tokens": reply.need_tokens,
            "mode": reply.mode,
            "executor": reply.executor,
            "append_tokens": reply.append_tokens,
        }
    return {"outcome": "refused", "reason": _reason(reply), "terminal": isinstance(reply, Refused) and reply.terminal}
