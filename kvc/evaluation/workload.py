"""Which requests of a trace are replayed, in which order, and how long clients pause: the same for every policy.

The choice is made before anything runs and depends on the trace and the options only. A session's turns run one after the other
(closed loop): the pause before a turn counts from the end of the turn before.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvc.evaluation.prompts import Outputs
    from kvc.evaluation.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes:
        limit: most requests; None: all. They are those that come first when sessions run at the trace's own pace.
        live_sessions: sessions at a time, the next starts when one ends; None: every session starts at its timestamp.
        max_input_tokens: requests with longer prompts are left out and counted; None: none are.
        max_output_tokens: longer replies are shortened; None: none are.
        max_think_s: longest pause; None: as the trace has it.
        time_scale: trace seconds per wall second.
        outputs: "actual": the next prompt contains the engine's reply; "trace": tokens follow the trace's block ids.
    """

    limit: int | None = None
    live_sessions: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_think_s: float | None = None
    time_scale: float = 1.0
    outputs: Outputs = "actual"

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: names the option.
        """
        for name in ("limit", "live_sessions", "max_input_tokens", "max_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is not at least 1")
        if not (math.isfinite(self.time_scale) and self.time_scale > 0):
            raise ValueError(f"time_scale: {self.time_scale} is no positive number")
        if self.max_think_s is not None and not 0 <= self.max_think_s < math.inf:
            raise ValueError(f"max_think_s: {self.max_think_s} is no time")
        if self.outputs not in ("actual", "trace"):
            raise ValueError(f"outputs: {self.outputs!r} is neither 'actual' nor 'trace'")


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The turns of one session that are replayed. `start_s` is its first timestamp, from the first of the workload."""

    session_id: str
    start_s: float
    turns: tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is replayed.

    Attributes:
        block_tokens: tokens a native block of the trace.
        sessions: in the order in which they start.
        requests: turns in all sessions.
        too_long: requests left out for max_input_tokens.
        beyond_limit: requests left out for limit.
        shortened: replies cut to max_output_tokens.
        longest_tokens: longest prompt plus reply.
    """

    block_tokens: int
    sessions: tuple[SessionPlan, ...]
    requests: int
    too_long: int
    beyond_limit: int
    shortened: int
    longest_tokens: int


def select(trace: Trace, options: ReplayOptions) -> Workload:
    """Chooses the requests.

    Raises:
        ValueError: nothing is left.
    """
    longest = options.max_input_tokens
    most = options.max_output_tokens or math.inf
    kept: dict[str, list[TraceRequest]] = {}
    total = shortened = 0
    for session_id, turns in trace.sessions().items():
        fitting = [turn for turn in turns if longest is None or turn.input_tokens <= longest]
        if fitting:
            kept[session_id] = [_with_reply(turn, most) for turn in fitting]
            total += len(fitting)
            shortened += sum(turn.output_tokens > most for turn in fitting)
    if not kept:
        raise ValueError(f"max_input_tokens: no request of {trace.source} has at most {longest} tokens")
    counts = _first_turns(kept, options.live_sessions, min(options.limit or total, total))
    chosen = [tuple(turns[: counts[session_id]]) for session_id, turns in kept.items() if counts.get(session_id)]
    origin = min(turns[0].timestamp_s for turns in chosen)
    plans = tuple(SessionPlan(turns[0].session_id, turns[0].timestamp_s - origin, turns) for turns in chosen)
    requests = sum(counts.values())
    return Workload(
        block_tokens=trace.block_tokens,
        sessions=plans,
        requests=requests,
        too_long=len(trace.requests) - total,
        beyond_limit=total - requests,
        shortened=shortened,
        longest_tokens=max(turn.input_tokens + turn.output_tokens for plan in plans for turn in plan.turns),
    )


def think_s(previous: TraceRequest | None, turn: TraceRequest, service_s: float, options: ReplayOptions) -> float:
    """Trace seconds between the end of the previous turn and this one: measured, or what the timestamps leave.

    Args:
        previous: the turn before in the session, as replayed; None: the first.
        turn: the turn.
        service_s: modelled service time of the previous turn.
        options: caps the pause.
    """
    if previous is None:
        return 0.0
    gap = turn.think_s if turn.think_s is not None else max(0.0, turn.timestamp_s - previous.timestamp_s - service_s)
    return gap if options.max_think_s is None else min(gap, options.max_think_s)


def _with_reply(turn: TraceRequest, most: float) -> TraceRequest:
    """A turn that asks for at least one token and at most `most`."""
    tokens = int(min(max(1, turn.output_tokens), most))
    return turn if tokens == turn.output_tokens else replace(turn, output_tokens=tokens)


def _first_turns(sessions: dict[str, list[TraceRequest]], live: int | None, limit: int) -> dict[str, int]:
    """How many turns of each session are among the first `limit`, when sessions run at the trace's own pace."""
    waiting = deque(sessions)
    clock: list[tuple[float, int, str]] = []
    started = 0

    def start(now_s: float) -> None:
        nonlocal started
        session_id = waiting.popleft()
        heapq.heappush(clock, (now_s if live else sessions[session_id][0].timestamp_s, started, session_id))
        started += 1

    for _ in range(min(live or len(waiting), len(waiting))):
        start(0.0)
    counts: dict[str, int] = {}
    for _ in range(limit):
        now_s, order, session_id = heapq.heappop(clock)
        turns = sessions[session_id]
        done = counts[session_id] = counts.get(session_id, 0) + 1
        if done < len(turns):
            period = turns[done].timestamp_s - turns[done - 1].timestamp_s
            heapq.heappush(clock, (now_s + period, order, session_id))
        elif waiting:
            start(now_s)
    return counts
