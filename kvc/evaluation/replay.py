"""Replays a trace against a mesh as its clients would: closed loop, one turn of a session at a time, every reply checked."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core.blocks import TOKEN_BYTES
from kvc.errors import KvcError
from kvc.evaluation.ports import TurnResult
from kvc.evaluation.prompts import SessionPrompts
from kvc.evaluation.records import Record
from kvc.evaluation.stats import summarise
from kvc.evaluation.workload import select, think_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvc.evaluation.ports import MeshClient, Verifier
    from kvc.evaluation.stats import PoolUse, Summary
    from kvc.evaluation.traces import Trace, TraceRequest
    from kvc.evaluation.workload import ReplayOptions, SessionPlan, Workload

_MAX_ERROR_CHARACTERS = 300


@dataclass(slots=True)
class Progress:
    """How far a replay is; mutated as it goes.

    Attributes:
        total: requests of the workload.
        sessions: sessions of the workload.
        done: requests ended, in any way.
        failed: of those, without a complete reply.
        wrong: of those, with a wrong one.
        modes: of those, by mode.
        live: sessions begun and not ended.
        ended: sessions ended.
        elapsed_s: wall seconds.
    """

    total: int
    sessions: int
    done: int = 0
    failed: int = 0
    wrong: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    live: int = 0
    ended: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A finished replay: what was asked, one record a request in the order in which they ended, and its length."""

    workload: Workload
    records: tuple[Record, ...]
    wall_s: float

    def summary(self, pools: Sequence[PoolUse] = ()) -> Summary:
        """The run's numbers, with the pools' use when the mesh reports it."""
        return summarise(self.records, wall_s=self.wall_s, pools=pools)


async def replay(
    trace: Trace,
    client: MeshClient,
    options: ReplayOptions,
    *,
    verifier: Verifier | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> Run:
    """Replays a trace.

    Args:
        trace: what to ask.
        client: whom to ask.
        options: which part of it, and how fast.
        verifier: checks every reply; None: replies are not checked.
        on_progress: called after every request and at both ends.
        on_record: called with every request's record as it ends.

    Raises:
        ValueError: the options leave nothing to replay.
        ExceptionGroup: the client or a callback failed with anything but a KvcError; the replay is then cancelled.
    """
    driver = _Driver(select(trace, options), client, options, verifier, on_progress, on_record)
    return await driver.run()


class _Driver:
    """One replay."""

    def __init__(
        self,
        workload: Workload,
        client: MeshClient,
        options: ReplayOptions,
        verifier: Verifier | None,
        on_progress: Callable[[Progress], None] | None,
        on_record: Callable[[Record], None] | None,
    ) -> None:
        self._workload = workload
        self._client = client
        self._options = options
        self._verifier = verifier
        self._on_progress = on_progress
        self._on_record = on_record
        self._waiting = deque(workload.sessions)
        self._progress = Progress(workload.requests, len(workload.sessions))
        self._records: list[Record] = []
        self._began = 0.0

    async def run(self) -> Run:
        """Runs all sessions to their ends."""
        self._began = _now()
        self._report()
        async with asyncio.TaskGroup() as group:
            if self._options.live_sessions:
                for _ in range(min(self._options.live_sessions, len(self._waiting))):
                    group.create_task(self._slot())
            else:
                for plan in self._workload.sessions:
                    group.create_task(self._at_its_time(plan))
        self._report()
        return Run(self._workload, tuple(self._records), self._elapsed())

    async def _slot(self) -> None:
        """One live session after the other."""
        while self._waiting:
            await self._session(self._waiting.popleft())

    async def _at_its_time(self, plan: SessionPlan) -> None:
        await asyncio.sleep(plan.start_s / self._options.time_scale)
        await self._session(plan)

    async def _session(self, plan: SessionPlan) -> None:
        self._progress.live += 1
        prompts = SessionPrompts(self._workload.block_tokens, self._options.outputs)
        previous: TraceRequest | None = None
        result = TurnResult(ok=True)
        ended = _now()
        for turn, request in enumerate(plan.turns):
            pause_s = think_s(previous, request, result.latency_s, self._options)
            prompt = prompts.prompt(request, result.output)
            # Making and checking tokens takes real time: it is part of the pause, not on top of it.
            await asyncio.sleep(max(0.0, ended + pause_s / self._options.time_scale - _now()))
            began = _now()
            result = await self._ask(request, prompt, last=turn == len(plan.turns) - 1)
            ended = _now()
            wrong = self._is_wrong(request, prompt, result)
            self._keep(self._record(request, turn, prompts.kept_tokens, result, pause_s, began, ended, wrong=wrong))
            previous = request
        if self._verifier is not None:
            self._verifier.forget(plan.session_id)
        self._progress.live -= 1
        self._progress.ended += 1

    async def _ask(self, request: TraceRequest, prompt: bytes, *, last: bool) -> TurnResult:
        try:
            return await self._client.turn(request.session_id, prompt, request.output_tokens, request_id=request.request_id, last=last)
        except KvcError as error:
            return TurnResult(ok=False, error=f"{error.reason}: {error}")

    def _is_wrong(self, request: TraceRequest, prompt: bytes, result: TurnResult) -> bool:
        """A reply that differs from what the prompt calls for, or an engine that saw a prompt of another length."""
        if not result.ok or self._verifier is None:
            return False
        if result.prompt_tokens not in (0, request.input_tokens):
            return True
        return self._verifier.expected(request.session_id, prompt, request.output_tokens) != result.output

    def _record(
        self, request: TraceRequest, turn: int, kept: int, result: TurnResult, pause_s: float, began: float, ended: float, *, wrong: bool
    ) -> Record:
        outside_s = result.mesh_s + result.queued_s * self._options.time_scale
        return Record(
            request_id=request.request_id,
            session_id=request.session_id,
            turn=turn,
            request_type=request.request_type,
            input_tokens=request.input_tokens,
            append_tokens=request.input_tokens - kept,
            asked_tokens=request.output_tokens,
            received_tokens=len(result.output) // TOKEN_BYTES,
            ok=result.ok,
            wrong=wrong,
            error=result.error[:_MAX_ERROR_CHARACTERS],
            finish_reason=result.finish_reason,
            mode=result.mode,
            worker=result.worker,
            executor=result.executor,
            cached_tokens=result.cached_tokens,
            engine_ttft_s=result.ttft_s,
            mesh_s=result.mesh_s,
            queued_s=result.queued_s,
            ttft_s=result.ttft_s + outside_s,
            engine_latency_s=result.latency_s,
            latency_s=result.latency_s + outside_s,
            probes=result.probes,
            think_s=pause_s,
            started_s=began - self._began,
            wall_s=ended - began,
        )

    def _keep(self, record: Record) -> None:
        self._records.append(record)
        progress = self._progress
        progress.done += 1
        progress.failed += not record.ok
        progress.wrong += record.wrong
        progress.modes[record.mode] += 1
        if self._on_record is not None:
            self._on_record(record)
        self._report()

    def _report(self) -> None:
        self._progress.elapsed_s = self._elapsed()
        if self._on_progress is not None:
            self._on_progress(self._progress)

    def _elapsed(self) -> float:
        return _now() - self._began


def _now() -> float:
    return asyncio.get_running_loop().time()
