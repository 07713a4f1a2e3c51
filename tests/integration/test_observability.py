"""What an operator sees of a mesh of real processes: metrics of every service, one log line a dispatch, and never a prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
import pytest_asyncio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvc.core.blocks import pack_tokens
from kvc.v1 import router_pb2
from tests.support.live_mesh import live_mesh
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.live_mesh import LiveMesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
ARRIVES_S = 10.0
MARK = "nobody-may-read-this"
FIRST_ID = 7_654_321
TOO_LONG = 95_000
Sample = tuple[str, tuple[tuple[str, str], ...]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LiveMesh]:
    """Everything is logged. Seeds run on the prefill worker, so that it has something to count."""
    async with live_mesh("1P1D", time_scale=50.0, engine_args=("--params-executor", "prefill"), log_level="debug") as live:
        yield live


async def dispatch(live: LiveMesh, **fields: Any) -> router_pb2.Finished:
    """One turn to its end."""
    finished = router_pb2.Finished()
    async for response in live.client.stub.Dispatch(router_pb2.DispatchRequest(**fields), timeout=30.0):
        if response.HasField("finished"):
            finished = response.finished
    return finished


async def conversation(live: LiveMesh, session_id: str, first_id: int) -> list[router_pb2.Finished]:
    """Three turns of one session, the second and third appending to what came before."""
    ends = []
    for turn in range(3):
        prompt = pack_tokens(list(range(first_id, first_id + 2_000 + 100 * turn)))
        ends.append(await dispatch(live, session_id=session_id, packed_input_ids=prompt, max_new_tokens=5))
    return ends


def port_of(live: LiveMesh, service: str) -> int:
    worker = live.mesh.workers["p0" if service.endswith("p0") else "d0"]
    return {"router": live.mesh.router_ops_port, "agent": worker.agent_ops_port}.get(service.partition(" ")[0], worker.engine_ops_port)


async def scrape(live: LiveMesh, service: str) -> dict[Sample, float]:
    """Every sample of a service, as Prometheus parses it."""
    async with live.http.get(f"http://127.0.0.1:{port_of(live, service)}/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def moved(before: dict[Sample, float], after: dict[Sample, float], name: str) -> dict[str, float]:
    """By how much the series of a counter went up, by label values; those that stood still are left out."""
    steps = {key: value - before.get(key, 0.0) for key, value in after.items() if key[0] == name}
    return {" ".join(value for _, value in labels): step for (_, labels), step in steps.items() if step}


def lines(live: LiveMesh, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (live.mesh.directory / file).read_text().splitlines()]


def dispatches(live: LiveMesh, session_id: str) -> list[dict[str, Any]]:
    found = [line for line in lines(live, "router.log") if line["event"] == "dispatch"]
    return [line for line in found if line["session_id"] == session_id]


async def test_counters_of_every_service_move_with_three_turns(mesh: LiveMesh) -> None:
    services = ("router", "agent", "engine d0", "engine p0")
    before = {service: await scrape(mesh, service) for service in services}
    ends = await conversation(mesh, "counted", 1_000_000)
    after: dict[str, dict[Sample, float]] = {}

    async def check() -> None:
        after.update({service: await scrape(mesh, service) for service in services})
        assert moved(before["engine p0"], after["engine p0"], "kvc_engine_requests_total") == {"completed": 1}

    await eventually(check, ARRIVES_S)

    def step(service: str, name: str) -> dict[str, float]:
        return moved(before[service], after[service], name)

    prompt, cached = 2_000 + 2_100 + 2_200, sum(end.cached_tokens for end in ends)
    assert cached > 3_900
    assert step("router", "kvc_router_turns_total") == {"completed seed": 1, "completed direct": 2}
    assert step("router", "kvc_router_ttft_seconds_count") == {"seed": 1, "direct": 2}
    assert step("router", "kvc_router_decide_seconds_count") == {"": 3}
    assert step("router", "kvc_router_prompt_tokens_total") == {"": prompt}
    assert step("router", "kvc_router_cached_tokens_total") == {"": cached}
    assert step("router", "kvc_router_refusals_total") == {}
    assert step("agent", "kvc_agent_admits_total") == {"admitted seed": 1, "admitted direct": 2}
    assert step("agent", "kvc_agent_admit_seconds_count") == {"": 3}
    assert step("agent", "kvc_agent_link_call_seconds_count")["Admit"] == 3
    assert step("engine d0", "kvc_engine_requests_total") == {"completed": 3}
    tokens = step("engine d0", "kvc_engine_tokens_total")
    assert (tokens["prompt"], tokens["output"]) == (prompt, 15)
    assert step("engine d0", "kvc_engine_ttft_seconds_count") == {"": 3}
    assert after["router"]["kvc_router_inflight", (("role", "decode"), ("worker", "d0"))] == 0


@pytest.mark.parametrize("service", ["router", "agent", "engine d0", "engine p0"])
async def test_both_formats_parse(mesh: LiveMesh, service: str) -> None:
    """Prometheus asks for OpenMetrics, whose rules on names are stricter; older scrapers get the text format."""
    url = f"http://127.0.0.1:{port_of(mesh, service)}/metrics"
    names = []
    for accept, parse in ((OPENMETRICS, openmetrics), ("text/plain", text_string_to_metric_families)):
        async with mesh.http.get(url, headers={"Accept": accept}) as response:
            assert response.content_type == accept.partition(";")[0]
            names.append({family.name for family in parse(await response.text()) if not family.name.endswith("_created")})
    assert names[0] == names[1]
    assert any(name.startswith(f"kvc_{service.partition(' ')[0]}_") for name in names[0])


async def test_the_agents_gauges_follow_the_engine(mesh: LiveMesh) -> None:
    """Load is reported twice a second."""
    await dispatch(mesh, session_id="held", packed_input_ids=pack_tokens(list(range(2_000_000, 2_001_000))), max_new_tokens=5)

    async def check() -> None:
        agent, engine = await scrape(mesh, "agent"), await scrape(mesh, "engine d0")
        assert agent["kvc_agent_evictable_tokens", ()] == engine["kvc_engine_kv_tokens", (("use", "evictable"),)] > 0
        assert agent["kvc_agent_sessions", ()] == engine["kvc_engine_sessions", ()] > 0
        assert agent["kvc_agent_resident_blocks", ()] > 40

    await eventually(check, ARRIVES_S)


async def test_refusals_and_failures_are_counted_by_reason(mesh: LiveMesh) -> None:
    before = {service: await scrape(mesh, service) for service in ("router", "agent")}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await dispatch(mesh, session_id="huge", packed_input_ids=pack_tokens(list(range(TOO_LONG))), max_new_tokens=5)
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    after = {service: await scrape(mesh, service) for service in before}
    assert moved(before["router"], after["router"], "kvc_router_undecided_total") == {"EXCEEDS_CAPACITY": 1}
    assert moved(before["router"], after["router"], "kvc_router_refusals_total") == {"exceeds-capacity": 1}
    assert moved(before["agent"], after["agent"], "kvc_agent_admits_total") == {"refused exceeds-capacity": 1}
    (line,) = dispatches(mesh, "huge")
    assert (line["level"], line["end"], line["reason"], line["input_tokens"]) == ("warning", "failed", "EXCEEDS_CAPACITY", TOO_LONG)


async def test_one_line_a_dispatch(mesh: LiveMesh) -> None:
    """However it ends: completed, or left by its client. The line says where it ran and what it took."""
    ends = await conversation(mesh, "logged", 3_000_000)
    call = mesh.client.stub.Dispatch(
        router_pb2.DispatchRequest(session_id="left", request_id="gone", text="x" * 100, max_new_tokens=50_000), timeout=30.0
    )
    await call.read()
    call.cancel()

    async def check() -> None:
        assert [line["end"] for line in dispatches(mesh, "left")] == ["cancelled"]

    await eventually(check, ARRIVES_S)
    found = dispatches(mesh, "logged")
    assert [line["mode"] for line in found] == ["seed", "direct", "direct"]
    assert [line["cached_tokens"] for line in found] == [end.cached_tokens for end in ends]
    assert [line["input_tokens"] for line in found] == [2_000, 2_100, 2_200]
    assert all(line["probes"] == ["d0:yes"] and line["end"] == "completed" and 0 < line["ttft_s"] <= line["latency_s"] for line in found)
    assert (found[0]["executor"], found[0]["decode"], found[0]["prefill"]) == ("prefill", "d0", "p0")
    seen = [line["request_id"] for line in lines(mesh, "router.log") if line["event"] == "dispatch"]
    assert len(seen) == len(set(seen))


async def test_no_log_carries_a_prompt_or_a_reply(mesh: LiveMesh) -> None:
    """At debug level, of turns that go well, that are refused, that are malformed, over gRPC and at the engine's own door."""
    ids = list(range(FIRST_ID, FIRST_ID + 500))
    await dispatch(mesh, session_id="ids", packed_input_ids=pack_tokens(ids), max_new_tokens=5)
    reply = ""
    request = router_pb2.DispatchRequest(session_id="text", text=MARK * 40, max_new_tokens=30)
    async for response in mesh.client.stub.Dispatch(request, timeout=30.0):
        reply += response.chunk.text
    assert len(reply) == 30
    for wrong in (
        {"session_id": "wrong", "text": MARK * 5_000},
        {"session_id": "wrong", "text": MARK, "temperature": -1.0},
        {"session_id": "wrong", "packed_input_ids": MARK.encode()[:19]},
        {"session_id": "wrong", "text": MARK, "request_id": f"\n{MARK}"},
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await dispatch(mesh, **wrong)
    url = f"http://127.0.0.1:{mesh.mesh.workers['d0'].engine_port}/generate"
    for body in (
        f'{{"text": "{MARK}", "sampling_params": {{"max_new_tokens": 2}}}}',
        f'{{"text": ["{MARK}"',
        f'{{"input_ids": ["{MARK}"]}}',
    ):
        async with mesh.http.post(url, data=body) as answer:
            await answer.read()

    async def check() -> None:
        assert len(dispatches(mesh, "text")) == 1

    await eventually(check, ARRIVES_S)
    files = sorted(mesh.mesh.directory.glob("*.log"))
    assert {file.name for file in files} == {"router.log", "d0.agent.log", "d0.engine.log", "p0.agent.log", "p0.engine.log"}
    logged = "".join(file.read_text() for file in files)
    assert '"level":"debug"' in logged
    assert "ids" in {line["session_id"] for line in lines(mesh, "d0.agent.log") if line["event"] == "admit"}
    assert MARK not in logged
    assert str(FIRST_ID) not in logged
    assert json.dumps(reply)[1:-1] not in logged


def table(text: str) -> str:
    """The project's metrics of a service, as Prometheus parses them."""
    rows = ["| metric | kind | meaning |", "|--|--|--|"]
    for family in sorted(text_string_to_metric_families(text), key=lambda one: one.name):
        if family.name.startswith("kvc_") and not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(rows) + "\n"


async def test_the_page_lists_every_metric(mesh: LiveMesh, rewrite: bool) -> None:  # noqa: FBT001 - a fixture
    """docs/observability.md has each metric with its meaning, as the services describe them."""
    page = PAGE.read_text()
    for service in ("router", "agent", "engine"):
        async with mesh.http.get(f"http://127.0.0.1:{port_of(mesh, service)}/metrics") as response:
            made = table(await response.text())
        begin, end = f"<!-- {service}:begin -->\n", f"<!-- {service}:end -->"
        before, rest = page.split(begin)
        written, after = rest.split(end)
        if rewrite:
            page = before + begin + made + end + after
        else:
            assert written == made
    if rewrite:
        PAGE.write_text(page)


async def test_the_page_names_every_field_of_the_line(mesh: LiveMesh) -> None:
    await dispatch(mesh, session_id="fields", text="x" * 100, max_new_tokens=2)
    (line,) = dispatches(mesh, "fields")
    section = PAGE.read_text().split("## Logs")[1].split("## Metrics")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [key for key in line if key not in {"ts", "level", "service", "event"}]
