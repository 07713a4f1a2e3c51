"""How KV travels from a prefill engine to a decode engine: a TCP connection a request, msgpack frames, checksummed page values.

    decode engine                              prefill engine
    Join(room, prompt digest, ...)      ->     pairs with the request that came over HTTP with the same room
    (waits for its own memory)
    Ready(first_page)                   ->     only now takes memory and prefills (R29: decode memory first)
                                        <-     Kv(page values from first_page on, checksum, modelled times)
    Done()                              ->     releases the prompt's KV, which stays cached
                                        <-     Refused(...) instead, at any time
Either side that goes away is noticed by the other as the end of the connection, at once.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec
import xxhash

from kvc.core.blocks import pack_hashes, unpack_hashes
from kvc.engine.link_io import FrameMalformed, encode, read_frame

if TYPE_CHECKING:
    import asyncio
    from array import array

    from kvc.engine.reference.request import Request

TRANSFER_VERSION = 1


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Asks for the KV of a room. Both halves must hold the same prompt, model and page size."""

    version: int
    room: int
    rid: str
    model_salt: int
    page_tokens: int
    input_tokens: int
    prompt_digest: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The decode engine has its memory, and already holds the pages before `first_page`."""

    first_page: int


class Kv(msgspec.Struct, frozen=True, tag="kv"):
    """The KV. `values` are packed u64, one a page from `first_page` on; `tail` is the value of what follows the last full page.

    Times are modelled seconds from Ready: `queue_s` for the prefill engine's memory and turn, `prefill_s` in all until the prompt was
    done, `transfer_s` on the link.
    """

    first_page: int
    values: bytes
    tail: int
    checksum: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    cached_tokens: int
    prefill_tokens: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The KV has arrived whole."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """No KV will come. `code` and `reason` are those of kvc.errors."""

    code: str
    reason: str
    message: str


FromDecode = Join | Ready | Done
FromPrefill = Kv | Refused

_from_decode = msgspec.msgpack.Decoder(FromDecode)
_from_prefill = msgspec.msgpack.Decoder(FromPrefill)


class Wire:
    """One end of a transfer connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes over both directions."""
        self._reader = reader
        self._writer = writer

    async def send(self, message: FromDecode | FromPrefill) -> None:
        """Sends one message.

        Raises:
            OSError: the connection is gone.
        """
        self._writer.write(encode(message))
        await self._writer.drain()

    async def from_decode(self) -> FromDecode:
        """The decode engine's next message.

        Raises:
            LinkError: the connection ended or carried something else.
        """
        try:
            return _from_decode.decode(await read_frame(self._reader))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameMalformed(f"malformed frame: {error}") from error

    async def from_prefill(self) -> FromPrefill:
        """The prefill engine's next message.

        Raises:
            LinkError: the connection ended or carried something else.
        """
        try:
            return _from_prefill.decode(await read_frame(self._reader))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameMalformed(f"malformed frame: {error}") from error

    async def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def prompt_digest(request: Request) -> int:
    """Names a prompt."""
    return xxhash.xxh3_64_intdigest(request.prompt)


def checksum(values: bytes, tail: int, first_page: int) -> int:
    """Covers everything in a `Kv` that output depends on."""
    return xxhash.xxh3_64_intdigest(values + tail.to_bytes(8, "little"), first_page)


def pack_values(values: array[int]) -> bytes:
    """Wire form of page values."""
    return pack_hashes(values)


def unpack_values(packed: bytes) -> array[int]:
    """Page values from their wire form.

    Raises:
        ValueError: the length is no multiple of 8.
    """
    return unpack_hashes(packed)
