"""Admit on one long-lived stream an agent, batched: everything that is asked in one turn of the event loop travels in one message.

A stream is opened when it is first needed and again, after a pause, when it breaks; questions that are then under way, and those asked
meanwhile, go by unary Admit. Every question has its own deadline, so an agent that hangs delays nobody else's answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import grpc.aio

from kvc import wire
from kvc.core.dispatch import Unreachable
from kvc.core.types import Attempt
from kvc.v1 import admission_pb2
from services.router.adapters.agents import answer_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from kvc.core.dispatch import Answer, Ask
    from kvc.v1 import admission_pb2_grpc
    from services.router.adapters.agents import Agents
    from services.router.door.admission import Asking

MAX_BATCH = 512
RETRY_BASE_S = 0.05
RETRY_CAP_S = 1.0


class _Question:
    """One question on its way."""

    __slots__ = ("answered", "ask", "asked_s", "timer", "traceparent")

    def __init__(self, ask: Ask, answered: Callable[[Answer], None], asked_s: float, timer: asyncio.TimerHandle, traceparent: str) -> None:
        self.ask = ask
        self.answered = answered
        self.asked_s = asked_s
        self.timer = timer
        self.traceparent = traceparent


class AgentStream:
    """The stream to one agent. `up` while questions may be asked on it."""

    def __init__(self, stub: admission_pb2_grpc.AdmissionServiceAsyncStub, fallback: Asking, timeout_s: float) -> None:
        """Opens nothing until `run`."""
        self._stub = stub
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._open: dict[Attempt, _Question] = {}
        self._batch: list[admission_pb2.AdmitRequest] = []
        self._releases: list[admission_pb2.ReleaseRequest] = []
        self._wake = asyncio.Event()
        self.up = False

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:
        """Asks on the stream, or by unary Admit while it is down."""
        if not self.up or ask.attempt in self._open:
            self._fallback.ask(ask, answered, traceparent)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._timeout_s, self._late, ask.attempt)
        self._open[ask.attempt] = _Question(ask, answered, loop.time(), timer, traceparent)
        deadline_ms = max(1, int(self._timeout_s * 1000))
        self._batch.append(
            wire.admit_request_to_pb(ask.attempt, ask.worker, ask.turn, ask.offer, deadline_ms=deadline_ms, traceparent=traceparent)
        )
        self._wake.set()

    async def run(self) -> None:
        """Keeps the stream open until it is cancelled."""
        failures = 0
        while True:
            opened = False
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with contextlib.aclosing(self._responses()) as responses:
                    async for response in responses:
                        opened = True
                        for result in response.results:
                            self._take(result)
            self._broken()
            failures = 1 if opened else failures + 1
            bound = min(RETRY_CAP_S, RETRY_BASE_S * 2.0 ** min(failures, 8))
            await asyncio.sleep(random.uniform(bound / 2, bound))  # noqa: S311 - spreads reconnects, guards nothing

    async def _responses(self) -> AsyncGenerator[admission_pb2.AdmitStreamResponse, None]:
        call = self._stub.AdmitStream(self._batches())
        try:
            await call.wait_for_connection()
            self.up = True
            async for response in call:
                yield response
        finally:
            self.up = False
            call.cancel()

    async def _batches(self) -> AsyncIterator[admission_pb2.AdmitStreamRequest]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._batch = self._batch, []
            releases, self._releases = self._releases, []
            for start in range(0, max(len(batch), len(releases)), MAX_BATCH):
                part = slice(start, start + MAX_BATCH)
                yield admission_pb2.AdmitStreamRequest(admits=batch[part], releases=releases[part])

    def _take(self, result: admission_pb2.AdmitStreamResult) -> None:
        question = self._open.pop(Attempt(result.attempt.request_id, result.attempt.attempt_number), None)
        if question is None:
            self._give_back(result)
            return
        question.timer.cancel()
        elapsed_s = asyncio.get_running_loop().time() - question.asked_s
        if result.WhichOneof("result") == "response":
            question.answered(answer_of(question.ask, result.response, elapsed_s))
            return
        error = wire.stream_error_from_pb(result.error)
        question.answered(Unreachable(error.code, gone=error.code == "UNAVAILABLE", elapsed_s=elapsed_s))

    def _give_back(self, result: admission_pb2.AdmitStreamResult) -> None:
        """An answer that came after its deadline: the turn has gone elsewhere, and a ticket in it would hold memory until its TTL."""
        response = result.response
        if response.WhichOneof("outcome") == "admission":
            ticket = response.admission.ticket
            self._releases.append(admission_pb2.ReleaseRequest(attempt=result.attempt, worker=response.worker, ticket=ticket))
            self._wake.set()

    def _late(self, attempt: Attempt) -> None:
        question = self._open.pop(attempt)  # answering cancels the timer
        question.answered(Unreachable("DEADLINE_EXCEEDED", gone=False, elapsed_s=self._timeout_s))

    def _broken(self) -> None:
        """Questions that are under way are asked again, by unary Admit: the same attempt gets the same answer."""
        questions, self._open, self._batch, self._releases = list(self._open.values()), {}, [], []
        for question in questions:
            question.timer.cancel()
            self._fallback.ask(question.ask, question.answered, question.traceparent)


class StreamAdmission:
    """One AgentStream an agent; the worker's agent is the one that is followed for it."""

    def __init__(self, agents: Agents, fallback: Asking, timeout_s: float) -> None:
        """Opens nothing until `run`."""
        self._agents = agents
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._streams: dict[str, AgentStream] = {}

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:
        """Asks the worker's agent."""
        target = self._agents.target_of(ask.worker.worker_id)
        stream = self._streams.get(target) if target is not None else None
        (stream if stream is not None else self._fallback).ask(ask, answered, traceparent)

    def is_up(self, target: str) -> bool:
        """True while the agent is asked on its stream."""
        stream = self._streams.get(target)
        return stream is not None and stream.up

    async def run(self, targets: tuple[str, ...]) -> None:
        """Keeps streams to all agents open until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for target in targets:
                stream = AgentStream(self._agents.stub(target), self._fallback, self._timeout_s)
                self._streams[target] = stream
                group.create_task(stream.run())
