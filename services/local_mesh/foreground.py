"""How a command runs in a terminal: Ctrl-C, SIGTERM and a hangup cancel it, so that whatever it started is stopped before it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from kvc.errors import KvcError, leaf
from kvc.runtime.config import ConfigError
from services.local_mesh.options import EXIT_FAILED, EXIT_USAGE
from services.local_mesh.views import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

EXIT_SIGNAL = 128
PLAIN_WIDTH = WIDE
"""Columns of tables that go to a file or a pipe."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):  # noqa: N818 - named after what happened
    """A signal ended the command.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        """Keeps the signal's number."""
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command to its end.

    Raises:
        Interrupted: a signal came; the work was cancelled and has cleaned up. A second signal cuts that short.
    """
    with asyncio.Runner() as runner:
        return runner.run(_watched(work))


async def _watched(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    caught: list[int] = []

    def on_signal(number: int) -> None:
        caught.append(number)
        task.cancel()

    # A hangup that is ignored (nohup) stays so: the command outlives its terminal on purpose.
    handled = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not caught:
            raise
        raise Interrupted(caught[0]) from None
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def guarded(prog: str, command: Callable[[], int]) -> int:
    """Calls a command; what goes wrong in it is one line on stderr and an exit code.

    Args:
        prog: name of the command.
        command: does everything; returns the exit code.

    Returns:
        Its exit code; 1: it failed; 2: a setting is wrong; 128 + n: signal n ended it.
    """
    try:
        return command()
    except Interrupted as interrupted:
        sys.stderr.write(f"{prog}: stopped by {interrupted}\n")
        return EXIT_SIGNAL + interrupted.number
    except KeyboardInterrupt:  # outside `run`, where signals are Python's own
        sys.stderr.write(f"{prog}: stopped\n")
        return EXIT_SIGNAL + signal.SIGINT
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return EXIT_USAGE
    except (KvcError, BaseExceptionGroup) as error:
        cause = leaf(error)
        if not isinstance(cause, KvcError):
            raise
        sys.stderr.write(f"{prog}: {cause}\n")
        return EXIT_FAILED


def output(*, stderr: bool = False) -> Console:
    """Where tables go: as wide as the terminal, 110 columns elsewhere."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)
