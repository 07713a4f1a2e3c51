"""Settings: a dataclass field is default, TOML key, environment variable, flag and help text.

    @dataclass(frozen=True)
    class Config:
        queue_limit: int = setting(256, help="turns that may wait", minimum=0)
        server: ServerConfig = section(ServerConfig)

    loaded = load(Config, sys.argv[1:], prog="kvc router")

Precedence: flag > environment > TOML file (`--config FILE`) > default. A field `queue_limit` is `--queue-limit`, `KVC_QUEUE_LIMIT`
and `queue_limit = 256`; a field `port` of the section `server` is `--server-port`, `KVC_SERVER_PORT` and `port` in the table
`[server]`. Booleans are `--x / --no-x`; tuples are repeated flags, comma-separated variables and TOML arrays; an empty value of an
optional setting means none. Whatever is wrong with a value is one line on stderr that names the key and where it came from, and exit
code 2. The classes' annotations are evaluated, so what they name must exist at run time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, get_type_hints

from kvc.runtime.settings import ENV_PREFIX, REQUIRED, ConfigError, Setting, section, setting, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["REQUIRED", "ConfigError", "Loaded", "load", "parse", "section", "setting"]

T = TypeVar("T")

EXIT_CONFIG = 2
MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What `load` found.

    Attributes:
        config: the settings.
        origins: dotted key -> where its value came from: "flag --x", "environment KVC_X", "FILE" or "default".
    """

    config: T
    origins: Mapping[str, str]

    def given(self, prefix: str = "") -> dict[str, Any]:
        """Values below the dotted `prefix` that were set by something other than their default, by dotted key without the prefix."""
        lead = f"{prefix}." if prefix else ""
        values = {key.removeprefix(lead): key for key, origin in self.origins.items() if key.startswith(lead) and origin != "default"}
        return {short: _value_at(self.config, key.split(".")) for short, key in values.items()}


def load(cls: type[T], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] = os.environ) -> Loaded[T]:
    """Settings from flags, environment, file and defaults; handles `--help` and `--print-config`, then exits.

    Args:
        cls: a dataclass of settings and sections.
        argv: arguments without the program name.
        prog: program name for messages.
        environ: the environment.

    Raises:
        SystemExit: 2 after one line on stderr when a setting is wrong; 0 after `--help` or `--print-config`.
    """
    try:
        return parse(cls, argv, prog=prog, environ=environ)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        raise SystemExit(EXIT_CONFIG) from None


