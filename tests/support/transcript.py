"""Console blocks of a page of documentation: commands and what they print, what of that may differ, and how to write it anew."""

from __future__ import annotations

import asyncio
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_VARIES = (
    (re.compile(r'"(id|kvc_worker)":\s*"[^"]*"'), r'"\1":"..."'),
    (re.compile(r'"(created|kvc_\w+_s)":\s*[-+0-9.e]+'), r'"\1":0'),
    (re.compile(r"(x-kvc-worker): \w+"), r"\1: ..."),
    (re.compile(r"traceparent: [-0-9a-f]+"), "traceparent: ..."),
    (re.compile(r"\r"), ""),
)
_DEADLINE_S = 30.0


@dataclass
class Step:
    """A command and what the page says it prints."""

    command: str
    answer: str


def python_blocks(page: str) -> list[str]:
    """The Python examples of a page."""
    return [textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


def steps(page: str) -> list[list[Step]]:
    """The console blocks of a page."""
    return [_steps(block) for block in _BLOCK.findall(page)]


def _steps(block: str) -> list[Step]:
    found: list[Step] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(Step(line[2:], ""))
        else:
            found[-1].answer += line + "\n"
    return found


def comparable(answer: str) -> str:
    """An answer without what differs each time."""
    for pattern, instead in _VARIES:
        answer = pattern.sub(instead, answer)
    return answer.strip()


async def printed(command: str) -> str:
    """What a shell command prints; one that fails says so."""
    process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    async with asyncio.timeout(_DEADLINE_S):
        out, _ = await process.communicate()
    text = comparable(out.decode()) + "\n"
    return text if process.returncode == 0 else f"{text}(exit status {process.returncode})\n"


def write(path: Path, blocks: list[list[Step]]) -> None:
    """Puts the answers of `blocks` into the page."""
    written = iter(blocks)
    path.write_text(_BLOCK.sub(lambda _: "".join(f"$ {step.command}\n{step.answer}" for step in next(written)), path.read_text()))
