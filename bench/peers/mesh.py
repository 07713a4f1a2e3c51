"""Starts what is measured: an always-admitting agent for each engine, and `kvc router` with default settings in front of them."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from bench.peers.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES: Final = (33001, 33002, 33003, 33004)
STOP_S: Final = 10.0


def commands(
    port: int, engines: Sequence[int], agents: Sequence[int], *, admission: str, pd: bool, on_arrival: bool, rest: Sequence[str]
) -> list[list[str]]:
    """The agents' commands, and the router's after them."""
    made: list[list[str]] = []
    router = [sys.executable, "-m", "services.cli", "router", "--http-port", str(port)]
    if admission:
        router += ["--http-admission", admission]
    for number, (engine, agent) in enumerate(zip(engines, agents, strict=True)):
        role = "prefill" if pd and number == 0 else "decode"
        identity = ["--worker-id", f"w{number}", "--role", role, "--url", f"http://127.0.0.1:{engine}"]
        made.append(
            [sys.executable, "-m", "bench.peers.always", "--port", str(agent), *identity, *(["--on-arrival"] if on_arrival else [])]
        )
        router += ["--agent", f"127.0.0.1:{agent}"]
    if pd:
        # Every prompt goes to both workers, as it does at the peers; a short one would stay with the decode worker.
        router += ["--params-executor", "prefill"]
    return [*made, [*router, *rest]]


def main() -> int:
    """`python -m bench.peers.mesh --port P [--engines P ...] [--admission off] [--pd] [-- more arguments of the router]`."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.mesh", description="kvc router in front of engines that admit every turn.")
    parser.add_argument("--port", type=int, required=True, help="the router's HTTP port")
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES, help="the engines' HTTP ports")
    parser.add_argument("--admission", default="", help="the router's --http-admission; its default when absent")
    parser.add_argument("--pd", action="store_true", help="the first engine prefills for the others")
    parser.add_argument("--on-arrival", action="store_true", help="engines decide on hot turns as they arrive: one hop")
    parser.add_argument("rest", nargs="*", help="more arguments of the router")
    arguments = parser.parse_args()
    agents = free_ports(len(arguments.engines))
    told = commands(
        arguments.port,
        arguments.engines,
        agents,
        admission=arguments.admission,
        pd=arguments.pd,
        on_arrival=arguments.on_arrival,
        rest=arguments.rest,
    )
    children = [subprocess.Popen(command) for command in told]

    def stop(*_: object) -> None:
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    code = children[-1].wait()
    stop()
    for child in children:
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
