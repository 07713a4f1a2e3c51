"""The benchmark beside peer routers: systems, processes, its arithmetic by hand, its page, its command. Nothing is measured here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bench.peers import __main__ as command
from bench.peers import environments, mesh, page, processes, table
from bench.peers.bars import BARS, Bar, judge
from bench.peers.identity import Identity
from bench.peers.load import Seen, Times
from bench.peers.results import HOT, LARGE, MEASURES, PACED, READS, SHORT, Results, spread
from bench.peers.rig import Row
from bench.peers.scenarios import SCENARIOS, STANDARD
from bench.peers.systems import BASE, DIRECT, NEEDED, OFF, PD_BASE, PD_OFF, SYSTEMS, Site, System

if TYPE_CHECKING:
    from pathlib import Path

BY_NAME = {system.name: system for system in SYSTEMS}


# ---- systems ----


def site(folder: Path) -> Site:
    return Site(20_001, 20_002, (1, 2, 3), folder)


def test_systems_have_names_of_their_own_and_bases_that_exist() -> None:
    assert len(BY_NAME) == len(SYSTEMS)
    assert set(NEEDED) <= BY_NAME.keys()
    assert {system.base for system in SYSTEMS} == {BASE, PD_BASE}
    for system in SYSTEMS:
        assert set(system.scenarios) <= set(BY_NAME[system.base].scenarios)
    assert {bar.system for bar in BARS} | {bar.base for bar in BARS if bar.base} <= set(NEEDED)
    assert {bar.measure.scenario for bar in BARS} <= set(STANDARD)
    assert {measure.scenario for measure in MEASURES} == SCENARIOS.keys()


def test_a_peer_gets_its_workers_and_ports(tmp_path: Path) -> None:
    base, pd = BY_NAME[BASE].command, BY_NAME[PD_BASE].command
    assert base is not None
    assert pd is not None
    plain, split = list(base(site(tmp_path))), list(pd(site(tmp_path)))
    assert plain[:3] == [str(tmp_path / "smg" / "bin" / "smg"), "launch", "--worker-urls"]
    assert plain[3:6] == [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    assert split[2:9] == [
        "--pd-disaggregation",
        "--prefill",
        "http://127.0.0.1:1",
        "--decode",
        "http://127.0.0.1:2",
        "--decode",
        "http://127.0.0.1:3",
    ]
    for argv in (plain, split):
        assert argv[argv.index("--port") + 1] == "20001"
        assert argv[argv.index("--prometheus-port") + 1] == "20002"
        assert argv[argv.index("--policy") + 1] == "cache_aware"


def test_the_router_runs_with_its_defaults() -> None:
    *agents, router = mesh.commands(7, (1, 2), (11, 12), admission="", pd=False, on_arrival=True, rest=())
    assert router[1:] == ["-m", "services.cli", "router", "--http-port", "7", "--agent", "127.0.0.1:11", "--agent", "127.0.0.1:12"]
    assert [argv[argv.index("--role") + 1] for argv in agents] == ["decode", "decode"]
    *agents, router = mesh.commands(7, (1, 2), (11, 12), admission="off", pd=True, on_arrival=False, rest=("--more",))
    assert [argv[argv.index("--role") + 1] for argv in agents] == ["prefill", "decode"]
    assert router[-3:] == ["--params-executor", "prefill", "--more"]
    assert router[router.index("--http-admission") + 1] == "off"


def test_an_environment_is_the_right_one_by_its_version(tmp_path: Path) -> None:
    folder = tmp_path / "sglang-router"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "sglang-router").touch()
    (folder / "lib/python3.11/site-packages/sglang_router-0.3.1.dist-info").mkdir(parents=True)
    assert not environments.installed(tmp_path, "sglang-router")
    (folder / "lib/python3.11/site-packages/sglang_router-0.3.2.dist-info").mkdir()
    assert environments.installed(tmp_path, "sglang-router")
    environments.ensure(tmp_path, "sglang-router")  # touches nothing


# ---- processes ----


def test_a_process_is_charged_with_what_its_children_spend() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        before = processes.cpu_s([process.pid])
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        after = processes.cpu_s([process.pid])
        assert len(processes.tree(process.pid)) == 2
        assert 0.25 < processes.spent_s(before, after) < 5.0
        assert processes.resident_mib(after) > 5.0
        process.communicate(b"\n")
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        processes.spent_s(after, processes.cpu_s([os.getpid()]))


def test_the_cpu_clock_of_this_process() -> None:
    before = time.process_time()
    assert before <= processes.cpu_s([os.getpid()])[os.getpid()] <= time.process_time()
    assert processes.spent_s({1: 2.0}, {1: 2.5, 2: 0.25}) == 0.75


def test_free_ports_differ() -> None:
    ports = processes.free_ports(20)
    assert len(set(ports)) == 20
    assert processes.free_ports(0) == []


# ---- results ----


def row(number: int, scenario: str, system: str, cpu_s: float, *, p10: float = 1.0, **seen: Any) -> Row:
    told: dict[str, Any] = {"requests": 100, "errors": {}, "wall_s": 1.0, "chunks": 200, "reads": 160} | seen
    return Row(
        number, scenario, system, cpu_s, 0.1, 0.1, 50.0 + number, 1.0, Seen(**told, first_us=Times(1, 2, 3), end_us=Times(p10, 2, 3))
    )


ROWS = [
    row(0, "short", BASE, 0.02),
    row(1, "short", BASE, 0.04),
    row(2, "short", BASE, 0.02),
    row(0, "short", OFF, 0.01),
    row(1, "short", OFF, 0.01),
    row(2, "short", OFF, 0.03, errors={"status 503": 2}),
    row(0, "hot", BASE, 0.0, p10=200.0),
    row(0, "hot", OFF, 0.0, p10=50.0),
    row(1, "hot", OFF, 0.0, p10=60.0),
    row(0, "paced", OFF, 0.004),
    row(0, "large", OFF, 0.5, requests=0),
]


def test_values_and_ratios_by_hand() -> None:
    results = Results(ROWS)
    assert results.values(SHORT, OFF) == pytest.approx({0: 100.0, 1: 100.0, 2: 300.0})
    assert results.value(SHORT, OFF) == pytest.approx((100.0, 100.0, 300.0))
    # 100/200, 100/400, 300/200: the median of the ratios, not the ratio of the medians.
    assert results.ratio(SHORT, OFF, BASE) == pytest.approx((0.5, 0.25, 1.5))
    assert results.ratio(HOT, OFF, BASE) == pytest.approx((0.25, 0.25, 0.25))  # round 1 has no base
    assert results.value(PACED, OFF) == pytest.approx((20.0, 20.0, 20.0))
    assert results.value(READS, OFF) == pytest.approx((1.25, 1.25, 1.25))
    assert results.ratio(PACED, OFF, BASE) is None
    assert results.value(LARGE, OFF) is None  # no reply was right
    assert results.errors(OFF) == {"status 503": 2}
    assert results.resident_mib(OFF) == 52.0


def test_a_spread_has_the_median_between() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0]) == (2.5, 1.0, 4.0)
    assert spread([]) is None


def test_bars_are_judged_by_the_median() -> None:
    bars = (Bar(SHORT, OFF, 0.5), Bar(SHORT, OFF, 0.49), Bar(READS, OFF, 1.1, ""), Bar(PACED, OFF, 0.9))
    judged = judge(Results(ROWS), bars)
    assert [one.met for one in judged] == [True, False, False, False]
    assert [one.measured is None for one in judged] == [False, False, False, True]
    assert table.bars(judged).splitlines() == [
        "| bar | at most | measured | verdict |",
        "| --- | ---: | ---: | ---: |",
        "| kvc off: CPU µs/request | 0.5 x smg/cache_aware | 0.50 (0.25-1.50) | met |",
        "| kvc off: CPU µs/request | 0.49 x smg/cache_aware | 0.50 (0.25-1.50) | missed |",
        "| kvc off: chunks/read, 10 ms apart | 1.1 | 1.25 | missed |",
        "| kvc off: CPU µs/chunk, 10 ms apart | 0.9 x smg/cache_aware | - | not measured |",
    ]


def test_the_bars_are_those_that_were_set() -> None:
    told = {(bar.measure.scenario, bar.measure is READS, bar.system): (bar.limit, bar.base) for bar in BARS}
    assert len(told) == len(BARS) == 16
    assert told["short", False, OFF] == (0.5, BASE)
    assert told["hot", False, OFF] == (0.5, BASE)
    for asked in ("kvc stream", "kvc hop"):
        assert told["short", False, asked] == (0.8, BASE)
        assert told["paced", False, OFF] == told["paced", False, asked] == (0.9, BASE)
        assert told["large", False, OFF] == told["large", False, asked] == (0.5, BASE)
        assert told["hot", False, asked] == (1.5, BASE)
    assert told["short", False, PD_OFF] == told["short", False, "kvc pd"] == (0.5, PD_BASE)
    assert told["paced", True, OFF] == told["paced", True, "kvc stream"] == (1.1, "")


def test_tables_show_what_was_measured() -> None:
    systems = [BY_NAME[name] for name in (DIRECT, BASE, OFF)]
    rows = [one for one in ROWS if one.scenario in {"hot", "short"}] + [row(0, "hot", DIRECT, 0.0, p10=1234.5)]
    results = Results(rows)
    assert table.measured(results, systems).splitlines() == [
        "| system | hot p10, µs | CPU µs/request | RSS MiB | errors |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| direct | 1,234 | - | - | 0 |",
        "| smg/cache_aware | 200.0 | 200.0 (200.0-400.0) | 52 | 0 |",
        "| kvc off | 55.0 (50.0-60.0) | 100.0 (100.0-300.0) | 52 | status 503: 2 |",
    ]
    assert table.ratios(results, systems).splitlines()[0::2] == [
        "| system | hot p10, ratio | CPU µs/request, ratio | to |",
        "| kvc off | 0.25 | 0.50 (0.25-1.50) | smg/cache_aware |",
    ]


# ---- the page ----


def test_a_run_is_put_between_the_marks() -> None:
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    stored = page.replaced(text, "\nnew\n")
    assert stored == f"before\n{page.BEGIN}\n\nnew\n\n{page.END}\nafter\n"
    assert page.replaced(stored, "new") == stored


@pytest.mark.parametrize("text", ["", "B", "E", "E B", "B E E", "B B E", "B E B"])
def test_a_page_without_its_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "page.md"
    file.write_text(text.replace("B", page.BEGIN).replace("E", page.END))
    before = file.read_text()
    with pytest.raises(page.PageError, match="once each"):
        page.store(file, "new")
    assert file.read_text() == before


def test_the_conditions_name_machine_and_versions() -> None:
    text = page.conditions(3, {"smg": "1.13.0"})
    assert re.match(r"Run on \d{4}-\d\d-\d\d, 3 rounds: \d+ cores of .+ GiB, Linux .+, CPython 3\.\d+\.\d+; smg 1\.13\.0, uvloop ", text)
    assert "\nThe router's request path ran from its sources.\n" in text
    assert re.search(r"\nLoad average before the run \(1, 5, 15 minutes\): \d+\.\d\d \d+\.\d\d \d+\.\d\d\.$", text)
    assert "1 round:" in page.conditions(1, {})


# ---- the command ----


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the command measures, without measuring."""
    told: dict[str, Any] = {"rows": [], "identities": {}}

    def measure(systems: list[System], *_: Any) -> command.Run:
        told["systems"] = [system.name for system in systems]
        return command.Run(systems, told["identities"], told["rows"])

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "ensure", lambda _, peer: told.setdefault("peers", []).append(peer))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return told


