"""Fails unless every module that pyproject.toml has compiled is imported as compiled; names those that are not.

Run it with the interpreter, and from the folder, whose modules are asked about: it knows nothing of how they came there.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main() -> int:
    """Entry point; returns the exit code."""
    hooks = tomllib.loads(PYPROJECT.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    names = [path.removesuffix(".py").replace("/", ".") for path in hooks["mypyc"]["include"]]
    extensions = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    wrong = [name for name in names if not str(importlib.import_module(name).__file__).endswith(extensions)]
    for name in wrong:
        print(f"not compiled: {name} ({sys.modules[name].__file__})", file=sys.stderr)
    return 1 if wrong or not names else 0


if __name__ == "__main__":
    sys.exit(main())
