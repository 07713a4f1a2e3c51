"""The agent's README names every setting and every metric there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kvc.core.types import WorkerRef
from kvc.v1 import types_pb2
from services.admission_agent.agent import AdmissionAgent
from services.admission_agent.config import AdmitConfig, AgentConfig, EngineConfig, ResidencyConfig
from services.admission_agent.connection import EngineConnection
from services.admission_agent.metrics import AdmitMetrics, StateCollector
from services.admission_agent.residency import Residency
from tests.support.fake_engine import FakeEngine

README = (Path(__file__).resolve().parents[2] / "services/admission_agent/README.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"[a-z_.]+", README))


@pytest.mark.parametrize(("section", "cls"), [("engine", EngineConfig), ("admit", AdmitConfig), ("residency", ResidencyConfig)])
def test_every_setting_is_there(section: str, cls: type[EngineConfig | AdmitConfig | ResidencyConfig]) -> None:
    assert {f"{section}.{field.name}" for field in dataclasses.fields(cls)} <= WORDS


def test_every_metric_is_there() -> None:
    config = AgentConfig(engine=EngineConfig(socket=cast("Path", "unused")))
    residency = Residency(config.residency)
    residency.begin(WorkerRef("d0", 1), 0, 16)
    residency.report(types_pb2.WorkerLoad())
    connection = EngineConnection(FakeEngine(), config, residency, lambda _: None)
    registry = CollectorRegistry()
    AdmitMetrics(registry)
    registry.register(StateCollector(AdmissionAgent(connection, 1), connection, residency))
    names = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert len(names) > 20
    assert {name.removeprefix("kvc_agent_") for name in names} <= WORDS
