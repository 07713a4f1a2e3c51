"""The router put together: settings, readiness, a turn from client to engine, and the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # no types published

from kvc import wire
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode
from kvc.runtime.channel import channel
from kvc.runtime.config import ConfigError, load
from kvc.v1 import admission_pb2, router_pb2, router_pb2_grpc
from services.router.config import AgentsConfig, RouterConfig
from services.router.main import SERVICE, running_router, with_profile
from tests.support.builders import worker
from tests.support.fake_agent import FakeAgent, agent
from tests.support.mesh_server import until
from tests.support.raw_http import END, RawServer, chunk, event, head, raw_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.router.main import RunningRouter
    from tests.support.raw_http import Script

CAPABLE = ("admit", "residency")
LAST = event(meta_info={"finish_reason": {"type": "length"}, "prompt_tokens": 48, "completion_tokens": 1, "cached_tokens": 24})
GOOD: Script = [head() + chunk(event(text="a", output_ids=[7])), chunk(LAST + b"data: [DONE]\n\n") + END]


async def yes(request: admission_pb2.AdmitRequest) -> admission_pb2.AdmitResponse:
    attempt = Attempt(request.attempt.request_id, request.attempt.attempt_number)
    admission = Admission(Mode.SEED, Executor.LOCAL, 48, 52, f"kvc-{attempt.request_id}", 5.0)
    return wire.outcome_to_pb(admission, attempt, wire.ref_from_pb(request.worker), Facts(92_104))


@asynccontextmanager
async def mesh(script: Script, **settings: Any) -> AsyncIterator[tuple[RunningRouter, FakeAgent, RawServer]]:
    """A router, one agent, one engine."""
    async with raw_server(script) as engine, agent(worker("d0", engine_url=engine.url, capabilities=CAPABLE)) as one:
        one.admit = yes
        config = RouterConfig(agents=AgentsConfig(targets=(one.target,), backoff_base_s=0.01, backoff_cap_s=0.05), **settings)
        async with running_router(config) as running:
            await running.followed(20)
            yield running, one, engine


def request(session_id: str = "s") -> router_pb2.DispatchRequest:
    return router_pb2.DispatchRequest(session_id=session_id, packed_input_ids=bytes(4 * 48), max_new_tokens=1)


async def test_a_turn_and_readiness() -> None:
    async with mesh(GOOD) as (running, one, engine):
        assert running.not_ready() is None
        async with channel(running.target) as client:
            responses = [response async for response in router_pb2_grpc.RouterServiceStub(client).Dispatch(request(), timeout=20)]
            assert [response.WhichOneof("event") for response in responses] == ["decision", "chunk", "finished"]
            assert engine.requests[0][1]["rid"].startswith("kvc-")
            health = health_pb2_grpc.HealthStub(client)
            await until_status(health, health_pb2.HealthCheckResponse.SERVING)
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{running.ops_port}/metrics") as metrics:
                assert 'kvc_router_turns_total{end="completed",mode="seed"} 1.0' in await metrics.text()
            await one.stop()
            await until_status(health, health_pb2.HealthCheckResponse.NOT_SERVING)
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{running.ops_port}/ready") as ready:
                assert ready.status == 503
                assert one.target in await ready.text()
            await one.start()
            await until_status(health, health_pb2.HealthCheckResponse.SERVING)


async def until_status(health: Any, status: int) -> None:
    async with asyncio.timeout(20):
        while (await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status != status:  # noqa: ASYNC110 - asks the server
            await asyncio.sleep(0.02)


async def test_turns_in_flight_get_a_grace() -> None:
    """They finish; new ones are refused; readiness says so."""
    async with mesh([*GOOD[:1], "wait", *GOOD[1:]], grace_s=20.0) as (running, _, engine):
        async with channel(running.target) as client:
            call = router_pb2_grpc.RouterServiceStub(client).Dispatch(request(), timeout=30)
            assert (await anext(aiter(call))).HasField("decision")
            stopping = asyncio.create_task(running.server.stop(20.0))
            await asyncio.sleep(0)
            engine.go.set()
            rest = [response async for response in call]
            assert rest[-1].HasField("finished")
            await asyncio.wait_for(stopping, 10)
        assert running.router.sigma.open == {}


@pytest.mark.parametrize("place", ["engine", "agent", "room"])
async def test_what_the_grace_cuts_off_is_accounted_for(place: str) -> None:
    """Nothing is in flight in Σ afterwards, engines are let go of, and unused tickets are given back before the process ends."""
    async with (
        raw_server([*GOOD[:1], "hang"]) as engine,
        agent(worker("d0", engine_url=engine.url, capabilities=("admit", "residency"))) as one,
    ):
        asked = asyncio.Event()
        go = asyncio.Event()

        async def slow(request_: admission_pb2.AdmitRequest) -> admission_pb2.AdmitResponse:
            asked.set()
            if place == "agent":
                await go.wait()
            return await yes(request_)

        one.admit = slow
        config = RouterConfig(agents=AgentsConfig(targets=(one.target,), admit_timeout_s=5.0, hedge_after_s=0.0), grace_s=0.1)
        async with running_router(config) as running:
            if place != "room":
                await running.followed(20)
            client = channel(running.target)
            call = router_pb2_grpc.RouterServiceStub(client).Dispatch(request(), timeout=30)
            reading = asyncio.ensure_future(anext(aiter(call)))
            if place == "engine":
                await reading
            elif place == "agent":
                await asyncio.wait_for(asked.wait(), 10)
                asyncio.get_running_loop().call_later(0.3, go.set)
            else:
                await until(lambda: len(running.router.claims) == 1)
            router = running.router
        assert router.sigma.open == {}
        assert len(router.claims) == 0
        assert all(state.inflight == 0 for state in router.sigma.workers.values())
        if place == "engine":
            await until(lambda: engine.closed_by_client == 1)
        if place == "agent":
            assert [release.ticket for release in one.releases] == [f"kvc-{one.asked[0].attempt.request_id}"]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.close()


class TestSettings:
    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["--agent", "nonsense"], ["targets", "nonsense"]),
            (["--agent", "host:0"], ["targets", "host:0"]),
            (["--agent", "host:70000"], ["targets"]),
            (["--agent", ":5000"], ["targets"]),
            (["--agent", "a:1", "--agent", "a:1"], ["targets", "twice"]),
            (["--agents-tls-cert", "x.pem"], ["tls_cert", "tls_key"]),
            (["--agents-tls-cert", "x.pem", "--agents-tls-key", "y.pem"], ["tls_ca"]),
            (["--requests-max-turns", "0"], ["max_turns"]),
            (["--policy", "best"], ["policy"]),
            (["--grace-s", "nan"], ["grace_s"]),
            (["--agents-tls-ca", "/nowhere.pem", "--agent", "127.0.0.1:1"], ["tls_ca", "/nowhere.pem"]),
            (["--params-rho", "x"], ["rho"]),
            (["--nonsense"], ["--nonsense"]),
        ],
    )
    def test_a_wrong_setting_is_one_line_and_exit_code_2(self, argv: list[str], words: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", "router", *argv], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
        assert all(word in line for word in words), line

    def test_a_profile_and_what_is_set_beside_it(self) -> None:
        loaded = load(RouterConfig, ["--params-profile", "paper", "--params-alpha", "3"], prog="kvc router", environ={})
        params = with_profile(loaded).params
        assert (params.profile, params.alpha, params.queue_limit, params.overlap) == ("paper", 3.0, 0, "full")

    def test_an_override_that_does_not_exist(self) -> None:
        with pytest.raises((ConfigError, SystemExit)):
            load(RouterConfig, ["--params-beta", "3"], prog="kvc router", environ={})
