"""What a service logs, as text."""

from __future__ import annotations

import io
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvc.runtime.logs import configure

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def captured_logs(service: str) -> Iterator[io.StringIO]:
    """Logging as the service configures it, into a buffer; afterwards it is as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("info", service, stream)
    try:
        yield stream
    finally:
        root.handlers[:], root.level = handlers, level
