"""Clients of a mesh: sessions whose every reply is checked, alone or many at once as load."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from kvc import wire
from kvc.core.blocks import TOKEN_BYTES
from kvc.engine.reference.config import DEFAULT_MODEL
from kvc.errors import KvcError, from_rpc_error
from kvc.evaluation.tokens import tail_tokens
from kvc.evaluation.verify import KvValueVerifier
from kvc.v1 import router_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvc.core.types import Executor, Mode, WorkerRef
    from services.local_mesh.client import RouterClient

DEADLINE_S = 60.0


@dataclass
class Turn:
    """One turn as its client saw it. Times by the monotonic clock; `first_s` is None while no chunk has come."""

    session_id: str
    prompt: bytes
    asked_tokens: int
    sent_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    output: bytes = b""
    decision: router_pb2.Decision | None = None
    finished: router_pb2.Finished | None = None
    error: KvcError | None = None

    @property
    def ok(self) -> bool:
        """The whole reply came."""
        return self.finished is not None

    @property
    def input_tokens(self) -> int:
        """Prompt length."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def history(self) -> bytes:
        """Prompt and reply."""
        return self.prompt + self.output

    @property
    def worker(self) -> WorkerRef | None:
        """Who decoded it, and in which life."""
        return wire.ref_from_pb(self.decision.decode) if self.decision is not None else None

    @property
    def prefiller(self) -> WorkerRef | None:
        """The prefill worker that took part."""
        return wire.ref_from_pb(self.decision.prefill) if self.decision is not None and self.decision.HasField("prefill") else None

    @property
    def mode(self) -> Mode:
        """How it ran."""
        assert self.decision is not None, self.error
        return wire.MODE_FROM_PB[self.decision.mode]

    @property
    def executor(self) -> Executor:
        """Who prefilled."""
        assert self.decision is not None, self.error
        return next(executor for executor, pb in wire.EXECUTOR_TO_PB.items() if pb == self.decision.executor)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused."""
        assert self.finished is not None, self.error
        return self.finished.cached_tokens

    @property
    def wall_s(self) -> float:
        """From request to end."""
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float:
        """From request to first chunk."""
        assert self.first_s is not None, self.error
        return self.first_s - self.sent_s


class Conversation:
    """A session as its client has it: the history is what was sent and received in turns that completed."""

    def __init__(self, client: RouterClient, session_id: str, *, prefix: bytes = b"") -> None:
        """Says nothing yet.

        Args:
            client: the router.
            session_id: the session.
            prefix: tokens its first prompt begins with.
        """
        self.client = client
        self.session_id = session_id
        self.history = prefix
        self.turns: list[Turn] = []
        self._made = 0
        self._verifier = KvValueVerifier(DEFAULT_MODEL)

    def words(self, tokens: int) -> bytes:
        """New tokens that nobody else has."""
        self._made += 1
        return tail_tokens(f"{self.session_id}/{self._made}", tokens)

    async def turn(self, append: int | bytes, output_tokens: int, *, timeout_s: float = DEADLINE_S, last: bool = False) -> Turn:
        """The next turn, to its end; an error is in the result. A reply that is not what the prompt calls for fails the test."""
        prompt = self.history + (self.words(append) if isinstance(append, int) else append)
        return await self.ask(prompt, output_tokens, timeout_s=timeout_s, last=last)

    async def ask(
        self,
        prompt: bytes,
        output_tokens: int,
        *,
        timeout_s: float = DEADLINE_S,
        last: bool = False,
        on_chunk: Callable[[Turn], None] | None = None,
        request_id: str = "",
    ) -> Turn:
        """A turn with a prompt of its own: the history becomes it and its reply when it completes.

        Args:
            prompt: packed tokens.
            output_tokens: reply length.
            timeout_s: deadline.
            last: the session ends with it.
            on_chunk: called after every chunk.
            request_id: the client's id.
        """
        turn = Turn(self.session_id, prompt, output_tokens, time.monotonic())
        self.turns.append(turn)
        request = router_pb2.DispatchRequest(
            request_id=request_id,
            session_id=self.session_id,
            packed_input_ids=prompt,
            max_new_tokens=output_tokens,
            close_session=last,
        )
        try:
            async for message in self.client.stub.Dispatch(request, timeout=timeout_s):
                self._take(turn, message)
                if on_chunk is not None and message.HasField("chunk"):
                    on_chunk(turn)
        except grpc.aio.AioRpcError as error:
            turn.error = from_rpc_error(error)
        finally:
            turn.ended_s = time.monotonic()
        self.check(turn)
        if turn.ok:
            self.history = turn.history
        return turn

    async def leave(self, append: int, output_tokens: int, *, after_s: float = DEADLINE_S, after_tokens: int | None = None) -> Turn:
        """The next turn, which its client leaves after a time, or when so many tokens have come; the history stays as it was."""
        history, enough = self.history, asyncio.Event()

        def look(turn: Turn) -> None:
            if after_tokens is not None and len(turn.output) >= after_tokens * TOKEN_BYTES:
                enough.set()

        asking = asyncio.create_task(self.ask(history + self.words(append), output_tokens, on_chunk=look))
        waiting = asyncio.create_task(enough.wait())
        try:
            await asyncio.wait({asking, waiting}, timeout=after_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
            waiting.cancel()
            await asyncio.wait({asking, waiting})
        turn = self.turns[-1]
        self.check(turn)
        return turn

    def _take(self, turn: Turn, message: router_pb2.DispatchResponse) -> None:
        if message.HasField("chunk"):
            turn.first_s = turn.first_s or time.monotonic()
            turn.output += array("I", message.chunk.output_ids).tobytes()
        elif message.HasField("decision"):
            turn.decision = message.decision
        else:
            turn.finished = message.finished

    def check(self, turn: Turn) -> None:
        """Every token that came is the right one, and a reply that is said to be whole is whole."""
        got = len(turn.output) // TOKEN_BYTES
        right = self._verifier.expected(self.session_id, turn.prompt, turn.asked_tokens)
        assert turn.output == right[: len(turn.output)], (
            f"wrong reply in {self.session_id} after {len(self.turns)} turns from {turn.worker}"
        )
        if turn.finished is not None:
            assert got == turn.asked_tokens, (got, turn.asked_tokens, turn.finished.finish_reason)
            assert turn.finished.prompt_tokens == turn.input_tokens


@dataclass
class Load:
    """Sessions that talk until they are told to stop."""

    conversations: list[Conversation]
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def turns(self) -> list[Turn]:
        """Every turn that has ended, in the order in which they ended."""
        return sorted((turn for one in self.conversations for turn in one.turns if turn.ended_s), key=lambda turn: turn.ended_s)

    @property
    def open(self) -> list[Turn]:
        """Turns that have not ended."""
        return [turn for one in self.conversations for turn in one.turns if not turn.ended_s]

    def completed(self, since_s: float = 0.0) -> int:
        """Turns completed since a moment."""
        return sum(turn.ok for turn in self.turns if turn.ended_s >= since_s)

    def everybody(self, since_s: float) -> bool:
        """True when each session has completed a turn that it began after a moment."""
        return all(any(turn.ok and turn.sent_s >= since_s for turn in one.turns) for one in self.conversations)


@dataclass(frozen=True)
class Shape:
    """What the sessions of a load ask: tokens of the first prompt, of appends and of replies, and the pause between turns."""

    first: tuple[int, int] = (2_000, 6_000)
    append: tuple[int, int] = (200, 1_500)
    output: tuple[int, int] = (20, 200)
    pause_s: float = 0.0
    limit: int = 40_000
    """A session that has grown to this many tokens ends, and another begins in its place."""


@asynccontextmanager
async def load(client: RouterClient, name: str, sessions: int, shape: Shape, *, seed: int = 1) -> AsyncIterator[Load]:
    """Sessions that talk for as long as the block lasts; on exit each says goodbye, which ends the session."""
    running = Load([])

    async def talk(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        generation = 0
        while not running.stopping.is_set():
            one = Conversation(client, f"{name}-{number}-{generation}")
            if generation == 0:
                running.conversations.append(one)
            else:
                one.turns = running.conversations[number].turns
                running.conversations[number] = one
            generation += 1
            size = draw.randint(*shape.first)
            while size < shape.limit and not running.stopping.is_set():
                tokens = draw.randint(*shape.append) if one.history else size
                asked = draw.randint(*shape.output)
                turn = await one.turn(tokens, asked, last=size + tokens + asked >= shape.limit)
                size = turn.input_tokens + turn.asked_tokens
                await asyncio.sleep(shape.pause_s)
            if size < shape.limit:
                await one.turn(8, 1, last=True)

    async with asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(talk(number))
        try:
            yield running
        finally:
            running.stopping.set()
