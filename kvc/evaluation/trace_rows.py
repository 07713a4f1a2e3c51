"""Lines of a trace file, and checked reads of their fields: whatever is wrong is named by file, line and field."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Iterator
    from pathlib import Path

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_TEXT_CHARACTERS = 128
MAX_TOKENS = 2**24  # longest prompt or output a trace may claim: 16 Mi tokens are 64 MiB of ids
MAX_SECONDS = 1e10
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace that cannot be used. `line` is 1-based, 0 when the file as a whole is at fault; `field` may be empty."""

    def __init__(self, path: Path | str, line: int, field: str, problem: str) -> None:
        """Composes `FILE:LINE: FIELD: PROBLEM`."""
        place = f"{path}:{line}" if line else str(path)
        super().__init__(f"{place}: {field}: {problem}" if field else f"{place}: {problem}")
        self.path = str(path)
        self.line = line
        self.field = field
        self.problem = problem


class Row:
    """One JSON object of a trace. Every reader raises TraceError for a value of the wrong type or out of range."""

    __slots__ = ("line", "path", "values")

    def __init__(self, path: Path, line: int, values: dict[str, Any]) -> None:
        """Wraps the decoded object of a line."""
        self.path = path
        self.line = line
        self.values = values

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raises TraceError for this line."""
        raise TraceError(self.path, self.line, field, problem)

    def has(self, field: str) -> bool:
        """True when the field is there and not null."""
        return self.values.get(field) is not None

    def integer(self, field: str, minimum: int, maximum: int) -> int:
        """A whole number; 3.0 and true are none."""
        value = self._required(field)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(field, f"{_shown(value)} is no integer")
        if not minimum <= value <= maximum:
            self.fail(field, f"{_shown(value)} is not in {minimum}..{maximum}")
        return value

    def seconds(self, field: str, scale: float = 1.0) -> float:
        """A finite, non-negative time in seconds after division by `scale` (1000 for a millisecond clock)."""
        value = self._required(field)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(field, f"{_shown(value)} is no number")
        if not 0 <= value <= MAX_SECONDS * scale or not math.isfinite(value):
            self.fail(field, f"{_shown(value)} is no time between 0 and {MAX_SECONDS:g} s")
        return value / scale

    def optional_seconds(self, field: str) -> float | None:
        """As `seconds`; None when absent or null."""
        return self.seconds(field) if self.has(field) else None

    def text(self, field: str) -> str:
        """A string of 1 to MAX_TEXT_CHARACTERS printable ASCII characters: what the mesh takes as an id."""
        value = self._required(field)
        if not isinstance(value, str):
            self.fail(field, f"{_shown(value)} is no string")
        if not 0 < len(value) <= MAX_TEXT_CHARACTERS:
            self.fail(field, f"a string of {len(value)} characters is not in 1..{MAX_TEXT_CHARACTERS}")
        if not (value.isascii() and value.isprintable()):
            self.fail(field, f"{_shown(value)} is not printable ASCII")
        return value

    def items(self, field: str) -> list[Any]:
        """A list."""
        value = self._required(field)
        if not isinstance(value, list):
            self.fail(field, f"{_shown(value)} is no list")
        return value

    def _required(self, field: str) -> Any:
        if field not in self.values:
            self.fail(field, "is missing")
        return self.values[field]


def read_rows(path: Path, digest: hashlib._Hash) -> Iterator[Row]:
    """The objects of a JSONL file, plain or gzip; blank lines are skipped.

    Args:
        path: the file.
        digest: updated with the uncompressed bytes.

    Raises:
        TraceError: the file cannot be read, is truncated, or a line is no JSON object.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                digest.update(line)
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(path, number, "", f"line is longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield Row(path, number, _decode(path, number, line))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(path, number + 1, "", f"gzip data is damaged or cut short ({error})") from error
    except OSError as error:
        raise TraceError(path, 0, "", f"cannot be read: {error.strerror or error}") from error


def _decode(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, number, "", f"is no JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise TraceError(path, number, "", f"{_shown(value)} is no JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _shown(value: object) -> str:
    """A value in a message: short, whatever it is."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        # An integer of more digits than Python prints, or a list nested deeper than its stack.
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - a readable length
