"""One Admit over gRPC: as the router asks, against an agent that decides at once, on loopback, beside an empty call on the same server.

Client and server share one event loop, so a number is the computing of both ends; two processes overlap parts of it. What the agent
would wait for its engine is not in it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from bench.report import Row
from bench.timing import MICRO, percentile
from bench.world import BLOCK_TOKENS, RESERVE_TOKENS, random_chain
from kvc import wire
from kvc.core.admit import admit
from kvc.core.params import params_for
from kvc.core.types import Admission, Attempt, Facts, Turn, WorkerRef
from kvc.runtime.channel import channel
from kvc.v1 import admission_pb2, admission_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvc.core.types import Outcome

NAME = "grpc"
TIMEOUT_S = 10.0
WORKER = WorkerRef("d0", 1)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    prefix_blocks: tuple[int, ...] = (0, 4167)
    capacity_tokens: int = 400_000
    calls: int = 300
    rounds: int = 5


class Agent:
    """An agent whose engine is idle and holds every prompt but its last 2,000 tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        """Decides with the default profile."""
        self._capacity_tokens = capacity_tokens
        self._params = params_for("default")

    async def admit(self, request: admission_pb2.AdmitRequest, _: object) -> admission_pb2.AdmitResponse:
        """Algorithm 2 without an engine."""
        attempt, worker, turn, offer = wire.admit_request_to_core(request, BLOCK_TOKENS)
        facts = Facts(self._capacity_tokens, matched_tokens=max(0, turn.input_tokens - 2_000))
        return wire.outcome_to_pb(_with_ticket(admit(facts, turn, self._params, offer)), attempt, worker, facts)


def _with_ticket(outcome: Outcome) -> Admission:
    assert isinstance(outcome, Admission), f"an idle engine takes the turn: {outcome}"
    return Admission(outcome.mode, outcome.executor, outcome.append_tokens, outcome.need_tokens, "kvc-1", 5.0)


async def _answer_nothing(_: bytes, __: object) -> bytes:
    return b""


def measure(size: Size | None = None) -> list[Row]:
    """All rows."""
    return asyncio.run(_measure(size or Size()))


async def _measure(size: Size) -> list[Row]:
    server = grpc.aio.server()
    answer = grpc.unary_unary_rpc_method_handler(
        Agent(size.capacity_tokens).admit, admission_pb2.AdmitRequest.FromString, admission_pb2.AdmitResponse.SerializeToString
    )
    nothing: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_answer_nothing)
    for service, method, handler in (("kvc.v1.AdmissionService", "Admit", answer), ("bench.Empty", "Call", nothing)):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with channel(f"127.0.0.1:{port}") as wires:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = wires.unary_unary("/bench.Empty/Call")
            floor = await _time(lambda _: call(b"", timeout=TIMEOUT_S), size)
            stub: admission_pb2_grpc.AdmissionServiceAsyncStub = admission_pb2_grpc.AdmissionServiceStub(wires)
            rows = [Row(NAME, "an empty unary call, p50", floor[0], "µs", detail=f"p99 {floor[1]:.0f} µs")]
            return rows + [await _row(stub, blocks, size, floor[0]) for blocks in size.prefix_blocks]
    finally:
        await server.stop(0)


async def _row(stub: admission_pb2_grpc.AdmissionServiceAsyncStub, blocks: int, size: Size, floor_us: float) -> Row:
    turn = Turn("session", 3, random_chain(random.Random(1), blocks), blocks * BLOCK_TOKENS + 12, RESERVE_TOKENS, known_session=True)

    async def ask(number: int) -> None:
        request = wire.admit_request_to_pb(Attempt("request", number), WORKER, turn, None, deadline_ms=1000)
        response = await stub.Admit(request, timeout=TIMEOUT_S)
        outcome = wire.outcome_from_pb(response)
        wire.facts_from_pb(response.facts)
        assert isinstance(outcome, Admission), outcome

    p50, p99 = await _time(ask, size)
    detail = f"p99 {p99:.0f} µs; {8 * blocks:,} bytes of hashes"
    return Row(NAME, f"Admit with {blocks:,} blocks, p50", p50, "µs", baseline=floor_us, baseline_name="an empty call", detail=detail)


async def _time(call: Callable[[int], Awaitable[object]], size: Size) -> tuple[float, float]:
    """p50 and p99 in microseconds, medians over the rounds; one call at a time."""
    for number in range(10):
        await call(number)
    results = []
    for _ in range(size.rounds):
        spent = []
        for number in range(size.calls):
            start = time.perf_counter_ns()
            await call(number)
            spent.append(float(time.perf_counter_ns() - start))
        spent.sort()
        results.append((percentile(spent, 50), percentile(spent, 99)))
    p50, p99 = (statistics.median(column) * MICRO for column in zip(*results, strict=True))
    return p50, p99
