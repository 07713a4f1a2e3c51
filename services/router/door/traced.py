"""An exchange whose request is recorded: notes what it waits for, whom it asks, what it sends, and how each of these ends.

    kvc.http (root)
    ├─ kvc.wait          for the session's previous turn, for room, for a worker that is busy with the session
    ├─ .../Admit         one for each question; agent and engine continue it
    ├─ engine.prefill    one for each request that is sent to an engine, failed and refused ones too; the engine continues it
    ├─ engine.generate
    └─ kvc.stream        from the reply's first byte to its last

Everything else is Exchange: only a recorded request is one of these, so the others pay nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc import StatusCode
from opentelemetry.trace import SpanKind

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Pause, Refused, Resumed, Unreachable
from kvc.core.types import Decision, Executor, Mode, Role
from kvc.runtime.tracing import rpc_attributes
from services.router.door.admission import LocalAdmission
from services.router.door.exchange import Exchange
from services.router.tracing import choice, decided_attributes

if TYPE_CHECKING:
    from kvc.core.blocks import Chain
    from kvc.core.dispatch import Answer, Ask, Effect
    from kvc.core.types import GaveUp, WorkerInfo, WorkerRef
    from kvc.errors import KvcError
    from kvc.runtime.spans import Noted, Value
    from services.router.door.client import Client
    from services.router.door.door import Door
    from services.router.door.request import HttpRequest
    from services.router.door.spans import Trace

ADMIT = "/kvc.v1.AdmissionService/Admit"
_ERROR = 400


class TracedExchange(Exchange):
    """One routed request that is recorded."""

    def __init__(self, door: Door, client: Client, request: HttpRequest, trace: Trace) -> None:
        """Does nothing yet."""
        super().__init__(door, client, request)
        self._trace = trace
        self._step_span: Noted | None = None
        self._prefill_span: Noted | None = None
        self._decode_span: Noted | None = None
        self._stream_span: Noted | None = None
        self._chosen: Decision | None = None

    # --- waiting and asking -------------------------------------------------------------------------------------------------------

    async def _wait_turn(self, chain: Chain) -> None:
        self._step_span = self._trace.open("kvc.wait", SpanKind.INTERNAL, {"kvc.for": "session"})
        await super()._wait_turn(chain)

    def _entered(self, chain: Chain) -> None:
        self._end_step()
        super()._entered(chain)

    async def _wait(self, effect: Effect) -> None:
        waits: dict[str, Value] = {"kvc.for": "room"}
        if isinstance(effect, Pause):
            waits = {"kvc.for": "worker", "kvc.worker_id": effect.worker.worker_id}
        self._step_span = self._trace.open("kvc.wait", SpanKind.INTERNAL, waits)
        await super()._wait(effect)

    def _ask(self, ask: Ask) -> None:
        if isinstance(self._door.admission, LocalAdmission):
            super()._ask(ask)
            return
        attributes: dict[str, Value] = {"kvc.attempt_number": ask.attempt.attempt_number, "kvc.worker_id": ask.worker.worker_id}
        span = self._step_span = self._trace.open(ADMIT[1:], SpanKind.CLIENT, rpc_attributes(ADMIT) | attributes)
        self._door.admission.ask(ask, self._advance, self._trace.traceparent(span))

    def _advance(self, answer: Answer) -> None:
        span = self._step_span
        if span is not None:
            span.attributes |= _told(answer)
            span.error = answer.error if isinstance(answer, Unreachable) else None
            self._end_step()
        super()._advance(answer)

    def _end_step(self) -> None:
        span, self._step_span = self._step_span, None
        if span is not None:
            span.end()

    def _decided(self, outcome: Decision | GaveUp) -> None:
        decided_s = self.sent_s if self._landed is not None else self._door.clock.now_s()
        self._trace.root.event("decided", decided_attributes(outcome, decided_s - self.arrived_s))
        if isinstance(outcome, Decision):
            self._chosen = outcome
        super()._decided(outcome)

    # --- engines ------------------------------------------------------------------------------------------------------------------

    def _carried(self, worker: WorkerInfo, rid: str) -> bytes:
        decision = self._decision
        mode, executor = (decision.mode, decision.executor) if decision is not None else (Mode.DIRECT, Executor.LOCAL)
        attributes: dict[str, Value] = {
            "kvc.worker_id": worker.ref.worker_id,
            "kvc.rid": rid,
            "kvc.session_id": self.session_id,
            "kvc.mode": mode.value,
            "kvc.executor": executor.value,
            "url.full": worker.engine_url.rstrip("/") + self.request.path.decode("ascii"),
        }
        if worker.role is Role.PREFILL:
            span = self._prefill_span = self._trace.open("engine.prefill", SpanKind.CLIENT, attributes)
        else:
            span = self._decode_span = self._trace.open("engine.generate", SpanKind.CLIENT, attributes)
        return self._trace.traceparent(span).encode()

    def _ask_after_all(self, outcome: str) -> None:
        self._end_hop(outcome, error=None if outcome == "refused" else "hop-failed")
        super()._ask_after_all(outcome)

    def _hop_failed(self, *, gone: bool) -> None:
        self._end_hop("failed", error="worker-lost")
        super()._hop_failed(gone=gone)

    def _end_hop(self, outcome: str, *, error: str | None) -> None:
        span, self._decode_span = self._decode_span, None
        if span is not None:
            span.attributes["kvc.hop"] = outcome
            _fail(span, error)
            span.end()

    def _land(self) -> bool:
        span = self._decode_span
        landed = super()._land()
        if span is not None:
            span.attributes["kvc.hop"] = "landed" if landed else "failed"
        return landed

    def begins(self, cached_tokens: int) -> bytes | None:
        """As Exchange."""
        lines = super().begins(cached_tokens)
        if lines is not None:
            if self._decode_span is not None:
                self._decode_span.event("first chunk")
            self._stream_span = self._trace.open("kvc.stream", SpanKind.INTERNAL, {})
        return lines

    def completed(self, tail: bytes) -> None:
        """As Exchange."""
        status = self._client.status
        if self._decode_span is not None and status >= _ERROR:
            self._decode_span.attributes["http.response.status_code"] = status
            _fail(self._decode_span, f"http-{status}")
        super().completed(tail)

    def rejected(self, status: int, body: bytearray) -> bool:
        """As Exchange."""
        if self._decode_span is not None:
            self._decode_span.attributes["http.response.status_code"] = status
        return super().rejected(status, body)

    def decode_failed(self, reason: str, problem: str, *, gone: bool) -> None:
        """As Exchange."""
        _fail(self._decode_span, reason)
        super().decode_failed(reason, problem, gone=gone)

    def broken(self, problem: str) -> None:
        """As Exchange."""
        _fail(self._decode_span, "connection-lost")
        super().broken(problem)

    def prefill_failed(self, reason: str, problem: str, *, gone: bool) -> None:
        """As Exchange."""
        if self._prefill_span is not None:
            _fail(self._prefill_span, reason)
            self._prefill_span.end()
        super().prefill_failed(reason, problem, gone=gone)

    def prefill_done(self) -> None:
        """As Exchange."""
        if self._prefill_span is not None:
            self._prefill_span.end()
        super().prefill_done()

    def _failed(self, reason: str, problem: str, *, guilty: WorkerRef, gone: bool) -> None:
        decision = self._decision
        of_prefill = decision is not None and guilty == decision.prefill
        _fail(self._prefill_span if of_prefill else self._decode_span, reason)
        super()._failed(reason, problem, guilty=guilty, gone=gone)

    def _retry(self, reason: str, problem: str) -> None:
        if self._decision is not None:
            self._trace.root.event("retried", {"error.type": reason, "kvc.worker_id": self._decision.decode.worker_id})
        if self._prefill_span is None or self._prefill_span.error is None:
            _fail(self._decode_span, reason)
        super()._retry(reason, problem)

    def _end_attempt(self, end: ev.End) -> None:
        if end is ev.End.COMPLETED and self._decode_span is not None:
            self._decode_span.attributes |= self._usage()
        for span in (self._prefill_span, self._decode_span):
            if span is not None:
                span.end()
        self._prefill_span = self._decode_span = None
        super()._end_attempt(end)

    # --- the end ------------------------------------------------------------------------------------------------------------------

    def _finish(self, end: ev.End, error: KvcError | None = None) -> None:
        if self._over:
            return
        decision = self._decision
        super()._finish(end, error)
        self._end_step()
        if self._stream_span is not None:
            self._stream_span.end()
        root = self._trace.root
        root.attributes |= {
            "kvc.request_id": self.request_id,
            "kvc.session_id": self.session_id,
            "kvc.end": end.value,
            "kvc.input_tokens": self.input_tokens,
        }
        if decision is not None:
            root.attributes |= choice(decision)
        if self.first_s:
            root.attributes["kvc.ttft_s"] = round(self.first_s - self.arrived_s, 6)
        if decision is not None and end is ev.End.COMPLETED:
            root.attributes |= self._usage() | {"kvc.mesh_s": round(self.mesh_s(decision), 6)}
        if error is not None:
            self._trace.refused(error)
        self._trace.over()

    def _usage(self) -> dict[str, Value]:
        return {"kvc.cached_tokens": self.cached_tokens(), "kvc.output_tokens": self.output_tokens()}


def _told(answer: Answer) -> dict[str, Value]:
    """An answer as attributes, as the agent's span of the question has them."""
    if isinstance(answer, Admitted):
        admission = answer.admission
        return {"kvc.outcome": "admitted", "kvc.mode": admission.mode.value, "kvc.executor": admission.executor.value}
    if isinstance(answer, Refused):
        return {"kvc.outcome": "refused", "kvc.reason": answer.rejection.reason.value}
    if isinstance(answer, Resumed):
        return {"kvc.resumed": answer.why}
    told: dict[str, Value] = {"kvc.outcome": "error", "kvc.reason": answer.error}
    code = StatusCode.__members__.get(answer.error)
    return told | ({"rpc.grpc.status_code": code.value[0]} if code is not None else {})


def _fail(span: Noted | None, reason: str | None) -> None:
    """The call's error; the first one counts."""
    if span is not None and span.error is None and not span.end_ns and reason is not None:
        span.attributes["error.type"] = reason
        span.error = reason
