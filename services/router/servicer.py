"""kvc.v1.RouterService: messages in, messages out; every decision is the router's."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvc import checks, wire
from kvc.core import events as ev
from kvc.core.blocks import resident_blocks
from kvc.core.route import explain, route
from kvc.errors import InvalidField, NotFound
from kvc.runtime.telemetry import traceparent
from kvc.v1 import router_pb2, router_pb2_grpc
from services.router import prompts
from services.router.ports import EngineChunk, Request, Started
from services.router.relay import batches

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    import grpc.aio

    from kvc.core.blocks import Chain
    from kvc.core.members import WorkerState
    from kvc.core.route import Candidate
    from kvc.core.types import Turn
    from kvc.runtime.clock import Clock
    from services.router.ports import Output, Result
    from services.router.router import Router

DEFAULT_NEW_TOKENS = 128
MAX_TEMPERATURE = 2.0
MARGIN_S = 0.05
MARGIN_SHARE = 0.1


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The router over gRPC."""

    def __init__(self, router: Router, clock: Clock, problems: Callable[[], dict[str, str]]) -> None:
        """Serves `router`.

        Args:
            router: the router.
            clock: the router's clock.
            problems: why the agents of workers are not followed, by worker.
        """
        self._router = router
        self._clock = clock
        self._problems = problems

    async def Route(
        self, request: router_pb2.RouteRequest, context: grpc.aio.ServicerContext[router_pb2.RouteRequest, router_pb2.RouteResponse]
    ) -> router_pb2.RouteResponse:
        """Algorithm 1 without any effect on Σ."""
        checks.session_id(request.session_id)
        sigma = self._router.sigma
        turn = self._hypothetical(request)
        routing = route(turn, sigma)
        return router_pb2.RouteResponse(
            worker=wire.ref_to_pb(routing.ref) if routing.ref is not None else None,
            candidates=[_candidate_pb(row) for row in explain(turn, sigma)],
            degenerate=routing.degenerate,
            prompt_blocks=len(turn.chain),
            shared_blocks=turn.shared_blocks,
        )

    def _hypothetical(self, request: router_pb2.RouteRequest) -> Turn:
        """The turn that this prompt would be, had it arrived."""
        sigma = self._router.sigma
        if request.WhichOneof("prompt") == "block_hashes":
            chain: Chain = prompts.hashes_of(request.block_hashes)
            tokens = len(chain) * sigma.params.block_tokens
        else:
            packed = prompts.tokens_of(request, self._router.config.requests.max_prompt_tokens)
            chain = self._router.chains.fresh(packed)
            tokens = len(packed) // 4
        return sigma.preview(request.session_id, chain, tokens)

    async def Dispatch(
        self,
        request: router_pb2.DispatchRequest,
        context: grpc.aio.ServicerContext[router_pb2.DispatchRequest, router_pb2.DispatchResponse],
    ) -> AsyncGenerator[router_pb2.DispatchResponse, None]:
        """Algorithm 3, streamed; chunks are coalesced after the first."""
        outputs = self._router.dispatch(self._request(request, context.time_remaining()))
        async with aclosing(batches(outputs, self._router.config.engines.coalesce_s)) as told:
            async for batch in told:
                for response in _responses(batch):
                    yield response

    def _request(self, pb: router_pb2.DispatchRequest, remaining_s: float | None) -> Request:
        limits = self._router.config.requests
        checks.session_id(pb.session_id)
        checks.identifier(pb.request_id, "request_id", empty=True)
        checks.count(pb.max_new_tokens, "max_new_tokens", 0, prompts.MAX_NEW_TOKENS)
        if not 0.0 <= pb.temperature <= MAX_TEMPERATURE:
            raise InvalidField(f"must be 0 to {MAX_TEMPERATURE}, is {pb.temperature}", field="temperature")
        tokens = prompts.tokens_of(pb, limits.max_prompt_tokens)
        # A little is kept back for the way home, so that the caller gets the typed error and not its own bare deadline.
        budget_s = (
            limits.timeout_s if remaining_s is None else min(limits.timeout_s, remaining_s - min(MARGIN_S, remaining_s * MARGIN_SHARE))
        )
        return Request(
            request_id=pb.request_id or uuid.uuid4().hex,
            session_id=pb.session_id,
            tokens=tokens,
            text=pb.text if pb.WhichOneof("prompt") == "text" else None,
            input_tokens=len(tokens) // 4,
            max_new_tokens=pb.max_new_tokens or DEFAULT_NEW_TOKENS,
            temperature=pb.temperature,
            deadline_s=self._clock.now_s() + budget_s,
            close_session=pb.close_session,
            traceparent=traceparent(),
        )

    async def GetSessionStatus(
        self,
        request: router_pb2.RouterServiceGetSessionStatusRequest,
        context: grpc.aio.ServicerContext[
            router_pb2.RouterServiceGetSessionStatusRequest, router_pb2.RouterServiceGetSessionStatusResponse
        ],
    ) -> router_pb2.RouterServiceGetSessionStatusResponse:
        """Pin, turns, counters and residency of one session."""
        checks.session_id(request.session_id)
        sigma = self._router.sigma
        session = sigma.session(request.session_id)
        if session is None:
            return router_pb2.RouterServiceGetSessionStatusResponse(known=False)
        chain = sigma.forest.chain(request.session_id)
        return router_pb2.RouterServiceGetSessionStatusResponse(
            known=True,
            pin=wire.ref_to_pb(session.pin) if session.pin is not None else None,
            turns=session.turns,
            context_tokens=session.context_tokens,
            rejects=[router_pb2.SessionRejects(worker_id=worker, rejects=count) for worker, count in sorted(session.rejects.items())],
            busy=self._router.gate.busy(request.session_id),
            residency=[
                router_pb2.SessionOverlap(worker_id=worker.ref.worker_id, resident_blocks=resident_blocks(chain, worker.resident))
                for worker in sorted(sigma.decode_workers(), key=lambda worker: worker.ref)
            ]
            if chain is not None
            else [],
        )

    async def ListWorkers(
        self,
        request: router_pb2.ListWorkersRequest,
        context: grpc.aio.ServicerContext[router_pb2.ListWorkersRequest, router_pb2.ListWorkersResponse],
    ) -> router_pb2.ListWorkersResponse:
        """Every worker the router has heard of, by role and name."""
        workers = sorted(self._router.sigma.workers.values(), key=lambda worker: (worker.info.role.value, worker.ref))
        return router_pb2.ListWorkersResponse(workers=[self._status(worker) for worker in workers])

    def _status(self, worker: WorkerState) -> router_pb2.WorkerStatus:
        info = wire.worker_info_to_pb(worker.info)
        info.draining = worker.draining or worker.info.draining
        problem = self._problems().get(worker.ref.worker_id, "") if worker.why_not else ""
        return router_pb2.WorkerStatus(
            info=info,
            load=self._router.loads.get(worker.ref.worker_id),
            eligible=not worker.why_not,
            why_not=": ".join(part for part in (worker.why_not, problem) if part),
            inflight=worker.inflight,
            assigned=worker.assigned,
            pinned_sessions=worker.placed_sessions,
            resident_blocks=len(worker.resident),
            modes=[router_pb2.ModeCount(mode=wire.MODE_TO_PB[mode], turns=count) for mode, count in worker.modes.items()],
            residency_fresh=worker.fresh,
        )

    async def DrainWorker(
        self,
        request: router_pb2.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[router_pb2.DrainWorkerRequest, router_pb2.DrainWorkerResponse],
    ) -> router_pb2.DrainWorkerResponse:
        """Stops or resumes routing to a worker; turns in flight finish."""
        checks.identifier(request.worker_id, "worker_id")
        worker = self._router.sigma.workers.get(request.worker_id)
        if worker is None:
            raise NotFound("no such worker", field="worker_id")
        self._router.apply(ev.WorkerDraining(request.worker_id, request.drain))
        return router_pb2.DrainWorkerResponse(inflight=worker.inflight)


