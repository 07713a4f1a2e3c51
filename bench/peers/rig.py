"""The mock engine and the systems, started side by side, and one measurement of them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.peers.load import Job, Report, Seen
from bench.peers.processes import cpu_s, free_ports, resident_mib, spent_s
from bench.peers.replies import MODEL
from bench.peers.scenarios import Load, Scenario
from bench.peers.systems import Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.peers.systems import System

ROOT: Final = Path(__file__).resolve().parents[2]
ENGINES: Final = 4
START_S: Final = 60.0
STOP_S: Final = 10.0
LOAD_S: Final = 120.0
POLL_S: Final = 0.1
LOG_BYTES: Final = 2000
WARM_UP: Final = Load(connections=32, requests=10)
_ASK: Final = json.dumps({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]})


class Row(msgspec.Struct, frozen=True):
    """One system under one scenario in one round.

    Attributes:
        round: which round.
        scenario: its name.
        system: its name.
        cpu_s: CPU time of all of its processes.
        engine_cpu_s: of the mock engine, for all systems of the measurement.
        load_cpu_s: of the load generator, for all systems of the measurement.
        resident_mib: resident set of all of its processes, after the load.
        load_1min: the machine's load average, after the load.
        seen: what came back.
    """

    round: int
    scenario: str
    system: str
    cpu_s: float
    engine_cpu_s: float
    load_cpu_s: float
    resident_mib: float
    load_1min: float
    seen: Seen


class RigError(RuntimeError):
    """Something could not be started, or ended too early; the message has the end of its log."""


class Child:
    """A process that the rig started, in a group of its own."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        """Starts it."""
        self.name = name
        self._log = logs / f"{name.replace('/', '-').replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
            except OSError as error:
                raise RigError(f"{name} could not be started: {error}") from error
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def failed(self, what: str) -> RigError:
        """An error that quotes its log."""
        tail = self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()
        return RigError(f"{self.name} {what}{': ' if tail else ''}{tail}")

    def signal(self, number: int) -> None:
        """Signals it and all it started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # all have ended

    def end(self, ends_s: float) -> None:
        """Waits until then, and kills what is left."""
        try:
            self._process.wait(max(0.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()


class Rig:
    """Systems that run."""

    def __init__(self, engines: Sequence[int], ports: Mapping[str, int], children: Mapping[str, Child]) -> None:
        """All of them answer.

        Args:
            engines: ports of the engines.
            ports: of the systems, by name.
            children: what was started, by system.
        """
        self.engines = tuple(engines)
        self.ports = dict(ports)
        self._children = dict(children)

    def tune(self, **changes: float) -> dict[str, float]:
        """Changes the engine's pace; see `bench.peers.engine`."""
        query = "&".join(f"{name}={value}" for name, value in changes.items())
        answer: dict[str, float] = json.loads(_request(self.engines[0], "POST", f"/tune?{query}")[1])
        return answer

    def warm(self, system: str) -> None:
        """A few requests, not measured, so that connections and code are warm."""
        self._load([system], WARM_UP, 0)

    def measure(self, scenario: Scenario, systems: Sequence[str], seed: int, number: int) -> list[Row]:
        """One row for each system; several only for a paired scenario.

        Raises:
            RigError: the load generator failed.
            ProcessLookupError: a process of a system ended.
        """
        self.tune(first_token_ms=scenario.first_token_ms, gap_ms=scenario.gap_ms, varied=0)
        engine_before_s = self.tune()["cpu_s"]
        before = {name: self._cpu_s(name) for name in systems}
        report = self._load(systems, scenario.load, seed)
        after = {name: self._cpu_s(name) for name in systems}
        engine_s = self.tune()["cpu_s"] - engine_before_s
        return [
            Row(
                round=number,
                scenario=scenario.name,
                system=name,
                cpu_s=spent_s(before[name], after[name]),
                engine_cpu_s=engine_s,
                load_cpu_s=report.cpu_s,
                resident_mib=resident_mib(after[name]),
                load_1min=os.getloadavg()[0],
                seen=report.targets[name],
            )
            for name in systems
        ]

    def _cpu_s(self, system: str) -> dict[int, float]:
        child = self._children.get(system)
        return cpu_s([child.pid]) if child is not None else {}

    def _load(self, systems: Sequence[str], load: Load, seed: int) -> Report:
        job = Job({name: self.ports[name] for name in systems}, load, seed)
        command = [sys.executable, "-m", "bench.peers.load", msgspec.json.encode(job).decode()]
        try:
            done = subprocess.run(command, check=False, capture_output=True, cwd=ROOT, timeout=LOAD_S)
        except subprocess.TimeoutExpired as error:
            raise RigError(f"{', '.join(systems)}: the load did not end within {LOAD_S:.0f} s") from error
        if done.returncode:
            raise RigError(f"the load generator failed with {', '.join(systems)}: {done.stderr.decode(errors='replace')[-LOG_BYTES:]}")
        return msgspec.json.decode(done.stdout, type=Report)


@contextmanager
def running(systems: Sequence[System], environments: Path) -> Iterator[Rig]:
    """Starts the engine and the systems, and stops them at the end, whatever happens.

    Args:
        systems: what to start.
        environments: folder of the peers' environments.

    Raises:
        RigError: one of them does not come up.
    """
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="kvc-bench-") as folder:
        logs = Path(folder)

        def start(name: str, command: Sequence[str]) -> Child:
            child = Child(name, command, logs)
            children.append(child)
            return child

        try:
            ports = free_ports(ENGINES + 2 * len(systems))
            engines, own = ports[:ENGINES], ports[ENGINES:]
            engine = start("engine", [sys.executable, "-m", "bench.peers.engine", "--ports", *map(str, engines)])
            _await(engine, engines[0], "GET", "/health")
            at: dict[str, int] = {}
            started: dict[str, Child] = {}
            for system, port, metrics_port in zip(systems, own[::2], own[1::2], strict=True):
                at[system.name] = port if system.command is not None else engines[0]
                if system.command is not None:
                    site = Site(port, metrics_port, tuple(engines), environments)
                    started[system.name] = start(system.name, system.command(site))
            for name, child in started.items():
                _await(child, at[name], "POST", "/v1/chat/completions", _ASK)
            yield Rig(engines, at, started)
        finally:
            for child in children:
                child.signal(signal.SIGTERM)
            ends_s = time.monotonic() + STOP_S
            for child in children:
                child.end(ends_s)


def _await(child: Child, port: int, method: str, path: str, body: str = "") -> None:
    """Until it answers with 200."""
    ends_s = time.monotonic() + START_S
    said: Any = "nothing"
    while time.monotonic() < ends_s:
        if not child.running:
            raise child.failed("ended at its start")
        try:
            status, _ = _request(port, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            said = error
        else:
            if status == http.HTTPStatus.OK:
                return
            said = f"status {status}"
        time.sleep(POLL_S)
    raise child.failed(f"does not answer on port {port} ({said})")


def _request(port: int, method: str, path: str, body: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request(method, path, body, {"content-type": "application/json", "x-session-id": "start"})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()
