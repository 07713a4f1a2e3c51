"""Drives a dispatch generator by hand and keeps what was said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.core.dispatch import Ask, Refused, WaitForRoom
from kvc.core.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.core.dispatch import Answer, Dispatch, Effect
    from kvc.core.types import Decision, GaveUp, WorkerRef


@dataclass(slots=True)
class Conversation:
    """Effects and answers of one dispatch, in order."""

    said: list[tuple[Effect, Answer]] = field(default_factory=list)
    result: Decision | GaveUp | None = None

    @property
    def asked(self) -> list[WorkerRef]:
        """Every worker that was asked, in order."""
        return [effect.worker for effect, _ in self.said if isinstance(effect, Ask)]

    def sweeps(self) -> list[list[tuple[Ask, Answer]]]:
        """Questions and answers between waits."""
        parts: list[list[tuple[Ask, Answer]]] = [[]]
        for effect, answer in self.said:
            if isinstance(effect, WaitForRoom):
                parts.append([])
            elif isinstance(effect, Ask):
                parts[-1].append((effect, answer))
        return parts


def busy(answer: Answer) -> bool:
    """True for a refusal that only asks to come back."""
    return isinstance(answer, Refused) and answer.rejection.reason is Reason.SESSION_BUSY


def drive(generator: Dispatch, answer: Callable[[Effect], Answer]) -> Conversation:
    """Runs a dispatch to its end; `answer` plays workers, queue and clock."""
    conversation = Conversation()
    try:
        effect = next(generator)
        while True:
            reply = answer(effect)
            conversation.said.append((effect, reply))
            effect = generator.send(reply)
    except StopIteration as stop:
        conversation.result = stop.value
    return conversation
