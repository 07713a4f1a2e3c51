"""Admit on one long-lived stream an agent, batched.

    idle       a question leaves at the end of the loop's turn, with all that were asked in it
    expecting  a batch is unanswered: questions wait for its first answer, for `HOLD_S` at most, and then leave together
    down       questions go by unary Admit, also those that were under way when the stream broke; it is opened again after a pause

A message costs both ends some 50 microseconds however little is in it: while the agent is at work on one batch, asking again would not be
answered sooner. Every question has its own deadline, so an agent that hangs delays nobody else's answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvc import wire
from kvc.core.blocks import HASH_BYTES
from kvc.core.dispatch import Unreachable
from kvc.core.types import Attempt
from kvc.runtime.backoff import pause_s
from kvc.v1 import admission_pb2
from services.router.adapters.agents import answer_of
from services.router.adapters.duplex import Broken

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.core.dispatch import Answer, Ask
    from services.router.adapters.agents import Agents
    from services.router.adapters.duplex import Duplex
    from services.router.door.admission import Asking


MAX_BATCH = 512
MAX_BATCH_BYTES = 1 << 20
QUESTION_BYTES = 512
HOLD_S = 0.002
RETRY_BASE_S = 0.1
RETRY_CAP_S = 1.0


class _Question:
    """One question on its way."""

    __slots__ = ("answered", "ask", "asked_s", "traceparent")

    def __init__(self, ask: Ask, answered: Callable[[Answer], None], asked_s: float, traceparent: str) -> None:
        self.ask = ask
        self.answered = answered
        self.asked_s = asked_s
        self.traceparent = traceparent


class Outbox:
    """Batches that wait to be sent, and when the next may leave. No I/O, no clock."""

    def __init__(self, hold_s: float) -> None:
        """Empty; what comes first may leave at once.

        Args:
            hold_s: longest wait for the answer to the batch before, seconds.
        """
        self._hold_s = hold_s
        self._batches: deque[admission_pb2.AdmitStreamRequest] = deque()
        self._bytes = 0
        self._free_s = 0.0

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._batches)

    def due_s(self, now_s: float) -> float:
        """When what waits may leave: now, or when the batch before has been unanswered for `hold_s`."""
        return max(now_s, self._free_s)

    def room(self, size_bytes: int) -> admission_pb2.AdmitStreamRequest:
        """The batch that the next `size_bytes` bytes go into. Mutates."""
        batches = self._batches
        last = batches[-1] if batches else None
        if last is None or self._bytes + size_bytes > MAX_BATCH_BYTES or len(last.admits) + len(last.releases) >= MAX_BATCH:
            last = admission_pb2.AdmitStreamRequest()
            batches.append(last)
            self._bytes = 0
        self._bytes += size_bytes
        return last

    def take(self, now_s: float) -> admission_pb2.AdmitStreamRequest:
        """The oldest batch, which leaves now. Mutates."""
        self._free_s = now_s + self._hold_s
        return self._batches.popleft()

    def answered(self) -> None:
        """The agent has answered something: the next batch may leave. Mutates."""
        self._free_s = 0.0

    def clear(self) -> None:
        """Forgets everything. Mutates."""
        self._batches.clear()
        self._free_s = 0.0


class AgentStream:
    """The stream to one agent. `up` while questions may be asked on it."""

    def __init__(self, agents: Agents, target: str, fallback: Asking, timeout_s: float, hold_s: float) -> None:
        """Opens nothing until `run`."""
        self._agents = agents
        self._target = target
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._deadline_ms = max(1, int(timeout_s * 1000))
        self._open: dict[Attempt, _Question] = {}  # in the order of their deadlines
        self._outbox = Outbox(hold_s)
        self._call: Duplex | None = None
        self._answers = 0
        self._due: asyncio.Handle | None = None
        self._late: asyncio.TimerHandle | None = None
        self.up = False

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:
        """Asks on the stream, or by unary Admit while it is down."""
        if not self.up or ask.attempt in self._open:
            self._fallback.ask(ask, answered, traceparent)
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._open[ask.attempt] = _Question(ask, answered, now_s, traceparent)
        if self._late is None:
            self._late = loop.call_at(now_s + self._timeout_s, self._expire)
        batch = self._outbox.room(QUESTION_BYTES + HASH_BYTES * len(ask.turn.chain))
        wire.admit_request_into(
            batch.admits.add(), ask.attempt, ask.worker, ask.turn, ask.offer, deadline_ms=self._deadline_ms, traceparent=traceparent
        )
        self._schedule(loop, now_s)

    async def run(self) -> None:
        """Keeps the stream open until it is cancelled."""
        failures = 0
        while True:
            answers = self._answers
            with contextlib.suppress(OSError, TimeoutError, Broken):
                await self._converse()
            self._broken()
            failures = 1 if self._answers > answers else failures + 1
            await asyncio.sleep(pause_s(failures, RETRY_BASE_S, RETRY_CAP_S, least=0.5))

    async def _converse(self) -> None:
        """One life of the stream."""
        over = asyncio.Event()
        call = await self._agents.stream(self._target, self._received, self._flush, lambda _: over.set())
        try:
            self._call, self.up = call, True
            await over.wait()
        finally:
            self._call, self.up = None, False
            call.close()

    def _schedule(self, loop: asyncio.AbstractEventLoop, now_s: float) -> None:
        """Makes sure that what waits in the outbox leaves. Mutates."""
        if self._due is not None:
            return
        due_s = self._outbox.due_s(now_s)
        self._due = loop.call_soon(self._flush) if due_s <= now_s else loop.call_at(due_s, self._flush)

    def _flush(self) -> None:
        """Sends what may leave, as long as the agent has room for it; what is asked meanwhile joins the next."""
        self._due = None
        outbox, call, now_s = self._outbox, self._call, asyncio.get_running_loop().time()
        while outbox and call is not None and call.writable:
            call.send(outbox.take(now_s).SerializeToString())

    def _received(self, message: bytes) -> None:
        try:
            response = admission_pb2.AdmitStreamResponse.FromString(message)
        except DecodeError:
            raise Broken("no AdmitStreamResponse") from None
        self._answers += 1
        self._take(response)

    def _take(self, response: admission_pb2.AdmitStreamResponse) -> None:
        """Answers; then lets leave what has waited for them, and what was asked on account of them. Mutates."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._outbox.answered()
        for result in response.results:
            pb = result.attempt
            question = self._open.pop(Attempt(pb.request_id, pb.attempt_number), None)
            if question is None:
                self._give_back(result)
            elif result.HasField("response"):
                question.answered(answer_of(question.ask, result.response, now_s - question.asked_s))
            else:
                error = wire.stream_error_from_pb(result.error)
                question.answered(Unreachable(error.code, gone=error.code == "UNAVAILABLE", elapsed_s=now_s - question.asked_s))
        if self._outbox:
            if self._due is not None:
                self._due.cancel()
            self._due = loop.call_soon(self._flush)

    def _give_back(self, result: admission_pb2.AdmitStreamResult) -> None:
        """An answer that came after its deadline: the turn has gone elsewhere, and a ticket in it would hold memory until its TTL."""
        response = result.response
        if response.WhichOneof("outcome") == "admission":
            release = self._outbox.room(QUESTION_BYTES).releases.add()
            release.attempt.CopyFrom(result.attempt)
            release.worker.CopyFrom(response.worker)
            release.ticket = response.admission.ticket

    def _expire(self) -> None:
        """Questions whose time is over; one timer serves all of them."""
        self._late = None
        loop = asyncio.get_running_loop()
        over_s = loop.time() - self._timeout_s
        while self._open:
            attempt, question = next(iter(self._open.items()))
            if question.asked_s > over_s:
                self._late = loop.call_at(question.asked_s + self._timeout_s, self._expire)
                return
            del self._open[attempt]
            question.answered(Unreachable("DEADLINE_EXCEEDED", gone=False, elapsed_s=self._timeout_s))

    def _broken(self) -> None:
        """Questions that are under way are asked again, by unary Admit: the same attempt gets the same answer."""
        questions, self._open = list(self._open.values()), {}
        self._outbox.clear()
        for handle in (self._due, self._late):
            if handle is not None:
                handle.cancel()
        self._due = self._late = None
        for question in questions:
            self._fallback.ask(question.ask, question.answered, question.traceparent)


class StreamAdmission:
    """One AgentStream an agent; the worker's agent is the one that is followed for it."""

    def __init__(self, agents: Agents, fallback: Asking, timeout_s: float, hold_s: float = HOLD_S) -> None:
        """Opens nothing until `run`.

        Args:
            agents: which agent answers for which worker.
            fallback: asks while a stream is down.
            timeout_s: longest wait for an answer, seconds.
            hold_s: longest wait of a question for the answer to the batch before it, seconds.
        """
        self._agents = agents
        self._fallback = fallback
        self._timeout_s = timeout_s
        self._hold_s = hold_s
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
                stream = AgentStream(self._agents, target, self._fallback, self._timeout_s, self._hold_s)
                self._streams[target] = stream
                group.create_task(stream.run())
