from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.core.params import Params
from kvc.runtime.config import REQUIRED, ConfigError, Loaded, load, parse, section, setting
from kvc.runtime.server import ServerConfig
from kvc.runtime.telemetry import TelemetryConfig


@dataclass(frozen=True, slots=True)
class Ports:
    """Where to listen."""

    port: int = setting(0, help="gRPC port", minimum=0, maximum=65535, flag="--port")
    peers: tuple[str, ...] = setting((), help="peers")
    token: str | None = setting(None, help="token", secret=True)


@dataclass(frozen=True, slots=True)
class Config:
    """A 100% complete example."""

    queue_limit: int = setting(256, help="turns that may wait", minimum=0)
    wait_s: float = setting(1.5, help="longest wait", minimum=0.0, maximum=60.0)
    prefill_tokens_per_s: float = setting(7000.0, help="speed", minimum=1.0)
    name: str = setting("x", help="a name")
    drain: bool = setting(default=False, help="take no sessions")
    log_level: Literal["debug", "info"] = setting("info", help="level")
    folder: Path | None = setting(None, help="a folder")
    seats: int | None = setting(None, help="seats", minimum=1)
    server: Ports = section(Ports)
    params: Params = section(Params)


def read(*argv: str, **environ: str) -> Loaded[Config]:
    return parse(Config, argv, prog="test", environ=environ)


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    loaded = read()
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.given() == {}


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    toml = file(tmp_path, "queue_limit = 1\nwait_s = 2\nname = 'file'\n[server]\nport = 4\n")
    loaded = read("--config", toml, "--queue-limit", "3", KVC_QUEUE_LIMIT="2", KVC_WAIT_S="2.5")
    config = loaded.config
    assert (config.queue_limit, config.wait_s, config.name, config.server.port, config.drain) == (3, 2.5, "file", 4, False)
    assert loaded.origins["queue_limit"] == "flag --queue-limit"
    assert loaded.origins["wait_s"] == "environment KVC_WAIT_S"
    assert loaded.origins["server.port"] == f"file {toml}"
    assert loaded.given() == {"queue_limit": 3, "wait_s": 2.5, "name": "file", "server.port": 4}
    assert loaded.given("server") == {"port": 4}


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    assert read(KVC_CONFIG=file(tmp_path, "queue_limit = 7")).config.queue_limit == 7


def test_sections_have_flags_variables_and_short_flags() -> None:
    assert read("--server-port", "1").config.server.port == 1
    assert read("--port", "2").config.server.port == 2
    assert read(KVC_SERVER_PORT="3").config.server.port == 3


def test_booleans_tuples_optionals_and_paths(tmp_path: Path) -> None:
    assert read("--drain").config.drain is True
    assert read("--no-drain", KVC_DRAIN="true").config.drain is False
    assert read(KVC_DRAIN="on").config.drain is True
    assert read("--server-peers", "a", "--server-peers", "b").config.server.peers == ("a", "b")
    assert read(KVC_SERVER_PEERS="a, b").config.server.peers == ("a", "b")
    assert read(KVC_SERVER_PEERS="").config.server.peers == ()
    assert read("--config", file(tmp_path, "[server]\npeers = ['a', 'b']")).config.server.peers == ("a", "b")
    assert read(KVC_SEATS="3").config.seats == 3
    assert read("--seats", "", KVC_SEATS="3").config.seats is None
    assert read("--folder", "/a/b").config.folder == Path("/a/b")
    assert read("--config", file(tmp_path, "folder = '/c'\nseats = ''")).config.folder == Path("/c")


