"""A mesh whose router has no tokenizer: sessions stay, histories may be rewritten, and the metrics say that it is an estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from kvc.core.types import Mode
from kvc.engine.reference.config import DEFAULT_MODEL
from tests.support.http_talking import HttpConversation
from tests.support.live_mesh import LiveMesh, live_mesh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["--http-one-hop", "--no-http-one-hop"], ids=["one hop", "asked"])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[LiveMesh]:
    """Two decode workers and a prefill worker behind a router without a tokenizer."""
    arguments = ("--http-tokenizer", "none", request.param)
    async with live_mesh("1P2D", time_scale=20.0, kv_tokens=400_000, router_args=arguments) as live:
        yield live


async def decisions(live: LiveMesh) -> dict[str, float]:
    async with live.http.get(f"{live.mesh.http_url}/metrics") as response:
        text = await response.text()
    found = [family for family in text_string_to_metric_families(text) if family.name == "kvc_router_decisions"]
    return {sample.labels["overlap_source"]: sample.value for family in found for sample in family.samples}


@pytest.mark.parametrize("named", [True, False], ids=["header", "prefix"])
async def test_a_chat_stays_direct_on_its_worker(mesh: LiveMesh, *, named: bool) -> None:
    before = await decisions(mesh)
    chats = [HttpConversation(mesh.http, mesh.mesh.http_url, f"chat {named} {number}", named=named) for number in range(4)]
    for turn in range(5):
        for chat in chats:
            ended = await chat.turn(3_000 if turn == 0 else 300, 12)
            assert ended.ok, (ended.status, ended.error)
    for chat in chats:
        assert [turn.worker for turn in chat.turns] == [chat.turns[0].worker] * 5
        assert [turn.mode for turn in chat.turns[1:]] == [Mode.DIRECT] * 4
    after = await decisions(mesh)
    assert after["estimate"] - before["estimate"] >= 20
    assert after["blocks"] == before["blocks"]
    await mesh.at_rest()


async def test_a_rewritten_history_is_served_from_what_is_left_of_it(mesh: LiveMesh) -> None:
    """The reply is the one that the new history calls for, and the worker that has the old one's beginning keeps the session."""
    chat = HttpConversation(mesh.http, mesh.mesh.http_url, "rewritten")
    for _ in range(3):
        assert (await chat.turn(2_000, 12)).ok
    del chat.messages[3:]
    chat.messages[2] = {"role": "user", "content": "something else was said here " * 9}
    ended = await chat.turn(300, 12)
    assert ended.ok
    assert ended.worker == chat.turns[0].worker
    following = await chat.turn(300, 12)
    assert (following.mode, following.worker) == (Mode.DIRECT, ended.worker)
    await mesh.at_rest()


async def test_lengths_are_learnt_from_the_engine(mesh: LiveMesh) -> None:
    """The reference engine counts a token a byte, four times the first guess: what the router expects to be cached comes near it."""
    headers = {"x-session-id": "learnt"}
    messages: list[dict[str, str]] = []
    cached = expected = 0
    for _ in range(4):
        messages.append({"role": "user", "content": "tell me more about it " * 50})
        body: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": messages, "max_tokens": 12}
        async with mesh.http.post(f"{mesh.mesh.http_url}/v1/chat/completions", json=body, headers=headers) as response:
            told = await response.json()
            expected = int(response.headers["x-kvc-cached-tokens"])
        messages.append(told["choices"][0]["message"])
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 3_000
    assert 0.7 * cached <= expected <= 1.1 * cached, (expected, cached)


async def test_token_ids_need_no_estimate(mesh: LiveMesh) -> None:
    before = await decisions(mesh)
    body = {"input_ids": list(range(300, 500)), "sampling_params": {"max_new_tokens": 4}}
    async with mesh.http.post(f"{mesh.mesh.http_url}/generate", json=body) as response:
        assert response.status == 200
    after = await decisions(mesh)
    assert (after["blocks"] - before["blocks"], after["estimate"] - before["estimate"]) == (1, 0)
