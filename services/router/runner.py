"""Runs a decided turn on its engines: the decode worker alone, or prefill and decode workers at once.

Until the first token everything can still be undone and tried elsewhere; a prefill worker that fails takes the decode worker's half
down with it at once, so nobody waits for KV that will not come (F32).
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.router.engines import LINGER_S, MAX_ROOM
from services.router.ports import EngineCall, EngineChunk, EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from kvc.core.types import Decision, WorkerInfo
    from services.router.ports import EnginePort

CAUSE_WAIT_S = 0.05
"""How long a decode worker's failure waits for the prefill worker's own words about it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the client asked for."""

    session_id: str
    tokens: bytes
    text: str | None
    max_new_tokens: int
    temperature: float
    traceparent: str = ""


class PrefillFailedError(EngineError):
    """The prefill worker did not do its half."""


class Runner:
    """Runs turns over an EnginePort."""

    def __init__(self, engines: EnginePort) -> None:
        """Uses one port for all engines."""
        self._engines = engines

    async def run(
        self, job: Job, decision: Decision, decode: WorkerInfo, prefill: WorkerInfo | None, on_prefilled: Callable[[], None]
    ) -> AsyncGenerator[EngineChunk, None]:
        """Streams the turn. Closing the iterator aborts it on every engine.

        Args:
            job: the turn.
            decision: how it runs.
            decode: the decode worker.
            prefill: the prefill worker, when one takes part.
            on_prefilled: called when the prefill worker is done.

        Raises:
            PrefillFailedError: the prefill worker failed.
            EngineError: the decode worker failed.
        """
        if prefill is None:
            async with aclosing(self._engines.generate(self._call(job, decision, decode, None))) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        bootstrap = (prefill.bootstrap_host, prefill.bootstrap_port, secrets.randbelow(MAX_ROOM))
        half = asyncio.create_task(self._engines.prefill(self._call(job, decision, prefill, bootstrap)))
        try:
            async with (
                aclosing(self._engines.generate(self._call(job, decision, decode, bootstrap))) as chunks,
                aclosing(_joined(chunks, half, on_prefilled)) as joined,
            ):
                async for chunk in joined:
                    yield chunk
        finally:
            half.cancel()
            await asyncio.gather(half, return_exceptions=True)

    def _call(self, job: Job, decision: Decision, worker: WorkerInfo, bootstrap: tuple[str, int, int] | None) -> EngineCall:
        admission = decision.admission
        # Never like a ticket, whatever a caller names its request.
        own = f"turn-{decision.attempt.request_id}.{decision.attempt.attempt_number}"
        return EngineCall(
            url=worker.engine_url,
            rid=admission.ticket if admission is not None and worker.ref == decision.decode else own,
            session_id=job.session_id,
            tokens=job.tokens,
            text=job.text,
            max_new_tokens=job.max_new_tokens,
            temperature=job.temperature,
            bootstrap=bootstrap,
            traceparent=job.traceparent,
        )


async def _joined(
    chunks: AsyncGenerator[EngineChunk, None], half: asyncio.Task[None], on_prefilled: Callable[[], None]
) -> AsyncGenerator[EngineChunk, None]:
    """The decode worker's chunks, for as long as the prefill worker has not failed."""
    following: asyncio.Task[EngineChunk] | None = None
    try:
        while not half.done():
            following = following or asyncio.ensure_future(anext(chunks))
            await asyncio.wait({following, half}, return_when=asyncio.FIRST_COMPLETED)
            if half.done() or not following.done():
                break
            try:
                chunk = following.result()
            except StopAsyncIteration:
                await asyncio.wait({half}, timeout=LINGER_S)
                return
            except EngineError as error:
                raise await _cause(error, half) from error
            following = None
            yield chunk
        _check(half)
        on_prefilled()
        if following is not None:
            try:
                chunk = await following
            except StopAsyncIteration:
                return
            following = None
            yield chunk
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    async for chunk in chunks:
        yield chunk


async def _cause(error: EngineError, half: asyncio.Task[None]) -> EngineError:
    """When the decode worker fails because the prefill worker did, the prefill worker's own words are the better reason."""
    await asyncio.wait({half}, timeout=CAUSE_WAIT_S)
    failure = _failure(half) if half.done() else None
    return failure or error


def _check(half: asyncio.Task[None]) -> None:
    failure = _failure(half)
    if failure is not None:
        raise failure


def _failure(half: asyncio.Task[None]) -> PrefillFailedError | None:
    """What a prefill half that is done failed of."""
    if half.cancelled():  # by nobody here: the connection pool was closed under it
        return PrefillFailedError(0, "prefill-failed", "the call was cut off")
    error = half.exception()
    if error is None:
        return None
    if isinstance(error, EngineError):
        failure = PrefillFailedError(
            error.status, error.reason, error.message, gone=error.gone, field=error.field, retry_after_s=error.retry_after_s
        )
    else:
        failure = PrefillFailedError(0, "prefill-failed", f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
