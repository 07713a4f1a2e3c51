"""Spans of the engine: children of the caller's, over HTTP and over the link, with modelled times as attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvc.engine import link
from kvc.engine.reference.engine import Engine
from kvc.engine.reference.http_api import HttpApi, serve
from kvc.engine.reference.link_server import LinkDesk
from kvc.engine.reference.main import running_engine
from kvc.runtime.telemetry import Telemetry
from tests.support.engines import config

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def recorder() -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider), exporter


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    spans = exporter.get_finished_spans()
    assert len(spans) == 1
    return spans[0]


async def test_a_request_is_a_span_of_the_callers_trace() -> None:
    telemetry, exporter = recorder()
    async with running_engine(config()) as running, aiohttp.ClientSession() as http:
        runner, port = await serve(HttpApi(running.engine, telemetry).application(), "127.0.0.1", 0)
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}, "session_id": "s", "rid": "r"}
        async with http.post(f"http://127.0.0.1:{port}/generate", json=body, headers={"traceparent": PARENT}) as response:
            meta = (await response.json())["meta_info"]
        await runner.cleanup()
    span = only(exporter)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:52]
    attributes = dict(span.attributes or {})
    assert (attributes["kvc.rid"], attributes["kvc.session_id"], attributes["kvc.output_tokens"]) == ("r", "s", 4)
    assert attributes["kvc.ttft_s"] == pytest.approx(meta["kvc_ttft_s"]) == 0.00105
    assert not any("hello" in str(value) for value in attributes.values()), "no prompt text leaves in a span"


async def test_an_admit_is_a_span_of_the_callers_trace() -> None:
    telemetry, exporter = recorder()
    desk = LinkDesk(Engine(config()), "http://x", telemetry)
    answer = await desk.handle(link.Admit("r", 0, "s", 0, 100, 10, b"", traceparent=PARENT))
    assert isinstance(answer, link.Admitted)
    span = only(exporter)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT[36:52]
    assert dict(span.attributes or {}) == {"kvc.session_id": "s", "kvc.outcome": "seed"}
    assert isinstance(await desk.handle(link.Admit("r", 1, "s", 0, 100, 10, b"")), link.Admitted)
    assert only(exporter) is span, "a question without a trace begins none"
