"""docs/faults.md and the tests agree: every fault that a test names has a row, and every row names its tests.

The last column is written by `pytest tests/contract/test_faults_table.py --rewrite`; the others are written by hand.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/faults.md"
REQUIRED = (5, 8, 10, 18, 19, 32, 40, 41, 43, 46, 54, 58, 60, 62, 65, 66, 67, 68, 76, 78)
_IN_TEXT = re.compile(r"\bF(\d{1,2})\b")
_IN_NAME = re.compile(r"(?:^|_)f(\d{1,2})(?=_|$)")
_ROW = re.compile(r"^\| F(\d{1,2}) \|(.*)\|$")
_CELLS = 3


class Row(NamedTuple):
    """A row of the table: what goes wrong, what is done about it, which tests show it."""

    wrong: str
    done: str
    tests: str


def named_tests() -> dict[int, str]:
    """The last column by fault: test functions and classes whose name or docstring has the fault's name."""
    found: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not node.name.lower().startswith("test"):
                continue
            text = ast.get_docstring(node) or ""
            for number in {int(name) for name in (*_IN_TEXT.findall(text), *_IN_NAME.findall(node.name))}:
                found[number][path.relative_to(ROOT / "tests").as_posix()].append(node.name)
    return {number: _cell(files) for number, files in sorted(found.items())}


def _cell(files: dict[str, list[str]]) -> str:
    return "<br>".join(f"{file}: {', '.join(f'`{name}`' for name in sorted(set(names)))}" for file, names in sorted(files.items()))


def rows() -> dict[int, Row]:
    """The table."""
    table: dict[int, Row] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        found = _ROW.match(line)
        if found is not None:
            cells = [cell.strip() for cell in found[2].split("|")]
            assert len(cells) == _CELLS, f"F{found[1]} has {len(cells)} cells after its name"
            assert int(found[1]) not in table, f"F{found[1]} has two rows"
            table[int(found[1])] = Row(*cells)
    return table


def test_every_fault_that_a_test_names_has_a_row_and_the_other_way_round(rewrite: bool) -> None:  # noqa: FBT001 - a fixture
    tests = named_tests()
    assert set(rows()) == set(tests), "write a row for the fault, or a test for the row"
    if rewrite:
        lines = PAGE.read_text(encoding="utf-8").splitlines()
        for index, line in enumerate(lines):
            found = _ROW.match(line)
            if found is not None:
                row = rows()[int(found[1])]
                lines[index] = f"| F{found[1]} | {row.wrong} | {row.done} | {tests[int(found[1])]} |"
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number, row in rows().items():
        assert row.tests == tests[number], f"F{number}: run this file with --rewrite"


def test_rows_are_complete_and_in_order() -> None:
    table = rows()
    assert list(table) == sorted(table)
    assert set(REQUIRED) <= set(table)
    for number, row in table.items():
        assert len(row.wrong) > 10, f"F{number} does not say what goes wrong"
        assert len(row.done) > 20, f"F{number} does not say what is done about it"
