"""`python -m bench.peers`: measures the router beside peers, prints tables, and says which bars were met."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.peers import table
from bench.peers.bars import judge
from bench.peers.environments import VERSIONS, ensure
from bench.peers.identity import compare
from bench.peers.page import conditions, replaced, store
from bench.peers.results import Results
from bench.peers.rig import ROOT, Rig, Row, running
from bench.peers.scenarios import SCENARIOS, STANDARD, Scenario
from bench.peers.systems import NEEDED, SYSTEMS, System

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.peers.bars import Judged
    from bench.peers.identity import Identity

ENVIRONMENTS: Final = ROOT / ".venv-peers"


@dataclass(slots=True)
class Run:
    """What was measured."""

    systems: Sequence[System]
    identities: dict[str, Identity] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What must not happen, however fast the machine: replies that differ or fail."""
        found = [f"{name}: {what}" for name, identity in self.identities.items() for what in identity.differences]
        results = Results(self.rows)
        for system in self.systems:
            if system.own or system.command is None:
                found += [f"{system.name}: {count} replies failed, {kind}" for kind, count in results.errors(system.name).items()]
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 when something was missed or wrong, 2 when the run could not be made."""
    arguments = _parser().parse_args(argv)
    try:
        systems = _systems(arguments.peers, arguments.only)
        scenarios = [SCENARIOS[name].within(arguments.at_most) for name in arguments.scenario]
        if arguments.store:
            replaced(arguments.store.read_text(), "")
        peers = {system.peer: VERSIONS[system.peer] for system in systems if system.peer}
        told = conditions(arguments.rounds, peers)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        for peer in peers:
            ensure(arguments.environments, peer)
        start_s = time.monotonic()
        done = measure(systems, scenarios, arguments.rounds, arguments.seed, arguments.environments)
        told = f"{told}\nThe run took {time.monotonic() - start_s:.0f} s."
        if arguments.out:
            arguments.out.write_text("".join(f"{msgspec.json.encode(row).decode()}\n" for row in done.rows))
        judged = judge(Results(done.rows))
        text = section(done, judged, told)
        if arguments.store:
            store(arguments.store, text)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench.peers: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    print(text)
    return _verdict(done, judged, report_only=arguments.report_only)


def measure(systems: Sequence[System], scenarios: Sequence[Scenario], rounds: int, seed: int, environments: Path) -> Run:
    """Compares replies, then measures every system under every scenario, in a new random order each time.

    Raises:
        RigError: a system does not come up, or the load generator failed.
        ProcessLookupError: a process of a system ended.
    """
    done = Run(systems)
    rng = random.Random(seed)
    with running(systems, environments) as rig:
        for system in systems:
            if system.own:
                _say(f"comparing replies: {system.name}")
                done.identities[system.name] = _compare(rig, system)
        for system in systems:
            rig.warm(system.name)
        for number in range(rounds):
            for scenario in scenarios:
                _say(f"round {number + 1} of {rounds}: {scenario.name}")
                names = [system.name for system in systems if scenario.name in system.scenarios]
                rng.shuffle(names)
                for group in [names] if scenario.load.paired else [[name] for name in names]:
                    done.rows += rig.measure(scenario, group, rng.randrange(10**6), number)
    return done


def section(done: Run, judged: Sequence[Judged], told: str) -> str:
    """The run, as Markdown."""
    results = Results(done.rows)
    met = sum(one.met for one in judged)
    parts = [told]
    if done.identities:
        parts += ["Replies through the router beside the engine's own, framing included:", table.identities(done.identities)]
    parts += [
        f"Bars, as medians over the rounds (least-most): {met} of {len(judged)} met.",
        table.bars(judged),
        "What each system cost, its median over the rounds (least-most):",
        table.measured(results, done.systems),
        "The ratio to its base in the same round:",
        table.ratios(results, done.systems),
    ]
    return "\n\n".join(parts)


def _compare(rig: Rig, system: System) -> Identity:
    rig.tune(first_token_ms=0, gap_ms=0, varied=1)
    return asyncio.run(compare(rig.engines[0], rig.ports[system.name]))


def _verdict(done: Run, judged: Sequence[Judged], *, report_only: bool) -> int:
    missed = [one for one in judged if not one.met]
    for one in missed:
        what = "not measured" if one.measured is None else f"{one.measured.median:.2f} is more than {one.bar.limit}"
        print(f"missed: {one.bar.system}, {one.bar.measure.name}: {what}", file=sys.stderr)
    for what in done.wrong:
        print(f"wrong: {what}", file=sys.stderr)
    return 1 if done.wrong or (missed and not report_only) else 0


def _systems(peers: str, only: str) -> list[System]:
    """Those that were asked for.

    Raises:
        ValueError: there is none, or the pattern is none.
    """
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ValueError(f"--only {only}: {error}") from error
    chosen = [system for system in SYSTEMS if pattern.fullmatch(system.name)]
    if peers == "none":
        chosen = [system for system in chosen if not system.peer]
    elif peers == "smg":
        chosen = [system for system in chosen if system.name in NEEDED]
    if not chosen:
        raise ValueError(f"--only {only}: no such system (there are {', '.join(system.name for system in SYSTEMS)})")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="The router's request path beside peer routers.")
    parser.add_argument("--rounds", type=_positive, default=3, help="every round measures every system under every scenario")
    parser.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), default=list(STANDARD))
    parser.add_argument("--only", default=".*", metavar="PATTERN", help="only systems whose whole name the regular expression matches")
    parser.add_argument("--peers", choices=("smg", "all", "none"), default="smg", help="smg: what the bars need; all: everything there is")
    parser.add_argument("--at-most", type=_seconds, default=600.0, metavar="SECONDS", help="cuts every measurement, for a quick look")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of orders and prompts")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, metavar="FOLDER", help="the peers' virtual environments")
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes every row as a line of JSON")
    parser.add_argument("--store", type=Path, metavar="PAGE", help="writes the tables between the marks of a Markdown page")
    parser.add_argument("--report-only", action="store_true", help="a missed bar does not fail the run; a wrong reply does")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1000:
        raise argparse.ArgumentTypeError("1 to 1000")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0.05 <= number <= 600.0:
        raise argparse.ArgumentTypeError("0.05 to 600 seconds")
    return number


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
