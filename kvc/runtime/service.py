"""How every service process runs: one event loop, signals as one stop event, and exit codes that mean something.

    0    stopped cleanly (SIGTERM, SIGINT or by itself)
    1    a fault; the log has it
    2    a setting is wrong; one line on stderr names it
    128+n  a second signal n arrived while stopping: what was in flight was cut off

`main` owns everything it starts: tasks live in its TaskGroup, and when the stop event is set it drains and returns.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
import sys
from typing import TYPE_CHECKING

from kvc.errors import KvcError, leaf
from kvc.runtime.config import ConfigError
from kvc.runtime.logs import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_CONFIG = 2
EXIT_SIGNAL = 128
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Runs a service to its end on uvloop when it is installed, else on asyncio's own loop.

    Args:
        main: the service; returns after the event is set, having closed what it opened.

    Returns:
        The exit code of the process.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_supervise(main))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of a service; None: asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415 - an optional speed-up: stock asyncio serves as well

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _supervise(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    stop = asyncio.Event()
    second: list[int] = []
    task = asyncio.ensure_future(main(stop))
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            second.append(number)
            task.cancel()
        else:
            event(logger, "stopping", signal=signal.Signals(number).name)
            stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the outermost frame turns every failure into an exit code
        return EXIT_SIGNAL + second[0] if second else _exit_code(leaf(error), error)
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return EXIT_OK


def _exit_code(cause: BaseException, error: BaseException) -> int:
    if isinstance(cause, ConfigError):
        sys.stderr.write(f"{cause}\n")
        return EXIT_CONFIG
    if isinstance(cause, KvcError):
        event(logger, "service_failed", level=logging.ERROR, reason=cause.reason, message=str(cause))
    else:
        event(logger, "service_failed", level=logging.ERROR, error=error)
    return EXIT_FAULT
