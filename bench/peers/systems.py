"""What is measured: name, command, and what it is compared with. A further system is one more entry here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.peers.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

MAX_BODY_BYTES: Final = 1 << 28
MAX_REQUESTS: Final = 4096
BASE: Final = "smg/cache_aware"
PD_BASE: Final = "smg/pd"
DIRECT: Final = "direct"
OFF: Final = "kvc off"
STREAM: Final = "kvc stream"
HOP: Final = "kvc hop"
PD_OFF: Final = "kvc pd off"
PD_STREAM: Final = "kvc pd"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a system runs: its own port, a second one for its metrics, the engines' ports, and the folder of the peers' environments."""

    port: int
    metrics_port: int
    engines: tuple[int, ...]
    environments: Path

    @property
    def urls(self) -> list[str]:
        """The engines' URLs; the first one prefills when there is disaggregation."""
        return [f"http://127.0.0.1:{port}" for port in self.engines]


@dataclass(frozen=True, slots=True)
class System:
    """One thing that is measured.

    Attributes:
        name: its name.
        what: what it is, for readers.
        command: what to start; the CPU time of every process below it is the system's. None: the load goes to an engine.
        base: the system that it is compared with.
        peer: the peer that it is of; empty for this project's own.
        scenarios: those it takes part in.
    """

    name: str
    what: str
    command: Callable[[Site], Sequence[str]] | None
    base: str = BASE
    peer: str = ""
    scenarios: tuple[str, ...] = tuple(SCENARIOS)

    @property
    def own(self) -> bool:
        """It is this project's router."""
        return self.command is not None and not self.peer


def _mesh(*arguments: str) -> Callable[[Site], Sequence[str]]:
    def command(site: Site) -> Sequence[str]:
        engines = [str(port) for port in site.engines]
        return [sys.executable, "-m", "bench.peers.mesh", "--port", str(site.port), "--engines", *engines, *arguments]

    return command


def _peer(peer: str, policy: str, *before: str, pd: str = "", after: Sequence[str] = ()) -> Callable[[Site], Sequence[str]]:
    """A peer's command; all three understand the same options. `pd`: the option that turns disaggregation on."""

    def command(site: Site) -> Sequence[str]:
        if pd:
            prefill, *decode = site.urls
            workers = [pd, "--prefill", prefill]
            for url in decode:
                workers += ["--decode", url]
        else:
            workers = ["--worker-urls", *site.urls]
        listen = ["--host", "127.0.0.1", "--port", str(site.port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port)]
        limits = ["--max-concurrent-requests", str(MAX_REQUESTS), "--max-payload-size", str(MAX_BODY_BYTES)]
        program = str(site.environments / peer / "bin" / peer)
        return [program, *before, *workers, "--policy", policy, *listen, *metrics, *limits, "--log-level", "error", *after]

    return command


def _of_peer(peer: str, policies: Sequence[str], *before: str, pd: str) -> list[System]:
    made = [System(f"{peer}/{policy}", f"{peer}, policy {policy}", _peer(peer, policy, *before), peer=peer) for policy in policies]
    what = f"{peer}, one prefill worker and three decode workers"
    command = _peer(peer, "cache_aware", *before, pd=pd)
    return [*made, System(f"{peer}/pd", what, command, base=PD_BASE, peer=peer, scenarios=("short",))]


SYSTEMS: Final = (
    System(DIRECT, "no router: the load goes to one engine", None),
    *_of_peer("smg", ("cache_aware", "consistent_hashing", "round_robin"), "launch", pd="--pd-disaggregation"),
    *_of_peer("sglang-router", ("cache_aware", "round_robin", "manual"), "launch", pd="--pd-disaggregation"),
    *_of_peer("vllm-router", ("cache_aware", "consistent_hash", "round_robin"), pd="--vllm-pd-disaggregation"),
    System(OFF, "`kvc router --http-admission off`", _mesh("--admission", "off")),
    System(STREAM, "`kvc router` as it comes: every turn is asked about on AdmitStream to four agents", _mesh()),
    System(HOP, "the same, before engines that decide on arrival: hot turns take their question along", _mesh("--on-arrival")),
    System(
        PD_OFF,
        "`kvc router --http-admission off`, one prefill worker and three decode workers",
        _mesh("--admission", "off", "--pd"),
        base=PD_BASE,
        scenarios=("short",),
    ),
    System(PD_STREAM, "`kvc router`, one prefill worker and three decode workers", _mesh("--pd"), base=PD_BASE, scenarios=("short",)),
)
NEEDED: Final = (DIRECT, BASE, PD_BASE, OFF, STREAM, HOP, PD_OFF, PD_STREAM)
"""What the bars need; other peers are measured when asked for."""
