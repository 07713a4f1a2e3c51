"""An HTTP server that sends exactly the bytes a test wants, and sees what its clients do with their connections."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.listening import listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Script = list[bytes | str]
"""Bytes to write. Words: `wait` until `go` is set, `reset` the connection, `close` it, `hang` until the client closes it."""


def head(status: int = 200, *, kind: str = "text/event-stream", **headers: str) -> bytes:
    """A response head with a chunked body."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Type: {kind}", "Transfer-Encoding: chunked"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


END = b"0\r\n\r\n"


def event(**body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def whole(body: bytes, status: int = 200, **headers: str) -> bytes:
    """A whole response with a length."""
    lines = [f"HTTP/1.1 {status} Whatever", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class RawServer:
    """Answers every request with the next script, and repeats the last one."""

    scripts: list[Script] = field(default_factory=list)
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    connections: int = 0
    closed_by_client: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.closed_by_client += 1
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append((headers | {":line": lines[0]}, body))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        for item in script:
            if item == "wait":
                await self.go.wait()
            elif item == "hang":
                await reader.readexactly(1)
            elif item == "reset":
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            elif item == "close":
                return False
            else:
                assert isinstance(item, bytes)
                writer.write(item)
                await writer.drain()
        return True


@asynccontextmanager
async def raw_server(*scripts: Script) -> AsyncIterator[RawServer]:
    """A server on a free port."""
    made = RawServer(list(scripts))
    async with listening(made.serve) as made.port:
        yield made
