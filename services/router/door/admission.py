"""How an exchange asks for admission: a question and a callback, so that a hot turn needs no task.

StreamAdmission   one AdmitStream an agent, batched a loop turn (services/router/adapters/admit_stream.py)
TaskAdmission     unary Admit; the fallback while a stream is down
LocalAdmission    no question at all: the router's own copy of the worker's numbers decides (`admission = off`)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from opentelemetry.context import attach, detach

from kvc.core.admit import admit
from kvc.core.dispatch import Admitted, Refused, Unreachable
from kvc.core.prefill import matched_tokens
from kvc.core.types import Admission, Facts
from kvc.runtime.telemetry import context_from
from kvc.runtime.tracing import with_own_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.core.dispatch import Answer, Ask
    from kvc.core.members import WorkerState
    from kvc.core.params import Params
    from kvc.core.state import Sigma
    from services.router.ports import AdmissionPort

NOT_RECORDED: Final = f"00-{1:032x}-{1:016x}-00"
"""What a unary call carries for a request that is not recorded: without it the call would begin a trace of its own."""


class Asking(Protocol):
    """Asks for admission."""

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:
        """Asks; `answered` is called exactly once, possibly before this returns.

        Args:
            ask: the question.
            answered: gets the answer.
            traceparent: the question's span, when it is recorded.
        """
        ...


class LocalAdmission:
    """Decides from Σ alone: no ticket, no promise; what the engine cannot take it queues."""

    def __init__(self, sigma: Sigma) -> None:
        """Reads `sigma`."""
        self._sigma = sigma

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:  # noqa: ARG002 - nobody is asked
        """Answers at once."""
        worker = self._sigma.worker(ask.worker)
        answered(Unreachable("NOT_FOUND", gone=True) if worker is None else local_answer(ask, worker, self._sigma.params))


def local_answer(ask: Ask, worker: WorkerState, params: Params) -> Admitted | Refused:
    """Algorithm 2 over what Σ knows of the worker. Reads only."""
    known = worker.facts
    matched = matched_tokens(ask.turn, worker)
    held = (known.held_tokens, known.reserved_tokens, known.evictable_tokens) if known is not None else (0, 0, 0)
    facts = Facts(worker.info.capacity_tokens, *held, matched, prefill_tokens_per_s=worker.info.prefill_tokens_per_s)
    outcome = admit(facts, ask.turn, params, ask.offer)
    return Admitted(outcome, facts) if isinstance(outcome, Admission) else Refused(outcome, facts)


class TaskAdmission:
    """Asks through the unary port, in a task of its own."""

    def __init__(self, port: AdmissionPort, timeout_s: float) -> None:
        """Waits `timeout_s` for each answer."""
        self._port = port
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str = "") -> None:
        """Asks."""
        task = asyncio.get_running_loop().create_task(self._ask(ask, answered, traceparent or NOT_RECORDED))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, ask: Ask, answered: Callable[[Answer], None], traceparent: str) -> None:
        token = attach(with_own_span(context_from(traceparent)))
        try:
            answer = await self._port.admit(ask, self._timeout_s)
        finally:
            detach(token)
        answered(answer)

    def close(self) -> None:
        """Cancels questions in flight."""
        for task in self._tasks:
            task.cancel()