def _responses(batch: list[Output]) -> Iterator[router_pb2.DispatchResponse]:
    """One message for the decision, one for all chunks, one for the end."""
    chunk: router_pb2.Chunk | None = None
    for output in batch:
        if isinstance(output, EngineChunk):
            if output.output_ids or output.text:
                chunk = chunk or router_pb2.Chunk()
                chunk.output_ids.extend(output.output_ids)
                chunk.text += output.text
            continue
        if chunk is not None:
            yield router_pb2.DispatchResponse(chunk=chunk)
            chunk = None
        if isinstance(output, Started):
            yield router_pb2.DispatchResponse(decision=wire.decision_to_pb(output.decision, decide_s=output.decide_s))
        else:
            yield router_pb2.DispatchResponse(finished=_finished_pb(output))
    if chunk is not None:
        yield router_pb2.DispatchResponse(chunk=chunk)


def _finished_pb(result: Result) -> router_pb2.Finished:
    last = result.last
    return router_pb2.Finished(
        finish_reason=last.finish_reason,
        prompt_tokens=last.prompt_tokens,
        completion_tokens=last.completion_tokens,
        cached_tokens=last.cached_tokens,
        ttft_s=result.ttft_s,
        latency_s=result.latency_s,
        engine_ttft_s=last.engine_ttft_s,
        engine_latency_s=last.engine_latency_s,
        mesh_s=result.mesh_s,
        decision=wire.decision_to_pb(result.decision, decide_s=result.decide_s),
    )


def _candidate_pb(row: Candidate) -> router_pb2.Candidate:
    return router_pb2.Candidate(
        worker=wire.ref_to_pb(row.ref),
        overlap_blocks=row.overlap_blocks,
        resident_blocks=row.resident_blocks,
        sticky=row.sticky,
        inflight=row.inflight,
        assigned=row.assigned,
        rejects=row.rejects,
        placement_load=row.placement_load,
        score=row.score,
        excluded=row.excluded,
    )
