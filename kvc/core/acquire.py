"""R29: one order in which the memory of a turn is acquired.

A turn prefilled on P needs memory on its decode worker and on its prefill worker. Decode memory comes first, always: a turn that
waits for decode memory holds none on P, so a wait for P memory can only be for turns that already have everything they need and
will finish. Binding D late (for Fallback only) lets P memory wait for D while D memory waits for P.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvc.core.types import Executor

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


class Memory(enum.Enum):
    """What a turn acquires."""

    DECODE = "decode"
    PREFILL = "prefill"


def acquisition_order(executor: Executor) -> tuple[Memory, ...]:
    """The memory a turn needs, in the order it must be acquired. The same for admitted turns and for Fallback."""
    if executor is Executor.LOCAL:
        return (Memory.DECODE,)
    return (Memory.DECODE, Memory.PREFILL)


def next_acquisition(executor: Executor, held: AbstractSet[Memory]) -> Memory | None:
    """What a turn that holds `held` acquires next; None when it has everything and may run."""
    return next((memory for memory in acquisition_order(executor) if memory not in held), None)