def good_rows() -> list[Row]:
    made = [row(0, scenario, BASE, 1.0, p10=100.0, reads=200) for scenario in STANDARD] + [row(0, "short", PD_BASE, 1.0)]
    for name in (OFF, "kvc stream", "kvc hop"):
        made += [row(0, scenario, name, 0.4, p10=40.0, reads=200) for scenario in STANDARD]
    return made + [row(0, "short", name, 0.4) for name in (PD_OFF, "kvc pd")]


def test_all_bars_met_is_exit_0(measured: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured["rows"] = good_rows()
    measured["identities"] = {OFF: Identity(144, 1000, ())}
    file, out = tmp_path / "page.md", tmp_path / "rows.jsonl"
    file.write_text(f"# Page\n{page.BEGIN}\n{page.END}\n")
    assert command.main(["--store", str(file), "--out", str(out)]) == 0
    printed, said = capsys.readouterr()
    assert "16 of 16 met" in printed
    assert said == ""
    assert printed.strip() in file.read_text()
    assert "| kvc off | 144 | 1,000 | none |" in printed
    assert [msgspec.json.decode(line, type=Row) for line in out.read_text().splitlines()] == measured["rows"]
    assert measured["systems"] == list(NEEDED)
    assert measured["peers"] == ["smg"]


def test_a_missed_bar_is_exit_1_and_named(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    measured["rows"] = [msgspec.structs.replace(one, cpu_s=0.85) if one.system == "kvc stream" else one for one in good_rows()]
    assert command.main([]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "missed: kvc stream, CPU µs/request: 0.85 is more than 0.8",
        "missed: kvc stream, CPU µs/request, 40-400 KB: 0.85 is more than 0.5",
    ]
    assert command.main(["--report-only"]) == 0


def test_what_was_not_measured_is_missed(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    measured["rows"] = [one for one in good_rows() if one.system != PD_BASE]
    assert command.main([]) == 1
    assert capsys.readouterr().err.count("not measured") == 2


def test_a_reply_that_differs_or_fails_is_exit_1_whatever_is_asked(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    measured["rows"] = good_rows()
    measured["identities"] = {OFF: Identity(144, 1000, ("POST /generate: body differs",))}
    assert command.main(["--report-only"]) == 1
    assert capsys.readouterr().err == "wrong: kvc off: POST /generate: body differs\n"
    measured["identities"] = {}
    measured["rows"] += [row(1, "short", OFF, 0.4, errors={"status 503": 3}), row(1, "short", BASE, 1.0, errors={"status 503": 3})]
    assert command.main(["--report-only"]) == 1
    assert capsys.readouterr().err == "wrong: kvc off: 3 replies failed, status 503\n"  # a peer's are in the table


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--only", "nonsense"], "no such system"),
        (["--only", "("], "--only ("),
        (["--store", "/nowhere/page.md"], "/nowhere/page.md"),
        (["--store", "README.md"], "once each"),
    ],
)
def test_what_cannot_be_run_is_exit_2(measured: dict[str, Any], capsys: pytest.CaptureFixture[str], argv: list[str], told: str) -> None:
    assert command.main(argv) == 2
    assert told in capsys.readouterr().err
    assert "systems" not in measured


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--rounds", "x"], ["--at-most", "nan"], ["--at-most", "-1"], ["--peers", "x"]])
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_peers_are_chosen(measured: dict[str, Any]) -> None:
    command.main(["--peers", "none", "--only", "direct|kvc off|smg.*"])
    assert measured["systems"] == [DIRECT, OFF]
    command.main(["--peers", "all"])
    assert measured["systems"] == list(BY_NAME)
