"""Hyper-parameters of Algorithms 1-3 and the switches of the rulings (seed 000 section 2.4; docs/spec.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

Profile = Literal["default", "paper"]


@dataclass(frozen=True, slots=True)
class Params:
    """One value holds everything that changes a decision.

    Attributes:
        profile: the profile the other values were derived from.
        block_tokens: routing block (R17).
        alpha: sticky bonus in blocks.
        tau_reject: refusals after which a worker is blacklisted for a session.
        tau_append_tokens: longest append that runs Direct.
        rho: high-water mark of the KV pool.
        epsilon: most probes a dispatch; None: max(1, eligible - 1) by R1, or |D| - 1 when `paper_epsilon`.
        paper_epsilon: R1 off.
        exclude_tried: R2: workers probed in this dispatch are no candidates.
        fallback: R3/R27: "room" (most free + evictable - queued), "rejects" (untried, fewest rejects, least inflight), "round_robin".
        reset_on_admit: R4, line 8 of Algorithm 3.
        pin_on_admit: line 9 of Algorithm 3: an admission moves the pin; off: it only sets a missing pin, a completed turn moves it (R20).
        reset_on_complete: R4, section 3.4: a completed Direct turn clears every counter of the session.
        capacity: R7: "headroom" or the paper's "used" rule.
        reseed_large_append: R9: admit a large append as Reseed on the same worker.
        partial_residency: R10: residency is the matched prefix, not a yes/no.
        overlap: R14: "exclusive" leaves out blocks of more than shared_after live sessions.
        shared_after: R14.
        load_floor_bonus: blocks added to the overlap of workers without inflight turns; 0 = off.
        seed_budget: R15: KV transfers pending per decode worker; 0 = unlimited.
        retry_after_s: pause hint sent with a refusal for lack of room or budget (R15).
        executor: R24: "cost" or always "prefill".
        interference: R24: slow-down of a local prefill per running request.
        transfer_overhead_s: R24: fixed cost of a P to D hand-over.
        placement: R26: "open_tokens" or the paper's inflight and assigned ties.
        inflight_weight: R26: what one inflight turn adds to the load of a worker.
        queue_limit: R28: turns that may wait for capacity in one router; 0: no waiting, fall back at once.
        queue_wait_s: R28: longest wait of one turn for capacity before it falls back.
        ageing_tokens_per_s: R28: how fast a waiting turn's place improves, in tokens of prefill per second waited.
        backoff_base_s: R16: first pause between two refusals of the same worker; full jitter.
        backoff_cap_s: R16: longest pause.
        ticket_ttl_s: R8: life of an unused reservation.
    """

    profile: Profile = "default"
    block_tokens: int = 24
    alpha: float = 1.0
    tau_reject: int = 3
    tau_append_tokens: int = 8192
    rho: float = 0.95
    epsilon: int | None = None
    paper_epsilon: bool = False
    exclude_tried: bool = True
    fallback: Literal["room", "rejects", "round_robin"] = "room"
    reset_on_admit: bool = True
    reset_on_complete: bool = True
    pin_on_admit: bool = False
    capacity: Literal["headroom", "used"] = "headroom"
    reseed_large_append: bool = True
    partial_residency: bool = True
    overlap: Literal["exclusive", "full"] = "exclusive"
    shared_after: int = 4
    load_floor_bonus: float = 0.0
    seed_budget: int = 4
    retry_after_s: float = 0.05
    executor: Literal["cost", "prefill"] = "cost"
    interference: float = 0.3
    transfer_overhead_s: float = 0.030
    placement: Literal["open_tokens", "paper"] = "open_tokens"
    inflight_weight: float = 0.5
    queue_limit: int = 256
    queue_wait_s: float = 30.0
    ageing_tokens_per_s: float = 2000.0
    backoff_base_s: float = 0.02
    backoff_cap_s: float = 1.0
    ticket_ttl_s: float = 5.0

    def __post_init__(self) -> None:
        """Checks the numbers, whoever sets them: the router, an engine, a test.

        Raises:
            ValueError: one is out of its range; leads with its name.
        """
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}: {value} is out of range: {low:g} to {high:g}")
        for name in ("rho", "ticket_ttl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is out of range: above 0")


_TOKENS = (0, 2**31 - 1)
_SECONDS = (0, 86_400)
_WEIGHT = (0, 1e9)
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "block_tokens": (1, 4096),
    "alpha": _WEIGHT,
    "tau_reject": (1, 2**31 - 1),
    "tau_append_tokens": _TOKENS,
    "rho": (0, 1),
    "epsilon": (0, 2**31 - 1),
    "shared_after": (0, 2**31 - 1),
    "load_floor_bonus": _WEIGHT,
    "seed_budget": (0, 2**31 - 1),
    "retry_after_s": _SECONDS,
    "interference": _WEIGHT,
    "transfer_overhead_s": _SECONDS,
    "inflight_weight": _WEIGHT,
    "queue_limit": (0, 2**31 - 1),
    "queue_wait_s": _SECONDS,
    "ageing_tokens_per_s": _WEIGHT,
    "backoff_base_s": _SECONDS,
    "backoff_cap_s": _SECONDS,
    "ticket_ttl_s": _SECONDS,
}
_PAPER: dict[str, Any] = {
    "profile": "paper",
    "paper_epsilon": True,
    "exclude_tried": False,
    "fallback": "round_robin",
    "reset_on_complete": False,
    "pin_on_admit": True,
    "capacity": "used",
    "reseed_large_append": False,
    "partial_residency": False,
    "overlap": "full",
    "seed_budget": 0,
    "executor": "prefill",
    "placement": "paper",
    "queue_limit": 0,
}


def params_for(profile: Profile, **overrides: Any) -> Params:
    """The parameters of a profile with single rulings overridden.

    Raises:
        ValueError: unknown profile, unknown field, a number out of its range.
    """
    if profile not in ("default", "paper"):
        msg = f"profile: {profile!r} is neither 'default' nor 'paper'"
        raise ValueError(msg)
    base = Params() if profile == "default" else replace(Params(), **_PAPER)
    unknown = overrides.keys() - {f for f in Params.__dataclass_fields__ if f != "profile"}
    if unknown:
        msg = f"unknown parameter: {', '.join(sorted(unknown))}"
        raise ValueError(msg)
    return replace(base, **overrides)
