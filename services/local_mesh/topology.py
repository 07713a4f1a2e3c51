"""Names of topologies: 1P3D is one prefill and three decode workers, 0P4D four that prefill for themselves (R25)."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_WORKERS = 64
_SHAPE = re.compile(r"(\d{1,2})P(\d{1,2})D", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Topology:
    """Numbers of prefill and decode workers."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        """The topology called `text`.

        Raises:
            ValueError: not of the form 1P3D, without a decode worker, or with more than 64 workers.
        """
        found = _SHAPE.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no topology: write e.g. 1P3D or 0P4D")
        shape = cls(int(found[1]), int(found[2]))
        if shape.decode < 1 or shape.prefill + shape.decode > MAX_WORKERS:
            raise ValueError(f"{text!r}: 1 to {MAX_WORKERS} workers, at least one of them a decode worker")
        return shape

    def workers(self) -> list[tuple[str, str]]:
        """(name, role) of each worker: p0.., d0.. ."""
        prefill = [(f"p{index}", "prefill") for index in range(self.prefill)]
        return prefill + [(f"d{index}", "decode") for index in range(self.decode)]

    def __str__(self) -> str:
        """The name."""
        return f"{self.prefill}P{self.decode}D"
