"""docs/http.md is executed: every curl command and both Python examples, on one mesh; its tables are the code's."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from services.router.door.config import DoorConfig
from services.router.door.request import ROUTED
from tests.support import transcript
from tests.support.live_mesh import live_mesh

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs/http.md"
DOCUMENTED = "http://127.0.0.1:8000"
PLACES = {"host", "port"}


async def test_the_examples_do_what_the_page_says(rewrite: bool, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: FBT001 - a fixture
    page = PAGE.read_text()
    blocks = transcript.steps(page)
    assert sum(map(len, blocks)) > 10
    wrong: list[str] = []
    async with live_mesh("1P2D", time_scale=20.0) as live:
        for step in (step for block in blocks for step in block):
            answer = await transcript.printed(step.command.replace(DOCUMENTED, live.mesh.http_url))
            if transcript.comparable(step.answer) != transcript.comparable(answer):
                wrong.append(f"$ {step.command}\n  the page: {step.answer}\n  the mesh: {answer}")
                step.answer = answer
        for example in transcript.python_blocks(page):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", example.replace(DOCUMENTED, live.mesh.http_url), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            assert (process.returncode, bool(out.strip())) == (0, True), example
    if rewrite:
        transcript.write(PAGE, blocks)
        return
    assert wrong == [], "\n".join(wrong)


def test_the_tables_name_every_path_and_setting() -> None:
    page = PAGE.read_text()
    assert [path for path in ROUTED if f"| `{path.decode()}` | POST |" not in page] == []
    limits = [one for one in dataclasses.fields(DoorConfig) if one.name not in PLACES and not isinstance(one.default, str | bool)]
    assert len(limits) > 5
    assert [one.name for one in limits if f"| `http.{one.name}` | {one.default} |" not in page] == []
    assert [one.name for one in dataclasses.fields(DoorConfig) if one.name not in PLACES and f"`http.{one.name}`" not in page] == []
