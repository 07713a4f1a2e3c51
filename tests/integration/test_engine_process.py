"""The reference engine as a process: its death, its next life under the same address, its settings."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from kvc.engine.link_io import LinkClient
from kvc.engine.reference.main import run
from tests.support.engines import config, engine_process, numbers, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.engines import Answer


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
async def test_the_prefill_engine_dies_mid_prefill(kill: signal.Signals) -> None:
    """F32: P is killed while it prefills for D: D fails typed within 1 s and serves on."""
    async with engine_process("--role", "prefill", "--time-scale", "0.05", "--chunk-tokens", "64") as (process, line):
        async with serving(config(role="decode")) as subject:
            info = await subject.http.get(line["url"] + "/server_info")
            port = (await info.json())["disaggregation_bootstrap_port"]
            fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
            body = {"input_ids": numbers(4000), "sampling_params": {"max_new_tokens": 5}, **fields}
            prefill = asyncio.create_task(subject.http.post(line["url"] + "/generate", json=body))
            decode = asyncio.create_task(subject.generate(numbers(4000), 5, **fields))
            pool: dict[str, int] = {}
            while not pool.get("held_tokens"):
                pool = await (await subject.http.get(line["url"] + "/kv_pool")).json()
            process.send_signal(kill)
            async with asyncio.timeout(1.0 if kill is signal.SIGKILL else 5.0):
                answer: Answer = await decode
            assert (answer.status, answer.kind) == (502, "prefill-failed")
            await asyncio.gather(prefill, return_exceptions=True)
            await subject.idle()
            await subject.checked(numbers(100), 5)
        assert await process.wait() == (-9 if kill is signal.SIGKILL else 0)


async def test_restart_under_the_same_address_is_another_life(tmp_path: Path) -> None:
    """F40: epochs grow from life to life, so what was learnt of an earlier one is void."""
    flags = ["--link-path", str(tmp_path / "e.sock"), "--worker-id", "w"]
    epochs = []
    port = "0"
    for _ in range(2):
        async with engine_process(*flags, "--port", port) as (process, line):
            port = line["url"].rpartition(":")[2]
            client = await LinkClient.connect(tmp_path / "e.sock")
            epochs.append(client.welcome.epoch)
            await client.close()
            process.kill()
            await process.wait()
    assert epochs[0] < epochs[1]


WRONG_SETTINGS = [
    (["--page-tokens", "0"], "page_tokens"),
    (["--kv-tokens", "16"], "kv_tokens"),
    (["--preset", "x"], "preset"),
    (["--params-rho", "1.5"], "params.rho"),
    (["--params-ticket-ttl-s", "0"], "params.ticket_ttl_s"),
]


@pytest.mark.parametrize(("flags", "name"), WRONG_SETTINGS, ids=[name for _, name in WRONG_SETTINGS])
def test_wrong_settings_are_one_line(flags: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(flags)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert len(said.splitlines()) == 1
    assert name in said
