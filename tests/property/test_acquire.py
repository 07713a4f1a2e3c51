"""R29: all interleavings of small systems, explored state by state. One acquisition order never deadlocks; late binding of D does."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import TYPE_CHECKING, Literal

import pytest

from kvc.core.acquire import Memory, acquisition_order, next_acquisition
from kvc.core.types import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Next = Callable[["Request", frozenset[Memory]], Memory | None]

Held = frozenset[Memory] | Literal["decoding", "done"]
"""What a request has acquired so far; or it decodes (its prefill memory is back), or it is over."""


@dataclass(frozen=True, slots=True)
class Request:
    """A turn that wants `size` units on decode worker `decode`, and on the prefill worker unless it prefills locally."""

    executor: Executor
    decode: int
    size: int
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class System:
    """One prefill worker, some decode workers, their memory in units."""

    requests: tuple[Request, ...]
    prefill_units: int
    decode_units: tuple[int, ...]

    def free(self, state: tuple[Held, ...], memory: Memory, worker: int) -> int:
        """Units that nobody holds."""
        total = self.prefill_units if memory is Memory.PREFILL else self.decode_units[worker]
        for request, held in zip(self.requests, state, strict=True):
            holds = held == "decoding" and memory is Memory.DECODE if isinstance(held, str) else memory in held
            if holds and (memory is Memory.PREFILL or request.decode == worker):
                total -= request.size
        return total

    def steps(self, state: tuple[Held, ...], order: Next) -> Iterator[tuple[Held, ...]]:
        """Every state that one step of one request leads to: acquire what is next, give P back, or end."""
        for index, (request, held) in enumerate(zip(self.requests, state, strict=True)):
            for new in self._after(request, held, state, order):
                yield (*state[:index], new, *state[index + 1 :])

    def _after(self, request: Request, held: Held, state: tuple[Held, ...], order: Next) -> Iterator[Held]:
        if isinstance(held, str):
            if held == "decoding":
                yield "done"
            return
        wanted = order(request, held)
        if wanted is None:
            yield "decoding"
        elif self.free(state, wanted, request.decode) >= request.size:
            yield held | {wanted}

    def deadlocks(self, order: Next) -> list[tuple[Held, ...]]:
        """States from which no request can step although not all are done."""
        start: tuple[Held, ...] = tuple(frozenset() for _ in self.requests)
        seen, todo = {start}, deque([start])
        stuck: list[tuple[Held, ...]] = []
        while todo:
            state = todo.popleft()
            after = list(self.steps(state, order))
            if not after and any(held != "done" for held in state):
                stuck.append(state)
            fresh = [new for new in after if new not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return stuck


def one_order(request: Request, held: frozenset[Memory]) -> Memory | None:
    """The core's order, for admitted turns and for Fallback alike."""
    return next_acquisition(request.executor, held)


def late_binding(request: Request, held: frozenset[Memory]) -> Memory | None:
    """The negative control: Fallback prefills first and looks for decode memory afterwards."""
    if not request.fallback or request.executor is Executor.LOCAL:
        return one_order(request, held)
    return next((memory for memory in (Memory.PREFILL, Memory.DECODE) if memory not in held), None)


def systems(fallbacks: int) -> Iterator[System]:
    """Three requests on two decode workers; P has memory for one or two of them."""
    kinds = [Request(executor, decode, size) for executor, decode, size in product(Executor, (0, 1), (1, 2))]
    for chosen in combinations_with_replacement(kinds, 3):
        for prefill_units, decode_units in product((2, 4), ((2, 2), (2, 4))):
            requests = tuple(
                Request(request.executor, request.decode, request.size, fallback=index < fallbacks) for index, request in enumerate(chosen)
            )
            yield System(requests, prefill_units, decode_units)


@pytest.mark.parametrize("fallbacks", [0, 1, 2, 3])
def test_one_order_never_deadlocks(fallbacks: int) -> None:
    """ACQ-1, ACQ-2, I6: in no reachable state of any of these systems does everybody wait."""
    count = 0
    for system in systems(fallbacks):
        count += 1
        assert system.deadlocks(one_order) == []
    assert count > 400


def test_late_binding_deadlocks() -> None:
    """R29, the control: the same search finds the deadlock that binding D late for Fallback makes."""
    ticketed = Request(Executor.PREFILL, decode=0, size=2)
    fallback = Request(Executor.PREFILL, decode=0, size=2, fallback=True)
    other = Request(Executor.PREFILL, decode=1, size=2)
    system = System((ticketed, fallback, other), prefill_units=2, decode_units=(2, 2))
    stuck = system.deadlocks(late_binding)
    assert (frozenset({Memory.DECODE}), frozenset({Memory.PREFILL}), frozenset({Memory.DECODE})) in stuck
    assert system.deadlocks(one_order) == []
    assert any(system.deadlocks(late_binding) for system in systems(1))


def test_the_order_is_decode_then_prefill() -> None:
    """ACQ-1: decode memory first; a turn that prefills locally needs no other."""
    assert acquisition_order(Executor.PREFILL) == (Memory.DECODE, Memory.PREFILL)
    assert acquisition_order(Executor.LOCAL) == (Memory.DECODE,)
    assert next_acquisition(Executor.LOCAL, frozenset({Memory.DECODE})) is None
    assert next_acquisition(Executor.PREFILL, frozenset({Memory.DECODE})) is Memory.PREFILL
    assert next_acquisition(Executor.PREFILL, frozenset({Memory.DECODE, Memory.PREFILL})) is None


@pytest.mark.parametrize("executor", Executor)
def test_who_waits_for_decode_memory_holds_none_on_p(executor: Executor) -> None:
    """ACQ-2: from whatever is held, decode memory is never wanted while prefill memory is held."""
    held: frozenset[Memory] = frozenset()
    while (wanted := next_acquisition(executor, held)) is not None:
        assert wanted is not Memory.DECODE or Memory.PREFILL not in held
        held |= {wanted}
