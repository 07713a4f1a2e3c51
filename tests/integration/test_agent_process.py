"""The admission agent and the engine as real processes: killed, frozen, stopped, and configured from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import grpc.aio
import pytest

from kvc import wire
from kvc.core.blocks import chain_seed, hash_chain, pack_tokens
from kvc.core.types import Admission, Attempt, Reason, Rejection, Turn, WorkerRef
from kvc.engine.hop import HOP_CAPABILITY
from kvc.engine.reference.config import EngineConfig as ReferenceConfig
from kvc.errors import Unavailable, from_rpc_error
from kvc.runtime.channel import channel
from kvc.v1 import admission_pb2, admission_pb2_grpc
from services.admission_agent.main import main
from tests.support.waiting import eventually, until
from tests.support.watch import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0


def prompt(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


class Child:
    """A `kvc` process whose log lines are kept."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, *arguments: str) -> Child:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.cli",
                *arguments,
                stderr=asyncio.subprocess.PIPE,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": "."},
            )
        )

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            with contextlib.suppress(json.JSONDecodeError):
                self.lines.append(json.loads(line))

    def said(self, name: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line.get("event") == name), None)

    async def says(self, name: str) -> dict[str, Any]:
        await until(lambda: self.said(name) is not None or self.process.returncode is not None, WAIT_S, f"{name} in the log")
        found = self.said(name)
        assert found is not None, f"ended with {self.process.returncode}: {self.lines}"
        return found

    async def end(self, number: int) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), WAIT_S)
        await asyncio.wait_for(self._reader, WAIT_S)
        return code


