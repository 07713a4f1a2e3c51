"""Request bodies: checked, looked into, and edited without being serialised again.

A body is a JSON object. Its top-level values are kept as raw bytes; a key that occurs twice is refused, because two readers of such a
body need not agree on it; keys that are the mesh's own are taken out of the bytes before anything is appended to them.

A conversation's next request repeats the last one's body up to the end of its messages. Those bytes were checked then: a digest says
that they are the same, and only the rest is read, from where it stands in the grammar (`Written`).
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash

from kvc.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Container

Fields = dict[str, msgspec.Raw]

_KEY = re.compile(rb'[ \t\r\n]*"((?:[^"\\]|\\.)*)"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_OPEN = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_NEXT = re.compile(rb"[ \t\r\n]*(?:,[ \t\r\n]*|\}[ \t\r\n]*\Z)")
_WHITE = re.compile(rb"[ \t\r\n]*")
_SPACE = 0x20
_BLANKS = b" \t\r\n"
_MOST_BLANKS = 256
_SHORT_BYTES = 2048
_USUAL_FIELDS = 32
_SEED: Final = secrets.randbits(64)
"""Of digests of what was read: nobody else can look for two beginnings with the same one."""
MESSAGES: Final = "messages"
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
    if len(fields) > MAX_FIELDS or max(map(len, fields), default=0) > MAX_KEY_CHARS:
        raise InvalidField(f"at most {MAX_FIELDS} keys of at most {MAX_KEY_CHARS} characters are taken", field=field)
    return fields


@dataclass(frozen=True, slots=True)
class Written:
    """The beginning of a body that was read and checked, up to the end of one of its messages.

    Attributes:
        start: bytes up to and including the bracket that opens the messages.
        size: bytes in all.
        digest: of these bytes.
    """

    start: int
    size: int
    digest: bytes


class Payload:
    """A checked body.

    Attributes:
        raw: its bytes, without the mesh's own keys.
        fields: top-level values as raw JSON.
        known: its beginning, when that was not read again: `messages` is then a 0 in place of the messages in it, and those after it.
    """

    __slots__ = ("fields", "known", "raw")

    def __init__(self, body: bytes, written: Written | None = None) -> None:
        """Parses.

        Args:
            body: the bytes.
            written: how it may begin.

        Raises:
            InvalidField: no JSON object, a key twice, or a key that only the mesh may set; names the key.
        """
        self.raw = body
        self.known: Written | None = None
        if written is None or not self._read_rest(written):
            self._read_all()

    def _read_all(self) -> None:
        body = self.raw
        fields = self.fields = parse(body, "body")
        if check_keys(body, fields):
            self.raw = _without(fields, REPLACED)

    def _read_rest(self, written: Written) -> bool:
        """Reads what follows `written`; false when the body does not begin so, and when it has to be read as a whole."""
        body, size = self.raw, written.size
        if len(body) <= size:
            return False
        view = memoryview(body)
        if xxhash.xxh3_128_digest(view[:size], _SEED) != written.digest:
            return False
        # Behind one message the grammar goes on as behind any other one.
        rest = b"".join((view[: written.start], b"0", view[size:]))
        try:
            fields = parse(rest, "body")
            if check_keys(rest, fields):
                return False
        except InvalidField:
            return False  # the whole body's error names the right place
        self.fields = fields
        self.known = written
        return True

    def read_all(self) -> None:
        """Reads the beginning, too, when it was not."""
        if self.known is not None:
            self.known = None
            self._read_all()

    def written(self) -> Written | None:
        """What the conversation's next body may begin with; None when there is no message."""
        raw, known, messages = self.raw, self.known, len(self.fields[MESSAGES])
        if known is not None:
            start, least = known.start, known.size
            end = least + messages - len(b"[0]")
        else:
            start = least = _value_at(raw, self.fields, MESSAGES) + 1
            end = start + messages - len(b"[]")
        blanks = raw[max(least, end - _MOST_BLANKS) : end]
        end -= len(blanks) - len(blanks.rstrip(_BLANKS))
        if end == least:
            return known
        return Written(start, end, xxhash.xxh3_128_digest(memoryview(raw)[:end], _SEED))

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
            self.read_all()
            self.raw = _without(self.fields, {"session_id"})

    def parts(self, added: bytes) -> tuple[memoryview, bytes]:
        """The body with `added` (`"key":value,...`) as its last keys, in parts: what is large is not copied."""
        raw = self.raw
        end = raw.rindex(b"}")
        return memoryview(raw)[:end], (b"," if self.fields else b"") + added + raw[end:]

    def with_fields(self, added: bytes) -> bytes:
        """The same in one piece."""
        return b"".join(self.parts(added))


def check_keys(body: bytes, fields: Fields) -> bool:
    """Refuses a key that occurs twice, and one that only the mesh sets.

    Returns:
        True when it has keys that are to be replaced.

    Raises:
        InvalidField: as said; names the key.
    """
    names = tuple(fields)
    size, shortest, own = (_shape if len(names) <= _USUAL_FIELDS else _shape_of)(names)
    # One entry more takes a key that is there, its marks, and a value of at least one byte: mostly there is no room for it.
    if len(body) - size - sum(map(len, fields.values())) >= shortest + len(b'"":1,') and not _once(body, fields):
        _walk(body, fields)
    return own


def _shape_of(names: tuple[str, ...]) -> tuple[int, int, bool]:
    """Bytes that an object with these keys takes beside its values, at least; bytes of its shortest key; whether one is to be replaced.

    Raises:
        InvalidField: one is the mesh's; names the key.
    """
    for name in names:
        if name.startswith(_REFUSED_PREFIX):
            raise InvalidField("only the mesh sets this", field=name)
    sizes = [len(name.encode()) for name in names]
    return len(b"{}") + sum(sizes) + len(sizes) * len(b'"":,') - len(b","), min(sizes, default=0), not REPLACED.isdisjoint(names)


_shape = lru_cache(maxsize=256)(_shape_of)


def _once(body: bytes, fields: Fields) -> bool:
    """True when each key, as it is written without escapes, occurs once and nowhere else: a look worth its while in short bodies."""
    if len(body) > _SHORT_BYTES or b"\\" in body:
        return False
    return all(body.count(b'"%b"' % name.encode()) == 1 for name in fields)


def _walk(body: bytes, fields: Fields) -> None:
    """Compares the top level, key by key.

    Raises:
        InvalidField: a key occurs twice.
    """
    opened = _OPEN.match(body)
    assert opened is not None
    position = opened.end()
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
    if fields and position != len(body):
        raise _twice(_key_at(body, position))


def _value_at(body: bytes, fields: Fields, wanted: str) -> int:
    """Where the value of a key begins in a body whose keys were checked."""
    opened = _OPEN.match(body)
    assert opened is not None
    position = opened.end()
    for name, raw in fields.items():
        start = _after_key(body, position, name)
        if name == wanted:
            return start
        after = _NEXT.match(body, start + len(raw))
        assert after is not None
        position = after.end()
    raise KeyError(wanted)


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
