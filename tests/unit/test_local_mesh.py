"""What the commands of a local mesh are made of: topologies, arguments, views, the router's client, and the command line itself."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from kvc.core import events as ev
from kvc.core.blocks import pack_tokens
from kvc.core.types import Reason, WorkerRef
from kvc.errors import Exhausted, InvalidField, Unavailable
from kvc.v1 import router_pb2
from services import cli
from services.local_mesh.client import RouterClient, answers_of
from services.local_mesh.options import Parser, add_mesh_arguments, add_router_arguments, real, whole
from services.local_mesh.topology import MAX_WORKERS, Topology
from services.local_mesh.views import as_json, candidates_table, session_lines, workers_table
from services.router.ports import EngineError
from tests.support.fake_ports import ok, refusal
from tests.support.router_server import Served, served

if TYPE_CHECKING:
    from rich.table import Table

    from kvc.evaluation.ports import TurnResult


class TestTopology:
    @pytest.mark.parametrize(("name", "prefill", "decode"), [("1P3D", 1, 3), ("0p4d", 0, 4), (" 2P10D ", 2, 10), ("0P64D", 0, 64)])
    def test_names(self, name: str, prefill: int, decode: int) -> None:
        shape = Topology.parse(name)
        assert shape == Topology(prefill, decode)
        assert Topology.parse(str(shape)) == shape
        roles = [role for _, role in shape.workers()]
        assert roles == ["prefill"] * prefill + ["decode"] * decode
        assert len({worker for worker, _ in shape.workers()}) == prefill + decode

    @pytest.mark.parametrize(
        "name", ["", "3D", "1P", "1P0D", "-1P3D", "1P3D1", "P D", "1P99D", f"1P{MAX_WORKERS}D", "1P3D\n4", "٣P3D", "1P3d x"]
    )
    def test_no_topologies(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"no topology|workers"):
            Topology.parse(name)


class TestOptions:
    @pytest.mark.parametrize("given", ["x", "1.5", "", "9", "101", "1e3", "9" * 5000])
    def test_whole(self, given: str) -> None:
        assert whole(10, 100)("10") == 10
        with pytest.raises(argparse.ArgumentTypeError) as wrong:
            whole(10, 100)(given)
        assert len(str(wrong.value)) < 100

    @pytest.mark.parametrize("given", ["x", "", "nan", "inf", "-inf", "0.4", "1e400", "2.1"])
    def test_real(self, given: str) -> None:
        assert real(0.5, 2.0)("1.5") == 1.5
        with pytest.raises(argparse.ArgumentTypeError):
            real(0.5, 2.0)(given)

    def parser(self) -> Parser:
        made = Parser(prog="kvc test")
        add_mesh_arguments(made, kv_tokens=92_104, time_scale=2.0)
        add_router_arguments(made)
        return made

    def test_defaults(self) -> None:
        arguments = self.parser().parse_args([])
        assert (str(arguments.topology), arguments.kv_tokens, arguments.time_scale) == ("1P3D", 92_104, 2.0)
        assert (arguments.profile, arguments.json) == ("default", False)

    @pytest.mark.parametrize(
        "argv",
        [
            ["--topology", "3D"],
            ["--kv-tokens", "0"],
            ["--time-scale", "nan"],
            ["--page-tokens", "x"],
            ["--profile", "best"],
            ["--preset", "tpu"],
            ["--kv", "5000"],
            ["extra"],
        ],
    )
    def test_wrong_arguments_are_one_line(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            self.parser().parse_args(argv)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("kvc test: ")


def shown(table: Table, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


async def listed(made: Served) -> router_pb2.ListWorkersResponse:
    return await made.stub.ListWorkers(router_pb2.ListWorkersRequest())


class TestViews:
    @pytest.mark.parametrize("width", [80, 160])
    async def test_workers(self, width: int) -> None:
        async with served() as made:
            made.world.prefill("p0")
            ref = made.world.join("d1")
            made.world.router.apply(ev.WorkerHealth(ref, healthy=False))
            made.problems["d1"] = "silent for 3.0 s"
            await made.dispatch()
            text = shown(workers_table(await listed(made), "the title", width=width), width)
            for word in ("the title", "d0", "d1", "p0", "decode", "prefill", "ready", "unhealthy", "silent for 3.0 s", "100"):
                assert word in text
            assert all(len(line) <= width for line in text.splitlines())

    async def test_no_workers(self) -> None:
        assert "worker" in shown(workers_table(router_pb2.ListWorkersResponse()), 120)

    @pytest.mark.parametrize("width", [80, 160])
    async def test_candidates(self, width: int) -> None:
        async with served() as made:
            made.world.join("d1")
            made.world.router.apply(ev.WorkerDraining("d1", draining=True))
            response = await made.stub.Route(router_pb2.RouteRequest(session_id="s", text="x" * 100))
            text = shown(candidates_table(response, width=width), width)
            assert "4 blocks in the prompt" in text
            assert any("d0" in line and "chosen" in line for line in text.splitlines())
            assert any("d1" in line and "draining" in line for line in text.splitlines())

    async def test_session(self) -> None:
        async with served() as made:
            ask = router_pb2.RouterServiceGetSessionStatusRequest(session_id="s")
            assert session_lines("s", await made.stub.GetSessionStatus(ask)) == ["s: not known to this router"]
            await made.dispatch()
            made.world.router.sigma.apply(ev.Refused("s", WorkerRef("d0", 1), Reason.NO_D_CAPACITY))
            status = await made.stub.GetSessionStatus(ask)
            lines = session_lines("s", status)
            assert lines[0] == "s: pinned to d0; 1 turns, 51 tokens"
            assert any("1 refusals" in line for line in lines)
            assert json.loads(as_json(status))["pin"]["worker_id"] == "d0"


class TestClient:
    async def turn(self, made: Served, **fields: object) -> TurnResult:
        target = made.target
        async with RouterClient(target, timeout_s=10.0) as client:
            return await client.turn("s", pack_tokens(list(range(48))), 4, request_id="r", last=bool(fields.get("last")))

    async def test_a_turn(self) -> None:
        async with served() as made:
            stream = ok("a", "b", "c")
            made.world.engines.streams["http://d0"] = stream
            result = await self.turn(made)
            assert result.ok
            assert (result.mode, result.worker, result.executor, result.finish_reason) == ("seed", "d0", "local", "length")
            assert result.output == pack_tokens([0, 1, 2])
            assert (result.cached_tokens, result.probes) == (24, 1)
            assert 0 <= result.mesh_s < 10
            assert made.world.router.sigma.session("s") is not None
            await self.turn(made, last=True)
            assert made.world.router.sigma.session("s") is None

    @pytest.mark.parametrize(
        ("error", "kind"),
        [(EngineError(503, "queue-full", "", retry_after_s=2.0), Exhausted), (EngineError(400, "invalid-field", "no"), InvalidField)],
    )
    async def test_typed_errors(self, error: EngineError, kind: type[Exhausted]) -> None:
        async with served(engines={"retries": 0}) as made:
            made.world.engines.streams["http://d0"] = [error]
            failure = await refusal(kind, self.turn(made))
            assert failure.retry_after_s == error.retry_after_s

    async def test_nobody_answers(self) -> None:
        async with RouterClient("127.0.0.1:1", timeout_s=5.0) as client:
            with pytest.raises(Unavailable, match=r"no router answers at 127\.0\.0\.1:1"), answers_of("127.0.0.1:1"):
                await client.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5.0)

    async def test_answers_that_are_typed_stay_so(self) -> None:
        async with served() as made, RouterClient(made.target) as client:
            with pytest.raises(InvalidField, match="session_id"), answers_of(made.target):
                await client.stub.Route(router_pb2.RouteRequest(text="x"), timeout=5.0)


class TestCommandLine:
    def test_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        for argv, code in (([], 2), (["--help"], 0), (["-h"], 0), (["help"], 0)):
            assert cli.main(argv) == code
            out = capsys.readouterr().out
            assert all(f"  {name} " in out for name in cli.COMMANDS)

    def test_every_command_is_listed_and_exists(self, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["--help"])
        text = capsys.readouterr().out
        for name, command in cli.COMMANDS.items():
            assert f"  {name} " in text
            assert command.help in text

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--version"]) == 0
        assert capsys.readouterr().out.startswith("kvc ")

    @pytest.mark.parametrize("name", ["nonsense", "", "--nonsense", "x" * 1000, "\x00"])
    def test_an_unknown_command_is_one_line(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("kvc: no such command: ")
        assert len(line) < 200

    @pytest.mark.parametrize("name", cli.COMMANDS)
    def test_help_of_every_command(self, name: str) -> None:
        done = kvc(name, "--help")
        assert done.returncode == 0
        assert f"kvc {name}" in done.stdout
        assert done.stderr == ""

    @pytest.mark.parametrize("name", cli.COMMANDS)
    def test_a_wrong_argument_of_every_command_is_one_line(self, name: str) -> None:
        done = kvc(name, "--no-such-option")
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"kvc {name}: ")


def kvc(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "services.cli", *argv], capture_output=True, text=True, timeout=60, check=False)
