"""What is a setting: fields of dataclasses, described, and found with all their names."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from kvc.runtime.values import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

ENV_PREFIX = "KVC_"
MASK = "****"
_KEY = "kvc.setting"


class ConfigError(Exception):
    """A setting is wrong: one line that names it, for stderr, with exit code 2."""

    def __init__(self, message: str) -> None:
        """Escapes control characters, so that the message is one line whatever it quotes."""
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


class _Required:
    """Stands for the default of a setting that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()


@dataclass(frozen=True, slots=True)
class Meta:
    """What `setting` says about a field; see there."""

    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None
    secret: bool = False
    flag: str | None = None


def setting(
    default: Any,
    *,
    help: str,  # noqa: A002 - argparse's word for it
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    secret: bool = False,
    flag: str | None = None,
) -> Any:
    """A dataclass field that `load` can fill.

    Args:
        default: its value when nothing sets it; REQUIRED when it must be set.
        help: one line; the unit comes from the field's name (`_s`, `_ms`, `_bytes`, `_tokens`).
        minimum: smallest allowed number, inclusive.
        maximum: largest allowed number, inclusive.
        choices: allowed strings.
        secret: never shown.
        flag: an additional, shorter flag, e.g. "--port".
    """
    meta = Meta(help, minimum, maximum, tuple(choices) if choices is not None else None, secret, flag)
    return dataclasses.field(default=default, metadata={_KEY: meta})


def section(cls: type[T]) -> T:
    """A dataclass field that is a section: a dataclass of settings of its own."""
    field: T = dataclasses.field(default_factory=cls)
    return field


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting with all its names."""

    path: tuple[str, ...]
    kind: Kind
    default: Any
    meta: Meta

    @property
    def key(self) -> str:
        """Dotted name, as TOML spells it."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + "_".join(self.path).upper()

    @property
    def dest(self) -> str:
        """Where argparse keeps the flag."""
        return "__".join(self.path)

    def shown(self, value: Any) -> str:
        """A value of the setting for people: as TOML, or masked."""
        return MASK if self.meta.secret and value else self.kind.show(value)

    def limits(self) -> list[str]:
        """The allowed values in words; empty when all are."""
        meta, choices = self.meta, self.meta.choices or self.kind.choices
        if choices:
            return ["one of " + " | ".join(choices)]
        if meta.minimum is not None and meta.maximum is not None:
            return [f"{meta.minimum} to {meta.maximum}"]
        low = [] if meta.minimum is None else [f"at least {meta.minimum}"]
        high = [] if meta.maximum is None else [f"at most {meta.maximum}"]
        return low + high

    def help(self) -> str:
        """Help text of the flag, for argparse: what it is, variable, default, range and unit."""
        default = "required" if self.default is REQUIRED else f"default {self.shown(self.default)}"
        parts = [self.meta.help, self.env, default, *self.limits()]
        unit = _unit(self.path[-1])
        if unit:
            parts.append(unit)
        return f"{parts[0]} [{'; '.join(parts[1:])}]".replace("%", "%%")


def settings_of(cls: type[Any]) -> list[Setting]:
    """The settings of a dataclass in order, sections expanded. Fields without `setting` are settings too, without limits.

    Raises:
        TypeError: the class is wrong: a type that settings cannot have, or one name for two settings.
    """
    settings = list(_expanded(cls, ()))
    names = [one.env for one in settings]
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:  # e.g. a field `server_port` beside a section `server` with a `port`
        raise TypeError(f"{cls.__name__}: two settings are called {', '.join(twins)}")
    return settings


def _expanded(cls: type[Any], path: tuple[str, ...]) -> Iterator[Setting]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        here = (*path, field.name)
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _expanded(hint, here)
            continue
        if not field.init:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        meta = field.metadata.get(_KEY) or Meta(_attribute_help(cls, field.name))
        yield Setting(here, kind_of(hint, ".".join(here)), REQUIRED if default is MISSING else default, meta)


def _attribute_help(cls: type[Any], name: str) -> str:
    """First line of a field's entry under "Attributes:" in its class's docstring, or its name in words."""
    lead = f"{name}: "
    lines = (line.strip() for line in (cls.__doc__ or "").splitlines())
    found = next((line.removeprefix(lead) for line in lines if line.startswith(lead)), name.replace("_", " "))
    return found.rstrip(".")


def _unit(name: str) -> str:
    units = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes", "tokens": "tokens"}
    lead, _, last = name.rpartition("_")
    if last == "s" and lead.endswith("_per"):
        return lead.removesuffix("_per").rpartition("_")[2] + " per second"
    return units.get(last, "")
