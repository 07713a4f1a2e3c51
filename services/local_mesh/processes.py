"""Child processes of a local mesh: started, watched through their JSON log lines, stopped or killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from kvc.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_KEPT_LINES = 50
_STREAM_LIMIT_BYTES = 1 << 20


class Child:
    """One `kvc` subcommand as a process. Its log goes to a file; one event of it says that it is up and where."""

    def __init__(self, name: str, argv: Sequence[str], log_file: Path, up_event: str = "listening") -> None:
        """Starts nothing yet.

        Args:
            name: for messages.
            argv: arguments of `kvc`.
            log_file: its log lines are appended here.
            up_event: name of the event that says that it is up.
        """
        self.name = name
        self._argv = list(argv)
        self._log_file = log_file
        self._up_event = up_event
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._listening: asyncio.Future[dict[str, Any]] | None = None
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    @property
    def returncode(self) -> int | None:
        """Exit status once it has ended."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Starts the process.

        Raises:
            RuntimeError: it runs already.
        """
        if self.pid is not None:
            raise RuntimeError(f"{self.name} runs already")
        self._listening = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.local_mesh.child",
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_STREAM_LIMIT_BYTES,
            start_new_session=True,  # a Ctrl-C of the terminal reaches the parent only, which stops children in order
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def listening(self, timeout_s: float) -> dict[str, Any]:
        """The fields of the event that says that the child is up.

        Raises:
            Unavailable: it ended before, or did not say so in time; the message has its last log lines.
        """
        assert self._listening is not None, "not started"
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._listening)
        except TimeoutError:
            raise Unavailable(f"{self.name} did not listen within {timeout_s} s: {self.tail()}") from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with self._log_file.open("ab") as log:
            while line := await _line(process.stderr):
                _keep(log, line)
                self._last.append(line.decode(errors="replace").rstrip())
                if self._listening is not None and not self._listening.done():
                    self._look_for_up(line, self._listening)
        await process.wait()
        if self._listening is not None and not self._listening.done():
            self._listening.set_exception(Unavailable(f"{self.name} ended with status {process.returncode}: {self.tail(1)}"))
            self._listening.exception()  # looked at here, so that a caller who no longer waits is no fault

    def _look_for_up(self, line: bytes, listening: asyncio.Future[dict[str, Any]]) -> None:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("event") == self._up_event:
                listening.set_result(record)

    def tail(self, lines: int = 3) -> str:
        """Its last log lines as people read them, for messages."""
        return " | ".join(_readable(line) for line in list(self._last)[-lines:]) or "(it logged nothing)"

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Sends a signal; a process that has ended gets none."""
        if self.pid is not None and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def ended(self) -> int:
        """Waits for the end.

        Returns:
            Exit status; negative: the signal that ended it.
        """
        assert self._process is not None, "not started"
        assert self._reader is not None, "not started"
        await asyncio.shield(self._reader)  # who no longer waits must not end the reading
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then after `grace_s` SIGKILL. Idempotent."""
        if self._process is None or self._reader is None:
            return
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        self.signal(signal.SIGKILL)
        await self._process.wait()
        await asyncio.shield(self._reader)


def _readable(line: str) -> str:
    """A log line in words: its event and what went wrong, without the traceback. A line that is no event stays as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    told = [str(record[key]) for key in ("event", "reason", "message") if record.get(key)]
    told += str(record.get("exception", "")).splitlines()[-1:]
    return ": ".join(told)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """One line; one that is longer than the limit is dropped."""
    while True:
        try:
            return await stream.readline()
        except ValueError:  # longer than the limit; readline has dropped it
            continue


def _keep(log: IO[bytes], line: bytes) -> None:
    log.write(line)
    log.flush()