def test_a_plain_dataclass_is_a_section_with_help_from_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = read("--params-alpha", "2", "--params-epsilon", "3", KVC_PARAMS_FALLBACK="rejects")
    assert loaded.config.params == Params(alpha=2.0, epsilon=3, fallback="rejects")
    assert loaded.given("params") == {"alpha": 2.0, "epsilon": 3, "fallback": "rejects"}
    with pytest.raises(SystemExit):
        read("--help")
    assert "sticky bonus in blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--queue-limit", "abc"], {}, "queue_limit: 'abc' is not an integer (flag --queue-limit)"),
        (["--queue-limit", "-1"], {}, "queue_limit: -1 is out of range: at least 0 (flag --queue-limit)"),
        (["--queue-limit", "1_000"], {}, "queue_limit"),
        (["--queue-limit", "9" * 6000], {}, "queue_limit"),
        (["--queue-limit", "1.0"], {}, "queue_limit"),
        ([], {"KVC_QUEUE_LIMIT": ""}, "queue_limit: '' is not an integer (environment KVC_QUEUE_LIMIT)"),
        (["--wait-s", "nan"], {}, "wait_s: 'nan' is not a finite number"),
        (["--wait-s=-inf"], {}, "wait_s"),
        (["--wait-s", "1e400"], {}, "wait_s"),
        (["--wait-s", "60.1"], {}, "wait_s: 60.1 is out of range: 0.0 to 60.0"),
        (["--log-level", "loud"], {}, "log_level: 'loud' is not one of debug | info"),
        ([], {"KVC_DRAIN": "maybe"}, "drain: 'maybe' is not true or false"),
        (["--seats", "0"], {}, "seats"),
        (["--name", "two\nlines"], {}, "name: 'two\\nlines' is not a printable string"),
        (["--port", "65536"], {}, "server.port: 65536 is out of range: 0 to 65535"),
        (["--params-capacity", "vibes"], {}, "params.capacity"),
        (["--no-such-flag", "1"], {}, "--no-such-flag"),
        (["--queue", "1"], {}, "--queue"),
        (["--queue-limit"], {}, "--queue-limit"),
        (["stray"], {}, "stray"),
        (["--config", "/no/such/file.toml"], {}, "/no/such/file.toml: No such file"),
        (["--config", "/"], {}, "--config /: Is a directory"),
    ],
)
def test_every_mistake_is_one_line_that_names_the_setting(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*argv, **environ)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 7000


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("queue_limits = 1", "no such setting: queue_limits"),
        ("[servers]\nport = 1", "no such setting: servers"),
        ("[server]\nports = 1", "no such setting: server.ports"),
        ("[server.port]\nx = 1", "server.port"),
        ("server = 1", "server is a table"),
        ("queue_limit = 'a'", "queue_limit: 'a' is not an integer"),
        ("queue_limit = 1.0", "queue_limit: 1.0 is not an integer"),
        ("queue_limit = true", "queue_limit: True is not an integer"),
        ("queue_limit = 123456789012345678901234567890", "queue_limit"),
        ("wait_s = nan", "wait_s"),
        ("wait_s = inf", "wait_s"),
        ("wait_s = 1" + "0" * 400, "wait_s"),
        ("drain = 1", "drain: 1 is not true or false"),
        ("name = 5", "name: 5 is not a printable string"),
        ('name = "a\\u0000b"', "name"),
        ("[server]\npeers = 'a'", "server.peers: 'a' is not an array"),
        ("[server]\npeers = [1]", "server.peers"),
        ("queue_limit = ", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
        ("x = 1\n" * 200_000, "larger than"),
    ],
)
def test_every_mistake_in_a_file_is_one_line_too(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("--config", file(tmp_path, text))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="not TOML"):
        read("--config", str(path))


def test_secrets_are_never_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        read("--print-config", KVC_SERVER_TOKEN="s3cret")
    assert exit_.value.code == 0
    assert "s3cret" not in capsys.readouterr().out
    for argv in (["--server-token", "s3cret\n"], ["--config", file(tmp_path, "[server]\ntoken = ['s3cret']")]):
        with pytest.raises(ConfigError) as caught:
            read(*argv)
        assert "s3cret" not in str(caught.value)
        assert "server.token" in str(caught.value)
    assert read(KVC_SERVER_TOKEN="s3cret").config.server.token == "s3cret"


