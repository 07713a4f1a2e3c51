"""The router's README names every setting, every metric and every reason there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.router.config import AgentsConfig, EnginesConfig, RequestsConfig, RouterConfig
from services.router.metrics import UNDECIDED, RouterMetrics, SigmaCollector
from tests.support.fake_ports import world

README = (Path(__file__).resolve().parents[2] / "services/router/README.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"[A-Za-z_.]+", README))


@pytest.mark.parametrize(("section", "cls"), [("agents", AgentsConfig), ("engines", EnginesConfig), ("requests", RequestsConfig)])
def test_every_setting_is_there(section: str, cls: type[AgentsConfig | EnginesConfig | RequestsConfig]) -> None:
    assert {f"{section}.{field.name}" for field in dataclasses.fields(cls)} <= WORDS
    assert {field.name for field in dataclasses.fields(RouterConfig) if not dataclasses.is_dataclass(field.default)} - {
        "agents",
        "engines",
        "http",  # docs/http.md
        "requests",
        "params",
        "server",
        "telemetry",
    } <= WORDS


async def test_every_metric_is_there() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    async with world() as made:
        registry.register(SigmaCollector(made.router, made.janitor))
        names = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert len(names) > 20
    assert {name.removeprefix("kvc_router_") for name in names} <= WORDS


def test_every_reason_is_there() -> None:
    assert set(UNDECIDED) - {"CANCELLED", "OTHER", "DEADLINE_EXCEEDED"} <= WORDS
