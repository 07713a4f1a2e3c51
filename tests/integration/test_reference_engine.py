"""One reference engine over its real doors: HTTP and the link."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import TYPE_CHECKING, Any

import pytest

from kvc.core.blocks import hash_chain, pack_tokens
from kvc.core.params import params_for
from kvc.core.reblock import Reblocker
from kvc.engine import kvvalue, link
from kvc.engine.link_io import CallFailed, LinkClient
from kvc.engine.reference.request import Phase, Request
from kvc.engine.tokens import encode_chat, encode_text
from kvc.runtime.config import ConfigError
from tests.support.engines import Answer, EngineUnderTest, config, paired, serving, until

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [1, 16, 24, 64]


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


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


async def test_queue_bound_and_its_hint() -> None:
    """F9: past the bound 503 with Retry-After, and what waits is served."""
    async with serving(config(queue_limit=1, time_scale=1.0)) as subject:
        running = asyncio.create_task(subject.generate(numbers(4000), 500))
        await until(lambda: bool(subject.engine.scheduler.prefilling or subject.engine.scheduler.running))
        waiting = asyncio.create_task(subject.generate(numbers(100, 9000), 500))
        await until(lambda: bool(subject.engine.scheduler.waiting))
        async with subject.http.post(subject.url + "/generate", json={"text": "abc"}) as response:
            refused = Answer(response.status, await response.json())
            assert (refused.status, refused.kind) == (503, "queue-full")
            assert int(response.headers["Retry-After"]) >= 1
        await subject.post("/abort_request", {"rid": "", "abort_all": True})
        assert {(await task).body["meta_info"]["finish_reason"]["type"] for task in (running, waiting)} == {"abort"}
        await subject.idle()


async def test_a_queued_request_starts_at_the_modelled_moment_the_memory_is_free() -> None:
    """Not a wall clock's rounding later, whatever the time scale, and without anybody waking the engine."""
    async with serving(config(time_scale=1000.0)) as subject:
        first = Request("first", pack_tokens(numbers(4000)), 500, kvvalue.IDS_VOCAB)
        second = Request("second", pack_tokens(numbers(3000, 9000)), 5, kvvalue.IDS_VOCAB)
        for request in (first, second):
            subject.engine.submit(request)
        await until(lambda: second.phase is Phase.DONE)
        assert second.times.arrival_s == first.times.arrival_s
        assert second.times.queue_s == pytest.approx(first.times.latency_s, abs=1e-9)
        for request in (first, second):
            subject.engine.forget(request)


MOMENTS = ["queued", "prefill", "first chunk", "decode", "stream decode", "whole reply"]


