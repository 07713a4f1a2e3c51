"""Arguments that several commands share, checked with one clear line each."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvc.engine.reference.costs import PRESETS
from services.local_mesh.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_FAILED = 1
EXIT_USAGE = 2
DEFAULT_PORT = 5820
"""Below the range from which Linux takes ports of its own choice (32768 on): there, any connection could hold the port already."""
DEFAULT_HTTP_PORT = 8000
CREDENTIAL_VARIABLE = "KVC_ROUTER_TOKEN"
DEFAULT_ROUTER = f"127.0.0.1:{DEFAULT_PORT}"


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, with exit code 2. Takes no abbreviations: an option that is added later breaks none."""

    def __init__(self, **settings: Any) -> None:
        """As argparse's."""
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """One line on stderr."""
        sys.stderr.write(f"{self.prog}: {message}\n")
        raise SystemExit(EXIT_USAGE)


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from `low` to `high`."""

    def parse(given: str) -> int:
        try:
            value = int(given)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{given[:32]!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{given[:32]} is not {low} to {high}")
        return value

    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a finite number from `low` to `high`."""

    def parse(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{given[:32]!r} is no number") from None
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"{given[:32]} is not {low:g} to {high:g}")
        return value

    return parse


def text(value: str) -> str:
    """An argparse type: text that can be sent, which bytes that are no UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is no UTF-8") from None
    return value


def topology(name: str) -> Topology:
    """An argparse type: a topology."""
    try:
        return Topology.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_mesh_arguments(parser: argparse.ArgumentParser, *, kv_tokens: int, time_scale: float) -> None:
    """Arguments of commands that start a mesh."""
    parser.add_argument(
        "--topology", type=topology, default=Topology(1, 3), metavar="xPyD", help="prefill and decode workers: 1P3D (default), 0P4D, ..."
    )
    parser.add_argument(
        "--kv-tokens",
        type=whole(1_000, 100_000_000),
        default=kv_tokens,
        metavar="N",
        help=f"K_d, the KV pool of each decode worker (default {kv_tokens})",
    )
    parser.add_argument("--page-tokens", type=whole(1, 1024), default=16, metavar="N", help="KV page of the engines (default 16)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="h100-rdma", help="hardware the engines model (default h100-rdma)")
    parser.add_argument(
        "--time-scale",
        type=real(0.001, 10_000.0),
        default=time_scale,
        metavar="X",
        help=f"modelled seconds a second (default {time_scale:g})",
    )
    parser.add_argument("--profile", choices=("default", "paper"), default="default", help="rulings in force (docs/spec.md)")
    parser.add_argument("--policy", choices=("kvc", "sticky", "round_robin"), default="kvc", help="how turns are placed (default kvc)")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of commands that talk to a router. Its token comes from the environment: other users of the machine see flags."""
    parser.add_argument("--router", default=DEFAULT_ROUTER, metavar="HOST:PORT", help=f"the router (default {DEFAULT_ROUTER})")
    parser.add_argument("--tls-ca", type=Path, default=None, metavar="FILE", help="PEM authority of a router that uses TLS")
    parser.epilog = f"The environment variable {CREDENTIAL_VARIABLE} holds the token of a router that asks for one."
    parser.add_argument("--json", action="store_true", help="one JSON object")
