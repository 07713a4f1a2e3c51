"""Synthetic agent traces: presets whose distributions were fitted to real sessions.

Everything is drawn from `random.Random` seeded per session, so a trace depends on preset, seed and options only, and more sessions
leave the earlier ones as they were.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from kvc.evaluation.trace_files import kvt_lines
from kvc.evaluation.traces import Trace, TraceRequest

BLOCK_TOKENS = 24
MAX_SESSIONS = 100_000
_SESSION_BLOCKS = 2**26  # ids set aside for each session
_NOMINAL_PREFILL_TOKENS_PER_S = 7000.0  # only to place timestamps
_NOMINAL_STEP_S = 0.012


class Lognormal(NamedTuple):
    """Parameters of ln(value)."""

    mu: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return rng.lognormvariate(self.mu, self.sigma)


@dataclass(frozen=True, slots=True)
class Preset:
    """A kind of agent. Lengths in tokens, gaps in seconds, shares of turns in 0..1.

    Attributes:
        boilerplate_tokens: system prompt and tool schemas, the same in all sessions.
        turns: turns a session.
        first: first input beyond the boilerplate.
        tool: growth of the input on a tool turn, previous output included.
        user: growth of the input on a user turn.
        output: reply.
        tool_gap: client time before a tool turn; the whole period between two turns when `periodic`.
        user_gap: client time before a user turn.
        user_share: turns that a user causes.
        big_share: appends drawn from `big` instead, above `big_minimum`.
        big: big appends.
        big_minimum: the least of them.
        rewrite_share: turns that rewrite the end of the history and keep 5-60 % of its unique part.
        compact_at: input length at which history is summarised to `compacted`; 0: such a session ends instead.
        compacted: input after a compaction.
        periodic: gaps are periods between timestamps; requests then carry no think_s.
    """

    boilerplate_tokens: int
    turns: Lognormal
    first: Lognormal
    tool: Lognormal
    user: Lognormal
    output: Lognormal
    tool_gap: Lognormal
    user_gap: Lognormal
    user_share: float
    big_share: float
    big: Lognormal
    big_minimum: int
    rewrite_share: float
    compact_at: int
    compacted: Lognormal
    periodic: bool


_CLAUDE_CODE = Preset(
    boilerplate_tokens=12_432,
    turns=Lognormal(3.994, 1.062),
    first=Lognormal(8.217, 1.125),
    tool=Lognormal(6.642, 1.151),
    user=Lognormal(6.347, 1.068),
    output=Lognormal(5.544, 0.869),
    tool_gap=Lognormal(2.496, 1.284),
    user_gap=Lognormal(4.785, 1.830),
    user_share=0.126,
    big_share=0.015,
    big=Lognormal(9.4, 0.45),
    big_minimum=8193,
    rewrite_share=0.013,
    compact_at=155_000,
    compacted=Lognormal(10.41, 0.53),
    periodic=False,
)
PRESETS = {
    "claude-code": _CLAUDE_CODE,
    "mini-swe": replace(
        _CLAUDE_CODE,
        boilerplate_tokens=120,
        turns=Lognormal(3.601, 0.423),
        first=Lognormal(7.384, 0.231),
        tool=Lognormal(5.758, 0.929),
        output=Lognormal(4.779, 1.071),
        tool_gap=Lognormal(1.606, 0.698),
        user_share=0.0,
        big_share=0.0,
        rewrite_share=0.0,
        compact_at=0,
        periodic=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Cuts applied while sessions are drawn; None: no cut.

    Attributes:
        max_input_tokens: longest prompt; history is compacted (or the session ends) before it grows beyond.
        max_output_tokens: longest reply.
        min_turns: fewest turns a session is meant to have.
        max_turns: most turns a session.
        max_think_s: longest client gap.
    """

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    min_turns: int | None = None
    max_turns: int | None = None
    max_think_s: float | None = None

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: a limit below 1, or min_turns above max_turns.
        """
        for name, value in asdict(self).items():
            if value is not None and not 1 <= value < float("inf"):
                raise ValueError(f"{name}: {value} is not at least 1")
        if self.min_turns and self.max_turns and self.min_turns > self.max_turns:
            raise ValueError(f"min_turns: {self.min_turns} is above max_turns {self.max_turns}")


def generate(preset: str, *, seed: int, sessions: int, live: int = 32, limits: Limits | None = None) -> Trace:
    """Draws a trace.

    Args:
        preset: a name of PRESETS.
        seed: any integer.
        sessions: how many sessions.
        live: sessions at a time when timestamps are placed; the next starts when one ends.
        limits: cuts.

    Raises:
        ValueError: unknown preset, or a count out of range.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset: {preset!r} is none of {', '.join(PRESETS)}")
    if not 1 <= sessions <= MAX_SESSIONS:
        raise ValueError(f"sessions: {sessions} is not in 1..{MAX_SESSIONS}")
    if live < 1:
        raise ValueError(f"live: {live} is not at least 1")
    limits = limits or Limits()
    free = [0.5 * slot for slot in range(min(live, sessions))]
    requests: list[TraceRequest] = []
    for index in range(sessions):
        turns = _Session(PRESETS[preset], limits, random.Random(f"{preset}/{seed}/{index}"), index, heapq.heappop(free)).draw()
        requests += turns
        heapq.heappush(free, turns[-1].timestamp_s + _service_s(turns[-1], turns[-1].input_tokens))
    requests.sort(key=lambda request: (request.timestamp_s, request.request_id))
    meta = {"source": f"generated: {preset}", "seed": seed, "sessions": sessions, "live": live}
    meta |= {name: value for name, value in asdict(limits).items() if value is not None}
    text = "".join(f"{line}\n" for line in kvt_lines(BLOCK_TOKENS, meta, requests))
    return Trace(f"{preset}, seed {seed}", BLOCK_TOKENS, tuple(requests), hashlib.sha256(text.encode()).hexdigest(), meta)


