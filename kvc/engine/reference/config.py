"""Settings of the reference engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - settings evaluate their annotations
from typing import TYPE_CHECKING, Literal

from kvc.core.params import Params, params_for
from kvc.core.types import Role
from kvc.engine.reference.costs import PRESETS
from kvc.runtime.config import section, setting
from kvc.runtime.telemetry import TelemetryConfig

if TYPE_CHECKING:
    from kvc.engine.reference.costs import CostModel

DEFAULT_MODEL = "kvc/reference"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A reference engine: behaves as an SGLang worker, without a model."""

    role: Literal["monolithic", "prefill", "decode"] = setting("monolithic", help="what the worker does")
    worker_id: str = setting("engine", help="name of the worker, stable across restarts")
    model: str = setting(DEFAULT_MODEL, help="served model name; seeds block hashes and KV")
    host: str = setting("127.0.0.1", help="address to bind")
    port: int = setting(0, help="HTTP port; 0 = any free one", minimum=0, maximum=65535)
    advertise_host: str | None = setting(None, help="host that others reach this engine at; none = --host")
    bootstrap_port: int = setting(0, help="port of KV transfers, prefill engines only; 0 = any free one", minimum=0, maximum=65535)
    link_path: Path | None = setting(None, help="unix socket of the engine link; none = no link")
    ops_host: str = setting("127.0.0.1", help="address of /metrics, /health and /ready")
    ops_port: int = setting(0, help="port of /metrics, /health and /ready; 0 = any free one", minimum=0, maximum=65535)
    page_tokens: int = setting(16, help="KV page", minimum=1, maximum=4096)
    kv_tokens: int = setting(92_104, help="K, the KV pool, rounded down to pages", minimum=1, maximum=2**31 - 1)
    block_tokens: int = setting(24, help="the mesh's routing block", minimum=1, maximum=4096)
    max_input_tokens: int = setting(2**31 - 1, help="longest prompt taken", minimum=1, maximum=2**31 - 1)
    preset: str = setting("h100-rdma", help="what things cost", choices=tuple(PRESETS))
    time_scale: float = setting(1.0, help="modelled seconds a wall second", minimum=0.001, maximum=1e6)
    chunk_tokens: int | None = setting(
        None, help="prefill chunk; none = 8192 on prefill engines, 2048 elsewhere", minimum=1, maximum=2**31 - 1
    )
    max_running_requests: int = setting(256, help="requests with memory, open tickets included", minimum=1, maximum=100_000)
    queue_limit: int = setting(256, help="requests that may wait for memory", minimum=0, maximum=1_000_000)
    default_max_new_tokens: int = setting(128, help="output when a request does not say", minimum=1, maximum=2**31 - 1)
    bootstrap_timeout_s: float = setting(10.0, help="longest wait of one half of a room for the other", minimum=0.01, maximum=3600)
    transfer_timeout_s: float = setting(300.0, help="longest wait for KV once asked for", minimum=0.01, maximum=86_400)
    stream_interval_ms: float = setting(
        20.0, help="shortest time between two chunks of a stream but the first and last", minimum=0, maximum=10_000
    )
    max_body_bytes: int = setting(64 * 1024 * 1024, help="largest HTTP request body", minimum=1024, maximum=1 << 30)
    max_sessions: int = setting(10_000, help="session records kept", minimum=1, maximum=10_000_000)
    allow_corruption: bool = setting(default=False, help="serve POST /debug/corrupt, for tests")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", help="least severe log level")
    params: Params = section(Params)
    telemetry: TelemetryConfig = section(TelemetryConfig)

    def __post_init__(self) -> None:
        """Checks what concerns several settings.

        Raises:
            ValueError: nothing fits into the pool.
        """
        usable = int(self.params.rho * (self.kv_tokens // self.page_tokens * self.page_tokens)) // self.page_tokens * self.page_tokens
        if usable < 2:  # noqa: PLR2004 - one token of prompt and one of output
            raise ValueError(f"kv_tokens: {self.kv_tokens} tokens leave no page of {self.page_tokens} within rho = {self.params.rho}")

    @property
    def worker_role(self) -> Role:
        """The role as the core knows it."""
        return Role(self.role)

    @property
    def costs(self) -> CostModel:
        """The preset's cost model."""
        return PRESETS[self.preset]

    @property
    def chunk(self) -> int:
        """Prefill chunk in tokens."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return 8192 if self.role == "prefill" else 2048

    @property
    def public_host(self) -> str:
        """Where others reach this engine."""
        return self.advertise_host or self.host


def effective_params(config: EngineConfig, given: dict[str, object]) -> Params:
    """The profile's parameters with what was set explicitly.

    Args:
        config: the settings.
        given: values of the section `params` that were set, by name.
    """
    overrides = {name: value for name, value in given.items() if name != "profile"}
    return params_for(config.params.profile, **overrides, **({} if "block_tokens" in overrides else {"block_tokens": config.block_tokens}))
