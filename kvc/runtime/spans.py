"""Spans that are written afterwards: ids come first, times are noted on the way, and a span is built only when its trace is recorded.

A live span costs several microseconds to start and to end, recorded or not. A path that cannot afford that for every request asks
`SpanLog.records` once, hands the ids on in a traceparent, and gives all spans of the request to `write` when it is over.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor

SCOPE: Final = "kvc"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
Value = str | int | float


class Noted:
    """What is known of one span so far. Times are nanoseconds since 1970; `end_ns` 0: it is not over. `error`: its status is this error."""

    __slots__ = ("attributes", "end_ns", "error", "events", "kind", "name", "parent_id", "span_id", "start_ns")

    def __init__(self, name: str, kind: SpanKind, parent_id: int, attributes: Mapping[str, Value]) -> None:
        """Starts now, under a random id."""
        self.name = name
        self.kind = kind
        self.parent_id = parent_id
        self.span_id = random.getrandbits(64) or 1
        self.attributes = dict(attributes)
        self.events: list[Event] = []
        self.error: str | None = None
        self.end_ns = 0
        self.start_ns = time.time_ns()

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Something that happens now. Mutates."""
        self.events.append(Event(name, attributes))

    def end(self) -> None:
        """It ends now, unless it has ended. Mutates."""
        self.end_ns = self.end_ns or time.time_ns()


class SpanLog:
    """Where finished spans go, and which traces that begin here are recorded."""

    def __init__(self, processor: SpanProcessor, resource: Resource, ratio: float) -> None:
        """Writes to `processor`.

        Args:
            processor: gets every span when it is written.
            resource: who the spans are of.
            ratio: share of traces begun here that is recorded, 0 to 1.
        """
        self._processor = processor
        self._resource = resource
        self._scope = InstrumentationScope(SCOPE)
        self._bound = TraceIdRatioBased(ratio).bound

    def records(self, trace_id: int) -> bool:
        """Whether a new trace of this id is recorded; the same answer as the SDK's sampler of that ratio."""
        return trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound

    def write(self, trace_id: int, spans: Iterable[Noted], remote_id: int = 0) -> None:
        """Builds spans and hands them over. Those that have not ended end now.

        Args:
            trace_id: the trace of all of them.
            spans: in any order.
            remote_id: the span of another process among the parents, if there is one.
        """
        for span in spans:
            span.end()
            self._processor.on_end(self._built(trace_id, span, remote_id))

    def _built(self, trace_id: int, span: Noted, remote_id: int) -> ReadableSpan:
        parent_id = span.parent_id
        parent = SpanContext(trace_id, parent_id, is_remote=parent_id == remote_id, trace_flags=_SAMPLED) if parent_id else None
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=span.events,
            kind=span.kind,
            status=_UNSET if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )
