"""The engine link over its unix socket."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvc.engine.link_io import CallFailed, LinkClient, LinkError, LinkTimeout
from kvc.errors import DeadlineExceeded, Unavailable, error_for

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

    from kvc.engine.link import EventBody, ReplyBody, RequestBody, Welcome
    from kvc.errors import KvcError
    from kvc.runtime.asking import Pending

ENGINE_AWAY = "ENGINE_AWAY"


class SocketLink:
    """A `LinkClient` that speaks the project's errors."""

    def __init__(self, client: LinkClient) -> None:
        """Owns the client."""
        self._client = client

    @property
    def welcome(self) -> Welcome:
        """What the engine said it is."""
        return self._client.welcome

    def ask(self, body: RequestBody, answered: Callable[[ReplyBody | KvcError], None], timeout_s: float) -> Pending | None:
        """Asks the engine; see EngineLink.ask."""
        return self._client.ask(body, lambda reply: answered(typed(reply) if isinstance(reply, LinkError) else reply), timeout_s)

    async def call(self, body: RequestBody, timeout_s: float) -> ReplyBody:
        """Asks the engine; see EngineLink.call."""
        with _typed():
            reply: ReplyBody = await self._client.call(body, timeout_s)
        return reply

    async def events(self, timeout_s: float) -> AsyncGenerator[EventBody, None]:
        """Subscribes and follows; see EngineLink.events."""
        with _typed():
            async with contextlib.aclosing(self._client.events(timeout_s)) as events:  # type: ignore[type-var]  # a generator
                async for event in events:
                    yield event

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()


class SocketConnector:
    """An engine that listens on a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Keeps the path and the longest wait for connection and greeting, seconds."""
        self._path = path
        self._timeout_s = timeout_s

    async def connect(self) -> SocketLink:
        """Connects and greets; see EngineConnector.connect."""
        with _typed():
            return SocketLink(await LinkClient.connect(self._path, self._timeout_s))


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    """Errors of the link as errors of the tree."""
    try:
        yield
    except LinkError as error:
        raise typed(error) from error


def typed(error: LinkError) -> KvcError:
    """An error of the link as an error of the tree."""
    if isinstance(error, CallFailed):
        return error_for(error.code, str(error), field=error.field)
    if isinstance(error, LinkTimeout):
        return DeadlineExceeded(f"engine: {error}", reason="ENGINE_TIMEOUT")
    return Unavailable(f"engine: {error}", reason=ENGINE_AWAY)
