"""Processes of this machine: which are below one, what they have spent, free ports. Linux only, as /proc is."""

from __future__ import annotations

import random
import re
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PROC: Final = Path("/proc")
_RESIDENT: Final = re.compile(r"VmRSS:\s+(\d+) kB")
# Below the ports that the kernel gives to clients, which could otherwise take one before its server does.
_FIRST_PORT: Final = 20_000
_LAST_PORT: Final = 32_000
_TRIES: Final = 1_000


def tree(root: int) -> list[int]:
    """A process and all below it, now."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            text = _read(entry / "stat")
            if text:
                # The name, in parentheses, may contain anything; the parent is the second field after it.
                children[int(text.rpartition(")")[2].split()[1])].append(int(entry.name))
    found, todo = [], [root]
    while todo:
        process = todo.pop()
        found.append(process)
        todo += children[process]
    return found


def cpu_s(roots: Iterable[int]) -> dict[int, float]:
    """CPU seconds of every process below `roots` that lives, by process."""
    spent: dict[int, float] = {}
    for root in roots:
        for process in tree(root):
            try:
                # How the kernel numbers the CPU clock of another process: its complement, and 2 for all its threads' run time.
                spent[process] = time.clock_gettime((~process << 3) | 2)
            except OSError:
                continue  # it ended meanwhile
    return spent


def spent_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """CPU seconds between two looks, those of new processes from their start.

    Raises:
        ProcessLookupError: a process ended meanwhile, so that what it spent is unknown.
    """
    gone = before.keys() - after.keys()
    if gone:
        raise ProcessLookupError(f"ended while it was measured: {', '.join(map(str, sorted(gone)))}")
    return sum(value - before.get(process, 0.0) for process, value in after.items())


def resident_mib(processes: Iterable[int]) -> float:
    """Resident sets, in MiB; what processes share is counted for each."""
    sizes = (_RESIDENT.search(_read(_PROC / str(process) / "status")) for process in processes)
    return sum(int(size[1]) for size in sizes if size is not None) / 1024


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has, all different.

    Raises:
        OSError: there are none.
    """
    rng = random.SystemRandom()
    held: list[socket.socket] = []
    try:
        for _ in range(_TRIES):
            if len(held) == count:
                break
            candidate = socket.socket()
            try:
                candidate.bind(("127.0.0.1", rng.randint(_FIRST_PORT, _LAST_PORT)))
            except OSError:
                candidate.close()
            else:
                held.append(candidate)
        else:
            raise OSError(f"no {count} free ports between {_FIRST_PORT} and {_LAST_PORT}")
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _read(path: Path) -> str:
    """The text of a file in /proc; empty when its process is gone."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
