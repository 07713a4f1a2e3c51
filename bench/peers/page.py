"""The run that docs/benchmarks.md shows: what it was measured on, and where it stands in the page."""

from __future__ import annotations

import datetime as dt
import os
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from bench.report import machine
from kvc.core import route

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BEGIN: Final = "<!-- bench-peers: begin -->"
END: Final = "<!-- bench-peers: end -->"
PACKAGES: Final = ("uvloop", "grpcio", "protobuf", "httptools", "msgspec")


class PageError(ValueError):
    """The page has no place for the run."""


def conditions(rounds: int, peers: Mapping[str, str]) -> str:
    """One paragraph about machine and versions, made before anything runs.

    Args:
        rounds: of the run.
        peers: versions of the peers that are measured, by name.
    """
    where = machine()
    loads = " ".join(f"{load:.2f}" for load in os.getloadavg())
    versions = [*(f"{name} {number}" for name, number in peers.items()), *(f"{name} {version(name)}" for name in PACKAGES)]
    now = dt.datetime.now(dt.UTC)
    way = "from its sources" if (route.__file__ or "").endswith(".py") else "compiled by mypyc"
    return (
        f"Run on {now:%Y-%m-%d}, {rounds} round{'s' * (rounds != 1)}: {where['cores']} cores of {where['cpu']}, {where['memory_gib']} GiB,"
        f" Linux {platform.release()} {platform.machine()}, {where['python']}; {', '.join(versions)}.\n"
        f"The router's request path ran {way}.\n"
        f"Load average before the run (1, 5, 15 minutes): {loads}."
    )


def replaced(text: str, section: str) -> str:
    """The page with `section` between its marks.

    Raises:
        PageError: the marks are not there exactly once, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before + after or BEGIN in rest:
        raise PageError(f"the page does not have {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n\n{section.strip()}\n\n{END}{after}"


def store(page: Path, section: str) -> None:
    """Writes the section into the page.

    Raises:
        OSError: the page cannot be read or written.
        PageError: it has no place for it.
    """
    page.write_text(replaced(page.read_text(), section))
