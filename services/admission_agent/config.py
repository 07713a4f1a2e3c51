"""Settings of the admission agent. One field is one setting: TOML key, environment variable, flag and help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - annotations of settings are evaluated
from typing import Literal

from kvc.runtime.config import REQUIRED, section, setting
from kvc.runtime.server import ServerConfig
from kvc.runtime.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine beside the agent."""

    socket: Path = setting(REQUIRED, help="unix socket of the engine link")
    model: str = setting("", help="model the engine must serve; empty: any")
    advertise_host: str = setting("", help="host under which routers reach the engine's URL and bootstrap; empty: as the engine reports")
    connect_timeout_s: float = setting(5.0, help="longest wait for the connection and the engine's greeting", minimum=0.01, maximum=60.0)
    call_timeout_s: float = setting(
        5.0,
        help="longest wait for any answer but Admit's; an engine that misses it on a load poll counts as away",
        minimum=0.01,
        maximum=60.0,
    )
    snapshot_timeout_s: float = setting(30.0, help="longest wait for a whole residency snapshot", minimum=0.01, maximum=600.0)
    backoff_base_s: float = setting(
        0.05, help="bound of the first pause before the engine is tried again; full jitter", minimum=0.001, maximum=60.0
    )
    backoff_cap_s: float = setting(2.0, help="longest pause before the engine is tried again", minimum=0.001, maximum=300.0)

    def __post_init__(self) -> None:
        """Checks what concerns two settings.

        Raises:
            ValueError: the first pause is longer than the longest.
        """
        if self.backoff_base_s > self.backoff_cap_s:
            raise ValueError(f"backoff_base_s {self.backoff_base_s} is above backoff_cap_s {self.backoff_cap_s}")


@dataclass(frozen=True, slots=True)
class AdmitConfig:
    """How turns are admitted."""

    timeout_s: float = setting(1.0, help="longest wait for the engine's decision on one turn", minimum=0.001, maximum=60.0)
    margin_s: float = setting(0.002, help="kept back from the caller's deadline for the way home", minimum=0.0, maximum=1.0)
    max_inflight: int = setting(4096, help="turns that may wait for the engine at once", minimum=1, maximum=1_000_000)
    draining: bool = setting(default=False, help="tell the engine to take no new sessions; known ones go on")


@dataclass(frozen=True, slots=True)
class ResidencyConfig:
    """How resident blocks are reported to routers."""

    block_tokens: int = setting(24, help="routing block, equal in the whole mesh", minimum=1, maximum=4096)
    load_interval_s: float = setting(
        0.5,
        help="pace at which the engine is asked for its load; a change is reported at once, no change every second",
        minimum=0.01,
        maximum=1.0,
    )
    coalesce_s: float = setting(0.01, help="changes within this time travel as one delta; 0: as they come", minimum=0.0, maximum=1.0)
    part_bytes: int = setting(524_288, help="most block hash bytes in one message", minimum=8, maximum=1_040_000)
    buffer_bytes: int = setting(
        4_194_304, help="deltas kept for a follower that lags, before it gets a snapshot", minimum=64, maximum=1 << 30
    )
    max_followers: int = setting(64, help="routers that may follow at once", minimum=1, maximum=10_000)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Admission agent: Algorithm 2 and residency of one engine over gRPC."""

    engine: EngineConfig = section(EngineConfig)
    admit: AdmitConfig = section(AdmitConfig)
    residency: ResidencyConfig = section(ResidencyConfig)
    server: ServerConfig = section(ServerConfig)
    telemetry: TelemetryConfig = section(TelemetryConfig)
    grace_s: float = setting(10.0, help="longest wait for calls in flight after SIGTERM", minimum=0.0, maximum=3600.0)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", help="least severe level that is logged")
