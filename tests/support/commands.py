"""`kvc` as its users run it: a process, with or without a terminal; whatever a test does, nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
KVC = (sys.executable, "-m", "services.cli")
# Runs a command in a terminal of its own: what is written to its standard input is typed there.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
UP = re.compile(r"router on (127\.0\.0\.1:\d+), metrics on \S+\s+agents: (.*)\n(?:.*\n)*?logs in (\S+);")
PLAIN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
START_S = 60.0


def kvc(*argv: str, timeout_s: float = 100.0, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; `text` is its standard input."""
    return subprocess.run(
        [*KVC, *argv], input=text, capture_output=True, text=True, check=False, timeout=timeout_s, env=ENVIRONMENT, cwd=ROOT
    )


@dataclass
class Command:
    """A command that runs."""

    process: subprocess.Popen[bytes]
    printed: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """What it printed so far, without the terminal's control sequences."""
        return PLAIN.sub("", self.printed.decode(errors="replace")).replace("\r", "")

    def wait_for(self, pattern: str | re.Pattern[str], timeout_s: float = START_S) -> re.Match[str]:
        """Waits until it has printed something.

        Raises:
            AssertionError: it does not in time, or ended before.
        """
        ends_s = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.text)) is None:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text}"
            assert time.monotonic() < ends_s, f"not within {timeout_s} s: {pattern}; printed: {self.text}"
            time.sleep(0.02)
        return found

    def end(self, number: int = signal.SIGINT, timeout_s: float = 30.0) -> int:
        """Sends a signal and waits; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def type(self, keys: bytes) -> None:
        """Types into its terminal."""
        assert self.process.stdin is not None
        self.process.stdin.write(keys)
        self.process.stdin.flush()

    def below(self) -> dict[int, str]:
        """Processes under it, by id, with their arguments."""
        return descendants(self.process.pid)


@contextmanager
def running(*argv: str, terminal: bool = False, **environment: str) -> Iterator[Command]:
    """A command for as long as the context lasts. Then it is asked to stop; what still runs of it afterwards is killed."""
    whole = [sys.executable, "-c", TERMINAL, *KVC, *argv] if terminal else [*KVC, *argv]
    process = subprocess.Popen(
        whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT | environment, cwd=ROOT
    )
    command = Command(process)
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, command.printed))
    reader.start()
    known: dict[int, str] = {}
    try:
        yield command
        known = command.below()
    finally:
        known = known or command.below()
        _stop(process)
        for pid in known:
            _kill(pid)
        reader.join()
        process.stdout.close()
        if process.stdin is not None:
            process.stdin.close()


@contextmanager
def up(*argv: str, terminal: bool = False) -> Iterator[tuple[Command, str, Path]]:
    """`kvc up` on any free port, once it serves: the command, the router's address, the folder of its logs."""
    with running("up", "--port", "0", "--http-port", "0", "--time-scale", "50", *argv, terminal=terminal) as command:
        found = command.wait_for(UP)
        yield command, found[1], Path(found[3])


def alive(pids: dict[int, str]) -> dict[int, str]:
    """Those that still run: not gone, and not merely waiting to be reaped."""
    return {pid: name for pid, name in pids.items() if (_stat(pid) or ("", "Z"))[1] != "Z"}


def gone(pids: dict[int, str], timeout_s: float = 10.0) -> bool:
    """True once none of them runs; false when some still do after `timeout_s`."""
    ends_s = time.monotonic() + timeout_s
    while alive(pids):
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.02)
    return True


def descendants(pid: int) -> dict[int, str]:
    """Processes under a process, by id, with their arguments."""
    parents = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found: dict[int, str] = {}
    fresh = {pid}
    while fresh:
        fresh = {child for child, stat in parents.items() if stat is not None and int(stat[0]) in fresh}
        found |= {child: _arguments(child) for child in fresh}
    return found


def _stat(pid: int) -> tuple[str, str] | None:
    """Parent and state of a process; None when there is none."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return parent, state


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(stream: IO[bytes], into: bytearray) -> None:
    while data := os.read(stream.fileno(), 65_536):
        into += data
