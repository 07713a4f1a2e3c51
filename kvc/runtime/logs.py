"""Logs are JSON lines on stderr: one object a line, one line an event.

`event(logger, "dispatch", session_id=..., mode=...)` is the only way the project logs. Names that carry prompts or secrets are
masked whatever their value, long values are cut, and a value that cannot be encoded never breaks the line.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import math
import sys
import traceback
from typing import Any, TextIO

MAX_VALUE_CHARS = 512
MAX_TRACE_CHARS = 8192
MAX_ITEMS = 64
MAX_DEPTH = 4
MAX_INT = 2**64
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
        return json.dumps(line, default=str)


def configure(level: str, service: str, stream: TextIO | None = None) -> None:
    """Sends all logging of the process to `stream` (stderr when None) as JSON lines. Replaces earlier handlers of the root logger.

    Args:
        level: debug, info, warning or error.
        service: name written into every line.
        stream: where lines go.

    Raises:
        ValueError: unknown level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service))
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
    if logger.isEnabledFor(level):
        exc_info = None if error is None else (type(error), error, error.__traceback__)
        # Made by hand: `logger.log` would walk the stack for a file and line that no event carries.
        logger.handle(logger.makeRecord(logger.name, level, "", 0, name, (), exc_info, extra={"kvc_fields": fields}))


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
