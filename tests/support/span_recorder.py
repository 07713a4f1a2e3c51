"""What a front door records of its requests, kept in memory, and how to read it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvc.runtime.spans import SpanLog
from services.router.door.spans import Tracing
from tests.support.front import DEADLINE_S, Front, front
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from opentelemetry.sdk.trace import Event, ReadableSpan

TRACE = "0123456789abcdef0123456789abcdef"
PARENT = f"00-{TRACE}-0123456789abcdef-01"
UNSAMPLED = PARENT[:-1] + "0"
ADMIT = "kvc.v1.AdmissionService/Admit"


class Recorder:
    """What was written."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.processor = SimpleSpanProcessor(self.exporter)

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    async def roots(self, count: int = 1) -> list[ReadableSpan]:
        """The root spans, once there are that many."""

        def found() -> list[ReadableSpan]:
            return [span for span in self.spans if span.name == "kvc.http"]

        await until(lambda: len(found()) == count, DEADLINE_S, f"{count} traces")
        return found()

    async def children(self) -> list[ReadableSpan]:
        """The spans under the only root, which they lie in."""
        (root,) = await self.roots()
        children = [span for span in self.spans if span is not root]
        for span in children:
            assert span.parent is not None
            assert root.context is not None
            assert (span.parent.span_id, span.parent.trace_id) == (root.context.span_id, root.context.trace_id)
            assert root.start_time is not None
            assert span.start_time is not None
            assert span.end_time is not None
            assert root.end_time is not None
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time
        return children

    async def told(self) -> list[tuple[str, str | None]]:
        """Names of the children with their errors, in the order in which they began."""
        return [(span.name, error(span)) for span in await self.children()]

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


def error(span: ReadableSpan) -> str | None:
    return span.status.description if span.status.status_code is StatusCode.ERROR else None


def noted(of: ReadableSpan | Event) -> dict[str, Any]:
    """All attributes."""
    return dict(of.attributes or {})


def attributes(span: ReadableSpan, *names: str) -> dict[str, Any]:
    """The attributes of these names, without their `kvc.`."""
    return {name: noted(span).get(f"kvc.{name}") for name in names}


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


@asynccontextmanager
async def traced(*, ratio: float = 1.0, **fields: Any) -> AsyncIterator[tuple[Front, Recorder]]:
    """A door whose requests are recorded."""
    recorder = Recorder()
    tracing = Tracing(SpanLog(recorder.processor, Resource.create({"service.name": "door"}), ratio))
    async with front(tracing=tracing, **fields) as door:
        yield door, recorder
