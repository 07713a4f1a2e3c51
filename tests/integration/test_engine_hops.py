"""One-hop admission over HTTP: what one request does in place of an Admit and a request, and how it is turned down."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import aiohttp
import msgspec
import pytest

from kvc.core.types import Attempt
from kvc.engine import link
from kvc.engine.hop import HOP_CAPABILITY, HOP_REFUSED, hop_rid
from kvc.engine.link_io import LinkClient
from kvc.engine.reference.request import Phase
from kvc.runtime.telemetry import TelemetryConfig
from tests.support.collector import collector
from tests.support.engines import BASELINE, SLOW, config, engine_process, numbers, serving, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.engines import Answer, EngineUnderTest

CHAT = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 20}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": numbers(200), "sampling_params": {"max_new_tokens": 20}},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x" * 200, "max_tokens": 20},
    "/v1/messages": CHAT | {"model": "m"},
}


def rid(subject: EngineUnderTest, request_id: str = "r-1", number: int = 0, epoch: int = 0) -> str:
    return hop_rid(epoch or subject.engine.identity.epoch, Attempt(request_id, number))


async def hop(subject: EngineUnderTest, ids: list[int], count: int, name: str, **fields: Any) -> Answer:
    return await subject.generate(ids, count, **({"rid": rid(subject, name), "session_id": "s"} | fields))


async def hops(subject: EngineUnderTest) -> dict[str, float]:
    """Counters of outcomes that occurred, as scraped."""
    async with subject.http.get(subject.running.ops_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = (line.partition('hops_total{outcome="')[2].partition('"} ') for line in lines if line.startswith("kvc_engine_hops_total{"))
    return {name: float(count) for name, _, count in counts if float(count)}


async def test_one_hop_replies_as_probe_first_does(tmp_path: Path) -> None:
    """Five turns each way, on an engine of its own each: the same reply, cached tokens and modelled times; each hop is one call."""
    ends = []
    for one_hop in (False, True):
        async with serving(config(link_path=tmp_path / "l.sock")) as subject:
            assert HOP_CAPABILITY in subject.client.welcome.capabilities
            history = numbers(100)
            history += await subject.checked(history, 10, session_id="s")
            seen = []
            for turn in range(5):
                history += numbers(30, 1000 * turn + 5000)
                fields: dict[str, Any] = {"rid": rid(subject, f"turn-{turn}")}
                if not one_hop:
                    admitted = await subject.admit("s", history, 20, known_session=True)
                    assert (type(admitted), admitted.mode) == (link.Admitted, "direct")
                    fields = {"rid": admitted.ticket}
                answer = await subject.generate(history, 20, session_id="s", **fields)
                assert answer.status == 200
                assert answer.body["output_ids"] == subject.expected(history, 20)
                meta = answer.body["meta_info"]
                seen.append((answer.body["output_ids"], [meta[name] for name in ("cached_tokens", "kvc_prefill_tokens", "kvc_ttft_s")]))
                history += answer.body["output_ids"]
            books = await subject.idle()
            ends.append((seen, books["evictable_tokens"], await subject.session("s")))
            assert await hops(subject) == ({"direct": 5.0} if one_hop else {})
    assert ends[0] == ends[1]


async def test_against_a_process(tmp_path: Path) -> None:
    """The epoch of the greeting is the one the rid must carry; another life of the engine refuses it."""
    port = "0"
    body = {"input_ids": numbers(100), "sampling_params": {"max_new_tokens": 8}, "session_id": "s"}
    old = ""
    async with aiohttp.ClientSession() as http:
        for life in range(2):
            flags = ["--link-path", str(tmp_path / "e.sock"), "--port", port, "--time-scale", "50"]
            async with engine_process(*flags) as (process, line):
                port = line["url"].rpartition(":")[2]
                client = await LinkClient.connect(tmp_path / "e.sock")
                epoch = client.welcome.epoch
                await client.close()
                async with http.post(line["url"] + "/generate", json=body) as response:
                    first = await response.json()
                turn = body | {"input_ids": numbers(100) + first["output_ids"] + [5], "rid": hop_rid(epoch, Attempt("a", 0))}
                async with http.post(line["url"] + "/generate", json=turn | {"rid": old} if life else turn) as response:
                    reply = await response.json()
                    if life:
                        assert (response.status, reply["kvc"]["reason"], reply["kvc"]["epoch"]) == (409, "stale-epoch", epoch)
                    else:
                        assert (response.status, reply["meta_info"]["cached_tokens"]) == (200, 96)
                async with http.get(line["url"] + "/kv_pool") as response:
                    books = await response.json()
                assert not any(books[name] for name in BASELINE)
                old = hop_rid(epoch, Attempt("b", 0))
                process.kill()
                await process.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
async def test_every_endpoint_takes_hops_and_turns_them_down(path: str, *, stream: bool) -> None:
    """A refusal is a plain 409 before any token in the endpoint's own error shape, streaming or not; nothing is held."""
    async with serving(config()) as subject:
        body = BODIES[path] | {"session_id": "s", "stream": stream}
        async with subject.http.post(subject.url + path, json=body | {"rid": rid(subject, "cold")}) as response:
            assert (response.status, response.content_type) == (409, "application/json")
            refused = await response.json()
            assert "Retry-After" not in response.headers
        error = refused["error"]
        if path == "/v1/messages":
            assert (refused["type"], error["type"], error["reason"], error["param"]) == ("error", "conflict_error", "HOP_REFUSED", "rid")
        else:
            assert (error["type"], error["param"], error["code"]) == (HOP_REFUSED, "rid", 409)
        answer = refused["kvc"]
        assert (answer["reason"], answer["terminal"], answer["retry_after_s"]) == ("not-direct", False, 0.0)
        assert answer["epoch"] == subject.engine.identity.epoch
        assert answer["append_tokens"] >= 200
        facts = msgspec.convert(answer["facts"], link.LinkFacts)
        assert (facts.capacity_tokens, facts.held_tokens, facts.matched_tokens) == (4800, 0, 0)
        await subject.idle()
        await _drain(subject, path, body | {"rid": "plain"}, 200)
        warm = body | {"rid": rid(subject, "warm")}
        await _drain(subject, path, warm, 200)
        await subject.idle()
        await _drain(subject, path, warm, 409)
        assert await hops(subject) == {"not-direct": 1.0, "direct": 1.0, "ticket-used": 1.0}


