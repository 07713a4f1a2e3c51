"""Clients that are not read from, because too much of theirs waits: an event loop does not tell when they go away, so the kernel is asked.

The end of a client's stream lies behind what it has sent and nobody reads; the state of its TCP connection tells of it all the same. It
stays out of sight, until something is written, when the kernel has no room left for what the client has sent; and when a client over TLS
only says farewell and leaves its TCP connection open.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from services.router.door.client import Client

LOOK_S: Final = 0.05
_TCP_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)  # Linux has it
_ENDED: Final = frozenset({7, 8})  # TCP_CLOSE and TCP_CLOSE_WAIT of linux/tcp_states.h


class Watch:
    """Looks at the connections of such clients a few times a second, while there are any."""

    def __init__(self) -> None:
        """Watches nobody."""
        self._clients: set[Client] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, client: Client) -> None:
        """Nobody reads from the client from now on. Mutates."""
        self._clients.add(client)
        if self._timer is None and _TCP_INFO is not None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def discard(self, client: Client) -> None:
        """The client is read from again, or is gone. Mutates."""
        self._clients.discard(client)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        for client in list(self._clients):
            client.look()
        if self._clients:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)


def has_ended(transport: asyncio.BaseTransport) -> bool:
    """True when the peer has closed its side of a TCP connection, or all of it, whether or not all it sent has been read."""
    sock = transport.get_extra_info("socket")
    if sock is None or _TCP_INFO is None:
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0] in _ENDED
    except (OSError, ValueError):  # closed on our side already
        return False
