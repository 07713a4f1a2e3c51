"""The engine link's calls, answered by the reference engine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind

from kvc import checks
from kvc.core.types import WorkerInfo
from kvc.engine import link
from kvc.engine.convert import facts_to_link, info_to_welcome
from kvc.engine.hop import HOP_CAPABILITY
from kvc.errors import Precondition
from kvc.runtime.telemetry import context_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvc.engine.reference.engine import Engine
    from kvc.runtime.telemetry import Telemetry

MAX_SESSIONS = 10_000
SESSION_CAPABILITIES = ("admit", "release", "residency", "local-append", HOP_CAPABILITY)


class LinkDesk:
    """Implements kvc.engine.link_serve.LinkHandler."""

    def __init__(self, engine: Engine, engine_url: str, telemetry: Telemetry) -> None:
        """Answers for `engine`, which is reached at `engine_url`."""
        self._engine = engine
        self._engine_url = engine_url
        self._telemetry = telemetry

    async def handle(self, body: link.RequestBody) -> link.ReplyBody:
        """Answers one call, between two scheduler steps.

        Raises:
            KvcError: the call cannot be answered; names the field at fault.
        """
        try:
            return self._handle(body)
        finally:
            self._engine.wake()

    def snapshot(self) -> Iterable[link.Snapshot]:
        """What is resident now."""
        self._engine.publish()
        return self._engine.residency.snapshot()

    def _handle(self, body: link.RequestBody) -> link.ReplyBody:
        desk = self._engine.desk
        match body:
            case link.Hello():
                return self._welcome()
            case link.Admit():
                return self._admit(body)
            case link.Release(ticket):
                return link.Released(desk.release(ticket))
            case link.Load():
                return self._load()
            case link.ListSessions():
                return self._sessions(body)
            case link.Drain(draining):
                desk.draining = draining
                return link.Drained(len(self._engine.inflight) + len(desk.tickets))
            case _:
                raise Precondition(f"{type(body).__name__} is not served")

    def _admit(self, body: link.Admit) -> link.ReplyBody:
        if not self._engine.config.worker_role.keeps_sessions:
            raise Precondition("a prefill engine keeps no sessions")
        with self._span(body.traceparent) as attributes:
            answer = self._engine.desk.admit(body)
            attributes["kvc.session_id"] = body.session_id
            attributes["kvc.outcome"] = answer.mode if isinstance(answer, link.Admitted) else answer.reason
            return answer

    def _welcome(self) -> link.Welcome:
        engine, config = self._engine, self._engine.config
        info = WorkerInfo(
            ref=engine.identity,
            role=config.worker_role,
            model=config.model,
            capacity_tokens=engine.pool.capacity_pages * config.page_tokens,
            page_tokens=config.page_tokens,
            block_tokens=config.block_tokens,
            engine_url=self._engine_url,
            bootstrap_host=config.public_host if config.role == "prefill" else "",
            bootstrap_port=engine.bootstrap.port,
            prefill_tokens_per_s=config.costs.chunked_prefill_tokens_per_s(config.chunk),
            transfer_tokens_per_s=config.costs.transfer_tokens_per_s,
            hash_seed=engine.hash_seed,
            max_input_tokens=engine.max_input_tokens,
            capabilities=SESSION_CAPABILITIES if config.worker_role.keeps_sessions else ("residency",),
        )
        return info_to_welcome(info)

    def _load(self) -> link.LoadReport:
        engine = self._engine
        engine.desk.expire()
        return link.LoadReport(
            facts=facts_to_link(engine.desk.facts()),
            sessions=len(engine.sessions),
            open_tickets=len(engine.desk.tickets),
            evicted_tokens=engine.pool.evicted_pages * engine.config.page_tokens,
            peak_use=engine.pool.peak_used_pages / engine.pool.capacity_pages,
        )

    def _sessions(self, body: link.ListSessions) -> link.Sessions:
        limit = checks.count(body.limit, "limit", 0, MAX_SESSIONS)
        names = [body.session_id] if body.session_id else self._engine.sessions.recent(limit)
        records = [record for name in names if (record := self._record(name)) is not None]
        return link.Sessions(records, len(self._engine.sessions))

    def _record(self, session_id: str) -> link.SessionRecord | None:
        engine = self._engine
        session = engine.sessions.get(session_id)
        busy = engine.sessions.owner(session_id) is not None
        if session is None:
            return link.SessionRecord(session_id, 0, 0, 0, busy) if busy else None
        resident = engine.tree.resident_prefix(session.pages) * engine.config.page_tokens
        return link.SessionRecord(session_id, session.committed_tokens, resident, session.generation, busy)

    @contextlib.contextmanager
    def _span(self, traceparent: str) -> Iterator[dict[str, str]]:
        """A span under the caller's; none without one: a question of a request that is not recorded begins no trace."""
        attributes: dict[str, str] = {}
        if not (self._telemetry.enabled and traceparent):
            yield attributes
            return
        with self._telemetry.tracer.start_as_current_span("engine.admit", context_from(traceparent), SpanKind.SERVER) as span:
            yield attributes
            span.set_attributes(attributes)
