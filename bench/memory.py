"""Memory of the router's state: bytes a block, chains under their cap, residency within its bound, and the constants of the estimate.

Each case runs in a process of its own, so that its resident set is nobody else's (bench/memory_cases.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import Row, table
from bench.world import BLOCK_TOKENS
from kvc.core.forest import NODE_BYTES, SESSION_BYTES

if TYPE_CHECKING:
    from bench.memory_cases import Numbers

NAME = "memory"
ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
CAP_SLACK = 1.10
"""Resident set over the cap: arrays that grow by appends hold up to 1/16 more than they use."""
CONSTANT_BAR_PERCENT = 25.0
CASE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: `entries` sessions of one block for the constants, `decoders` pools of `capacity_tokens`."""

    sessions: tuple[int, ...] = (10_000, 20_000)
    blocks: int = 4_000
    shared_blocks: int = 500
    turns: int = 20
    entries: int = 100_000
    decoders: int = 64
    capacity_tokens: int = 400_000
    served: int = 1_000
    prompts: int = 40


def case(name: str, **arguments: int) -> Numbers:
    """Runs one case in a new process.

    Raises:
        RuntimeError: it failed, or took longer than CASE_TIMEOUT_S; the message has the end of what it said.
    """
    command = [sys.executable, "-m", "bench.memory_cases", name, json.dumps(arguments)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"memory case {name} {arguments} took longer than {CASE_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"memory case {name} {arguments} exited with {error.returncode}: {error.stderr[-2000:]}") from error
    numbers: Numbers = json.loads(done.stdout)
    return numbers


def measure(size: Size | None = None) -> list[Row]:
    """All rows."""
    size = size or Size()
    rows = [_chains(count, size, shared_blocks, 1) for count in size.sessions for shared_blocks in (0, size.shared_blocks)]
    rows.append(_chains(size.sessions[0], size, 0, size.turns))
    return [*rows, *_capped(size), *_constants(size), *_residency(size)]


def _chains(count: int, size: Size, shared_blocks: int, turns: int) -> Row:
    numbers = case("forest", sessions=count, blocks=size.blocks, shared_blocks=shared_blocks, turns=turns)
    how = f"{shared_blocks} of them shared" if shared_blocks else f"grown in {turns} appends" if turns > 1 else "none shared"
    return Row(
        NAME,
        f"{count:,} sessions of {size.blocks:,} blocks, {how}",
        numbers["rss_bytes"] / numbers["owned_blocks"],
        "B/block",
        baseline=8.0,
        baseline_name="the hash alone",
        detail=f"{numbers['rss_bytes'] / MIB:.0f} MiB; the estimate says {numbers['held_bytes'] / MIB:.0f} MiB",
    )


def _capped(size: Size) -> list[Row]:
    count = size.sessions[-1]
    numbers = case("capped", sessions=count, blocks=size.blocks, turns=2)
    cap = numbers["cap_bytes"] / MIB
    held = f"{numbers['sessions_held']:,.0f} sessions held, {numbers['sessions_forgotten']:,.0f} forgotten"
    return [
        Row(
            NAME,
            f"{count:,} sessions under the cap of {cap:.0f} MiB",
            numbers["rss_bytes"] / MIB,
            "MiB",
            bar=cap * CAP_SLACK,
            baseline=cap,
            baseline_name="the cap",
            detail=held,
        ),
        Row(NAME, "  of those held, not the most recently updated", numbers["out_of_order"], "sessions", bar=0),
    ]


def _constants(size: Size) -> list[Row]:
    count = size.entries
    entry = case("entries", count=count)["rss_bytes"] / count
    rows = [_constant("SESSION_BYTES", "an entry of the forest", entry, SESSION_BYTES)]
    for branches, shape in ((1, "each alone"), (2, "parting in two"), (8, "parting in eight")):
        numbers = case("nodes", count=count, branches=branches)
        node = (numbers["rss_bytes"] - entry * count) / numbers["nodes"] - 8
        rows.append(_constant("NODE_BYTES", f"a node, {shape}", node, NODE_BYTES))
    numbers = case("sessions", count=count)
    beside = (numbers["rss_bytes"] - numbers["held_bytes"]) / count
    return [*rows, Row(NAME, "a session beside its chain: Σ's entry, digest", beside, "B")]


def _constant(name: str, what: str, measured: float, constant: int) -> Row:
    deviation = abs(measured / constant - 1) * 100
    return Row(NAME, f"{name} = {constant} off for {what}", deviation, "%", bar=CONSTANT_BAR_PERCENT, detail=f"{measured:.0f} B measured")


def _residency(size: Size) -> list[Row]:
    full = case("residency", decoders=size.decoders, capacity_tokens=size.capacity_tokens)
    decoders = min(8, size.decoders)
    pool_blocks = size.capacity_tokens // BLOCK_TOKENS
    blocks = min(size.blocks, pool_blocks)
    guessed = case("estimate", decoders=decoders, capacity_tokens=size.capacity_tokens, count=size.served, blocks=blocks)
    shared_blocks = min(size.shared_blocks, blocks // 2)
    followed = case("followed", capacity_tokens=size.capacity_tokens, count=size.prompts, blocks=blocks, shared_blocks=shared_blocks)
    pools = f"{size.capacity_tokens:,} tokens"
    return [
        Row(
            NAME,
            f"residency, {size.decoders} full pools of {pools}",
            full["rss_bytes"] / full["blocks"],
            "B/block",
            baseline=8.0,
            baseline_name="the hash alone",
            detail=f"{full['rss_bytes'] / MIB:.0f} MiB for {full['blocks']:,.0f} blocks = Σ K_d / block_tokens",
        ),
        _bound(f"  most resident by events, 1 pool of {pools}", followed),
        _bound(f"  most resident by estimate, {decoders} pools", guessed),
    ]


def _bound(what: str, numbers: Numbers) -> Row:
    detail = f"bar: Σ K_d / block_tokens; {numbers['served_blocks']:,.0f} blocks served"
    return Row(NAME, what, numbers["blocks"], "blocks", bar=numbers["bound_blocks"], detail=detail)


if __name__ == "__main__":
    print(table(measure()))
