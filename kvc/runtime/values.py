"""Types of settings: how each is read from text and from TOML, and shown."""

from __future__ import annotations

import math
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_INT = re.compile(r"[+-]?[0-9]{1,19}")
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NAMES: dict[type, str] = {int: "an integer", float: "a finite number", bool: "true or false", str: "a printable string", Path: "a path"}


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of a setting.

    Attributes:
        base: int, float, bool, str or Path; the type of the items of a tuple.
        optional: None is a value, written as nothing.
        is_tuple: several values.
        choices: allowed values of a Literal.
    """

    base: type
    optional: bool = False
    is_tuple: bool = False
    choices: tuple[str, ...] | None = None

    @property
    def is_bool(self) -> bool:
        """True when flags come as `--x / --no-x`."""
        return self.base is bool and not self.is_tuple

    @property
    def metavar(self) -> str:
        """Placeholder in help."""
        return "|".join(self.choices) if self.choices else self.base.__name__.upper()

    def from_text(self, text: str) -> Any:
        """A value from a flag or a variable; tuples are split at commas.

        Raises:
            ValueError: says what the text should have been.
        """
        if self.is_tuple:
            return self.from_texts([part.strip() for part in text.split(",")] if text.strip() else [])
        if self.optional and text == "":
            return None
        return self._checked(_scalar(self.base, text))

    def from_texts(self, texts: list[str]) -> tuple[Any, ...]:
        """A tuple from a repeated flag.

        Raises:
            ValueError: says what a text should have been.
        """
        return tuple(self._checked(_scalar(self.base, text)) for text in texts)

    def from_toml(self, value: Any) -> Any:
        """A value from TOML, which has types of its own.

        Raises:
            ValueError: says what the value should have been.
        """
        if self.is_tuple:
            if not isinstance(value, list):
                raise ValueError("an array")
            return tuple(self._typed(item) for item in value)
        if self.optional and value == "":
            return None
        return self._typed(value)

    def show(self, value: Any) -> str:
        """The value as TOML would spell it."""
        if value is None:
            return '""'
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return "[" + ", ".join(self.show(item) for item in value) + "]"
        return str(value) if isinstance(value, int | float) else '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'

    def _typed(self, value: Any) -> Any:
        if self.base is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**1023 else math.inf
        if self.base is Path and isinstance(value, str):
            value = _scalar(Path, value)
        exact = isinstance(value, self.base) and (self.base is bool or not isinstance(value, bool))
        if not exact:
            raise ValueError(_NAMES[self.base])
        if self.base is int and not -(2**63) <= value < 2**63:
            raise ValueError(_NAMES[int])
        if self.base is float and not math.isfinite(value):
            raise ValueError(_NAMES[float])
        return self._checked(_scalar(str, value) if self.base is str else value)

    def _checked(self, value: Any) -> Any:
        if self.choices is not None and value not in self.choices:
            raise ValueError("one of " + " | ".join(self.choices))
        return value


def kind_of(hint: Any, key: str) -> Kind:
    """The kind of an annotation.

    Raises:
        TypeError: settings cannot have that type; a fault of the class, not of the user.
    """
    optional = False
    if get_origin(hint) in {Union, types.UnionType}:
        arms = [arm for arm in get_args(hint) if arm is not type(None)]
        optional = len(arms) < len(get_args(hint))
        hint = arms[0] if len(arms) == 1 else None
    if get_origin(hint) is Literal and all(isinstance(word, str) for word in get_args(hint)):
        return Kind(str, optional=optional, choices=get_args(hint))
    if get_origin(hint) is tuple and len(get_args(hint)) == 2 and get_args(hint)[1] is Ellipsis:  # noqa: PLR2004 - tuple[X, ...]
        return Kind(_base(get_args(hint)[0], key), is_tuple=True)
    return Kind(_base(hint, key), optional=optional)


def _base(hint: Any, key: str) -> type:
    found: type | None = next((base for base in _NAMES if hint is base), None)
    if found is None:
        raise TypeError(f"{key}: a setting cannot be a {hint}")
    return found


def _scalar(base: type, text: str) -> Any:
    """One value of a base type from text."""
    if base is bool and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if base is int and _INT.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    if base is float and _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    if base is str and text.isprintable():
        return text
    if base is Path and text and text.isprintable():
        return Path(text).expanduser()
    raise ValueError(_NAMES[base])
