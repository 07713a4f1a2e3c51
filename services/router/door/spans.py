"""The trace of a request over HTTP: whether it is recorded is known when it begins, its spans are built when its reply has ended.

    Tracing.begin   client's traceparent, or a new one by the configured ratio -> the request's own, and a Trace if it is recorded
    Trace           the root span `kvc.http` and what is noted under it (services/router/door/traced.py does)
    -> answered / over, whichever comes; the loop's next turn writes everything to the exporter

What is not recorded costs its traceparent and nothing else. A traceparent that nobody here records is passed on as it came.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanKind

from kvc.runtime.spans import Noted
from kvc.runtime.tracing import is_fault
from services.router.door.request import ROUTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvc.errors import KvcError
    from kvc.runtime.spans import SpanLog, Value
    from services.router.door.request import HttpRequest

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1
_SPAN_ID_BITS: Final = 64
_SPAN_ID_MASK: Final = (1 << _SPAN_ID_BITS) - 1
_FAULT: Final = 500


def traceparent_of(request: HttpRequest) -> bytes:
    """What a request that nobody records carries on: its own, else a new one, whose id still ties the reply to the engine's log."""
    given = request.header(b"traceparent")
    if given is not None and _TRACEPARENT.fullmatch(given) is not None:
        return given
    raw = b"%048x" % random.getrandbits(192)
    return b"00-%b-%b-00" % (raw[:32], raw[32:])


class Tracing:
    """Begins traces of requests."""

    def __init__(self, log: SpanLog) -> None:
        """Records to `log`."""
        self._log = log

    def begin(self, request: HttpRequest) -> tuple[bytes, Trace | None]:
        """The traceparent of a request, and its trace when that is recorded. Only what may be routed is traced."""
        if request.path not in ROUTED:
            return traceparent_of(request), None
        given = request.header(b"traceparent")
        match = _TRACEPARENT.fullmatch(given) if given is not None else None
        if given is not None and match is not None:
            if not int(match[3], 16) & _SAMPLED:
                return given, None
            trace = Trace(self._log, request, int(match[1], 16), int(match[2], 16))
        else:
            ids = random.getrandbits(192)
            trace_id, span_id = ids >> _SPAN_ID_BITS, ids & _SPAN_ID_MASK
            if not self._log.records(trace_id):
                return b"00-%032x-%016x-00" % (trace_id, span_id), None
            trace = Trace(self._log, request, trace_id, 0)
        return trace.traceparent(trace.root).encode(), trace


class Trace:
    """One recorded request."""

    def __init__(self, log: SpanLog, request: HttpRequest, trace_id: int, parent_id: int) -> None:
        """Begins now, under a span of the client unless `parent_id` is 0."""
        self._log = log
        self._trace_id = trace_id
        self._parent_id = parent_id
        attributes = {"http.request.method": request.method.decode("ascii", "replace"), "url.path": request.path.decode("ascii", "replace")}
        self.root = Noted("kvc.http", SpanKind.SERVER, parent_id, attributes)
        self._spans = [self.root]
        self._status = 0
        self._error: KvcError | None = None

    def open(self, name: str, kind: SpanKind, attributes: Mapping[str, Value]) -> Noted:
        """A span under the root that begins now."""
        span = Noted(name, kind, self.root.span_id, attributes)
        self._spans.append(span)
        return span

    def traceparent(self, span: Noted) -> str:
        """What carries the trace on, to those whose work is a part of `span`."""
        return f"00-{self._trace_id:032x}-{span.span_id:016x}-01"

    def refused(self, error: KvcError) -> None:
        """Why the request was not done."""
        self._error = error

    def answered(self, status: int) -> None:
        """The reply, or its head, has gone out."""
        self._status = status

    def over(self) -> None:
        """The request is over. What else is noted in this turn of the event loop still belongs to it."""
        if not self.root.end_ns:
            self.root.end()
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        status, error = self._status, self._error
        if status:
            self.root.attributes["http.response.status_code"] = status
        if error is not None:
            self.root.attributes["kvc.reason"] = error.reason
        if error is not None and is_fault(error.code):
            self.root.error = f"{error.code}: {error}"
        elif status >= _FAULT:
            self.root.error = f"HTTP {status}"
        spans, self._spans = self._spans, []
        self._log.write(self._trace_id, spans, self._parent_id)
