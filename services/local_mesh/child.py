"""What a process of a local mesh runs: `kvc`, bound to the life of the mesh that started it.

The child binds itself once it runs. Code between fork and exec (`preexec_fn`) would need a plain fork, and a plain fork of a process
whose gRPC threads are at work can crash the child before it begins.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from services import cli

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs `kvc` with the arguments of the process; the exit code."""
    die_with_parent()
    return cli.main()


def die_with_parent() -> None:
    """SIGKILL when the parent dies, so that nothing outlives a killed command. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