class Pair:
    """An engine process and an agent process at fixed places, each replaceable."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "link.sock"
        self._children: list[Child] = []
        self.port = 0

    async def _child(self, *arguments: str) -> Child:
        child = await Child.start(*arguments)
        self._children.append(child)
        return child

    async def engine(self) -> tuple[Child, str]:
        """Starts the engine; its URL."""
        child = await self._child(
            *("engine", "--role", "decode", "--worker-id", "d0", "--link-path", str(self._socket)),
            *("--preset", "tiny", "--time-scale", "50", "--kv-tokens", "4800"),
        )
        return child, str((await child.says("engine_ready"))["url"])

    async def agent(self, *arguments: str) -> Child:
        """Starts the agent, on the port it had before if there was one."""
        child = await self._child(
            *("agent", "--engine-socket", str(self._socket), "--port", str(self.port), "--engine-call-timeout-s", "0.5"),
            *("--engine-backoff-cap-s", "0.1", "--residency-load-interval-s", "0.05", *arguments),
        )
        self.port = int((await child.says("listening"))["port"])
        return child

    async def stop(self) -> None:
        for child in self._children:
            if child.process.returncode is None:
                child.process.send_signal(signal.SIGCONT)
            await child.end(signal.SIGKILL)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    one = Pair(tmp_path)
    yield one
    await one.stop()


async def run_turn(stub: admission_pb2_grpc.AdmissionServiceAsyncStub, url: str, epoch: int, ids: list[int], request_id: str) -> None:
    """Admits through the agent and generates on the engine."""
    chain = hash_chain(pack_tokens(ids), 24, chain_seed(ReferenceConfig().model))
    request = wire.admit_request_to_pb(Attempt(request_id, 0), WorkerRef("d0", epoch), Turn("s", 0, chain, len(ids), 8), None)
    response = await stub.Admit(request, timeout=WAIT_S, wait_for_ready=True)
    outcome = wire.outcome_from_pb(response)
    assert isinstance(outcome, Admission), outcome
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "rid": outcome.ticket, "session_id": "s"}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def serving_epoch(stub: admission_pb2_grpc.AdmissionServiceAsyncStub) -> int:
    async def worker() -> int:
        try:
            response = await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=2.0)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(str(from_rpc_error(error))) from error
        assert HOP_CAPABILITY in response.info.capabilities, "what the engine can do reaches the router"
        return response.info.worker.epoch

    return await eventually(worker, WAIT_S)


async def test_f40_kill_9_of_the_engine_and_restart_under_the_same_address(pair: Pair) -> None:
    """F40: the follower is told at once, calls are UNAVAILABLE, and the next life starts with a later epoch and nothing resident."""
    agent = await pair.agent()
    assert agent.said("engine_connected") is None
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        engine, url = await pair.engine()
        first = await serving_epoch(stub)
        async with Watch(stub).reading() as watch:
            await run_turn(stub, url, first, prompt(1000, 480), "r1")
            await until(lambda: len(watch.model.blocks) == 20, WAIT_S, "resident")
            await engine.end(signal.SIGKILL)
            await until(lambda: watch.error is not None, WAIT_S, "the stream ends")
            assert watch.error is not None
            assert from_rpc_error(watch.error).reason == "ENGINE_AWAY"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=WAIT_S)
        assert isinstance(from_rpc_error(caught.value), Unavailable)
        await pair.engine()
        second = await serving_epoch(stub)
        assert second > first
        async with Watch(stub).reading() as watch:
            assert (watch.model.epoch, watch.model.blocks) == (second, set())
        stale = wire.admit_request_to_pb(Attempt("r2", 0), WorkerRef("d0", first), Turn("s", 1, hash_chain(b"", 24, 0), 480, 8), None)
        outcome = wire.outcome_from_pb(await stub.Admit(stale, timeout=WAIT_S))
        assert isinstance(outcome, Rejection)
        assert outcome.reason is Reason.STALE_EPOCH
    assert await agent.end(signal.SIGTERM) == 0


async def test_kill_9_of_the_agent_loses_nothing_but_the_streams(pair: Pair) -> None:
    """The next agent finds the same life and its residency; the engine and its sessions were never touched."""
    _, url = await pair.engine()
    agent = await pair.agent()
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        epoch = await serving_epoch(stub)
        async with Watch(stub).reading() as watch:
            await run_turn(stub, url, epoch, prompt(1000, 480), "r1")
            await until(lambda: len(watch.model.blocks) == 20, WAIT_S, "resident")
            await agent.end(signal.SIGKILL)
            await until(lambda: watch.error is not None, WAIT_S, "the stream ends")
            before = watch.model.blocks
        await pair.agent()
        assert await serving_epoch(stub) == epoch
        async with Watch(stub).reading() as watch:
            assert watch.model.blocks == before
        await run_turn(stub, url, epoch, prompt(1000, 480), "r2")


async def test_a_frozen_engine_is_away_until_it_moves_again(pair: Pair) -> None:
    """SIGSTOP keeps every socket open; the load poll notices within its timeout."""
    engine, _ = await pair.engine()
    agent = await pair.agent()
    await agent.says("engine_connected")
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        epoch = await serving_epoch(stub)
        engine.process.send_signal(signal.SIGSTOP)

        async def refused() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetWorker(admission_pb2.GetWorkerRequest(), timeout=2.0)
            assert from_rpc_error(caught.value).code == "UNAVAILABLE"

        async def noticed() -> None:
            try:
                await refused()
            except pytest.fail.Exception as error:
                raise AssertionError from error

        await eventually(noticed, WAIT_S)
        engine.process.send_signal(signal.SIGCONT)
        assert await serving_epoch(stub) == epoch


async def test_sigterm_ends_the_process_with_open_streams(pair: Pair) -> None:
    """SIGTERM: streams end with a reason, the exit code is 0 and it does not take the whole grace."""
    await pair.engine()
    agent = await pair.agent("--grace-s", "30")
    async with channel(f"127.0.0.1:{pair.port}") as one:
        stub = admission_pb2_grpc.AdmissionServiceStub(one)
        await serving_epoch(stub)
        stream = stub.AdmitStream()
        await stream.write(admission_pb2.AdmitStreamRequest())
        async with Watch(stub).reading() as watch:
            await until(lambda: agent.said("follower_joined") is not None, WAIT_S, "it is followed")
            assert await agent.end(signal.SIGTERM) == 0
            await until(lambda: watch.error is not None, WAIT_S, "the stream ends")
            assert watch.error is not None
            assert from_rpc_error(watch.error).reason == "SHUTTING_DOWN"
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


# ---- the command line ----


def test_print_config_shows_values_and_origins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVC_RESIDENCY_BLOCK_TOKENS", "32")
    with pytest.raises(SystemExit) as caught:
        main(["--engine-socket", "e.sock", "--server-auth-token", "s3cret", "--print-config"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith('engine.socket = "e.sock"') and "flag --engine-socket" in line for line in lines)
    assert any(line.startswith("residency.block_tokens = 32") and "environment KVC_RESIDENCY_BLOCK_TOKENS" in line for line in lines)
    assert any(line.startswith("admit.timeout_s = 1.0") and "default" in line for line in lines)
    assert "s3cret" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "engine.socket"),
        (["--engine-socket", "e", "--admit-timeout-s", "nan"], "admit.timeout_s"),
        (["--engine-socket", "e", "--admit-timeout-s", "0"], "admit.timeout_s"),
        (["--engine-socket", "e", "--residency-block-tokens", "24.5"], "residency.block_tokens"),
        (["--engine-socket", "e", "--residency-load-interval-s", "1.5"], "residency.load_interval_s"),
        (["--engine-socket", "e", "--residency-part-bytes", "1048576"], "residency.part_bytes"),
        (["--engine-socket", "e", "--engine-backoff-base-s", "5", "--engine-backoff-cap-s", "1"], "backoff_base_s"),
        (["--engine-socket", "e", "--log-level", "loud"], "log_level"),
        (["--engine-socket", "e", "--no-such-thing"], "--no-such-thing"),
    ],
)
def test_f76_a_wrong_setting_is_one_line_and_exit_code_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """F76: the line names the setting."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert named in error