def parse(cls: type[T], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] = os.environ) -> Loaded[T]:
    """As `load`, for callers that report errors themselves.

    Raises:
        ConfigError: a setting is wrong.
        SystemExit: 0 after `--help` or `--print-config`.
    """
    settings = settings_of(cls)
    parser = _parser(cls, settings, prog)
    flags = vars(parser.parse_args(list(argv)))
    file = flags["config"] or environ.get(ENV_PREFIX + "CONFIG") or None
    table = _read(file, settings) if file else {}
    values: dict[tuple[str, ...], Any] = {}
    origins: dict[str, str] = {}
    for one in settings:
        value, origin = _find(one, flags, environ, table, file or "")
        values[one.path], origins[one.key] = value, origin
    loaded = Loaded(_build(cls, (), values), origins)
    if flags["print_config"]:
        _print(settings, values, origins, environ)
        raise SystemExit(0)
    return loaded


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage: a wrong command line is one line, too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(cls: type[Any], settings: list[Setting], prog: str) -> argparse.ArgumentParser:
    first = (cls.__doc__ or "").split("\n", 1)[0]
    parser = _Parser(prog=prog, description=first, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file of settings [{ENV_PREFIX}CONFIG]")
    parser.add_argument("--print-config", action="store_true", help="print every effective setting and its origin, then exit")
    for one in settings:
        names = [one.flag, *([one.meta.flag] if one.meta.flag else [])]
        if one.kind.is_bool:
            parser.add_argument(*names, dest=one.dest, default=None, action=argparse.BooleanOptionalAction, help=one.help())
        else:
            action = "append" if one.kind.is_tuple else "store"
            parser.add_argument(*names, dest=one.dest, default=None, action=action, metavar=one.kind.metavar, help=one.help())
    return parser


def _find(one: Setting, flags: dict[str, Any], environ: Mapping[str, str], table: dict[str, Any], file: str) -> tuple[Any, str]:
    """The value of a setting and its origin."""
    flagged = flags[one.dest]
    if flagged is not None:
        origin = f"flag {one.flag}"
        value = (
            flagged if one.kind.is_bool else _cast(one, one.kind.from_texts if one.kind.is_tuple else one.kind.from_text, flagged, origin)
        )
    elif one.env in environ:
        origin = f"environment {one.env}"
        value = _cast(one, one.kind.from_text, environ[one.env], origin)
    elif one.key in table:
        origin = f"file {file}"
        value = _cast(one, one.kind.from_toml, table[one.key], origin)
    elif one.default is REQUIRED:
        raise ConfigError(f"{one.key} is required: set {one.flag}, {one.env} or its TOML key")
    else:
        return one.default, "default"
    return _checked(one, value, origin), origin


def _cast(one: Setting, cast: Any, raw: Any, origin: str) -> Any:
    try:
        return cast(raw)
    except ValueError as error:
        shown = "" if one.meta.secret else f"{_short(raw)} "
        raise ConfigError(f"{one.key}: {shown}is not {error} ({origin})") from None


def _checked(one: Setting, value: Any, origin: str) -> Any:
    meta = one.meta
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    low = numeric and meta.minimum is not None and value < meta.minimum
    high = numeric and meta.maximum is not None and value > meta.maximum
    items = value if isinstance(value, tuple) else (value,)
    odd = meta.choices is not None and value is not None and any(item not in meta.choices for item in items)
    if low or high or odd:
        limits = ", ".join(one.limits())
        shown = "the value" if meta.secret else _short(value)
        raise ConfigError(f"{one.key}: {shown} is out of range: {limits} ({origin})")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 - one terminal line


def _read(file: str, settings: list[Setting]) -> dict[str, Any]:
    """The file's values by dotted key.

    Raises:
        ConfigError: it cannot be read or parsed, or holds a key that no setting has.
    """
    try:
        with Path(file).open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"--config {file}: larger than {MAX_FILE_BYTES} bytes")
        document = tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {file}: not TOML: {error}") from None
    known = {one.path for one in settings}
    return dict(_flatten(document, (), known, file))


def _flatten(table: dict[str, Any], path: tuple[str, ...], known: set[tuple[str, ...]], file: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        here = (*path, name)
        if here in known:
            yield ".".join(here), value
            continue
        is_section = any(key[: len(here)] == here for key in known)
        if not is_section:
            raise ConfigError(f"--config {file}: no such setting: {'.'.join(here)}")
        if not isinstance(value, dict):
            raise ConfigError(f"--config {file}: {'.'.join(here)} is a table of settings, not a value")
        yield from _flatten(value, here, known, file)


def _build(cls: type[T], path: tuple[str, ...], values: dict[tuple[str, ...], Any]) -> T:
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # a dataclass, as `load` asks for
        here = (*path, field.name)
        if here in values:
            arguments[field.name] = values[here]
        elif dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], here, values)
    try:
        return cls(**arguments)
    except ValueError as error:  # a section's __post_init__ checks what the fields themselves do not say
        name, named, why = str(error).partition(": ")
        own = (name,) if named and name in arguments else ()
        where = ".".join((*path, *own))
        raise ConfigError(f"{where}: {why if own else error}" if where else str(error)) from None


def _value_at(config: Any, path: list[str]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _print(settings: list[Setting], values: dict[tuple[str, ...], Any], origins: dict[str, str], environ: Mapping[str, str]) -> None:
    """Every setting, its value and its origin, one a line; then variables with our prefix that no setting reads."""
    rows = [(one.key, one.shown(values[one.path]), origins[one.key]) for one in settings]
    width = max((len(f"{key} = {value}") for key, value, _ in rows), default=0)
    lines = [f"{f'{key} = {value}':<{width}}  # {origin}" for key, value, origin in rows]
    known = {one.env for one in settings} | {ENV_PREFIX + "CONFIG"}
    lines += [f"# ignored: {name}" for name in sorted(environ) if name.startswith(ENV_PREFIX) and name not in known]
    sys.stdout.write("\n".join(lines) + "\n")
