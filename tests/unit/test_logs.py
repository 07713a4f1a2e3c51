from __future__ import annotations

import io
import json
import logging
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc.runtime.logs import MASK, JsonFormatter, configure, event
from tests.support.captured import captured_logs

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("kvc.test")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    with captured_logs("router") as stream:
        yield stream


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line(lines: io.StringIO) -> None:
    event(logger, "dispatch", session_id="a\nb", mode="direct", elapsed_s=0.25, probes=3)
    (line,) = parsed(lines)
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info",
        "service": "router",
        "event": "dispatch",
        "session_id": "a\nb",
        "mode": "direct",
        "elapsed_s": 0.25,
        "probes": 3,
    }


def test_debug_is_ours_and_not_the_libraries(lines: io.StringIO) -> None:
    """Of gRPC there would be one for each call."""
    configure("debug", "router", lines)
    logging.getLogger("grpc._cython.cygrpc").debug("[_cygrpc] Loaded running loop")
    event(logger, "admit", level=logging.DEBUG)
    logging.getLogger("grpc._cython.cygrpc").warning("something is wrong")
    assert [line.get("message", line["event"]) for line in parsed(lines)] == ["admit", "something is wrong"]


def test_prompts_and_secrets_are_masked_whatever_their_value(lines: io.StringIO) -> None:
    event(logger, "x", prompt="my diary", input_ids=[1, 2], Authorization="Bearer s3cret", nested={"auth_token": "s3cret", "ok": 1})
    (line,) = parsed(lines)
    assert line["prompt"] == line["input_ids"] == line["Authorization"] == MASK
    assert line["nested"] == {"auth_token": MASK, "ok": 1}
    assert "diary" not in lines.getvalue()
    assert "s3cret" not in lines.getvalue()


def test_long_values_are_cut_and_numbers_stay_json(lines: io.StringIO) -> None:
    event(logger, "x", value="y" * 10_000, items=list(range(1000)), nan=math.nan, inf=-math.inf, odd=object, ts="taken")
    (line,) = parsed(lines)
    assert len(line["value"]) < 600
    assert len(line["items"]) == 64
    assert (line["nan"], line["inf"], line["ts_"]) == ("nan", "-inf", "taken")


def test_levels_below_the_configured_one_are_silent(lines: io.StringIO) -> None:
    event(logger, "noise", level=logging.DEBUG)
    assert lines.getvalue() == ""


def test_other_libraries_and_tracebacks_become_json_lines_too(lines: io.StringIO) -> None:
    logging.getLogger("lib").warning("odd %s", "thing\nwith lines")
    try:
        1 / 0  # noqa: B018 - raises
    except ZeroDivisionError as error:
        event(logger, "fault", level=logging.ERROR, error=error)
    first, second = parsed(lines)
    assert (first["event"], first["logger"], first["message"]) == ("log", "lib", "odd thing\nwith lines")
    assert "ZeroDivisionError" in second["exception"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        configure("loud", "x", io.StringIO())


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(object()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(), inner, max_size=5) | st.frozensets(st.text()),
    max_leaves=20,
)


def test_bottomless_and_endless_values_are_cut(lines: io.StringIO) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    event(logger, "x", deep=deep, long=10**5000)
    (line,) = parsed(lines)
    assert "<list>" in json.dumps(line["deep"])
    assert len(line["long"]) == 512


def strict_number(text: str) -> None:
    raise ValueError(text)


@given(st.dictionaries(st.text(), anything, max_size=5))
def test_any_fields_make_one_strict_json_line(fields: dict[str, Any]) -> None:
    record = logging.makeLogRecord({"msg": "x", "levelname": "INFO", "kvc_fields": fields})
    line = JsonFormatter("s").format(record)
    assert "\n" not in line
    json.loads(line, parse_constant=strict_number)
