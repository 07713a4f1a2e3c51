"""Settings of the router. One field is one setting: TOML key, environment variable, flag and help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - settings are read from the annotations
from typing import Literal

from kvc.core.params import Params
from kvc.runtime.config import section, setting
from kvc.runtime.server import ServerConfig
from kvc.runtime.telemetry import TelemetryConfig
from services.router.door.config import DoorConfig

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class AgentsConfig:
    """The admission agents the router follows, and how it talks to them."""

    targets: tuple[str, ...] = setting((), help="host:port of one admission agent; repeatable", flag="--agent")
    tls_ca: Path | None = setting(None, help="PEM authority of the agents; none = no TLS")
    tls_cert: Path | None = setting(None, help="PEM certificate shown to agents that ask for one")
    tls_key: Path | None = setting(None, help="PEM key of that certificate")
    token: str | None = setting(None, help="bearer token the agents ask for", secret=True)
    admit_timeout_s: float = setting(1.0, help="longest wait for one Admit", minimum=0.001, maximum=60.0)
    hedge_after_s: float = setting(0.25, help="ask once more for the same answer after this long; 0 = never", minimum=0.0, maximum=60.0)
    backoff_base_s: float = setting(
        0.05, help="bound of the first pause before an agent is tried again; jitter", minimum=0.001, maximum=60.0
    )
    backoff_cap_s: float = setting(1.0, help="longest pause before an agent is tried again", minimum=0.001, maximum=300.0)
    silence_s: float = setting(3.0, help="an agent that sends nothing for this long counts as gone", minimum=0.1, maximum=600.0)

    def __post_init__(self) -> None:
        """Checks what concerns several settings, or more than a range.

        Raises:
            ValueError: a target is no host:port or appears twice; TLS is half configured.
        """
        for target in self.targets:
            host, _, port = target.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
                raise ValueError(f"targets: {target[:64]!r} is no host:port")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError("targets: an agent is named twice")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both or none")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("tls_cert and tls_key need tls_ca")


@dataclass(frozen=True, slots=True)
class EnginesConfig:
    """How the router talks to engines."""

    connect_timeout_s: float = setting(2.0, help="longest wait for a connection", minimum=0.01, maximum=60.0)
    retries: int = setting(3, help="engines tried for one request before its first token, after the first", minimum=0, maximum=16)
    lost_s: float = setting(
        2.0, help="a worker that is away for this long owes no first token any more: turns run elsewhere", minimum=0.0, maximum=3600.0
    )
    coalesce_s: float = setting(0.02, help="chunks within this time travel as one; the first is never held back", minimum=0.0, maximum=1.0)


@dataclass(frozen=True, slots=True)
class RequestsConfig:
    """Limits of requests and sessions."""

    timeout_s: float = setting(600.0, help="deadline of a request whose caller sets none", minimum=0.1, maximum=86_400.0)
    max_prompt_tokens: int = setting(2_000_000, help="longest prompt taken", minimum=1, maximum=2**31 - 1)
    max_turns: int = setting(
        8192, help="requests in flight, waiting ones included; further ones are refused", minimum=1, maximum=10_000_000
    )
    session_waiters: int = setting(8, help="turns of one session that may wait for the one in flight", minimum=0, maximum=1024)
    session_idle_s: float = setting(7200.0, help="a session without turns for this long is forgotten", minimum=1.0, maximum=2_592_000.0)
    max_sessions: int = setting(200_000, help="sessions remembered; the least recently used go first", minimum=1, maximum=100_000_000)
    chain_bytes: int = setting(536_870_912, help="cap on the block hash chains of live sessions", minimum=1 << 20, maximum=1 << 40)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Router: Algorithms 1 and 3 over gRPC, in front of workers and their admission agents."""

    agents: AgentsConfig = section(AgentsConfig)
    engines: EnginesConfig = section(EnginesConfig)
    requests: RequestsConfig = section(RequestsConfig)
    params: Params = section(Params)
    server: ServerConfig = section(ServerConfig)
    http: DoorConfig = section(DoorConfig)
    telemetry: TelemetryConfig = section(TelemetryConfig)
    policy: Literal["kvc", "sticky", "round_robin"] = setting(
        "kvc", help="kvc, or a baseline without admission: vanilla P/D by turns, or pinned"
    )
    grace_s: float = setting(10.0, help="longest wait for turns in flight after SIGTERM", minimum=0.0, maximum=3600.0)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", help="least severe level that is logged")