async def _drain(subject: EngineUnderTest, path: str, body: dict[str, Any], status: int) -> None:
    async with subject.http.post(subject.url + path, json=body) as response:
        assert response.status == status, await response.text()
        await response.read()


async def test_each_refusal_over_http(tmp_path: Path) -> None:
    async with serving(config(link_path=tmp_path / "l.sock")) as subject:
        prompt = numbers(400)
        prompt += await subject.checked(prompt, 10, session_id="s")

        async def refused(name: str, ids: list[int] = prompt, count: int = 10, **fields: Any) -> dict[str, Any]:
            answer = await hop(subject, ids, count, name, **fields)
            assert (answer.status, answer.kind, answer.param) == (409, HOP_REFUSED, "rid"), answer
            return dict(answer.body["kvc"])

        assert (await refused("long", numbers(5000)))["terminal"] is True
        assert (await refused("reserve", count=4400))["reason"] == "exceeds-capacity"
        stale = await refused("stale", rid=rid(subject, epoch=7))
        assert (stale["reason"], stale["append_tokens"]) == ("stale-epoch", len(prompt))
        ticket = (await subject.admit("s", prompt, 10)).ticket
        busy = await refused("busy")
        assert (busy["reason"], busy["retry_after_s"] > 0) == ("session-busy", True)
        await subject.client.call(link.Release(ticket))
        await subject.admit("t", numbers(3900, 9000), 10, "t")
        assert (await refused("full", count=300))["reason"] == "no-d-capacity"
        assert (await refused("cold", numbers(300, 20_000), 400))["reason"] == "session-not-resident-no-capacity"
        await subject.client.call(link.Drain(draining=True))
        assert (await refused("drain"))["reason"] == "draining"
        await subject.client.call(link.Drain(draining=False))
        assert (await hop(subject, prompt, 10, "taken")).body["output_ids"] == subject.expected(prompt, 10)
        assert sorted(await hops(subject)) == sorted(
            ["exceeds-capacity", "stale-epoch", "session-busy", "no-d-capacity", "session-not-resident-no-capacity", "draining", "direct"]
        )


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("rid", {"rid": "kvc-hop-1-2"}),
        ("rid", {"rid": "kvc-hop-x-2-r"}),
        ("rid", {"rid": "kvc-hop-1-2-" + "r" * 201}),
        ("session_id", {"session_id": None}),
        ("session_id", {"session_id": ""}),
    ],
)
async def test_f76_malformed_hops_name_the_field(field: str, fields: dict[str, Any]) -> None:
    """F76: 400, and the engine serves on."""
    async with serving(config()) as subject:
        answer = await hop(subject, numbers(10), 1, "r", **fields)
        assert (answer.status, answer.kind, answer.param) == (400, "invalid-field", field)
        await subject.idle()


