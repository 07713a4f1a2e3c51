"""Request bodies: checked, looked into, and edited without being serialised again.

A body is a JSON object. Its top-level values are kept as raw bytes; a key that occurs twice is refused, because two readers of such a
body need not agree on it; keys that are the mesh's own are taken out of the bytes before anything is appended to them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvc.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Container

Fields = dict[str, msgspec.Raw]

_KEY = re.compile(rb'[ \t\r\n]*"((?:[^"\\]|\\.)*)"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_OPEN = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_NEXT = re.compile(rb"[ \t\r\n]*(?:,[ \t\r\n]*|\}[ \t\r\n]*\Z)")
_WHITE = re.compile(rb"[ \t\r\n]*")
_SPACE = 0x20
_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_any = msgspec.json.Decoder().decode
REPLACED: Final = frozenset({"rid"})
MAX_FIELDS = 1024
MAX_KEY_CHARS = 1024
_REFUSED_PREFIX = "bootstrap_"


def parse(body: bytes | msgspec.Raw, field: str) -> Fields:
    """The values of a JSON object as raw JSON.

    Raises:
        InvalidField: it is none, or it has too many keys or too long ones; names `field`.
    """
    try:
        fields = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"not a JSON object: {error}", field=field) from None
    if len(fields) > MAX_FIELDS or any(len(name) > MAX_KEY_CHARS for name in fields):
        raise InvalidField(f"at most {MAX_FIELDS} keys of at most {MAX_KEY_CHARS} characters are taken", field=field)
    return fields


class Payload:
    """A checked body.

    Attributes:
        raw: its bytes, without the mesh's own keys.
        fields: top-level values as raw JSON.
    """

    __slots__ = ("fields", "raw")

    def __init__(self, body: bytes) -> None:
        """Parses.

        Raises:
            InvalidField: no JSON object, a key twice, or a key that only the mesh may set; names the key.
        """
        fields = self.fields = parse(body, "body")
        own = check_keys(body, fields)
        self.raw = _without(fields, REPLACED) if own else body

    def value(self, name: str) -> Any:
        """A value decoded; None when it is absent.

        Raises:
            InvalidField: it is not JSON.
        """
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return _decode_any(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidField(f"not JSON: {error}", field=name) from None

    def inner(self, name: str) -> dict[str, Any]:
        """An object decoded, whose keys may occur only once, too; empty when it is absent or null.

        Raises:
            InvalidField: it is no object.
        """
        raw = self.fields.get(name)
        if raw is None or bytes(raw) == b"null":
            return {}
        check_keys(bytes(raw), parse(raw, name))
        value: dict[str, Any] = self.value(name)
        return value

    def text(self, name: str, high_bytes: int) -> str | None:
        """A string of 1 to `high_bytes` bytes; None when it is absent or null.

        Raises:
            InvalidField: anything else.
        """
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value.encode("utf-8", "surrogatepass")) <= high_bytes:
            raise InvalidField(f"must be a string of 1 to {high_bytes} bytes", field=name)
        return value

    def count(self, name: str, low: int, high: int) -> int | None:
        """An integer; None when it is absent or null.

        Raises:
            InvalidField: anything else, or out of range.
        """
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidField(f"must be an integer from {low} to {high}", field=name)
        return value

    def name_session(self, session_id: str) -> None:
        """Makes `session_id` the session's name for the engine, too. One that names another session is replaced."""
        if "session_id" in self.fields and self.value("session_id") != session_id:
            self.raw = _without(self.fields, {"session_id"})

    def with_fields(self, added: bytes) -> bytes:
        """The body with `added` (`"key":value,...`) as its last keys."""
        raw = self.raw
        end = raw.rindex(b"}")
        return raw[:end] + (b"," if self.fields else b"") + added + raw[end:]


def check_keys(body: bytes, fields: Fields) -> bool:
    """Walks the top level once: refuses a key that occurs twice, and one that only the mesh sets.

    Returns:
        True when it has keys that are to be replaced.

    Raises:
        InvalidField: as said; names the key.
    """
    opened = _OPEN.match(body)
    assert opened is not None
    position = opened.end()
    own = False
    for name, raw in fields.items():
        value = bytes(raw)
        start = _after_key(body, position, name)
        if start < 0:
            raise _twice(_key_at(body, position))
        # Another value here means that the key comes once more, with the value that counts.
        after = _NEXT.match(body, start + len(value)) if body.startswith(value, start) else None
        if after is None:
            raise _twice(name)
        position = after.end()
        if name in REPLACED:
            own = True
        elif name.startswith(_REFUSED_PREFIX):
            raise InvalidField("only the mesh sets this", field=name)
    if fields and position != len(body):
        raise _twice(_key_at(body, position))
    return own


def _after_key(body: bytes, position: int, name: str) -> int:
    """Where the value of the key at `position` begins; -1 when that key is another one."""
    plain = b'"%b":' % name.encode("utf-8", "surrogatepass")
    if body.startswith(plain, position):
        position += len(plain)
        return position if body[position] > _SPACE else _WHITE.match(body, position).end()  # type: ignore[union-attr]  # matches always
    key = _KEY.match(body, position)
    return key.end() if key is not None and _is(key[1], name) else -1


def _is(raw: bytes, name: str) -> bool:
    return raw == name.encode() if b"\\" not in raw else bool(_decode_any(b'"' + raw + b'"') == name)


def _key_at(body: bytes, position: int) -> str:
    key = _KEY.match(body, position)
    assert key is not None
    name: str = _decode_any(b'"' + key[1] + b'"')
    return name


def _twice(name: str) -> InvalidField:
    return InvalidField("a key occurs twice", field=name)


def _without(fields: Fields, names: Container[str]) -> bytes:
    """The object without some keys, which are taken out of `fields`, too (rare: clients seldom send them)."""
    for name in [name for name in fields if name in names]:
        del fields[name]
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items()) + b"}"
