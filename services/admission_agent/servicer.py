"""kvc.v1.AdmissionService: checks what arrives, asks the agent, answers."""

from __future__ import annotations

import logging
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from kvc import checks
from kvc.core.types import WorkerRef
from kvc.runtime.asking import answer_of
from kvc.runtime.logs import event
from kvc.v1 import admission_pb2, admission_pb2_grpc
from kvc.wire import attempt_from_pb, ref_from_pb, ref_to_pb, worker_info_to_pb
from services.admission_agent.deadlines import child_timeout_s
from services.admission_agent.stream import AdmitStream
from services.admission_agent.translation import Ask, admit_from_pb, answer_into

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc.aio

    from kvc.errors import KvcError
    from kvc.runtime.asking import Pending
    from services.admission_agent.agent import AdmissionAgent, Admitter
    from services.admission_agent.config import AgentConfig
    from services.admission_agent.residency import Residency
    from services.admission_agent.translation import Answer

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

MAX_FOLLOWER_BYTES = 128
DEFAULT_SESSIONS = 1000
MAX_SESSIONS = 10_000


class AdmissionServicer(admission_pb2_grpc.AdmissionServiceServicer):
    """The service of one agent. Errors are KvcErrors; the server's error boundary makes statuses of them."""

    def __init__(self, agent: AdmissionAgent, admitter: Admitter, residency: Residency, config: AgentConfig) -> None:
        """Serves.

        Args:
            agent: answers everything but Admit.
            admitter: answers Admit.
            residency: what WatchResidency follows.
            config: limits and deadlines.
        """
        self._agent = agent
        self._admitter = admitter
        self._residency = residency
        self._config = config
        self._block_tokens = config.residency.block_tokens
        self._timeout_admit_s = config.admit.timeout_s
        self._margin_s = config.admit.margin_s
        self._streams: set[AdmitStream] = set()

    def close_streams(self) -> None:
        """Streams end once what they have read is answered. Mutates."""
        for stream in self._streams:
            stream.close()

    async def Admit(self, request: admission_pb2.AdmitRequest, context: Context) -> admission_pb2.AdmitResponse:
        """One turn."""
        ask = self._ask(request, context.time_remaining(), request.traceparent or _traceparent(context))
        response = admission_pb2.AdmitResponse()
        answer_into(response, request.attempt, await answer_of(partial(self._admitter.ask, ask)))
        return response

    async def AdmitStream(
        self, request_iterator: AsyncIterator[admission_pb2.AdmitStreamRequest], context: Context
    ) -> AsyncIterator[admission_pb2.AdmitStreamResponse]:
        """Many turns; the deadline of each is its own, and none waits for another."""
        event(logger, "admit_stream", level=logging.DEBUG, peer=context.peer())
        stream = AdmitStream(self._admit, self._release, self._config.admit.max_inflight)
        if self._agent.draining:
            stream.close()
        self._streams.add(stream)
        try:
            async with aclosing(stream.serve(request_iterator)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._streams.discard(stream)

    async def Release(self, request: admission_pb2.ReleaseRequest, context: Context) -> admission_pb2.ReleaseResponse:
        """One ticket."""
        return admission_pb2.ReleaseResponse(
            released=await answer_of(partial(self._release, request, remaining_s=context.time_remaining()))
        )

    async def GetSessionStatus(
        self, request: admission_pb2.AdmissionServiceGetSessionStatusRequest, context: Context
    ) -> admission_pb2.AdmissionServiceGetSessionStatusResponse:
        """One session."""
        session_id = checks.session_id(request.session_id)
        ref, session = await self._agent.session(session_id, self._timeout_s(context.time_remaining()))
        return admission_pb2.AdmissionServiceGetSessionStatusResponse(
            worker=ref_to_pb(ref),
            session=session or admission_pb2.SessionResidency(session_id=session_id),
            known=session is not None,
        )

    async def ListSessions(self, request: admission_pb2.ListSessionsRequest, context: Context) -> admission_pb2.ListSessionsResponse:
        """The most recently used sessions."""
        limit = checks.count(request.limit, "limit", 0, MAX_SESSIONS) or DEFAULT_SESSIONS
        ref, sessions, total = await self._agent.sessions(limit, self._timeout_s(context.time_remaining()))
        return admission_pb2.ListSessionsResponse(worker=ref_to_pb(ref), sessions=sessions, total=total)

    async def WatchResidency(
        self, request: admission_pb2.WatchResidencyRequest, context: Context
    ) -> AsyncIterator[admission_pb2.WatchResidencyResponse]:
        """A snapshot, then what changes, for as long as this life of the engine lasts."""
        name = checks.text(request.follower, "follower", 0, MAX_FOLLOWER_BYTES) or context.peer()
        self._agent.life()
        with self._residency.follow() as follower:
            event(logger, "follower_joined", follower=name, followers=self._residency.followers)
            try:
                async for message in follower:
                    yield message
            finally:
                event(logger, "follower_left", follower=name)

    async def GetWorker(self, request: admission_pb2.GetWorkerRequest, context: Context) -> admission_pb2.GetWorkerResponse:
        """The worker and its load at this moment."""
        info, load = await self._agent.worker(self._timeout_s(context.time_remaining()))
        return admission_pb2.GetWorkerResponse(info=worker_info_to_pb(info), load=load)

    def _admit(self, request: admission_pb2.AdmitRequest, answered: Callable[[Answer | KvcError], None]) -> Pending | None:
        """One element of a stream.

        Raises:
            KvcError: the request is wrong, or its time is over.
        """
        return self._admitter.ask(self._ask(request, None, request.traceparent), answered)

    def _ask(self, request: admission_pb2.AdmitRequest, remaining_s: float | None, traceparent: str) -> Ask:
        message = admit_from_pb(request, self._block_tokens, traceparent)
        deadline_ms = request.deadline_ms
        if deadline_ms and (remaining_s is None or remaining_s > deadline_ms / 1000):
            remaining_s = deadline_ms / 1000
        timeout_s = child_timeout_s(self._timeout_admit_s, remaining_s, self._margin_s)
        worker = request.worker
        return Ask(WorkerRef(worker.worker_id, worker.epoch), message, timeout_s)

    def _release(
        self, request: admission_pb2.ReleaseRequest, answered: Callable[[bool | KvcError], None], *, remaining_s: float | None = None
    ) -> Pending | None:
        """One ticket.

        Raises:
            KvcError: the request is wrong, or its time is over.
        """
        if request.HasField("attempt"):
            attempt_from_pb(request.attempt)
        worker = ref_from_pb(request.worker)
        ticket = checks.identifier(request.ticket, "ticket")
        return self._agent.release(worker, ticket, answered, self._timeout_s(remaining_s))

    def _timeout_s(self, remaining_s: float | None) -> float:
        return child_timeout_s(self._config.engine.call_timeout_s, remaining_s, self._config.admit.margin_s)


def _traceparent(context: Context) -> str:
    """The caller's trace context from the call's metadata; an oversized one is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and len(value) <= checks.MAX_TRACEPARENT_BYTES:
            return value
    return ""
