"""`kvc` end to end: what a user types, what is printed, exit codes, and that nothing is left running."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from kvc.evaluation.demo import Demo
from kvc.evaluation.generator import Limits, generate
from kvc.evaluation.workload import ReplayOptions
from services import cli
from services.local_mesh import demo
from tests.support.certificates import make_certificates
from tests.support.commands import alive, gone, kvc, running, up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    """Address of the router of a mesh that `kvc up` runs."""
    with up("--topology", "1P2D") as (_, target, _):
        yield target


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 5 sessions, written by `kvc generate-trace`."""
    file = tmp_path_factory.mktemp("trace") / "agents.kvt.gz"
    argv = ["--sessions", "5", "--max-turns", "8", "--max-input-tokens", "40000", "--max-think", "20"]
    done = kvc("generate-trace", "claude-code", "--out", str(file), *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(file))}: \d+ requests of 5 sessions\n", done.stdout)
    return file


# ---- up ----


def test_up_ends_with_ctrl_c_and_leaves_nothing() -> None:
    """A worker that dies comes back meanwhile; exit code 0, no process and no folder left."""
    with up("--topology", "0P1D") as (command, target, logs):
        before = command.below()
        assert sorted(re.findall(r"child (router|agent|engine)", " ".join(before.values()))) == ["agent", "engine", "router"]
        (engine,) = [pid for pid, arguments in before.items() if " engine " in arguments]
        assert (logs / "d0.engine.log").exists()
        with up("--topology", "0P1D"):
            pass  # two meshes do not meet
        os.kill(engine, signal.SIGKILL)
        command.wait_for("d0 ended, starting it again")
        wait_ready(target, "d0")
        pids = command.below()
        assert len(pids) == 3
        assert command.end() == 0
        assert command.text.endswith("stopped\n")
        assert gone(pids)
        assert not logs.exists()


def test_up_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with up("--topology", "0P1D", "--dir", str(tmp_path)) as (command, _, logs):
        pids = command.below()
        assert (logs, len(pids)) == (tmp_path, 3)
        assert command.end(signal.SIGKILL) == -signal.SIGKILL
        assert gone(pids)


def test_up_ends_when_its_router_does() -> None:
    """One line that says so, exit code 1, no process left."""
    with up("--topology", "0P1D") as (command, _, _):
        pids = command.below()
        (router,) = [pid for pid, arguments in pids.items() if " router " in arguments]
        os.kill(router, signal.SIGKILL)
        assert command.process.wait(30) == 1
        assert command.text.splitlines()[-1].startswith("kvc up: the router ended with status -9")
        assert gone(pids)


def test_up_can_be_interrupted_while_it_starts() -> None:
    with running("up", "--port", "0", "--http-port", "0", "--topology", "1P3D") as command:
        command.wait_for("starting 1P3D")
        assert command.end(signal.SIGTERM) == 0
        assert alive(command.below()) == {}


def test_up_on_a_port_that_is_taken_says_so_in_one_line() -> None:
    with socket.socket() as taken, running("up", "--topology", "0P1D", "--http-port", "0", "--port", str(listen(taken))) as command:
        assert command.process.wait(60) == 1
        first, second = command.text.splitlines()
        assert first == "starting 0P1D ..."
        assert second.startswith("kvc up: router ended with status 2: ")
        assert f"server.port: cannot listen on 127.0.0.1:{taken.getsockname()[1]}, which is taken" in second


def test_up_on_a_terminal_shows_a_live_table_until_ctrl_c() -> None:
    """The workers with role, state, KV use, sessions and shares of modes, drawn again and again."""
    with up("--topology", "1P1D", terminal=True) as (command, target, _):
        command.wait_for(
            r"1P1D on 127\.0\.0\.1:\d+\s+worker\s+role\s+state\s+held KV\s+cached\s+of K_d\s+evicted\s+sessions\s+in flight\s+direct"
        )
        command.wait_for(r"d0\s+decode\s+ready\s+0\s+0\s+0%\s+0\s+0\s+0\s+-\s+-\s+-\s+-")
        command.wait_for(r"p0\s+prefill\s+ready")
        assert kvc("route", "s", "--router", target, "--text", "hello").stdout == "d0\n"
        drawn = len(re.findall("1P1D on", command.text))
        command.wait_for(f"(?:(?s:.*?)1P1D on){{{drawn + 2}}}")
        pids = command.below()
        command.type(b"\x03")
        assert command.process.wait(30) == 0
        assert command.text.endswith("stopped\n")
        assert gone(pids)


# ---- route and status ----


def test_route(router: str) -> None:
    plain = kvc("route", "s", "--router", router, "--text", "hello " * 20)
    assert (plain.returncode, plain.stdout in {"d0\n", "d1\n"}, plain.stderr) == (0, True, "")
    piped = kvc("route", "s", "--router", router, "--json", text="hello " * 20)
    answer = json.loads(piped.stdout)
    assert (answer["worker"]["worker_id"], answer["candidates"], answer["prompt_blocks"]) == (plain.stdout.strip(), [], 5)


