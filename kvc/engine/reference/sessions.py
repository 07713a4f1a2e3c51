"""Sessions as an engine knows them: what the last completed turn committed, and who has a turn in flight.

Only a completed turn changes a record (R21, F70): an aborted or failed one leaves the committed length as it was. A record holds page
hashes, not tokens, and pins nothing: idle sessions are evicted like anything else (F67).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvc.core.blocks import HASH_BYTES

ENTRY_BYTES = 300


@dataclass(slots=True)
class Session:
    """One session's record.

    Attributes:
        committed_tokens: prompt and output of the last completed turn, less its last token, which has no KV.
        generation: turns completed here.
        pages: hashes of the pages of the committed tokens.
    """

    committed_tokens: int = 0
    generation: int = 0
    pages: array[int] = field(default_factory=lambda: array("Q"))


class Sessions:
    """Records of sessions, most recently used last, bounded in number and bytes. Single-threaded."""

    def __init__(self, max_sessions: int, max_bytes: int = 256 * 1024 * 1024) -> None:
        """Starts empty."""
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._bytes = 0
        self._records: dict[str, Session] = {}
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        """Sessions with a record."""
        return len(self._records)

    def get(self, session_id: str) -> Session | None:
        """A session's record; does not mutate."""
        return self._records.get(session_id)

    def recent(self, limit: int) -> list[str]:
        """Session ids, most recently used first; does not mutate."""
        return [session_id for session_id, _ in zip(reversed(self._records), range(limit), strict=False)]

    def owner(self, session_id: str) -> str | None:
        """The rid whose turn of the session is in flight; does not mutate."""
        return self._owners.get(session_id)

    def claim(self, session_id: str, rid: str) -> bool:
        """Makes `rid` the session's turn in flight; False when another one is. Requests without a session always may."""
        return not session_id or self._owners.setdefault(session_id, rid) == rid

    def release(self, session_id: str, rid: str) -> None:
        """Ends a claim. No effect when `rid` has none."""
        if self._owners.get(session_id) == rid:
            del self._owners[session_id]

    def commit(self, session_id: str, committed_tokens: int, pages: array[int]) -> None:
        """Records a completed turn."""
        if not session_id:
            return
        before = self._records.pop(session_id, None)
        generation = 1
        if before is not None:
            self._bytes -= _size(before)
            generation += before.generation
        record = Session(committed_tokens, generation, pages)
        self._records[session_id] = record
        self._bytes += _size(record)
        while len(self._records) > self._max_sessions or (self._bytes > self._max_bytes and len(self._records) > 1):
            self._bytes -= _size(self._records.pop(next(iter(self._records))))


def _size(record: Session) -> int:
    return ENTRY_BYTES + HASH_BYTES * len(record.pages)
