"""The demonstration: a generated agentic workload that a 1P3D mesh with small KV pools serves mostly Direct, in about a minute.

18 Claude Code sessions of 12-20 turns, six at a time, 334 requests with the default seed. Six live sessions of some 30,000 tokens
fit three pools of K_d tokens; those that ended do not fit beside them, so that their blocks are evicted. The seed is one whose
sessions stay well inside the pools; others give Direct shares from about 0.85 to 0.97.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc.evaluation.generator import Limits, generate
from kvc.evaluation.workload import ReplayOptions

if TYPE_CHECKING:
    from kvc.evaluation.traces import Trace

_MAX_INPUT_TOKENS = 80_000
_MAX_OUTPUT_TOKENS = 4_096  # with the longest prompt still below 0.95 K_d: no turn is refused for good
_LIVE_SESSIONS = 6
_SEED = 4


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demonstration runs, once with the mesh and once with the baseline. `capacity_tokens` is K_d (seed 000 section 7)."""

    trace: Trace
    options: ReplayOptions
    topology: str = "1P3D"
    capacity_tokens: int = 92_104


def demo_workload(seed: int = _SEED) -> Demo:
    """The workload; the same for every policy."""
    limits = Limits(max_input_tokens=_MAX_INPUT_TOKENS, max_output_tokens=_MAX_OUTPUT_TOKENS, min_turns=12, max_turns=20, max_think_s=30.0)
    trace = generate("claude-code", seed=seed, sessions=18, live=_LIVE_SESSIONS, limits=limits)
    return Demo(trace, ReplayOptions(live_sessions=_LIVE_SESSIONS, max_input_tokens=_MAX_INPUT_TOKENS, time_scale=20.0))
