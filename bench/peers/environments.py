"""Virtual environments of the peers, each with the version that is measured."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSIONS: Final[Mapping[str, str]] = {"smg": "1.13.0", "sglang-router": "0.3.2", "vllm-router": "0.1.17"}
"""Versions by the name of the package, which is also that of its program."""


def installed(folder: Path, peer: str) -> bool:
    """True when `folder` has the peer's environment with the right version."""
    package = f"{peer.replace('-', '_')}-{VERSIONS[peer]}.dist-info"
    environment = folder / peer
    return (environment / "bin" / peer).exists() and any(environment.glob(f"lib/python*/site-packages/{package}"))


def install(folder: Path, peer: str) -> None:
    """Makes the peer's environment anew, from the package index that pip is set up for.

    Raises:
        RuntimeError: it could not be made.
    """
    environment = folder / peer
    requirement = f"{peer}=={VERSIONS[peer]}"
    print(f"installing {requirement} ...", file=sys.stderr, flush=True)
    python = str(environment / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement],
    ):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{requirement} could not be installed: {(done.stderr or done.stdout).strip()[-2000:]}")


def ensure(folder: Path, peer: str) -> None:
    """Makes the peer's environment unless it is there.

    Raises:
        RuntimeError: it could not be made.
    """
    if not installed(folder, peer):
        install(folder, peer)
