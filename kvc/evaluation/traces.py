"""Traces: what agents asked for and when, as token counts and block ids, without any text.

`blocks` are run-length coded ids of the prompt's native blocks, `((first, count), ...)`. Ids are chained: equal ids at the front of
two prompts mean equal tokens there. The last block of a prompt has an id in some sources (Mooncake, Bailian) and none in others; ids
may also stop a few blocks before the end. Tokens without an id are shared with nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One turn of one session.

    Attributes:
        request_id: unique in the trace.
        session_id: the session.
        turn_index: place in the session, from 0; siblings that answer the same turn share it.
        timestamp_s: when the source saw the request, from the trace's start.
        input_tokens: length of the whole prompt.
        output_tokens: length of the reply; 0 in a few records of real traces.
        blocks: run-length coded ids of the native blocks.
        think_s: measured time between the previous reply and this request.
        api_s: measured service time.
        request_type: "user", "tool", "chat" ...: who caused the turn.
    """

    request_id: str
    session_id: str
    turn_index: int
    timestamp_s: float
    input_tokens: int
    output_tokens: int
    blocks: Runs
    think_s: float | None = None
    api_s: float | None = None
    request_type: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their timestamps.

    Attributes:
        source: where they come from: a file name or a preset and seed.
        block_tokens: tokens a native block; 0 when the source has no ids.
        requests: all requests, sorted by timestamp_s.
        sha256: digest of the trace as uncompressed lines, in hexadecimal.
        meta: the rest of what the source says about itself.
    """

    source: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    sha256: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    def sessions(self) -> dict[str, list[TraceRequest]]:
        """Requests by session, sessions in the order in which they start."""
        found: dict[str, list[TraceRequest]] = {}
        for request in self.requests:
            found.setdefault(request.session_id, []).append(request)
        return found


def block_count(runs: Runs) -> int:
    """Number of ids in a run-length coded list."""
    return sum(count for _, count in runs)


def block_ids(runs: Runs, start: int = 0) -> Iterator[int]:
    """The ids from index `start` on."""
    for first, count in runs:
        if start < count:
            yield from range(first + start, first + count)
        start = max(0, start - count)


def compress(ids: list[int]) -> Runs:
    """Run-length coding of ids: consecutive numbers become one run."""
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return tuple(runs)


def full_blocks(request: TraceRequest, block_tokens: int) -> int:
    """Blocks of a prompt that have an id and all their tokens."""
    if not block_tokens:
        return 0
    return min(block_count(request.blocks), request.input_tokens // block_tokens)


def common_blocks(one: Runs, other: Runs) -> int:
    """Number of equal ids at the front of two run-length coded lists. O(runs)."""
    mine, theirs = iter(one), iter(other)
    left, right = next(mine, None), next(theirs, None)
    common = 0
    while left and right and left[0] == right[0]:
        step = min(left[1], right[1])
        common += step
        left = (left[0] + step, left[1] - step) if left[1] > step else next(mine, None)
        right = (right[0] + step, right[1] - step) if right[1] > step else next(theirs, None)
    return common
