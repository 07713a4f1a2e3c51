"""One OpenTelemetry trace a request, across router, agents and engines, in a mesh of real processes with a collector beside it."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import grpc.aio
import pytest
import pytest_asyncio
import rotel  # type: ignore[import-untyped]  # no types published

from kvc.core.blocks import pack_tokens
from kvc.errors import InvalidField, KvcError, Unavailable, from_rpc_error
from kvc.runtime.telemetry import Telemetry, traceparent
from kvc.v1 import router_pb2
from tests.support.collector import collector
from tests.support.live_mesh import live_mesh
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.collector import Collector, Span
    from tests.support.live_mesh import LiveMesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXPORT_S = 20.0
PARENT = "cd" * 8
TOKENS = [7_000_000 + index for index in range(3_000)]
MARK = "the-prompt-that-nobody-may-see"
ADMIT = """\
  kvc-router client Admit
    kvc-agent server Admit
      kvc-agent client engine.admit
        kvc-engine server engine.admit
"""
DIRECT = f"kvc-router server Dispatch\n{ADMIT}  kvc-router client engine.generate\n    kvc-engine server engine.request\n"
SEED = f"{DIRECT}  kvc-router client engine.prefill\n    kvc-engine server engine.request\n"
ON_STREAM = """\
  kvc-router client Admit
    kvc-agent client engine.admit
      kvc-engine server engine.admit
"""
GENERATE = "  kvc-router client engine.generate\n    kvc-engine server engine.request\n"
PREFILL = "  kvc-router client engine.prefill\n    kvc-engine server engine.request\n"
HTTP, STREAM = "kvc-router server kvc.http\n", "  kvc-router internal kvc.stream\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spans() -> AsyncIterator[Collector]:
    async with collector() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(spans: Collector) -> AsyncIterator[LiveMesh]:
    """Seeds always run on the prefill worker. Spans are sent soon: by default they wait 5 s for company."""
    with mock.patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "50"}):
        async with live_mesh(
            "1P1D", time_scale=50.0, engine_args=("--params-executor", "prefill"), telemetry_endpoint=spans.target, log_level="debug"
        ) as live:
            yield live


class Caller:
    """A client that begins a trace of its own for each request."""

    def __init__(self, live: LiveMesh, spans: Collector) -> None:
        self.spans = spans
        self._stub = live.client.stub
        self._http = live.http
        self._url = live.mesh.http_url

    async def ask(
        self, flags: str = "01", on_response: Callable[[router_pb2.DispatchResponse], None] = lambda _response: None, **fields: Any
    ) -> tuple[str, KvcError | None]:
        """Dispatches; the trace's id, and how it failed."""
        trace_id = uuid.uuid4().hex
        metadata = (("traceparent", f"00-{trace_id}-{PARENT}-{flags}"),)
        try:
            async for response in self._stub.Dispatch(router_pb2.DispatchRequest(**fields), metadata=metadata, timeout=30.0):
                on_response(response)
        except grpc.aio.AioRpcError as error:
            return trace_id, from_rpc_error(error)
        return trace_id, None

    async def post(self, session_id: str, tokens: list[int], flags: str = "01", **fields: Any) -> tuple[str, str, bytes]:
        """Asks over HTTP, for a stream; the trace's id, the traceparent of the reply, and its body."""
        trace_id = uuid.uuid4().hex
        headers = {"traceparent": f"00-{trace_id}-{PARENT}-{flags}", "x-session-id": session_id}
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 4}, "stream": True} | fields
        async with self._http.post(self._url + "/generate", json=body, headers=headers) as response:
            return trace_id, response.headers["traceparent"], await response.read()

    async def arrived(self, trace_id: str, tree: str) -> list[Span]:
        """The trace's spans, once all of `tree` are there."""

        async def check() -> list[Span]:
            assert self.spans.tree(trace_id) == tree.splitlines()
            return self.spans.trace(trace_id)

        return await eventually(check, EXPORT_S)


@pytest.fixture
def caller(mesh: LiveMesh, spans: Collector) -> Caller:
    return Caller(mesh, spans)


def one(found: list[Span], title: str) -> Span:
    (span,) = [span for span in found if span.title == title]
    return span