@pytest.mark.parametrize("how", ["disconnect", "abort"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_ends_at_any_moment_give_everything_back(tmp_path: Path, moment: str, how: str) -> None:
    """F5, F68, F69, F70: the pool returns to its baseline, the session's record does not move, its next turn runs at once and is right."""
    settings = config(link_path=tmp_path / "l.sock", time_scale=0.5 if moment != "whole reply" else 50.0, chunk_tokens=64)
    async with serving(settings) as subject:
        scheduler = subject.engine.scheduler
        subject.engine.clock.scale = 50.0
        first = await subject.checked(numbers(100), 20, session_id="s")
        subject.engine.clock.scale = settings.time_scale
        record = await subject.session("s")
        blocker = None
        if moment == "queued":
            blocker = asyncio.create_task(subject.generate(numbers(4000, 9000), 500, rid="blocker"))
            await until(lambda: scheduler.active == 1)
        prompt = [*numbers(100), *first, *numbers(400, 5000)]
        fields: dict[str, Any] = {"rid": "victim", "session_id": "s", "stream": moment in {"first chunk", "stream decode"}}
        turn = asyncio.create_task(send(subject, prompt, 300, fields))
        await until(lambda: "victim" in subject.engine.inflight or turn.done())
        if moment == "whole reply":
            await turn
        else:
            victim = subject.engine.inflight["victim"]
            reached = {
                "queued": lambda: victim.phase is Phase.QUEUED,
                "prefill": lambda: 0 < victim.kv_tokens - victim.cached_tokens < 300,
                "first chunk": lambda: victim.visible == 1,
                "decode": lambda: len(victim.output) > 5,
                "stream decode": lambda: victim.visible > 5,
            }[moment]
            await until(reached)
        if how == "abort":
            await subject.post("/abort_request", {"rid": "victim"})
        else:
            turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await until(lambda: "victim" not in subject.engine.inflight)
        subject.engine.pool.check()
        if moment != "whole reply":
            assert await subject.session("s") == record
        if blocker is not None:
            await subject.post("/abort_request", {"rid": "blocker"})
            await blocker
        subject.engine.clock.scale = 50.0
        await subject.idle()
        after = await subject.generate([*numbers(100), *first, 7, 8, 9], 10, session_id="s")
        assert after.body["output_ids"] == subject.expected([*numbers(100), *first, 7, 8, 9], 10)
        assert after.body["meta_info"]["cached_tokens"] == 112, "F68: the session's KV is still there"
        await subject.idle()


async def send(subject: EngineUnderTest, ids: list[int], count: int, fields: dict[str, Any]) -> bytes:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": count}, **fields}
    async with subject.http.post(subject.url + "/generate", json=body) as response:
        return await response.read()


async def test_a_turn_right_after_a_cancelled_one(tmp_path: Path) -> None:
    """F68: t0 completes, t1 is cancelled after its first chunk, t2 comes at once: length = t0 + its own append, and the engine lives."""
    async with serving(config(link_path=tmp_path / "l.sock", time_scale=2.0)) as subject:
        first = await subject.checked(numbers(100), 10, session_id="s")
        base = [*numbers(100), *first]
        body = {"input_ids": [*base, *numbers(20, 700)], "sampling_params": {"max_new_tokens": 2000}, "session_id": "s", "stream": True}
        async with subject.http.post(subject.url + "/generate", json=body) as response:
            await response.content.readuntil(b"\n\n")
        prompt = [*base, *numbers(30, 800)]
        await subject.checked(prompt, 10, session_id="s")
        record = await subject.session("s")
        assert record is not None
        assert (record.committed_tokens, record.generation, record.busy) == (len(prompt) + 9, 2, False)
        await subject.idle()


async def test_a_hundred_random_disconnects_leave_nothing() -> None:
    """F5, F58."""
    async with serving(config(time_scale=2.0, chunk_tokens=128, kv_tokens=3000)) as subject:

        async def impatient(index: int) -> None:
            try:
                async with asyncio.timeout(0.002 * (index % 40)):
                    await subject.generate(
                        numbers(50 + 13 * index % 700, 1000 * index), 50, session_id=f"s{index % 9}", stream=index % 2 == 0
                    )
            except TimeoutError:
                return

        await asyncio.gather(*(impatient(index) for index in range(100)))
        await subject.idle()
        assert not any(subject.engine.sessions.owner(f"s{index}") for index in range(9))
        await subject.checked(numbers(100), 5)


async def test_tickets_over_the_wire(tmp_path: Path) -> None:
    """F27: admitted, used, used again, expired: each has its answer, and an expired ticket is an error before any token."""
    params = params_for("default", ticket_ttl_s=0.05)
    async with serving(config(link_path=tmp_path / "l.sock"), params) as subject:
        prompt = numbers(100)
        first = await subject.admit("s", prompt, 20)
        assert isinstance(first, link.Admitted)
        assert first.mode == "seed"
        books = await subject.pool()
        assert books["reserved_tokens"] == 128
        await subject.checked(prompt, 20, rid=first.ticket)
        again = await subject.generate(prompt, 20, rid=first.ticket)
        assert (again.status, again.kind, again.param) == (409, "ticket-used", "rid")
        second = await subject.admit("s", prompt, 20)
        assert isinstance(second, link.Admitted)
        assert second.mode == "direct"
        await until(lambda: not subject.engine.desk.tickets)
        late = await subject.generate(prompt, 20, rid=second.ticket, stream=True)
        assert (late.status, late.kind) == (409, "ticket-expired")
        third = await subject.admit("s", prompt, 20)
        assert await subject.client.call(link.Release(third.ticket)) == link.Released(released=True)
        assert await subject.client.call(link.Release(third.ticket)) == link.Released(released=False)
        assert (await subject.generate(prompt, 20, rid=third.ticket)).status == 409
        await subject.idle()


async def test_two_routers_admitting_at_once_do_not_over_commit(tmp_path: Path) -> None:
    """R8: K=6000, four concurrent admits of 3,000 tokens on two connections: one ticket, three refusals."""
    async with serving(config(kv_tokens=6000, page_tokens=1, link_path=tmp_path / "l.sock")) as subject:
        other = EngineUnderTest(subject.running, subject.http, await LinkClient.connect(tmp_path / "l.sock"))
        admits = [(subject, other)[index % 2].admit(f"s{index}", numbers(2900, 10_000 * index), 100, f"r{index}") for index in range(4)]
        answers = await asyncio.gather(*admits)
        assert sorted(type(answer).__name__ for answer in answers) == ["Admitted", "Refused", "Refused", "Refused"]
        assert {answer.reason for answer in answers if isinstance(answer, link.Refused)} == {"session-not-resident-no-capacity"}
        assert (await subject.pool())["reserved_tokens"] == 3000
        await other.client.close()


async def test_an_expiring_ticket_lets_the_queue_move(tmp_path: Path) -> None:
    async with serving(config(link_path=tmp_path / "l.sock"), params_for("default", ticket_ttl_s=0.1)) as subject:
        assert isinstance(await subject.admit("s", numbers(4000), 100), link.Admitted)
        await subject.checked(numbers(2000, 50_000), 10)
        await subject.idle()


async def test_link_calls(tmp_path: Path) -> None:
    async with serving(config(role="decode", worker_id="d", page_tokens=24, link_path=tmp_path / "l.sock")) as subject:
        welcome = subject.client.welcome
        assert (welcome.worker_id, welcome.role, welcome.page_tokens, welcome.block_tokens) == ("d", "decode", 24, 24)
        assert (welcome.capacity_tokens, welcome.engine_url) == (4800, subject.url)
        assert welcome.epoch == subject.engine.identity.epoch > 0
        await subject.checked(numbers(100), 5, session_id="a")
        await subject.checked(numbers(50, 500), 5, session_id="b")
        sessions = await subject.client.call(link.ListSessions())
        assert [(one.session_id, one.committed_tokens, one.resident_tokens) for one in sessions.sessions] == [("b", 54, 48), ("a", 104, 96)]
        assert sessions.total == 2
        assert len((await subject.client.call(link.ListSessions(limit=1))).sessions) == 1
        assert await subject.session("nobody") is None
        load = await subject.client.call(link.Load())
        assert (load.sessions, load.open_tickets, load.facts.evictable_tokens) == (2, 0, 144)
        assert 0 < load.peak_use < 0.1
        assert await subject.client.call(link.Drain(draining=True)) == link.Drained(0)
        assert (await subject.admit("c", numbers(10), 1)).reason == "draining"
        with pytest.raises(CallFailed) as caught:
            await subject.client.call(link.ListSessions(limit=-1))
        assert caught.value.field == "limit"
        with pytest.raises(CallFailed) as caught:
            await subject.admit("", numbers(10), 1)
        assert caught.value.field == "session_id"


@pytest.mark.parametrize("page", PAGES)
async def test_residency_events_rebuild_what_is_resident(tmp_path: Path, page: int) -> None:
    """R17, R18: a follower that re-blocks the events knows exactly the blocks that Admit matches; sequences have no gap."""
    async with serving(config(kv_tokens=960, page_tokens=page, link_path=tmp_path / "l.sock")) as subject:
        await subject.checked(numbers(200), 10)
        follower = await LinkClient.connect(tmp_path / "l.sock")
        stream = follower.events()
        mirror = Reblocker(24, subject.client.welcome.hash_seed)
        snapshot = await anext(stream)
        assert isinstance(snapshot, link.Snapshot)
        assert snapshot.last
        for run in snapshot.stored:
            mirror.stored(run.page_hashes, run.parent, run.token_ids)
        sequence = snapshot.sequence
        prompts = [[*numbers(120), *numbers(100, 3000 + 500 * index)] for index in range(8)]
        for prompt in prompts:
            await subject.checked(prompt, 10)
        subject.engine.publish()
        assert subject.engine.pool.evicted_pages > 0
        while sequence < subject.engine.residency.sequence:
            delta = await asyncio.wait_for(anext(stream), 5)
            assert isinstance(delta, link.Delta)
            assert delta.sequence == sequence + 1
            sequence = delta.sequence
            apply(mirror, delta)
        for prompt in [numbers(200), *prompts]:
            chain = hash_chain(pack_tokens(prompt), 24, subject.client.welcome.hash_seed)
            _, pages = subject.engine.residency.match(chain, len(prompt))
            assert pages == sum(block in mirror for block in chain) * 24 // page
        await subject.post("/flush_cache", {})
        delta = await asyncio.wait_for(anext(stream), 5)
        assert isinstance(delta, link.Delta)
        assert isinstance(delta.changes[-1], link.AllCleared)
        await follower.close()


def apply(mirror: Reblocker, delta: link.Delta) -> None:
    for change in delta.changes:
        match change:
            case link.PageStored(hashes, parent, token_ids):
                mirror.stored(hashes, parent, token_ids)
            case link.PageRemoved(hashes):
                mirror.removed(hashes)
            case _:
                mirror.cleared()


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


async def test_stopping_ends_what_is_in_flight() -> None:
    async with serving(config(time_scale=0.1)) as subject:
        task = asyncio.create_task(subject.generate(numbers(100), 100))
        await until(lambda: bool(subject.engine.inflight))
        await subject.engine.stop()
        answer = await task
        assert (answer.status, answer.kind) == (503, "stopping")
        assert (await subject.generate(numbers(5), 1)).kind == "stopping"
        assert (await subject.get("/health")).status == 503


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="port"):
            async with serving(config(port=taken.getsockname()[1])):
                pytest.fail("listens on a port in use")


async def test_prefill_engines_keep_no_sessions(tmp_path: Path) -> None:
    async with paired(prefill={"link_path": tmp_path / "p.sock"}) as pair:
        with pytest.raises(CallFailed) as caught:
            await pair.prefill.admit("s", numbers(10), 1)
        assert caught.value.code == "FAILED_PRECONDITION"
        assert pair.prefill.client.welcome.bootstrap_port == pair.prefill.running.bootstrap_port > 0
        refused = await pair.prefill.generate(numbers(10), 1)
        assert (refused.status, refused.param) == (400, "bootstrap_room")