def test_route_explains_every_candidate(router: str) -> None:
    argv = ("route", "s", "--router", router, "--text", "hello " * 20, "--explain")
    table = kvc(*argv).stdout.splitlines()
    assert table[0].startswith("5 blocks in the prompt")
    assert table[1].split()[:4] == ["worker", "overlap", "resident", "sticky"]
    assert {row.split()[0] for row in table[2:]} == {"d0", "d1"}
    assert table[2].rstrip().endswith("chosen")
    assert max(map(len, table)) <= 120
    rows = json.loads(kvc(*argv, "--json").stdout)["candidates"]
    assert [row["worker"]["worker_id"] for row in rows] == [row.split()[0] for row in table[2:]]
    assert all(len(row["score"]) == 4 for row in rows)


def test_status_of_the_workers(router: str) -> None:
    table = kvc("status", "--router", router).stdout.splitlines()
    assert [row.split()[:3] for row in table[1:]] == [["d0", "decode", "ready"], ["d1", "decode", "ready"], ["p0", "prefill", "ready"]]
    listed = json.loads(kvc("status", "--router", router, "--json").stdout)["workers"]
    assert [(one["info"]["worker"]["worker_id"], one["eligible"], one["inflight"]) for one in listed] == [
        ("d0", True, 0),
        ("d1", True, 0),
        ("p0", True, 0),
    ]


def test_status_of_a_session_that_nobody_knows(router: str) -> None:
    done = kvc("status", "nobody", "--router", router)
    assert (done.returncode, done.stdout) == (1, "nobody: not known to this router\n")
    assert json.loads(kvc("status", "nobody", "--router", router, "--json").stdout)["known"] is False


@pytest.mark.parametrize("argv", [["route", "s", "--text", "x"], ["status"], ["status", "s"]])
def test_a_router_that_is_not_there(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*argv, "--router", NOWHERE]) == 1
    assert capsys.readouterr().err == f"kvc {argv[0]}: no router answers at {NOWHERE}: `kvc up` starts one, --router names another\n"


def test_a_router_that_refuses(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The router's own words, which name the field."""
    assert cli.main(["route", "", "--router", router, "--text", "x"]) == 1
    assert capsys.readouterr().err == "kvc route: session_id: must be 1 to 256 bytes of UTF-8, is 0\n"


def test_a_router_with_tls_and_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_certificates(tmp_path)
    argv = ["--port", "0", "--server-tls-cert", str(made.certificate), "--server-tls-key", str(made.key)]
    with running("router", *argv, KVC_SERVER_AUTH_TOKEN="open-sesame") as command:
        port = command.wait_for(r'"event":"listening".*?"port":(\d+)')[1]
        ask = ["status", "--router", f"127.0.0.1:{port}", "--tls-ca", str(made.authority)]
        assert cli.main(ask) == 1
        assert capsys.readouterr().err.startswith("kvc status: ")
        monkeypatch.setenv("KVC_ROUTER_TOKEN", "open-sesame")
        assert cli.main(ask) == 0
        assert capsys.readouterr().out.split()[:3] == ["worker", "role", "state"]
        assert cli.main([*ask[:-1], str(tmp_path / "none.pem")]) == 2
        assert "none.pem" in capsys.readouterr().err


# ---- replay and demo ----


def test_replay(trace: Path, tmp_path: Path) -> None:
    """Every reply is checked; the numbers go to standard output, progress to standard error, the records to files."""
    out = tmp_path / "run"
    argv = ["--limit", "30", "--sessions", "4", "--time-scale", "200", "--json", "--out", str(out), "--topology", "1P2D"]
    done = kvc("replay", str(trace), *argv)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["requests"], summary["failed"], summary["wrong"], summary["left_out"]["too_long"]) == (30, 0, 0, 0)
    assert summary["modes"]["direct"] > 15
    assert sum(summary["modes"].values()) == 30
    assert summary["command"].startswith(f"kvc replay {trace} --limit 30")
    assert "kvc: 30/30 requests" in done.stderr
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert (len(records), all(record["ok"] and not record["wrong"] for record in records)) == (30, True)
    assert json.loads((out / "summary.json").read_text())["requests"] == 30
    assert json.loads((out / "meta.json").read_text())["topology"] == "1P2D"


@pytest.mark.parametrize(("policy", "topology"), [("sticky", "0P2D"), ("round_robin", "1P1D")])
def test_replay_by_other_policies(trace: Path, policy: str, topology: str) -> None:
    """They ask nobody, which makes every turn a Fallback."""
    argv = ["--limit", "30", "--sessions", "4", "--time-scale", "200", "--policy", policy, "--topology", topology]
    done = kvc("replay", str(trace), *argv)
    assert done.returncode == 0, done.stderr
    assert "failed 0, wrong 0" in done.stdout
    assert f"{policy}: 30 requests" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 120
    assert re.search(r"fallback\W+30\W+100", done.stdout)


