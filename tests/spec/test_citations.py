"""docs/spec.md and its tests know each other: every line is tested, every quotation is in the text, every file it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "docs" / "spec.md").read_text()
HERE = Path(__file__).parent
CITATION = re.compile(r"\b(?:[A-Z]{3,}-\d+(?: to (?:[A-Z]{3,}-)?\d+)?|[RI]\d+)\b")


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@cache
def lines() -> dict[str, str]:
    """Numbered lines of the spec by name."""
    found = re.findall(r"^- \*\*([A-Z]+-?\d+)\*\* (.*?)(?=\n- \*\*|\n\n|\Z)", SPEC, re.MULTILINE | re.DOTALL)
    return {name: flat(text) for name, text in found}


@cache
def rulings() -> dict[str, list[str]]:
    """Rows of the table of rulings by name."""
    rows = re.findall(r"^\| (R\d+) \|(.*)\|$", SPEC, re.MULTILINE)
    return {name: [cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for name, row in rows}


def docstrings(folder: str) -> list[tuple[str, str]]:
    """Name and docstring of every test function, class and module under a folder."""
    found: list[tuple[str, str]] = []
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py")):
        found += [
            (f"{path.name}::{getattr(node, 'name', '')}", flat(text))
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node))
        ]
    return found


def cited() -> set[str]:
    """Every line that a test names; "ROUTE-1 to ROUTE-8" names eight."""
    names: set[str] = set()
    for folder in ("spec", "property", "unit"):
        for _, text in docstrings(folder):
            for citation in CITATION.findall(text):
                first, _, last = citation.partition(" to ")
                names.add(first)
                if last:
                    series = re.sub(r"\d+$", "", first)
                    numbers = range(int(re.sub(r"\D", "", first)), int(re.sub(r"\D", "", last)) + 1)
                    names |= {f"{series}{number}" for number in numbers}
    for path in (ROOT / "tests" / "scenarios").glob("*.txt"):
        names |= set(CITATION.findall(path.read_text()))
    return names


def test_the_spec_has_numbered_lines() -> None:
    series = {re.sub(r"\d+$", "", name) for name in lines()}
    assert series == {"BLOCK-", "STATE-", "ROUTE-", "ADMIT-", "TICKET-", "COST-", "DISP-", "QUEUE-", "ACQ-", "I"}
    for one in series:
        numbers = [int(re.sub(r"\D", "", name)) for name in lines() if re.sub(r"\d+$", "", name) == one]
        assert numbers == list(range(1, len(numbers) + 1)), one


def test_every_line_is_tested() -> None:
    assert set(lines()) - cited() == set()


def test_every_ruling_is_tested() -> None:
    assert set(rulings()) == {f"R{number}" for number in range(1, 30)}
    assert set(rulings()) - cited() == set()


def test_tests_cite_nothing_that_is_not_there() -> None:
    known = set(lines()) | set(rulings()) | {"THM-1", "THM-2"}
    series = {re.sub(r"\d+$", "", name) for name in lines()}
    unknown = {name for name in cited() - known if re.sub(r"\d+$", "", name) in series | {"R"}}
    assert unknown == set()


@pytest.mark.parametrize(("where", "text"), docstrings("spec"), ids=lambda value: value if "::" in value else "")
def test_quotations_are_in_the_text(where: str, text: str) -> None:
    """A docstring "LINE: "sentence"" quotes that line, or that row of the table of rulings."""
    match = re.match(r"^((?:[A-Z]+-|R)\d+)[^:\"]*: (.*)$", text)
    if match is None:
        return
    name, rest = match.groups()
    source = lines().get(name) or flat(" ".join(rulings()[name])).replace("\\|", "|")
    for quotation in re.findall(r'"([^"]*)"', rest):
        assert quotation in source.replace("\\|", "|"), f"{where} quotes {name}"


def test_files_that_the_table_names_exist() -> None:
    for name, cells in rulings().items():
        places = [place.strip() for place in cells[-1].strip("|").split(",")]
        assert places, name
        for place in places:
            kind, _, stem = place.partition("/")
            path = ROOT / "tests" / kind / (f"{stem}.txt" if kind == "scenarios" else f"{stem}.py")
            assert path.exists(), f"{name}: {place}"


def test_functions_that_the_map_names_exist() -> None:
    """The section "How to read the code" names files and functions that are there."""
    table = SPEC.split("## How to read the code")[1]
    for row in re.findall(r"^\| .*? \| (.*) \|$", table, re.MULTILINE):
        source = ""
        for name in re.findall(r"`([\w.]+)`", row):
            if name.endswith(".py"):
                source = (ROOT / "kvc" / "core" / name).read_text()
            elif name.startswith("Sigma."):
                assert f"def {name.removeprefix('Sigma.')}(" in (ROOT / "kvc" / "core" / "state.py").read_text()
            else:
                stem = name.rpartition(".")[2]
                assert re.search(rf"(def|class) {stem}\b", source), name


def test_ten_thousand_cases() -> None:
    """The core's properties draw at least 10,000 cases where no profile says otherwise, state machine runs not counted."""
    total = 0
    for stem in ("admit", "blocks", "dispatch", "forest", "queue", "reblock", "route", "sigma"):
        for node in ast.parse((ROOT / "tests" / "property" / f"test_{stem}.py").read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            calls = {call.func.id: call for call in node.decorator_list if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
            if "given" in calls:
                given = [word.value for word in calls["settings"].keywords if word.arg == "max_examples"] if "settings" in calls else []
                total += next((value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, int)), 100)
    assert total >= 10_000
