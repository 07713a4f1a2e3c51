"""Generates kvc/v1 from protos/kvc/v1, or checks that the committed files are what the generator makes.

Run as `make protos`, or `python scripts/protos.py --check` (exit code 1 when a file differs, is missing or is left over).
The output depends on the protos and on the versions pinned in constraints.txt only: no time, no path of this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("kvc/v1")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
INIT = '"""Generated messages and services of the package kvc.v1; regenerate with `make protos`."""\n'


class GenerationError(Exception):
    """protoc or one of its plugins refused the input."""


def generate(root: Path = ROOT) -> dict[Path, bytes]:
    """Runs the generator over `root`/protos.

    Returns:
        Contents by path relative to `root`.

    Raises:
        GenerationError: when protoc fails; its own message is on stderr.
    """
    protos = root / "protos"
    sources = sorted(str(path) for path in (protos / PACKAGE).glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        code = protoc.main(
            [
                "protoc",
                f"--proto_path={protos}",
                f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
                *(f"--plugin={name}={_plugin(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
                f"--python_out={folder}",
                f"--grpc_python_out={folder}",
                f"--mypy_out=quiet:{folder}",
                f"--mypy_grpc_out=quiet:{folder}",
                *sources,
            ]
        )
        if code != 0:
            raise GenerationError(f"protoc ended with exit code {code}")
        made = {path.relative_to(folder): path.read_bytes() for path in sorted(Path(folder).rglob("*.py*"))}
    return {PACKAGE / "__init__.py": INIT.encode(), **made}


def differences(made: dict[Path, bytes], root: Path = ROOT) -> list[str]:
    """Compares generated contents with the files in `root`; one line a difference."""
    lines = []
    for path, content in made.items():
        if not (root / path).is_file():
            lines.append(f"{path}: missing")
        elif (root / path).read_bytes() != content:
            lines.append(f"{path}: differs from what the generator makes")
    lines.extend(f"{path}: belongs to no proto" for path in _left_over(made, root))
    return lines


def write(made: dict[Path, bytes], root: Path = ROOT) -> None:
    """Writes generated contents under `root` and removes files whose proto is gone."""
    for path, content in made.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    for path in _left_over(made, root):
        (root / path).unlink()


def _left_over(made: dict[Path, bytes], root: Path) -> list[Path]:
    present = (path.relative_to(root) for path in sorted((root / PACKAGE).glob("*")) if path.name.endswith(SUFFIXES))
    return [path for path in present if path not in made]


def _plugin(name: str) -> Path:
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise GenerationError(f"{name} is not installed beside {sys.executable}; run `make setup`")
    return path


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="protos", description="Generates kvc/v1 from protos/kvc/v1.")
    parser.add_argument("--check", action="store_true", help="compare with the committed files and write nothing")
    arguments = parser.parse_args()
    try:
        made = generate()
    except GenerationError as error:
        sys.stderr.write(f"protos: {error}\n")
        return 1
    if not arguments.check:
        write(made)
        return 0
    found = differences(made)
    for line in found:
        sys.stderr.write(f"protos: {line}; run `make protos`\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
