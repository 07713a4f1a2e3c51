"""Golden scenarios: each file is a story in commands and what they print (tests/support/world.py has the commands).

    # why the next command is here
    command arguments
    ----
    what it prints

`pytest tests/scenarios --rewrite` writes what the code does now; read the difference before keeping it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.world import World

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def replay(text: str) -> str:
    """The same story with what its commands print now."""
    world = World()
    out: list[str] = []
    printing = False
    for line in text.splitlines(keepends=True):
        if printing:
            # Old output, up to the blank line that ends it.
            printing = line.strip() != ""
            if not printing:
                out.append(line)
        elif line.strip() == "----":
            assert out, "a story starts with a command"
            command = out[-1].strip()
            out.append(line)
            out.append(world.run(command))
            printing = True
        else:
            out.append(line)
    return "".join(out)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, rewrite: bool) -> None:  # noqa: FBT001 - a fixture
    """A story ends as it did when it was written down."""
    before = path.read_text()
    now = replay(before)
    if rewrite:
        path.write_text(now)
    assert now == path.read_text()


def test_the_harness_sees_a_difference() -> None:
    """A golden file whose output is wrong does not pass."""
    story = "worker D0\n----\nok\n\nsigma\n----\nD0/1: inflight 7\n"
    assert replay(story) != story
    assert replay(replay(story)) == replay(story)


def test_there_are_stories() -> None:
    assert len(FILES) >= 10
