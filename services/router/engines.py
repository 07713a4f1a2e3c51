"""What both ways to an engine, that of Dispatch and that of the front door, know of its connections and of pairs of them."""

from __future__ import annotations

import errno

KEEP_ALIVE_S = 4.0
"""Idle connections are given up before engines do it (5 s in uvicorn): a request must not meet a connection that is just being closed."""
LINGER_S = 0.5
"""How long a prefill worker may take to finish its reply after the decode worker is done: cutting it off would look like an abort."""
MAX_ROOM = 2**63 - 1
"""Bound of the number under which the two halves of a turn meet."""
OUT_OF_FILES = "the router has no file descriptor left for a connection"
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE})


def out_of_files(error: OSError) -> bool:
    """True when a connection failed for want of files: the router's own trouble, which says nothing about the engine."""
    return error.errno in _OUT_OF_FILES
