"""What is shipped: the wheel has the packages and nothing else, and its core needs neither gRPC nor any service library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_SHIPPED = {"bench"}  # benchmarks run from the source tree
PACKAGES = sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} - NOT_SHIPPED)

# Imports every module of the packages named, while all that is neither of the standard library nor allowed is refused.
IMPORT_ALONE = """
import importlib, pkgutil, sys

names, allowed = sys.argv[1].split(","), set(sys.argv[2].split(","))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in allowed:
            raise ImportError(f"{name} is refused here")

sys.meta_path.insert(0, Refuse())
for name in names:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(found.name)
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "kvc"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without touching the tree or a package index."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_package_of_the_tree_is_in_the_wheel(wheel: Path) -> None:
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == PACKAGES
    files = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - _names(wheel) == set()
    assert {"kvc/v1/router_pb2.py", "kvc/v1/router_pb2_grpc.pyi", "kvc/py.typed", "services/py.typed"} <= files


def test_the_wheel_carries_protos_licence_and_command(wheel: Path) -> None:
    info = f"kvc_mesh-{PROJECT['project']['version']}.dist-info"
    data = info.replace("dist-info", "data")
    protos = {f"{data}/data/share/kvc-mesh/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "protos").rglob("*.proto")}
    assert protos
    assert protos | {f"{info}/licenses/LICENSE"} <= _names(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert "kvc = services.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata


def test_the_wheel_has_nothing_else(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in _names(wheel)}
    stem = f"kvc_mesh-{PROJECT['project']['version']}"
    assert tops == {*PACKAGES, f"{stem}.dist-info", f"{stem}.data"}


def test_the_command_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import services.cli as cli; print(cli.__file__); sys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path), "--help"], check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "usage: kvc" in done.stdout


def test_whatever_is_imported_is_declared_and_the_other_way_round() -> None:
    declared = {_plain(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in PROJECT["project"]["dependencies"]}
    providers = packages_distributions()
    used: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for top in _imported(path) - set(sys.stdlib_module_names) - set(PACKAGES):
                offers = {_plain(name) for name in providers.get(top, [])}
                assert offers & declared, f"{path.relative_to(ROOT)} imports {top}, which no declared dependency provides"
                used |= offers
    assert declared - used == set()


def _imported(path: Path) -> set[str]:
    """Top-level names of the absolute imports of a file."""
    tops = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            tops.add(node.module.partition(".")[0])
    return tops


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        pytest.param("kvc.core", "kvc,xxhash", id="core"),
        pytest.param("kvc.core,kvc.engine.link", "kvc,xxhash,msgspec", id="what an engine plugin loads"),
    ],
)
def test_the_core_imports_where_grpc_is_missing(modules: str, allowed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE, modules, allowed], check=False, capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert {"kvc.core.admit", "kvc.core.blocks", "kvc.core.types"} <= set(done.stdout.split())


def test_the_import_guard_refuses_grpc() -> None:
    """The guard of the previous test can fail: the generated services need gRPC."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE, "kvc.v1.admission_pb2_grpc", "kvc"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert "is refused here" in done.stderr
