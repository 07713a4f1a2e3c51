"""An OpenTelemetry collector on 127.0.0.1 that keeps the spans it is sent."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
}


@dataclass(frozen=True)
class Span:
    """A span as it was sent. Ids are hex; `error` is the status description when the status is an error, else None."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]
    error: str | None
    start_ns: int
    end_ns: int

    @property
    def title(self) -> str:
        """Service, kind and the last part of the name."""
        return f"{self.service} {self.kind} {self.name.rpartition('/')[2]}"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans in the order in which they came."""

    target: str = ""
    spans: list[Span] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    async def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        self.raw.append(request.SerializeToString())
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            self.spans += [_span(service, one) for scope in resource.scope_spans for one in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace by their start."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def tree(self, trace_id: str) -> list[str]:
        """The trace as lines: two more spaces for each level, siblings by name. A span whose parent is missing is no part of it."""
        spans = self.trace(trace_id)
        known = {span.span_id for span in spans}
        roots = [span for span in spans if span.parent_id not in known]
        lines: list[str] = []

        def add(span: Span, depth: int) -> None:
            lines.append("  " * depth + span.title)
            for child in sorted((one for one in spans if one.parent_id == span.span_id), key=lambda one: one.title):
                add(child, depth + 1)

        for root in roots:
            add(root, 0)
        return lines


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """A collector that listens."""
    made = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]  # generated
    made.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield made
    finally:
        await server.stop(0)


def counts(spans: list[Span]) -> Counter[str]:
    """How many spans of each title."""
    return Counter(span.title for span in spans)


def _span(service: str, span: trace_pb2.Span) -> Span:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return Span(
        service=service,
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        events=tuple((event.name, _values(event.attributes)) for event in span.events),
        error=span.status.message if failed else None,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