def test_print_config_shows_origins_and_what_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--print-config", "--queue-limit", "9", KVC_NAME="env", KVC_QEUE_LIMIT="1")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "queue_limit = 9 # flag --queue-limit" in lines
    assert 'name = "env" # environment KVC_NAME' in lines
    assert "wait_s = 1.5 # default" in lines
    assert "server.port = 0 # default" in lines
    assert "# ignored: KVC_QEUE_LIMIT" in lines


def test_what_print_config_prints_is_a_file_with_the_same_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--name", 'a "quoted" \\ one', "--server-peers", "p", "--drain", "--folder", "/x"]
    with pytest.raises(SystemExit):
        read("--print-config", *argv)
    printed = capsys.readouterr().out
    tomllib.loads(printed)
    assert read("--config", file(tmp_path, printed)).config == read(*argv).config


def test_help_shows_default_variable_unit_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read("--help")
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "A 100% complete example." in text
    assert "longest wait [KVC_WAIT_S; default 1.5; 0.0 to 60.0; seconds]" in text
    assert "speed [KVC_PREFILL_TOKENS_PER_S; default 7000.0; at least 1.0; tokens per second]" in text
    assert "level [KVC_LOG_LEVEL; default" in text
    assert "one of debug | info" in text
    assert "--server-port INT, --port INT" in text


@dataclass(frozen=True)
class Needy:
    """Has a setting without default."""

    socket: Path = setting(REQUIRED, help="socket")
    low: int = setting(1, help="low")
    high: int = setting(2, help="high")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


def test_required_settings_and_checks_across_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="socket is required: set --socket, KVC_SOCKET or its TOML key"):
        parse(Needy, [], prog="t", environ={})
    assert parse(Needy, ["--socket", "/s"], prog="t", environ={}).config.socket == Path("/s")
    with pytest.raises(ConfigError, match="low is above high"):
        parse(Needy, ["--socket", "/s", "--low", "3"], prog="t", environ={})
    with pytest.raises(SystemExit):
        parse(Needy, ["--help"], prog="t", environ={})
    assert "socket [KVC_SOCKET; required]" in " ".join(capsys.readouterr().out.split())


def test_classes_that_cannot_be_settings_are_refused() -> None:
    @dataclass
    class Twins:
        server_port: int = setting(1, help="x")
        server: Ports = section(Ports)

    @dataclass
    class Odd:
        table: dict[str, int] = setting(None, help="x")

    Twins.__annotations__["server"] = Ports
    with pytest.raises(TypeError, match="KVC_SERVER_PORT"):
        parse(Twins, [], prog="t", environ={})
    with pytest.raises(TypeError, match="table"):
        parse(Odd, [], prog="t", environ={})


def test_load_exits_with_2_and_one_line_on_stderr() -> None:
    """The whole process: exit code 2, exactly one line on stderr, nothing on stdout, no traceback."""
    code = (
        "import sys; from dataclasses import dataclass; from kvc.runtime.config import load, setting\n"
        "@dataclass\nclass C:\n    n: int = setting(1, help='n', minimum=0)\n"
        "load(C, sys.argv[1:], prog='kvc test')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "--n", "-5"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvc test: n: -5 is out of range: at least 0 (flag --n)\n"


def test_load_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVC_QUEUE_LIMIT", "11")
    assert load(Config, [], prog="t").config.queue_limit == 11


@given(
    st.sampled_from(["queue_limit", "wait_s", "name", "drain", "log_level", "folder", "seats", "server_port", "server_peers"]), st.text()
)
def test_any_text_is_a_value_or_one_clear_line(name: str, text: str) -> None:
    key = name.replace("server_", "server.")
    outcome: str
    try:
        outcome = read(**{f"KVC_{name.upper()}": text}).origins[key]
    except ConfigError as error:
        outcome = str(error)
    assert outcome.startswith((f"environment KVC_{name.upper()}", f"{key}: "))
    assert outcome.isprintable()


def test_the_documentation_names_every_setting_that_all_services_share() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for cls in (ServerConfig, TelemetryConfig):
        for field in fields(cls):
            assert f"`{field.name}`" in text
