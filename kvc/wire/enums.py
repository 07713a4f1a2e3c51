"""Enums of the core and their numbers on the wire, by name; a member without its twin fails when this is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from kvc.core.types import Executor, Mode, Reason, Role
from kvc.errors import InvalidField
from kvc.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

ROLE_TO_PB: Final = {role: types_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
MODE_TO_PB: Final = {mode: types_pb2.Mode.Value(f"MODE_{mode.name}") for mode in Mode}
EXECUTOR_TO_PB: Final = {executor: types_pb2.Executor.Value(f"EXECUTOR_{executor.name}") for executor in Executor}
REASON_TO_PB: Final = {reason: types_pb2.Reason.Value(f"REASON_{reason.name}") for reason in Reason}
ROLE_FROM_PB: Final[Mapping[int, Role]] = {pb: role for role, pb in ROLE_TO_PB.items()}
MODE_FROM_PB: Final[Mapping[int, Mode]] = {pb: mode for mode, pb in MODE_TO_PB.items()}
EXECUTOR_FROM_PB: Final[Mapping[int, Executor]] = {pb: executor for executor, pb in EXECUTOR_TO_PB.items()}
REASON_FROM_PB: Final[Mapping[int, Reason]] = {pb: reason for reason, pb in REASON_TO_PB.items()}


def known(names: Mapping[int, T], number: int, field: str) -> T:
    """The core value of an enum number; 0 and numbers from the future have none."""
    found = names.get(number)
    if found is None:
        raise InvalidField(f"must be one of {', '.join(map(str, names))}, is {number}", field=field)
    return found
