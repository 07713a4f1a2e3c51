"""A transport that keeps what is written to it."""

from __future__ import annotations

import asyncio
from typing import Any


class Wire(asyncio.Transport):
    """Remembers what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    @property
    def sent(self) -> bytes:
        return b"".join(self.writes)
