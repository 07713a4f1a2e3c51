"""What the router needs of the world, and the values that pass between it and its callers. Fakes are plain classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvc.core.value import value

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvc.core.dispatch import Admitted, Ask, Refused, Unreachable
    from kvc.core.events import End
    from kvc.core.types import Attempt, Decision, GaveUp, WorkerRef


class AdmissionPort(Protocol):
    """Asks agents. One object serves all workers."""

    async def admit(self, ask: Ask, timeout_s: float) -> Admitted | Refused | Unreachable:
        """Algorithm 2 on one worker; idempotent by attempt. Never raises for a failure of the worker or the network."""
        ...

    async def release(self, attempt: Attempt, ref: WorkerRef, ticket: str) -> None:
        """Gives a ticket back, best effort: an unreachable worker's tickets expire by themselves."""
        ...


@value(frozen=True, slots=True)
class EngineCall:
    """One turn for one engine.

    Attributes:
        url: base URL.
        rid: request id at the engine; a ticket when admitted.
        session_id: the session.
        tokens: the prompt, packed little-endian u32.
        text: the prompt as text, when the client sent text; the engine tokenizes it then.
        max_new_tokens: tokens to generate.
        temperature: sampling temperature.
        bootstrap: (host, port, room) when the KV comes from, or goes to, another worker.
        traceparent: W3C trace context, or empty.
    """

    url: str
    rid: str
    session_id: str
    tokens: bytes
    text: str | None
    max_new_tokens: int
    temperature: float
    bootstrap: tuple[str, int, int] | None = None
    traceparent: str = ""


@value(frozen=True, slots=True)
class EngineChunk:
    """Tokens since the previous chunk; the last one carries `finish_reason` and the usage. Engine times are modelled seconds, or 0."""

    text: str = ""
    output_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    engine_ttft_s: float = 0.0
    engine_latency_s: float = 0.0


class EngineError(Exception):
    """An engine did not do a turn.

    Attributes:
        status: HTTP status, 0 when none was received.
        reason: the engine's error type, or what happened to the connection.
        gone: the connection was refused or broke: the engine is probably dead.
        field: the request field the engine objects to, or empty.
        retry_after_s: pause hint.
    """

    def __init__(self, status: int, reason: str, message: str, *, gone: bool = False, field: str = "", retry_after_s: float = 0.0) -> None:
        """One line for people in `message`."""
        super().__init__(f"{reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.gone = gone
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def final(self) -> bool:
        """True when another engine would say the same: the request itself is at fault."""
        return self.status in _FINAL


_FINAL = frozenset({400, 404, 413, 422})


class EnginePort(Protocol):
    """Runs turns on engines over HTTP."""

    def generate(self, call: EngineCall) -> AsyncGenerator[EngineChunk, None]:
        """Streams a turn; closing the iterator aborts it. Raises EngineError."""
        ...

    async def prefill(self, call: EngineCall) -> None:
        """Runs a prefill worker's part of a turn to its end; the reply is dropped. Raises EngineError."""
        ...


@value(frozen=True, slots=True)
class Request:
    """A validated Dispatch request. `deadline_s` is by the router's clock."""

    request_id: str
    session_id: str
    tokens: bytes
    text: str | None
    input_tokens: int
    max_new_tokens: int
    temperature: float
    deadline_s: float
    close_session: bool = False
    traceparent: str = ""


@value(frozen=True, slots=True)
class Started:
    """The decision that brought the first chunk. `decide_s`: from receipt until the engines were asked, waiting included."""

    decision: Decision
    decide_s: float


@value(frozen=True, slots=True)
class Result:
    """The end of a turn. Times in seconds; `mesh_s`: before the engines were asked, not spent waiting for room or another turn."""

    last: EngineChunk
    decision: Decision
    decide_s: float
    ttft_s: float
    latency_s: float
    mesh_s: float


Output: TypeAlias = "Started | EngineChunk | Result"


class Named(Protocol):
    """What observers need to know of a request, whichever way it came."""

    @property
    def request_id(self) -> str:
        """Its id."""
        ...

    @property
    def session_id(self) -> str:
        """Its session."""
        ...

    @property
    def input_tokens(self) -> int:
        """Its prompt."""
        ...


class Observer:
    """What metrics and logs see; every method may be overridden."""

    def decided(self, decision: Decision | GaveUp, decide_s: float) -> None:
        """Algorithm 3 returned; once an attempt."""

    def retried(self, request: Named, decision: Decision, error: EngineError) -> None:
        """A worker failed before the first token; the request is decided anew."""

    def ended(self, request: Named, decision: Decision | None, end: End, result: Result | None, error: BaseException | None) -> None:
        """A request ended; once a request. `decision` is None when it ended without one in force, `error` when it failed or was left."""
