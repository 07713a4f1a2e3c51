"""Logs are JSON lines on stderr: one object a line, one line an event.

`event(logger, "dispatch", session_id=..., mode=...)` is the only way the project logs. Names that carry prompts or secrets are
masked whatever their value, long values are cut, and a value that cannot be encoded never breaks the line.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import math
import sys
import time
import traceback
from typing import Any, TextIO

import msgspec

MAX_VALUE_CHARS = 512
MAX_TRACE_CHARS = 8192
MAX_ITEMS = 64
MAX_DEPTH = 4
MAX_INT = 2**64
MAX_LINES = 256
MASK = "[masked]"
# Never logged, whoever passes them: what users wrote, what models answered, and what opens doors.
_MASKED = frozenset(
    {
        "prompt",
        "text",
        "messages",
        "content",
        "input_ids",
        "output_ids",
        "token_ids",
        "auth_token",
        "token",
        "authorization",
        "password",
        "secret",
    }
)
# Libraries that fill a debug log with lines of no use: gRPC writes one for each call.
_TALKATIVE = ("asyncio", "grpc")
_RESERVED = frozenset({"ts", "level", "service", "event"})
_SPECIAL = _RESERVED | _MASKED
_encode = msgspec.json.Encoder().encode


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ts (UTC), level, service, event, then the fields."""

    def __init__(self, service: str) -> None:
        """Writes `service` into every line."""
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline; always valid ASCII JSON."""
        fields = getattr(record, "kvc_fields", None)
        moment = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
        }
        if fields is None:
            line |= {"event": "log", "logger": record.name, "message": _clean(record.getMessage())}
        else:
            line["event"] = record.msg
            for key, value in fields.items():
                line[f"{key}_" if key in _RESERVED else key] = MASK if key.lower() in _MASKED else _clean(value)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = "".join(traceback.format_exception(record.exc_info[1]))[-MAX_TRACE_CHARS:]
        return json.dumps(line, default=str, separators=(",", ":"))


class JsonHandler(logging.StreamHandler[TextIO]):
    """Writes events without the detour over a LogRecord: a line of twenty fields costs a few microseconds.

    Lines of `write_clean` wait for the end of the event loop's turn, and are then written at once: under load a system call is shared by
    several. Any other line, and `flush`, which logging calls at exit, writes them first.
    """

    def __init__(self, service: str, stream: TextIO) -> None:
        """Writes to `stream`; everything that is no event goes through JsonFormatter."""
        super().__init__(stream)
        self.setFormatter(JsonFormatter(service))
        self._service = service
        self._second = 0
        self._stamp = ""
        self._lines: list[str] = []

    def write_event(self, name: str, level: int, fields: dict[str, Any]) -> None:
        """Writes one event; a value that the fast way cannot take makes the line go the slow way."""
        line = self._begun(name, level)
        for key, value in fields.items():
            kind = type(value)
            if key in _SPECIAL or key.lower() in _MASKED:
                line[f"{key}_" if key in _RESERVED else key] = MASK if key.lower() in _MASKED else _clean(value)
            elif value is None or kind is bool or (kind is str and len(value) <= MAX_VALUE_CHARS):
                line[key] = value
            else:
                line[key] = _clean(value)
        self._write(line)

    def write_clean(self, name: str, level: int, fields: msgspec.Struct) -> None:
        """Writes one event whose fields need no look: no reserved or masked name, only numbers and short strings of ours."""
        try:
            text = _encode(fields).decode()
        except (TypeError, ValueError, OverflowError, UnicodeError):
            known = ((key, getattr(fields, key)) for key in fields.__struct_fields__)
            self.write_event(name, level, {key: value for key, value in known if value is not msgspec.UNSET})
            return
        level_name = _LEVELS.get(level, "info")
        self._lines.append(f'{{"ts":"{self._now()}","level":"{level_name}","service":"{self._service}","event":"{name}",{text[1:]}\n')
        if len(self._lines) == 1:
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:  # no loop, no turn
                self.flush()
        elif len(self._lines) >= MAX_LINES:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that wait."""
        lines, self._lines = self._lines, []
        self.acquire()
        try:
            if lines:
                self.stream.write("".join(lines))
            super().flush()
        except Exception:  # noqa: BLE001 - as logging does it: a log that cannot be written must not stop the service
            self.handleError(_NO_RECORD)
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of `logging`."""
        if self._lines:
            self.flush()
        super().emit(record)

    def _now(self) -> str:
        now_s = time.time()
        second = int(now_s)
        if second != self._second:
            self._second = second
            self._stamp = dt.datetime.fromtimestamp(second, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.")
        return f"{self._stamp}{int((now_s - second) * 1000):03d}+00:00"

    def _begun(self, name: str, level: int) -> dict[str, Any]:
        return {"ts": self._now(), "level": _LEVELS.get(level, "info"), "service": self._service, "event": name}

    def _write(self, line: dict[str, Any]) -> None:
        try:
            text = _encode(line).decode()
        except (TypeError, ValueError, OverflowError, UnicodeError):
            text = json.dumps(line, default=str, separators=(",", ":"))
        self._lines.append(text + "\n")
        self.flush()


_LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "critical"}
_NO_RECORD = logging.LogRecord("kvc", logging.ERROR, "", 0, "", (), None)


def configure(level: str, service: str, stream: TextIO | None = None) -> None:
    """Sends all logging of the process to `stream` (stderr when None) as JSON lines. Replaces earlier handlers of the root logger.

    Args:
        level: debug, info, warning or error.
        service: name written into every line.
        stream: where lines go.

    Raises:
        ValueError: unknown level.
    """
    handler = JsonHandler(service, stream or sys.stderr)
    root = logging.getLogger()
    root.setLevel(level.upper())
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(max(root.level, logging.INFO))
    root.handlers[:] = [handler]


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Logs one event.

    Args:
        logger: the module's logger.
        name: what happened, lower_snake; stable, since people search for it.
        level: a logging level.
        error: written with its traceback, for faults of this program only.
        fields: values with their unit in the name (`_s`, `_tokens`, `_bytes`).
    """
    if not logger.isEnabledFor(level):
        return
    handlers = logger.root.handlers
    if error is None and len(handlers) == 1 and isinstance(handlers[0], JsonHandler):
        handlers[0].write_event(name, level, fields)
    else:
        exc_info = None if error is None else (type(error), error, error.__traceback__)
        # Made by hand: `logger.log` would walk the stack for a file and line that no event carries.
        logger.handle(logger.makeRecord(logger.name, level, "", 0, name, (), exc_info, extra={"kvc_fields": fields}))


def clean_event(logger: logging.Logger, name: str, level: int, fields: msgspec.Struct) -> None:
    """As `event`, for the one line that is written for every request: its fields are known to be clean (JsonHandler.write_clean)."""
    handlers = logger.root.handlers
    if len(handlers) == 1 and isinstance(handlers[0], JsonHandler):
        handlers[0].write_clean(name, level, fields)
    else:
        event(logger, name, level=level, **msgspec.to_builtins(fields))


def _clean(value: Any, depth: int = 0) -> Any:
    """A JSON value of bounded size and depth for any value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_INT else hex(value)[:MAX_VALUE_CHARS]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict) and depth < MAX_DEPTH:
        pairs = list(value.items())[:MAX_ITEMS]
        return {str(key): MASK if str(key).lower() in _MASKED else _clean(item, depth + 1) for key, item in pairs}
    if isinstance(value, list | tuple | set | frozenset) and depth < MAX_DEPTH:
        return [_clean(item, depth + 1) for item in list(value)[:MAX_ITEMS]]
    text = f"<{type(value).__name__}>" if isinstance(value, dict | list | tuple | set | frozenset) else str(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
