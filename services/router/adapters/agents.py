"""Admission agents over gRPC: one channel an agent, shared by Admit calls and the residency stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from kvc import wire
from kvc.core.dispatch import Admitted, Refused, Unreachable
from kvc.core.types import Admission
from kvc.errors import KvcError
from kvc.runtime.channel import channel
from kvc.v1 import admission_pb2, admission_pb2_grpc

if TYPE_CHECKING:
    from kvc.core.dispatch import Ask
    from kvc.core.types import Attempt, WorkerRef
    from kvc.runtime.clock import Clock
    from kvc.runtime.telemetry import Telemetry
    from services.router.config import AgentsConfig

RELEASE_TIMEOUT_S = 1.0
_MARGIN_S = 0.005


class Agents:
    """Channels by target, and which target answers for which worker. Use as an async context manager."""

    def __init__(self, config: AgentsConfig, telemetry: Telemetry | None = None) -> None:
        """Opens nothing yet."""
        self._config = config
        self._telemetry = telemetry
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, admission_pb2_grpc.AdmissionServiceAsyncStub] = {}
        self._target_of: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        """Nothing to open: channels connect when they are used."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes all channels."""
        for one in self._channels.values():
            await one.close()

    def stub(self, target: str) -> admission_pb2_grpc.AdmissionServiceAsyncStub:
        """The stub of an agent."""
        if target not in self._stubs:
            config = self._config
            self._channels[target] = channel(
                target,
                tls_ca=config.tls_ca,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                token=config.token,
                telemetry=self._telemetry,
            )
            self._stubs[target] = admission_pb2_grpc.AdmissionServiceStub(self._channels[target])
        return self._stubs[target]

    def learn(self, worker_id: str, target: str) -> None:
        """The agent at `target` answers for the worker."""
        self._target_of[worker_id] = target

    def stub_of(self, worker_id: str) -> admission_pb2_grpc.AdmissionServiceAsyncStub | None:
        """The stub of the worker's agent; None when no agent has said that it is its own."""
        target = self._target_of.get(worker_id)
        return self.stub(target) if target is not None else None


class GrpcAdmission:
    """AdmissionPort by unary calls, with at most one hedge: the answer is the same, because Admit is idempotent by attempt (R16)."""

    def __init__(self, agents: Agents, hedge_after_s: float, clock: Clock) -> None:
        """Asks a second time when `hedge_after_s` has passed without an answer; 0 = never."""
        self._agents = agents
        self._hedge_after_s = hedge_after_s
        self._clock = clock

    async def admit(self, ask: Ask, timeout_s: float) -> Admitted | Refused | Unreachable:
        """Asks the worker's agent; a failure is an Unreachable."""
        start_s = self._clock.now_s()
        stub = self._agents.stub_of(ask.worker.worker_id)
        if stub is None:
            return Unreachable("NOT_FOUND", gone=True)
        request = wire.admit_request_to_pb(ask.attempt, ask.worker, ask.turn, ask.offer, deadline_ms=max(1, int(timeout_s * 1000)))
        try:
            response = await self._answer(stub, request, timeout_s)
            outcome = wire.outcome_from_pb(response)
            facts = wire.facts_from_pb(response.facts)
        except grpc.aio.AioRpcError as error:
            return Unreachable(error.code().name, error.code() is grpc.StatusCode.UNAVAILABLE, self._clock.now_s() - start_s)
        except KvcError as error:
            return Unreachable(error.code, gone=False, elapsed_s=self._clock.now_s() - start_s)
        elapsed_s = self._clock.now_s() - start_s
        if isinstance(outcome, Admission):
            return Admitted(outcome, facts, elapsed_s)
        return Refused(outcome, facts, elapsed_s)

    async def _answer(
        self, stub: admission_pb2_grpc.AdmissionServiceAsyncStub, request: admission_pb2.AdmitRequest, timeout_s: float
    ) -> admission_pb2.AdmitResponse:
        first = stub.Admit(request, timeout=timeout_s)
        if not 0 < self._hedge_after_s < timeout_s - _MARGIN_S:
            return await first
        calls = [asyncio.ensure_future(_result(first))]
        try:
            await asyncio.wait(calls, timeout=self._hedge_after_s)
            if not calls[0].done():
                calls.append(asyncio.ensure_future(_result(stub.Admit(request, timeout=timeout_s - self._hedge_after_s))))
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            answered = next((call for call in calls if call.done() and call.exception() is None), None)
            if answered is None:
                await asyncio.wait(calls)
                answered = next((call for call in calls if call.exception() is None), calls[0])
            return answered.result()
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def release(self, attempt: Attempt, ref: WorkerRef, ticket: str) -> None:
        """Best effort."""
        stub = self._agents.stub_of(ref.worker_id)
        if stub is None:
            return
        request = admission_pb2.ReleaseRequest(attempt=wire.attempt_to_pb(attempt), worker=wire.ref_to_pb(ref), ticket=ticket)
        try:
            await stub.Release(request, timeout=RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return  # the ticket expires by itself (R8)


async def _result(call: grpc.aio.UnaryUnaryCall[admission_pb2.AdmitRequest, admission_pb2.AdmitResponse]) -> admission_pb2.AdmitResponse:
    return await call
