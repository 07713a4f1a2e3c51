"""Spans of the router, around its ports: one for each call to an engine, and what was decided as events of the request's own span.

The spans of the request and of each Admit are gRPC's (kvc.runtime.tracing). Nothing here is built when no collector is configured.
"""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvc.core.types import Decision
from services.router.ports import EngineChunk, EngineError, Observer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from kvc.core.events import End
    from kvc.core.types import GaveUp
    from services.router.ports import EngineCall, EnginePort, Named, Result

_W3C = TraceContextTextMapPropagator()
_decision: ContextVar[Decision | None] = ContextVar("decision", default=None)
"""What the request's calls to engines follow from."""


class TracedEngines:
    """An EnginePort whose calls are spans, children of the current one; engines are handed their context."""

    def __init__(self, engines: EnginePort, tracer: trace.Tracer) -> None:
        """Traces calls to `engines`."""
        self._engines = engines
        self._tracer = tracer

    async def generate(self, call: EngineCall) -> AsyncGenerator[EngineChunk, None]:
        """As the port's."""
        decision = _decision.get()
        with self._span("engine.generate", decision.decode.worker_id if decision else "", call) as (span, traced):
            last = EngineChunk()
            try:
                async with aclosing(self._engines.generate(traced)) as chunks:
                    async for chunk in chunks:
                        if not (last.output_ids or last.text):
                            span.add_event("first chunk")
                        last = chunk
                        yield chunk
            finally:
                span.set_attributes(_usage(last))

    async def prefill(self, call: EngineCall) -> None:
        """As the port's."""
        decision = _decision.get()
        worker = decision.prefill.worker_id if decision is not None and decision.prefill is not None else ""
        with self._span("engine.prefill", worker, call) as (_, traced):
            await self._engines.prefill(traced)

    @contextmanager
    def _span(self, name: str, worker_id: str, call: EngineCall) -> Iterator[tuple[trace.Span, EngineCall]]:
        """A span and the call that carries it. It is never the current one: a stream is read by several tasks, each with a context."""
        decision = _decision.get()
        attributes = {"kvc.worker_id": worker_id, "kvc.rid": call.rid, "kvc.session_id": call.session_id, "url.full": call.url}
        if decision is not None:
            attributes |= {"kvc.mode": decision.mode.value, "kvc.executor": decision.executor.value}
        span = self._tracer.start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(span))
        try:
            yield span, replace(call, traceparent=carrier.get("traceparent", ""))
        except EngineError as error:
            span.set_attributes({"error.type": error.reason, "http.response.status_code": error.status})
            span.set_status(trace.Status(trace.StatusCode.ERROR, error.reason))
            raise
        finally:
            span.end()


class TracedDispatches(Observer):
    """An observer that also writes what it sees to the request's span."""

    def __init__(self, inner: Observer) -> None:
        """Passes everything on to `inner`."""
        self._inner = inner

    def decided(self, decision: Decision | GaveUp, decide_s: float) -> None:
        """An event for each decision."""
        self._inner.decided(decision, decide_s)
        if isinstance(decision, Decision):
            _decision.set(decision)
        trace.get_current_span().add_event("decided", decided_attributes(decision, decide_s))

    def retried(self, request: Named, decision: Decision, error: EngineError) -> None:
        """An event for each worker that failed before the first token."""
        self._inner.retried(request, decision, error)
        trace.get_current_span().add_event("retried", {"error.type": error.reason, "kvc.worker_id": decision.decode.worker_id})

    def ended(self, request: Named, decision: Decision | None, end: End, result: Result | None, error: BaseException | None) -> None:
        """How it ended, as attributes."""
        self._inner.ended(request, decision, end, result, error)
        span = trace.get_current_span()
        span.set_attributes({"kvc.request_id": request.request_id, "kvc.session_id": request.session_id, "kvc.end": end.value})
        span.set_attribute("kvc.input_tokens", request.input_tokens)
        if decision is not None:
            span.set_attributes(choice(decision))
        if result is not None:
            span.set_attributes(_usage(result.last) | {"kvc.ttft_s": round(result.ttft_s, 6), "kvc.mesh_s": round(result.mesh_s, 6)})


def decided_attributes(outcome: Decision | GaveUp, decide_s: float) -> dict[str, str | int | float]:
    """What the event `decided` says."""
    attributes: dict[str, str | int | float] = {
        "kvc.decide_s": round(decide_s, 6),
        "kvc.queued_s": round(outcome.queued_s, 6),
        "kvc.probes": len(outcome.probes),
    }
    return attributes | (choice(outcome) if isinstance(outcome, Decision) else {"kvc.gave_up": outcome.why.value})


def choice(decision: Decision) -> dict[str, str | int]:
    """How and where a turn runs."""
    chosen: dict[str, str | int] = {
        "kvc.mode": decision.mode.value,
        "kvc.executor": decision.executor.value,
        "kvc.decode": decision.decode.worker_id,
        "kvc.overlap_blocks": decision.overlap_blocks,
    }
    return chosen | ({"kvc.prefill": decision.prefill.worker_id} if decision.prefill is not None else {})


def _usage(last: EngineChunk) -> dict[str, str | int | float]:
    return {
        "kvc.cached_tokens": last.cached_tokens,
        "kvc.output_tokens": last.completion_tokens,
        "kvc.finish_reason": last.finish_reason,
        "kvc.engine_ttft_s": last.engine_ttft_s,
    }
