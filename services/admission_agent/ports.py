"""What the agent needs from the outside, as narrow as it needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from kvc.engine.link import EventBody, ReplyBody, RequestBody, Welcome
    from kvc.errors import KvcError
    from kvc.runtime.asking import Pending


class EngineLink(Protocol):
    """One connection to one life of the engine."""

    @property
    def welcome(self) -> Welcome:
        """What the engine said it is."""
        ...

    def ask(self, body: RequestBody, answered: Callable[[ReplyBody | KvcError], None], timeout_s: float) -> Pending | None:
        """Asks the engine without a task. Several questions may be in flight; answers come in any order.

        Args:
            body: the question.
            answered: called exactly once, possibly before this returns, with the reply or with the error that `call` would raise.
            timeout_s: longest wait, seconds.

        Returns:
            The question; None when it is answered already.
        """
        ...

    async def call(self, body: RequestBody, timeout_s: float) -> ReplyBody:
        """As `ask`, and waits.

        Args:
            body: the question.
            timeout_s: longest wait, seconds.

        Raises:
            DeadlineExceeded: no answer in time; the effect may still happen.
            Unavailable: the connection is lost.
            KvcError: the engine answered `Failed`; the error its code names.
        """
        ...

    def events(self, timeout_s: float) -> AsyncGenerator[EventBody, None]:
        """Subscribes, then yields the snapshot and deltas in order. Once per connection.

        Args:
            timeout_s: longest wait for the engine's consent, seconds; events may be any time apart.

        Raises:
            DeadlineExceeded: the engine does not consent in time.
            Unavailable: the connection is lost or holds what is no message; events may be missing.
            KvcError: the engine answered `Failed`.
        """
        ...

    async def close(self) -> None:
        """Ends the connection and fails what is in flight with Unavailable. May be called twice."""
        ...


class EngineConnector(Protocol):
    """Where the engine is."""

    async def connect(self) -> EngineLink:
        """Connects and greets.

        Raises:
            Unavailable: nobody listens there.
            DeadlineExceeded: the engine does not greet back in time.
            Precondition: the engine speaks another version of the link.
        """
        ...