def test_replay_ends_with_ctrl_c(trace: Path) -> None:
    """Exit code 130, one line, nothing left."""
    with running("replay", str(trace), "--time-scale", "0.01", "--topology", "0P1D", "--sessions", "2") as command:
        command.wait_for("0/.* requests")
        pids = command.below()
        assert command.end() == 128 + signal.SIGINT
        assert command.text.splitlines()[-1] == "kvc replay: stopped by SIGINT"
        assert gone(pids)


def test_demo_in_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The demonstration's path with a smaller workload: one JSON object, nothing failed or wrong, blocks evicted, a baseline."""
    monkeypatch.setattr(demo, "demo_workload", small)
    assert cli.main(["demo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["failed"], told["wrong"], told["requests"]) == (0, 0, told["baseline"]["requests"])
    assert set(told["modes"]) == {"direct", "seed", "reseed", "fallback"}
    assert 0 < told["direct_share"] < 1
    assert set(told["ttft_s"]) == {"p50", "p90", "p99"}
    assert (told["baseline"]["failed"], told["baseline"]["wrong"], told["baseline"]["modes"]["direct"]) == (0, 0, 0)
    assert told["evicted_tokens"] > 0


def small() -> Demo:
    """Six sessions whose KV does not fit into the pools together."""
    limits = Limits(max_input_tokens=20_000, max_output_tokens=500, max_turns=6, max_think_s=5.0)
    made = generate("claude-code", seed=1, sessions=6, live=3, limits=limits)
    return Demo(made, ReplayOptions(live_sessions=3, time_scale=100.0), topology="1P2D", capacity_tokens=24_000)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["nope"], "no such command: 'nope'"),
        (["up", "--topology", "9X"], "--topology"),
        (["up", "--topology", "3P0D"], "--topology"),
        (["up", "--topology", "40P40D"], "--topology"),
        (["up", "--port", "70000"], "--port"),
        (["up", "--time-scale", "nan"], "--time-scale"),
        (["up", "--time-scale", "0"], "--time-scale"),
        (["up", "--kv-tokens", "-5"], "--kv-tokens"),
        (["up", "--preset", "b200"], "--preset"),
        (["up", "--bogus"], "--bogus"),
        (["up", "--topo", "1P1D"], "--topo"),
        (["replay"], "trace"),
        (["replay", "/nonexistent"], "/nonexistent"),
        (["replay", "/"], "/"),
        (["replay", "TRACE", "--limit", "0"], "--limit"),
        (["replay", "TRACE", "--sessions", "many"], "--sessions"),
        (["replay", "TRACE", "--policy", "best"], "--policy"),
        (["replay", "TRACE", "--max-input-len", "1"], "max_input_tokens"),
        (["replay", "TRACE", "--out", "/proc/nowhere"], "/proc/nowhere"),
        (["generate-trace", "claude-code"], "--out"),
        (["generate-trace", "gpt", "--out", "x"], "preset"),
        (["generate-trace", "claude-code", "--out", "/proc/nowhere/x"], "/proc/nowhere/x"),
        (["generate-trace", "claude-code", "--out", "x", "--sessions", "0"], "--sessions"),
        (["route"], "session"),
        (["route", "s", "--text", "\udcff"], "--text"),
        (["status", "a", "b"], "b"),
        (["demo", "--fast"], "--fast"),
        (["router", "--port", "-1"], "port"),
        (["agent"], "engine.socket"),
        (["engine", "--role", "boss"], "role"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: list[str], named: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    try:
        status = cli.main([str(trace) if word == "TRACE" else word for word in argv])
    except SystemExit as ended:
        status = int(str(ended.code))
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert line.startswith("kvc")
    assert named in line


@pytest.mark.parametrize("content", ["garbage", '{"no": "trace"}', '{"meta": 1}\n[]', "\x00\x01", ""])
def test_replay_of_a_broken_file(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text(content)
    assert cli.main(["replay", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvc replay: {file}")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"\n  {name} " in usage for name in cli.COMMANDS)
    assert cli.main([]) == 2
    assert capsys.readouterr().out == usage
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"kvc \S.*\n", capsys.readouterr().out)
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert f"kvc {name}" in capsys.readouterr().out


def listen(taken: socket.socket) -> int:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return int(taken.getsockname()[1])


def wait_ready(target: str, worker: str) -> None:
    """Waits until the router may use the worker."""
    ends_s = time.monotonic() + 60.0
    while True:
        listed = json.loads(kvc("status", "--router", target, "--json").stdout)["workers"]
        if any(one["info"]["worker"]["worker_id"] == worker and one["eligible"] for one in listed):
            return
        assert time.monotonic() < ends_s, listed


def test_a_grpc_that_was_not_measured_gets_no_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that gRPC does not know is a line on stderr that is no JSON."""
    for name in ("GRPC_EXPERIMENTS", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "")  # so that what is set below goes with the test
        monkeypatch.delenv(name)
    for number, expected in (("1.85.3", None), ("1.81.1", cli.GRPC_EXPERIMENTS)):
        monkeypatch.setattr("importlib.metadata.version", lambda _, number=number: number)
        cli.prepare_grpc()
        assert os.environ.get("GRPC_EXPERIMENTS") == expected
