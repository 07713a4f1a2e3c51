"""Immutable values that are cheap to make.

`@value` is `@dataclass(frozen=True, slots=True)` to the type checker, which refuses every assignment to a field. At run time the class
has slots, equality and a hash, but not the frozen `__init__`, which sets each field by `object.__setattr__`: 0.15 microseconds a field,
with some eighty fields a request. Nothing here may be changed after it is made; what guards that is `mypy --strict`, not the interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from dataclasses import dataclass

    def value(*, frozen: bool, slots: bool):  # noqa: ANN201 - the type checker sees the other one
        """A dataclass decorator."""
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)


__all__ = ["value"]
