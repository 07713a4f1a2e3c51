"""What the door tells the router's metrics, and the page at `/`."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kvc.core import events as ev
from kvc.core.types import Decision, Facts, GaveUp, Role
from services.router.ports import EngineChunk, EngineError, Result

if TYPE_CHECKING:
    from kvc.core.members import WorkerState
    from kvc.errors import KvcError
    from services.router.door.door import Door
    from services.router.door.exchange import Exchange
    from services.router.metrics import RouterMetrics


class DoorObserver:
    """Counts exchanges where the router counts its own turns."""

    def __init__(self, metrics: RouterMetrics, started_s: float) -> None:
        """Counts into `metrics`; `started_s` is the clock's time of the start."""
        self._metrics = metrics
        self._started_s = started_s
        self._page = b""

    def decided(self, outcome: Decision | GaveUp, decide_s: float, *, estimated: bool = False) -> None:
        """Dispatch returned."""
        self._metrics.decided(outcome, decide_s, estimated=estimated)

    def hopped(self, outcome: str) -> None:
        """A one-hop admission landed, was refused or failed."""
        self._metrics.hopped(outcome)

    def retried(self, exchange: Exchange, decision: Decision, reason: str, problem: str) -> None:
        """A worker failed before the first byte."""
        self._metrics.retried(exchange, decision, EngineError(0, reason, problem))

    def ended(self, exchange: Exchange, decision: Decision | None, end: ev.End, error: KvcError | None) -> None:
        """An exchange is over."""
        result = None
        if decision is not None and end is ev.End.COMPLETED:
            last = EngineChunk(
                prompt_tokens=exchange.prompt_tokens(),
                completion_tokens=exchange.output_tokens(),
                cached_tokens=exchange.cached_tokens(),
            )
            now_s = exchange.clock.now_s()
            mesh_s = exchange.mesh_s(decision)
            result = Result(last, decision, mesh_s, exchange.first_s - exchange.arrived_s, now_s - exchange.arrived_s, mesh_s)
        self._metrics.ended(exchange, decision, end, result, error)

    def state(self, door: Door) -> dict[str, Any]:
        """What the page shows, as JSON. Names and numbers only: no prompt, no session's name, no address, no secret."""
        workers = sorted(door.sigma.workers.values(), key=lambda worker: (worker.info.role is not Role.PREFILL, worker.ref.worker_id))
        return {
            "model": next((worker.info.model for worker in workers), ""),
            "policy": door.router.config.policy,
            "uptime_s": round(door.clock.now_s() - self._started_s, 1),
            "workers": [_worker(worker) for worker in workers],
            "in_flight": len(door.exchanges),
            "waiting": len(door.room),
            "sessions": len(door.sigma.sessions),
            **self._metrics.totals(),
        }

    def page(self) -> bytes:
        """The page."""
        if not self._page:
            self._page = files("services.router.door").joinpath("page.html").read_bytes()
        return self._page


def _worker(worker: WorkerState) -> dict[str, Any]:
    facts = worker.facts or Facts(worker.info.capacity_tokens)
    used = min(facts.capacity_tokens, facts.held_tokens + facts.reserved_tokens)
    # What running turns may still grow to is held; until they do, cached KV lies there.
    cached = min(facts.evictable_tokens, facts.capacity_tokens - used)
    return {
        "worker": worker.ref.worker_id,
        "role": worker.info.role.value,
        "why_not": worker.why_not,
        "capacity_tokens": facts.capacity_tokens,
        "held_tokens": used,
        "cached_tokens": cached,
        "free_tokens": facts.capacity_tokens - used - cached,
        "sessions": worker.placed_sessions,
        "in_flight": worker.inflight,
        "turns": sum(worker.modes.values()),
    }