async def test_a_seed_and_a_direct_turn_are_one_trace_each(caller: Caller, spans: Collector) -> None:
    """Router, agent and both engines, each span under the one that caused it; what decided a turn can be read from its trace."""
    trace_id, error = await caller.ask(session_id="s", packed_input_ids=pack_tokens(TOKENS), max_new_tokens=4, request_id="seed-1")
    assert error is None
    seed = await caller.arrived(trace_id, SEED)
    root = one(seed, "kvc-router server Dispatch")
    assert root.parent_id == PARENT
    assert root.attributes["rpc.grpc.status_code"] == 0
    told = {key: root.attributes[f"kvc.{key}"] for key in ("request_id", "end", "mode", "executor", "decode", "prefill", "input_tokens")}
    assert told == {
        "request_id": "seed-1",
        "end": "completed",
        "mode": "seed",
        "executor": "prefill",
        "decode": "d0",
        "prefill": "p0",
        "input_tokens": 3_000,
    }
    (decided,) = [attributes for name, attributes in root.events if name == "decided"]
    assert (decided["kvc.mode"], decided["kvc.probes"]) == ("seed", 1)
    generate, prefill = one(seed, "kvc-router client engine.generate"), one(seed, "kvc-router client engine.prefill")
    assert (generate.attributes["kvc.worker_id"], prefill.attributes["kvc.worker_id"]) == ("d0", "p0")
    assert [name for name, _ in generate.events] == ["first chunk"]
    workers = {span.parent_id: span.attributes["kvc.worker_id"] for span in seed if span.name == "engine.request"}
    assert workers == {generate.span_id: "d0", prefill.span_id: "p0"}
    assert all(span.error is None for span in seed)
    assert all(root.start_ns <= span.start_ns <= span.end_ns for span in seed)

    grown = TOKENS + list(range(8_000_000, 8_000_100))
    trace_id, error = await caller.ask(session_id="s", packed_input_ids=pack_tokens(grown), max_new_tokens=4)
    assert error is None
    direct = await caller.arrived(trace_id, DIRECT)
    generate = one(direct, "kvc-router client engine.generate")
    assert (generate.attributes["kvc.mode"], generate.attributes["kvc.executor"]) == ("direct", "local")
    assert generate.attributes["kvc.cached_tokens"] == one(direct, "kvc-engine server engine.request").attributes["kvc.cached_tokens"]
    assert 2_900 < generate.attributes["kvc.cached_tokens"] <= 3_000
    assert one(direct, "kvc-agent client engine.admit").attributes["kvc.mode"] == "direct"
    assert len({span.trace_id for span in spans.spans if span.name.endswith("/Dispatch")}) == 2


async def test_an_unsampled_request_is_recorded_nowhere(caller: Caller, spans: Collector) -> None:
    """The caller's decision holds in every service: an engine does not begin a trace of its own."""
    trace_id, error = await caller.ask(flags="00", session_id="unsampled", packed_input_ids=pack_tokens(TOKENS), max_new_tokens=4)
    assert error is None
    after, error = await caller.ask(session_id="sampled", packed_input_ids=pack_tokens(TOKENS[::-1]), max_new_tokens=4)
    assert error is None
    await caller.arrived(after, SEED)
    assert spans.trace(trace_id) == []
    assert [span for span in spans.spans if span.attributes.get("kvc.session_id") == "unsampled"] == []


async def test_a_request_that_is_wrong_ends_at_the_router(caller: Caller) -> None:
    """By OpenTelemetry's convention the caller's mistake is no error of the server; the status says what it was."""
    trace_id, error = await caller.ask(session_id="", text="x")
    assert isinstance(error, InvalidField)
    (root,) = await caller.arrived(trace_id, "kvc-router server Dispatch\n")
    assert root.attributes["rpc.grpc.status_code"] == 3
    assert root.error is None


async def test_no_span_carries_a_prompt(caller: Caller, spans: Collector) -> None:
    trace_id, error = await caller.ask(session_id="marked", text=MARK * 20, max_new_tokens=4)
    assert error is None
    await caller.arrived(trace_id, SEED)
    sent = b"".join(spans.raw)
    assert b"marked" in sent
    assert MARK.encode() not in sent
    assert str(TOKENS[0]).encode() not in sent
    assert pack_tokens(TOKENS[:4]) not in sent


async def test_turns_over_http_are_one_trace_each(caller: Caller) -> None:
    """Probe first, then in one hop: every service's spans under the router's, which the client is told of."""
    tokens = [9_000_000 + index for index in range(3_000)]
    trace_id, told, _ = await caller.post("http", tokens)
    seed = await caller.arrived(trace_id, HTTP + ON_STREAM + GENERATE + PREFILL + STREAM)
    root = one(seed, "kvc-router server kvc.http")
    assert root.parent_id == PARENT
    assert told == f"00-{trace_id}-{root.span_id}-01"
    names = ("end", "mode", "executor", "decode", "prefill", "input_tokens", "session_id")
    assert {name: root.attributes[f"kvc.{name}"] for name in names} == {
        "end": "completed",
        "mode": "seed",
        "executor": "prefill",
        "decode": "d0",
        "prefill": "p0",
        "input_tokens": 3_000,
        "session_id": "http",
    }
    assert (root.attributes["url.path"], root.attributes["http.response.status_code"]) == ("/generate", 200)
    generate, prefill = one(seed, "kvc-router client engine.generate"), one(seed, "kvc-router client engine.prefill")
    workers = {span.parent_id: span.attributes["kvc.worker_id"] for span in seed if span.name == "engine.request"}
    assert workers == {generate.span_id: "d0", prefill.span_id: "p0"}
    assert one(seed, "kvc-router client Admit").attributes["kvc.outcome"] == "admitted"
    assert all(span.error is None for span in seed)
    assert all(root.start_ns <= span.start_ns <= span.end_ns for span in seed)

    trace_id, _, _ = await caller.post("http", tokens + list(range(9_500_000, 9_500_100)))
    direct = await caller.arrived(trace_id, HTTP + GENERATE + STREAM)
    root, generate = one(direct, "kvc-router server kvc.http"), one(direct, "kvc-router client engine.generate")
    assert (generate.attributes["kvc.hop"], generate.attributes["kvc.mode"], root.attributes["kvc.mode"]) == ("landed", "direct", "direct")
    assert one(direct, "kvc-engine server engine.request").attributes["kvc.rid"] == generate.attributes["kvc.rid"]
    assert 2_900 < root.attributes["kvc.cached_tokens"] <= 3_000
    assert root.attributes["kvc.cached_tokens"] == one(direct, "kvc-engine server engine.request").attributes["kvc.cached_tokens"]


