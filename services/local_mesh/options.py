"""Arguments that several commands share, checked with one clear line each."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, NoReturn

from services.local_mesh.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_FAILED = 1
EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """One line on stderr."""
        sys.stderr.write(f"{self.prog}: {message}\n")
        raise SystemExit(EXIT_USAGE)


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:32]!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:32]} is not {low} to {high}")
        return value

    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a finite number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:32]!r} is no number") from None
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"{text[:32]} is not {low:g} to {high:g}")
        return value

    return parse


def topology(text: str) -> Topology:
    """An argparse type: a topology."""
    try:
        return Topology.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_mesh_arguments(parser: argparse.ArgumentParser, *, kv_tokens: int, time_scale: float) -> None:
    """Arguments of commands that start a mesh."""
    parser.add_argument("--topology", type=topology, default=Topology(1, 3), help="e.g. 1P3D (default) or 0P4D")
    parser.add_argument(
        "--kv-tokens", type=whole(1_000, 100_000_000), default=kv_tokens, help=f"K_d of each decode worker (default {kv_tokens:,})"
    )
    parser.add_argument("--page-tokens", type=whole(1, 1024), default=16, help="KV page of the engines (default 16)")
    parser.add_argument("--preset", default="h100-rdma", help="hardware the engines model (default h100-rdma)")
    parser.add_argument(
        "--time-scale", type=real(0.001, 10_000.0), default=time_scale, help=f"modelled seconds a second (default {time_scale:g})"
    )
    parser.add_argument("--profile", choices=("default", "paper"), default="default", help="rulings in force (docs/spec.md)")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of commands that talk to a router."""
    parser.add_argument("--router", default="127.0.0.1:50050", metavar="HOST:PORT", help="the router (default 127.0.0.1:50050)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
