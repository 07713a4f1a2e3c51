"""A run as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.peers.results import MEASURES, READS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.peers.bars import Judged
    from bench.peers.identity import Identity
    from bench.peers.results import Results, Spread
    from bench.peers.systems import System


def cell(value: Spread | None, digits: int) -> str:
    """`median (least-most)`; the median alone when all are alike; `-` for nothing."""
    if value is None:
        return "-"
    median, least, most = (f"{number:,.{0 if abs(number) >= 1000 else digits}f}" for number in value)
    return median if least == most else f"{median} ({least}-{most})"


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others are right-aligned."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(results: Results, systems: Sequence[System]) -> str:
    """What each system cost."""
    measures = [measure for measure in MEASURES if any(row.scenario == measure.scenario for row in results.rows)]
    head = ["system", *(measure.name for measure in measures), "RSS MiB", "errors"]
    body = []
    for system in systems:
        # The load of `direct` goes to the engine, whose CPU time is not a router's.
        cells = [
            "-" if system.command is None and "CPU" in measure.name else cell(results.value(measure, system.name), measure.digits)
            for measure in measures
        ]
        resident = f"{results.resident_mib(system.name):,.0f}" if system.command is not None else "-"
        body.append([system.name, *cells, resident, _errors(results.errors(system.name))])
    return rows(head, body)


def ratios(results: Results, systems: Sequence[System]) -> str:
    """What each system cost beside its base; the bases themselves and `direct` are left out."""
    measures = [measure for measure in MEASURES if measure is not READS and any(row.scenario == measure.scenario for row in results.rows)]
    body = [
        [system.name, *(cell(results.ratio(measure, system.name, system.base), 2) for measure in measures), system.base]
        for system in systems
        if system.command is not None and system.name != system.base
    ]
    return rows(["system", *(f"{measure.name.partition(', µs')[0]}, ratio" for measure in measures), "to"], body)


def bars(judged: Sequence[Judged]) -> str:
    """Every bar."""
    body = []
    for one in judged:
        bar = one.bar
        what = f"{bar.system}: {bar.measure.name.partition(', µs')[0]}"
        limit = f"{bar.limit} x {bar.base}" if bar.base else f"{bar.limit}"
        verdict = "met" if one.met else ("missed" if one.measured is not None else "not measured")
        body.append([what, limit, cell(one.measured, 2), verdict])
    return rows(["bar", "at most", "measured", "verdict"], body)


def identities(compared: Mapping[str, Identity]) -> str:
    """What the comparison of replies found."""
    body = [
        [name, f"{identity.replies:,}", f"{identity.body_bytes:,}", str(len(identity.differences)) if identity.differences else "none"]
        for name, identity in compared.items()
    ]
    return rows(["system", "replies compared", "bytes", "differences"], body)


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(errors.items())) or "0"
