"""One reference engine over HTTP: replies that are right, and requests that are refused."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import TYPE_CHECKING, Any

import pytest

from kvc.engine import kvvalue
from kvc.engine.tokens import encode_chat, encode_text
from kvc.runtime.config import ConfigError
from tests.support.engines import EngineUnderTest, config, numbers, serving

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [1, 16, 24, 64]


async def events(subject: EngineUnderTest, path: str, body: dict[str, Any]) -> list[Any]:
    """Payloads of a stream; it must end with [DONE]."""
    async with subject.http.post(subject.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("page", PAGES)
async def test_turns_of_a_session_are_right_and_reuse_their_kv(page: int) -> None:
    """Local seed, appends, a divergence in the middle, a fork: every reply is the pure function of its whole prompt."""
    async with serving(config(page_tokens=page)) as subject:
        history = numbers(200, 300)
        for turn in range(4):
            answer = await subject.generate(history, 20, session_id="s")
            assert answer.body["output_ids"] == subject.expected(history, 20)
            meta = answer.body["meta_info"]
            assert meta["cached_tokens"] == (0 if turn == 0 else (len(history) - 31) // page * page)
            assert meta["cached_tokens"] + meta["kvc_prefill_tokens"] == meta["prompt_tokens"] == len(history)
            history = [*history, *answer.body["output_ids"], *numbers(30, 9000 + 100 * turn)]
        await subject.checked([*history[:150], *numbers(50, 50_000)], 10, session_id="s")
        await subject.checked(history, 5, session_id="fork")
        assert (await subject.idle())["sessions"] == 2


async def test_a_corrupt_page_changes_the_reply() -> None:
    """The reply is computed from the KV that the engine holds: one stray write into one resident page is visible."""
    async with serving(config(allow_corruption=True)) as subject:
        prompt = numbers(160)
        output = await subject.checked(prompt, 5, session_id="s")
        longer = [*prompt, *output, 1, 2, 3]
        assert (await subject.post("/debug/corrupt", {"session_id": "s", "page": 3})).status == 200
        answer = await subject.generate(longer, 8)
        assert answer.body["meta_info"]["cached_tokens"] == 160
        assert answer.body["output_ids"] != subject.expected(longer, 8)
        assert (await subject.post("/flush_cache", {})).body["flushed_tokens"] > 0
        await subject.checked(longer, 8)
        unknown = await subject.post("/debug/corrupt", {"session_id": "other"})
        assert (unknown.status, unknown.param) == (404, "session_id")
        beyond = await subject.post("/debug/corrupt", {"session_id": "s", "page": 99})
        assert (beyond.status, beyond.param) == (400, "page")
    async with serving(config()) as subject:
        assert (await subject.post("/debug/corrupt", {"session_id": "s"})).status == 404


async def test_streams_carry_new_tokens_only_and_end_with_usage() -> None:
    async with serving(config(stream_interval_ms=0.0)) as subject:
        prompt = numbers(50)
        chunks = await events(subject, "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 40}})
        assert [token for chunk in chunks for token in chunk["output_ids"]] == subject.expected(prompt, 40)
        assert len(chunks) > 1, "it is a stream"
        assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks][-1] == 40
        assert {chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1]} == {True}
        last = chunks[-1]["meta_info"]
        assert last["finish_reason"] == {"type": "length", "length": 40}
        assert 0 < last["kvc_ttft_s"] < last["kvc_latency_s"]


async def test_text_and_openai_shapes() -> None:
    async with serving(config()) as subject:
        text = await subject.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 12}})
        expected = kvvalue.expected_output(encode_text("hello"), 12, kvvalue.TEXT_VOCAB, subject.engine.salt)
        assert text.body["output_ids"] == expected
        assert text.body["text"] == "".join(chr(token - 3) for token in expected)

        messages = [{"role": "user", "content": "hello"}]
        said = kvvalue.expected_output(encode_chat(messages), 15, kvvalue.TEXT_VOCAB, subject.engine.salt)
        reply = "".join(chr(token - 3) for token in said)
        body = {"messages": messages, "max_tokens": 15, "model": "any", "session_id": "chat"}
        whole = (await subject.post("/v1/chat/completions", body)).body
        assert whole["choices"] == [{"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": reply}}]
        assert (whole["object"], whole["model"]) == ("chat.completion", "any")
        chunks = await events(subject, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]) == reply
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"
        prompt_tokens = len(encode_chat(messages)) // 4
        assert chunks[-1]["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 15,
            "total_tokens": prompt_tokens + 15,
            "prompt_tokens_details": {"cached_tokens": 16},
        }

        completion = (await subject.post("/v1/completions", {"prompt": "hello", "max_tokens": 12})).body
        assert completion["choices"][0]["text"] == text.body["text"]
        assert completion["usage"]["completion_tokens"] == 12
        by_ids = (await subject.post("/v1/completions", {"prompt": numbers(20), "max_tokens": 3})).body
        assert by_ids["choices"][0]["token_ids"] == subject.expected(numbers(20), 3)


async def test_information_endpoints() -> None:
    settings = config(page_tokens=24, kv_tokens=1000, worker_id="w", model="org/model")
    async with serving(settings) as subject:
        for path in ("/server_info", "/get_server_info"):
            info = (await subject.get(path)).body
            assert (info["page_size"], info["max_total_num_tokens"], info["worker_id"], info["role"]) == (24, 984, "w", "monolithic")
            assert info["max_req_input_len"] == subject.engine.max_input_tokens == 38 * 24 - 1
        assert (await subject.get("/v1/models")).body["data"][0]["id"] == "org/model"
        assert (await subject.get("/get_model_info")).body["model_path"] == "org/model"
        before = await subject.pool()
        for path in ("/health", "/health_generate"):
            assert (await subject.get(path)).status == 200
        assert await subject.pool() == before, "a probe leaves no KV behind"
        assert (await subject.get("/nothing")).status == 404
        assert (await subject.get("/generate")).kind == "http-error"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", b"[1,2]", "body"),
        ("/generate", b"null", "body"),
        ("/generate", b'{"text": "a', "body"),
        ("/generate", b'{"text": "\xff"}', "body"),
        ("/generate", b'{"text": "a", "sampling_params": {"temperature": NaN}}', "body"),
        ("/generate", b'{"text": "a", "sampling_params": {"temperature": 1e400}}', "sampling_params.temperature"),
        ("/generate", b'{"text": ""}', "text"),
        ("/v1/chat/completions", b'{"messages": [{"role": 1}]}', "messages[0].role"),
        ("/v1/completions", b'{"prompt": {}}', "prompt"),
        ("/abort_request", b"{}", "rid"),
        ("/abort_request", b"x", "body"),
    ],
)
async def test_bad_bodies_are_typed_and_the_process_lives(path: str, body: bytes, field: str) -> None:
    """F76."""
    async with serving(config()) as subject:
        answer = await subject.post(path, body)
        assert (answer.status, answer.kind, answer.param, answer.body["error"]["code"]) == (400, "invalid-field", field, 400)
        await subject.checked(numbers(20), 3)
        await subject.idle()


async def test_oversized_requests_are_refused() -> None:
    """F76: a body above the limit, and a header of 10 MB."""
    async with serving(config(max_body_bytes=4096)) as subject:
        answer = await subject.post("/generate", {"text": "x" * 5000})
        assert (answer.status, answer.kind) == (413, "too-large")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(subject.url.rpartition(":")[2]))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Big: ")
        try:
            writer.write(b"a" * 10_000_000)
            await writer.drain()
            status = await reader.read(12)
        except ConnectionResetError:
            status = b""
        assert status in {b"", b"HTTP/1.0 400", b"HTTP/1.1 400", b"HTTP/1.1 431"}
        writer.close()
        await subject.checked(numbers(20), 3)


async def test_a_prompt_that_can_never_fit_is_refused_before_anything_else() -> None:
    """F10, F19: at once, typed, nothing queued, nothing held; the engine serves on."""
    async with serving(config()) as subject:
        for ids, count, field in ((4561, 1, "input_ids"), (4000, 600, "sampling_params.max_new_tokens")):
            answer = await subject.generate(numbers(ids), count)
            assert (answer.status, answer.kind, answer.param) == (400, "context-too-long", field)
        await subject.idle()
        await subject.checked(numbers(4000), 500)


async def test_sessions_with_similar_names_are_different(tmp_path: Path) -> None:
    """F66."""
    async with serving(config(link_path=tmp_path / "l.sock")) as subject:
        await subject.checked(numbers(40), 5, session_id="session-1")
        await subject.checked(numbers(60), 5, session_id="session-12")
        one, other = await subject.session("session-1"), await subject.session("session-12")
        assert one is not None
        assert other is not None
        assert (one.committed_tokens, other.committed_tokens) == (44, 64)


async def test_two_hundred_turns_of_random_tokens_are_all_right() -> None:
    """F16: sessions interleave, grow, diverge and are evicted; every reply is checked end to end."""
    choose = random.Random(3)
    async with serving(config(kv_tokens=6000, time_scale=1000.0)) as subject:

        async def session(name: str) -> int:
            history: list[int] = []
            for _ in range(20):
                history = history[: choose.randint(0, len(history))] if choose.random() < 0.15 else history
                history += [choose.randint(0, 2**31 - 2) for _ in range(choose.randint(1, 80))]
                history += await subject.checked(history, choose.randint(1, 30), session_id=name)
            return 20

        assert sum(await asyncio.gather(*(session(f"s{index}") for index in range(10)))) == 200
        books = await subject.idle()
        assert books["evicted_tokens"] > 0


async def test_metrics_and_readiness() -> None:
    async with serving(config()) as subject:
        await subject.checked(numbers(100), 5)
        async with subject.http.get(subject.running.ops_url + "/metrics") as response:
            text = await response.text()
        for line in (
            'kvc_engine_requests_total{outcome="completed"} 1.0',
            'kvc_engine_tokens_total{kind="prompt"} 100.0',
            "kvc_engine_kv_capacity_tokens 4800.0",
            'kvc_engine_kv_tokens{use="protected"} 0.0',
        ):
            assert line in text
        async with subject.http.get(subject.running.ops_url + "/ready") as response:
            assert response.status == 200


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="port"):
            async with serving(config(port=taken.getsockname()[1])):
                pytest.fail("listens on a port in use")
