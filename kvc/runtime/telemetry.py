"""One OpenTelemetry trace a request, across router, agent and engine; off unless an endpoint is configured.

Between gRPC services interceptors (kvc.runtime.tracing) carry the context; over HTTP, over the engine link and inside batched streams
the W3C `traceparent` string does (`traceparent`, `context_from`). No global provider is set: whoever traces holds a `Telemetry`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvc.runtime.config import ConfigError, setting
from kvc.runtime.spans import SCOPE, SpanLog
from kvc.runtime.tracing import ClientTracing, ServerTracing

if TYPE_CHECKING:
    import grpc.aio

_EXPORT_TIMEOUT_S = 2
_SHUTDOWN_TIMEOUT_MS = 2000
_W3C = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Tracing settings."""

    endpoint: str | None = setting(None, help="OTLP gRPC collector, host:port; none = no tracing")
    insecure: bool = setting(default=True, help="talk to the collector without TLS")
    sample_ratio: float = setting(1.0, help="share of new traces that is recorded", minimum=0.0, maximum=1.0)


class Telemetry:
    """The tracer of one service and the interceptors that go with it. `log` takes spans that are written afterwards; None: nobody does."""

    def __init__(self, provider: TracerProvider | None, log: SpanLog | None = None) -> None:
        """Traces with `provider`; None traces nothing."""
        self._provider = provider
        self.log = log
        self.tracer: trace.Tracer = (provider or trace.NoOpTracerProvider()).get_tracer(SCOPE)

    @classmethod
    def start(cls, service: str, endpoint: str | None, *, insecure: bool = True, sample_ratio: float = 1.0) -> Self:
        """Starts exporting to an OTLP gRPC collector; without an endpoint nothing is recorded and calls cost next to nothing.

        A collector that is slow or down costs spans, never requests: they wait in a bounded queue for a thread of their own.

        Args:
            service: name of the service in traces.
            endpoint: `host:port` or URL of the collector.
            insecure: no TLS towards it.
            sample_ratio: share of traces begun here that is recorded, 0 to 1; a caller's decision is followed.

        Raises:
            ConfigError: `endpoint` is no address.
        """
        if not endpoint:
            return cls(None)
        if not _is_endpoint(endpoint):
            raise ConfigError(f"telemetry.endpoint: {endpoint!r} is neither host:port nor a URL with both")
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - only who exports pays

        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": service}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_TIMEOUT_S)
        processor = BatchSpanProcessor(exporter)
        provider.add_span_processor(processor)
        return cls(provider, SpanLog(processor, provider.resource, sample_ratio))

    @property
    def enabled(self) -> bool:
        """True when spans are recorded."""
        return self._provider is not None

    def server_interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Go before all others: an error must be a status by the time the span sees it."""
        return [ServerTracing(self.tracer)] if self.enabled else []

    def client_hooks(self) -> list[ClientTracing]:
        """What `kvc.runtime.channel.channel` wraps around every call."""
        return [ClientTracing(self.tracer)] if self.enabled else []

    def shutdown(self) -> None:
        """Exports what is left, for at most 2 s, and stops."""
        if self._provider is not None:
            self._provider.force_flush(_SHUTDOWN_TIMEOUT_MS)
            self._provider.shutdown()
            self._provider = None


def _is_endpoint(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and bool(parts.port) and " " not in endpoint
    except ValueError:
        return False


def traceparent() -> str:
    """W3C traceparent of the current span; empty when there is none or it is not recorded."""
    context = trace.get_current_span().get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def context_from(parent: str) -> Context:
    """The context to start a span in, as the child of a `traceparent`; a root when that is empty or malformed."""
    return _W3C.extract({"traceparent": parent}, context=Context()) if parent else Context()