def _service_s(request: TraceRequest, append_tokens: int) -> float:
    return append_tokens / _NOMINAL_PREFILL_TOKENS_PER_S + request.output_tokens * _NOMINAL_STEP_S


class _Session:
    """One session while it is drawn."""

    def __init__(self, preset: Preset, limits: Limits, rng: random.Random, index: int, start_s: float) -> None:
        self._preset = preset
        self._limits = limits
        self._rng = rng
        self._name = f"g{index:04d}"
        self._now_s = start_s
        self._next_id = (index + 1) * _SESSION_BLOCKS
        boilerplate = preset.boilerplate_tokens // BLOCK_TOKENS
        self._runs: list[tuple[int, int]] = [(0, boilerplate)] if boilerplate else []
        self._blocks = boilerplate
        self._most = min(limits.max_input_tokens or preset.compact_at or 2**24, preset.compact_at or 2**24)
        self._length = min(preset.boilerplate_tokens, self._most)

    def draw(self) -> list[TraceRequest]:
        """All turns: at least one."""
        turns: list[TraceRequest] = []
        self._truncate(self._length)
        self._grow(max(1, round(self._preset.first.draw(self._rng))), cap=True)
        for turn in range(self._turns()):
            user = turn == 0 or self._rng.random() < self._preset.user_share
            before = self._length
            if turn and not self._advance(user=user):
                break
            turns.append(self._request(turn, user=user, previous=turns[-1] if turns else None, append=self._length - before))
        return turns

    def _turns(self) -> int:
        turns = max(1, self._limits.min_turns or 1, round(self._preset.turns.draw(self._rng)))
        return min(turns, self._limits.max_turns or turns)

    def _advance(self, *, user: bool) -> bool:
        """Grows, rewrites or compacts the history for the next turn; False when the session ends instead."""
        preset, rng = self._preset, self._rng
        append = max(1, round((preset.user if user else preset.tool).draw(rng)))
        if rng.random() < preset.big_share:
            append = max(preset.big_minimum, round(preset.big.draw(rng)))
        rewrite = rng.random() < preset.rewrite_share
        kept = rng.uniform(0.05, 0.60)
        if self._length + append > self._most:
            if not preset.compact_at:
                return False
            target = max(preset.boilerplate_tokens + 1, round(preset.compacted.draw(rng)))
            self._truncate(preset.boilerplate_tokens)
            self._grow(target - self._length, cap=True)
            return True
        length = self._length
        if rewrite:
            self._truncate(preset.boilerplate_tokens + round(kept * (length - preset.boilerplate_tokens)))
        self._grow(length + append - self._length)
        return True

    def _truncate(self, tokens: int) -> None:
        """Keeps whole blocks of the first `tokens` tokens; what comes later gets new ids."""
        self._length = min(self._length, tokens)
        self._blocks = self._length // BLOCK_TOKENS
        left = self._blocks
        kept: list[tuple[int, int]] = []
        for first, count in self._runs:
            if left:
                kept.append((first, min(count, left)))
                left -= kept[-1][1]
        self._runs = kept

    def _grow(self, tokens: int, *, cap: bool = False) -> None:
        self._length = min(self._length + tokens, self._most) if cap else self._length + tokens
        fresh = self._length // BLOCK_TOKENS - self._blocks
        if fresh <= 0:
            return
        if self._runs and sum(self._runs[-1]) == self._next_id:
            self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + fresh)
        else:
            self._runs.append((self._next_id, fresh))
        self._next_id += fresh
        self._blocks += fresh

    def _request(self, turn: int, *, user: bool, previous: TraceRequest | None, append: int) -> TraceRequest:
        think_s = self._think_s(user=user) if previous else 0.0
        if previous and self._preset.periodic:
            self._now_s += think_s
        elif previous:
            self._now_s += _service_s(previous, max(0, append)) + think_s
        output = max(1, round(self._preset.output.draw(self._rng)))
        return TraceRequest(
            request_id=f"{self._name}.{turn}",
            session_id=self._name,
            turn_index=turn,
            timestamp_s=round(self._now_s, 3),
            input_tokens=self._length,
            output_tokens=min(output, self._limits.max_output_tokens or output),
            blocks=tuple(self._runs),
            think_s=None if self._preset.periodic else think_s,
            request_type="user" if user else "tool",
        )

    def _think_s(self, *, user: bool) -> float:
        gap = (self._preset.user_gap if user else self._preset.tool_gap).draw(self._rng)
        return round(min(gap, self._limits.max_think_s or gap), 3)