async def test_a_prefill_engine_takes_no_hop(tmp_path: Path) -> None:
    async with serving(config(role="prefill", link_path=tmp_path / "l.sock")) as subject:
        assert HOP_CAPABILITY not in subject.client.welcome.capabilities
        for bootstrap in ({}, {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}):
            answer = await hop(subject, numbers(10), 1, "r", **bootstrap)
            assert (answer.status, answer.param) == (400, "bootstrap_room")
        await subject.idle()


@pytest.mark.parametrize("how", ["disconnect", "abort"])
@pytest.mark.parametrize("moment", ["prefill", "first chunk", "decode"])
async def test_a_hop_that_ends_early_gives_everything_back(tmp_path: Path, moment: str, how: str) -> None:
    """F5, F68, F70: the pool is back at its baseline, the record did not move, and the session's next hop is taken at once and is right."""
    async with serving(config(link_path=tmp_path / "l.sock", **SLOW)) as subject:
        subject.engine.clock.scale = 50.0
        prompt = numbers(400)
        prompt += await subject.checked(prompt, 20, session_id="s")
        before, record = await subject.idle(), await subject.session("s")
        subject.engine.clock.scale = 0.2
        victim_rid = rid(subject, "victim")
        stream = moment == "first chunk"
        turn = asyncio.create_task(hop(subject, [*prompt, *numbers(400, 7000)], 300, "victim", stream=stream))
        await until(lambda: victim_rid in subject.engine.inflight)
        victim = subject.engine.inflight[victim_rid]
        reached = {
            "prefill": lambda: victim.phase is Phase.PREFILL and 0 < victim.prefill_tokens < 300,
            "first chunk": lambda: victim.visible >= 1,
            "decode": lambda: len(victim.output) > 5,
        }[moment]
        await until(reached)
        if how == "abort":
            assert (await subject.post("/abort_request", {"rid": victim_rid})).body == {"aborted": 1}
        else:
            turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await until(lambda: victim_rid not in subject.engine.inflight)
        subject.engine.pool.check()
        subject.engine.clock.scale = 50.0
        books = await subject.idle()
        assert books["capacity_tokens"] - books["free_tokens"] == books["evictable_tokens"] >= before["evictable_tokens"]
        assert await subject.session("s") == record
        again = await hop(subject, [*prompt, 7, 8], 10, "next")
        assert again.body["output_ids"] == subject.expected([*prompt, 7, 8], 10)
        await subject.idle()


async def test_hops_of_one_session_at_once_never_share_a_turn() -> None:
    """R21: of many at once one is taken at a time; the others are refused as busy, and each that ran was right."""
    async with serving(config(time_scale=5.0)) as subject:
        prompt = numbers(400)
        prompt += await subject.checked(prompt, 10, session_id="s")
        answers = await asyncio.gather(*(hop(subject, [*prompt, index], 10, f"r{index}") for index in range(8)))
        taken = [(index, answer) for index, answer in enumerate(answers) if answer.status == 200]
        assert taken
        for index, answer in taken:
            assert answer.body["output_ids"] == subject.expected([*prompt, index], 10)
        assert {answer.body["kvc"]["reason"] for answer in answers if answer.status != 200} <= {"session-busy"}
        assert (await hops(subject)).get("session-busy", 0.0) == len(answers) - len(taken)
        await subject.idle()


async def test_a_refused_hop_is_no_failed_span() -> None:
    """A refusal is an answer: its span has the reason and no error."""
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    with mock.patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "50"}):
        async with collector() as spans, serving(config(telemetry=TelemetryConfig(endpoint=spans.target))) as subject:
            body = BODIES["/generate"] | {"session_id": "s", "rid": rid(subject)}
            async with subject.http.post(subject.url + "/generate", json=body, headers={"traceparent": parent}) as response:
                assert response.status == 409
            await until(lambda: bool(spans.spans))
            (span,) = spans.spans
            assert (span.name, span.error, span.events) == ("engine.request", None, ())
            assert span.attributes == {"kvc.refused": "not-direct"}
