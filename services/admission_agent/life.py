"""One life of the engine, and whether the agent may serve it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvc.engine.convert import info_from_welcome
from kvc.errors import InvalidField, Precondition

if TYPE_CHECKING:
    from kvc.core.types import Role, WorkerInfo, WorkerRef
    from kvc.engine.link import Welcome
    from services.admission_agent.config import AgentConfig
    from services.admission_agent.ports import EngineLink

ADMIT = "admit"
RESIDENCY = "residency"


@dataclass(frozen=True, slots=True)
class Life:
    """A connected engine that passed `accept`."""

    info: WorkerInfo
    link: EngineLink

    @property
    def ref(self) -> WorkerRef:
        """Name and epoch."""
        return self.info.ref

    def offers(self, capability: str) -> bool:
        """True when the engine says that it can do this."""
        return capability in self.info.capabilities


def needed(role: Role) -> tuple[str, ...]:
    """Capabilities without which a worker of this role is of no use."""
    return (ADMIT, RESIDENCY) if role.keeps_sessions else ()


def accept(welcome: Welcome, config: AgentConfig) -> WorkerInfo:
    """The worker behind a greeting, as routers shall see it.

    Raises:
        Precondition: the greeting makes no sense, or the engine lacks a capability (F73), serves another model, or hashes blocks of
            another size; `reason` tells these apart.
    """
    block_tokens = config.residency.block_tokens
    if welcome.block_tokens not in {0, block_tokens}:
        raise Precondition(
            f"the engine hashes blocks of {welcome.block_tokens} tokens, residency.block_tokens is {block_tokens}",
            reason="ENGINE_BLOCK_TOKENS_MISMATCH",
        )
    try:
        info = info_from_welcome(welcome, block_tokens)
    except InvalidField as error:
        raise Precondition(f"the engine's greeting: {error}", reason="ENGINE_WELCOME_INVALID") from error
    missing = [name for name in needed(info.role) if name not in info.capabilities]
    if missing:
        offered = ", ".join(info.capabilities) or "none"
        raise Precondition(
            f"a {info.role.value} engine must offer {', '.join(missing)}; this one offers {offered}", reason="ENGINE_CAPABILITY_MISSING"
        )
    if config.engine.model and info.model != config.engine.model:
        raise Precondition(f"the engine serves {info.model!r}, not {config.engine.model!r}", reason="ENGINE_MODEL_MISMATCH")
    info = replace(info, draining=config.admit.draining)
    return _advertised(info, config.engine.advertise_host) if config.engine.advertise_host else info


def _advertised(info: WorkerInfo, host: str) -> WorkerInfo:
    """The worker under the host that routers reach it by; ports stay."""
    parts = urlsplit(info.engine_url)
    bracketed = f"[{host}]" if ":" in host else host
    netloc = bracketed if parts.port is None else f"{bracketed}:{parts.port}"
    url = parts._replace(netloc=netloc).geturl()
    return replace(info, engine_url=url, bootstrap_host=host if info.bootstrap_host else "")
