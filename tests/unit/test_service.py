from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import IO, TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PRELUDE = """
import asyncio, sys
from kvc.errors import Unavailable
from kvc.runtime import logs, service
from kvc.runtime.config import ConfigError

logs.configure("info", "test")

def say(word):
    print(word, flush=True)
"""

POLITE = """
async def main(stop):
    say("up " + type(asyncio.get_running_loop()).__module__)
    await stop.wait()
    say("drained")
"""

STUBBORN = """
async def main(stop):
    say("up")
    try:
        await stop.wait()
        say("stopping")
        await asyncio.Event().wait()
    finally:
        say("closed")
"""


class Process:
    """A service in a process of its own."""

    def __init__(self, body: str) -> None:
        code = PRELUDE + body + "\nsys.exit(service.run(main))\n"
        self.popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> str:
        out: IO[str] | None = self.popen.stdout
        assert out is not None
        return out.readline().strip()

    def end(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=30)
        return self.popen.returncode, out, err

    def close(self) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=30)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service_cleanly(number: signal.Signals, processes: list[Process]) -> None:
    processes.append(Process(POLITE))
    assert processes[0].line() == "up uvloop"
    processes[0].popen.send_signal(number)
    code, out, err = processes[0].end()
    assert (code, out) == (0, "drained\n")
    (line,) = [json.loads(line) for line in err.splitlines()]
    assert (line["event"], line["signal"]) == ("stopping", number.name)


def test_without_uvloop_the_stock_loop_serves(processes: list[Process]) -> None:
    hide = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "uvloop" else find(name, *rest)
"""
    processes.append(Process(hide + POLITE))
    assert processes[0].line().startswith("up asyncio")
    processes[0].popen.send_signal(signal.SIGTERM)
    assert processes[0].end()[:2] == (0, "drained\n")


def test_a_second_signal_cuts_the_drain_short_but_still_closes(processes: list[Process]) -> None:
    processes.append(Process(STUBBORN))
    assert processes[0].line() == "up"
    processes[0].popen.send_signal(signal.SIGTERM)
    assert processes[0].line() == "stopping"
    processes[0].popen.send_signal(signal.SIGTERM)
    code, out, err = processes[0].end()
    assert (code, out) == (128 + signal.SIGTERM, "closed\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("failure", "code", "expected"),
    [
        ("return", 0, ""),
        ("raise ConfigError('server.port: taken')", 2, "server.port: taken\n"),
        ("raise ExceptionGroup('', [ConfigError('server.port: taken')])", 2, "server.port: taken\n"),
    ],
)
def test_exit_codes_of_clean_ends_and_wrong_settings(failure: str, code: int, expected: str, processes: list[Process]) -> None:
    processes.append(Process(f"async def main(stop):\n    {failure}\n"))
    assert processes[0].end() == (code, "", expected)


@pytest.mark.parametrize(
    ("failure", "logged"),
    [
        ("raise Unavailable('etcd is away')", "etcd is away"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("raise asyncio.CancelledError", "CancelledError"),
    ],
)
def test_a_fault_is_logged_in_one_line_and_ends_with_1(failure: str, logged: str, processes: list[Process]) -> None:
    processes.append(Process(f"async def main(stop):\n    {failure}\n"))
    code, out, err = processes[0].end()
    assert (code, out) == (1, "")
    (line,) = [json.loads(line) for line in err.splitlines()]
    assert line["event"] == "service_failed"
    assert logged in json.dumps(line)
