"""Admission agents over gRPC: one channel an agent, shared by Admit calls and the residency stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, Self

import grpc
import grpc.aio

from kvc import wire
from kvc.core.dispatch import Admitted, Refused, Unreachable
from kvc.core.types import Admission, WorkerInfo
from kvc.errors import KvcError, Precondition
from kvc.runtime.channel import MAX_MESSAGE_BYTES, channel
from kvc.runtime.tls import client_context
from kvc.v1 import admission_pb2, admission_pb2_grpc
from services.router.adapters.duplex import ALPN, Duplex

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from kvc.core.dispatch import Ask
    from kvc.core.types import Attempt, WorkerRef
    from kvc.runtime.clock import Clock
    from kvc.runtime.telemetry import Telemetry
    from services.router.config import AgentsConfig

RELEASE_TIMEOUT_S = 1.0
ADMIT_STREAM = "/kvc.v1.AdmissionService/AdmitStream"
_MARGIN_S = 0.005


class _Followed(NamedTuple):
    target: str
    info: WorkerInfo


class Agents:
    """Channels by target, and which agent is followed for which worker. Use as an async context manager."""

    def __init__(self, config: AgentsConfig, telemetry: Telemetry | None = None) -> None:
        """Opens nothing yet."""
        self._config = config
        self._telemetry = telemetry
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, admission_pb2_grpc.AdmissionServiceAsyncStub] = {}
        self._followed: dict[str, _Followed] = {}
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Self:
        """Makes the channels of all agents; they connect when they are used.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        config = self._config
        if config.tls_ca is not None:
            self._tls = client_context(config.tls_ca, config.tls_cert, config.tls_key, ALPN)
        for target in config.targets:
            self.stub(target)
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

    async def stream(
        self, target: str, received: Callable[[bytes], None], drained: Callable[[], None], ended: Callable[[str], None]
    ) -> Duplex:
        """AdmitStream to an agent, on a connection of its own; see Duplex.connect.

        Raises:
            OSError: nobody listens there, or TLS failed.
            TimeoutError: the agent is silent.
            Broken: whoever listens there speaks no gRPC.
        """
        token = self._config.token
        metadata = [("authorization", f"Bearer {token}")] if token else []
        return await Duplex.connect(
            target,
            ADMIT_STREAM,
            metadata,
            received,
            drained,
            ended,
            tls=self._tls,
            max_message_bytes=MAX_MESSAGE_BYTES,
            timeout_s=self._config.silence_s,
        )

    def follow(self, info: WorkerInfo, target: str) -> None:
        """From now on the agent at `target` answers for the worker. Mutates.

        Raises:
            Precondition: the worker cannot be one of this mesh: another agent answers for its name, or it serves another model.
        """
        mine = self._followed.get(info.ref.worker_id)
        if mine is not None and mine.target != target:
            raise Precondition(f"the agent at {mine.target} answers for worker {info.ref.worker_id} already", reason="WORKER_ID_TAKEN")
        other = next((one.info for one in self._followed.values() if one.target != target and one.info.hash_seed != info.hash_seed), None)
        if other is not None:
            raise Precondition(
                f"the worker serves another model: {info.model!r} here, {other.model!r} on worker {other.ref.worker_id}",
                reason="OTHER_MODEL",
            )
        self._followed[info.ref.worker_id] = _Followed(target, info)

    def leave(self, worker_id: str, target: str) -> bool:
        """The agent at `target` answers for the worker no more; False when it did not before. Mutates."""
        mine = self._followed.get(worker_id)
        if mine is None or mine.target != target:
            return False
        del self._followed[worker_id]
        return True

    def target_of(self, worker_id: str) -> str | None:
        """host:port of the agent that is followed for the worker."""
        mine = self._followed.get(worker_id)
        return mine.target if mine is not None else None

    def stub_of(self, worker_id: str) -> admission_pb2_grpc.AdmissionServiceAsyncStub | None:
        """The stub of the worker's agent; None when none is followed."""
        mine = self._followed.get(worker_id)
        return self.stub(mine.target) if mine is not None else None


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
        except grpc.aio.AioRpcError as error:
            return Unreachable(error.code().name, error.code() is grpc.StatusCode.UNAVAILABLE, self._clock.now_s() - start_s)
        return answer_of(ask, response, self._clock.now_s() - start_s)

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


def answer_of(ask: Ask, response: admission_pb2.AdmitResponse, elapsed_s: float) -> Admitted | Refused | Unreachable:
    """What an agent's response says to the question, whichever way it came; one that cannot be used is an Unreachable."""
    try:
        outcome = wire.outcome_from_pb(response)
        facts = wire.facts_from_pb(response.facts) if response.HasField("facts") else None
        answered = wire.ref_from_pb(response.worker)
    except KvcError as error:
        return Unreachable(error.code, gone=False, elapsed_s=elapsed_s)
    if not isinstance(outcome, Admission):
        return Refused(outcome, facts, elapsed_s)
    if answered != ask.worker or facts is None:  # a ticket of another worker or life (F60): useless here, and void there soon
        return Unreachable("STALE_EPOCH", gone=False, elapsed_s=elapsed_s)
    return Admitted(outcome, facts, elapsed_s)


async def _result(call: grpc.aio.UnaryUnaryCall[admission_pb2.AdmitRequest, admission_pb2.AdmitResponse]) -> admission_pb2.AdmitResponse:
    return await call