async def test_an_unsampled_request_over_http_is_recorded_nowhere(caller: Caller, spans: Collector) -> None:
    unsampled, told, _ = await caller.post("http-unsampled", TOKENS[:2_000], flags="00")
    assert told == f"00-{unsampled}-{PARENT}-00"
    after, _, _ = await caller.post("http-sampled", [token + 5_000_000 for token in TOKENS])
    await caller.arrived(after, HTTP + ON_STREAM + GENERATE + PREFILL + STREAM)
    assert spans.trace(unsampled) == []
    assert [span for span in spans.spans if span.attributes.get("kvc.session_id") == "http-unsampled"] == []


async def test_a_request_over_http_that_is_wrong_ends_at_the_router(caller: Caller) -> None:
    trace_id, _, body = await caller.post("http-wrong", [], sampling_params={"max_new_tokens": "many"})
    assert b"INVALID_FIELD" in body
    (root,) = await caller.arrived(trace_id, HTTP)
    assert (root.attributes["http.response.status_code"], root.attributes["kvc.reason"], root.error) == (400, "INVALID_FIELD", None)


async def test_over_http_with_unary_admission() -> None:
    """Each question is one span, in the agent as well; one that is not recorded begins no trace of its own anywhere."""
    with mock.patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "50"}):
        async with (
            collector() as spans,
            live_mesh("0P1D", time_scale=50.0, router_args=("--http-admission", "unary"), telemetry_endpoint=spans.target) as live,
        ):
            caller = Caller(live, spans)
            unsampled, _, _ = await caller.post("unsampled", TOKENS, flags="00")
            trace_id, _, _ = await caller.post("sampled", TOKENS[::-1])
            await caller.arrived(trace_id, HTTP + ADMIT + GENERATE + STREAM)
            assert spans.trace(unsampled) == []
            admits = [span for span in spans.spans if span.name.endswith("/Admit") or span.name == "engine.admit"]
            assert {span.trace_id for span in admits} == {trace_id}


async def test_a_collector_of_another_make_takes_the_spans() -> None:
    """The one that prints what it is sent is rotel."""
    port = free_port()
    argv = ["--otlp-grpc-endpoint", f"127.0.0.1:{port}", "--otlp-http-endpoint", f"127.0.0.1:{free_port()}"]
    argv += ["--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    agent = Path(rotel.__file__).parent / "rotel-agent"
    process = await asyncio.create_subprocess_exec(agent, "start", *argv, stdout=asyncio.subprocess.PIPE)
    try:

        async def listens() -> None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError as error:
                raise AssertionError("rotel does not listen") from error
            writer.close()

        await eventually(listens, EXPORT_S)
        telemetry = Telemetry.start("kvc-router", f"127.0.0.1:{port}")
        with telemetry.tracer.start_as_current_span("engine.generate", attributes={"kvc.mode": "direct"}):
            parent = traceparent()
        await asyncio.to_thread(telemetry.shutdown)
        assert process.stdout is not None
        async with asyncio.timeout(EXPORT_S):
            printed = (await process.stdout.readuntil(b"kvc.mode: Str(direct)")).decode()
    finally:
        process.kill()
        await process.communicate()
    told = dict(re.findall(r"^\s*(?:-> )?([\w. ]+?)\s*: (.*)$", printed, re.MULTILINE))
    assert (told["service.name"], told["Name"]) == ("Str(kvc-router)", "engine.generate")
    assert parent == f"00-{told['Trace ID']}-{told['ID']}-01"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_request_that_fails_is_an_error_in_its_trace(mesh: LiveMesh, caller: Caller) -> None:
    """The engine dies in mid-stream: the call to it failed, and so did the request. Runs last, since it breaks the mesh."""

    def kill(response: router_pb2.DispatchResponse) -> None:
        if response.HasField("chunk"):
            mesh.mesh.workers["d0"].engine.kill()

    prompt = pack_tokens(TOKENS)
    trace_id, error = await caller.ask(session_id="s", packed_input_ids=prompt, max_new_tokens=50_000, on_response=kill)
    assert isinstance(error, Unavailable)

    async def check() -> dict[str, str]:
        found = caller.spans.trace(trace_id)
        assert "kvc-router server Dispatch" in {span.title for span in found}
        return {span.title: span.error for span in found if span.error is not None}

    assert await eventually(check, EXPORT_S) == {
        "kvc-router client engine.generate": "connection-lost",
        "kvc-router server Dispatch": f"UNAVAILABLE: {error}",
    }
