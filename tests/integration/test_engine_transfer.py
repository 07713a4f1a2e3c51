"""Prefill and decode engines together: KV travels, one order of memory, and every way in which one half can be missing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvc.core.params import params_for
from kvc.engine import link
from kvc.engine.link_io import LinkClient
from kvc.engine.reference.main import run
from kvc.engine.reference.transfer import TRANSFER_VERSION, Join, Kv, Ready, Refused, Wire, checksum, prompt_digest
from kvc.errors import Internal
from tests.support.engines import config, paired, serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.engines import Answer, Pair

SLOW: dict[str, Any] = {"time_scale": 0.2, "chunk_tokens": 64}
CRAWLING: dict[str, Any] = {"time_scale": 0.02, "chunk_tokens": 200}
"""Slow enough for a transfer of some milliseconds to be seen from outside."""


def numbers(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


async def balanced(pair: Pair) -> None:
    """Both engines are back at nothing held."""
    await pair.prefill.idle()
    await pair.decode.idle()


@pytest.mark.parametrize("page", [1, 16, 24, 64])
async def test_seed_direct_and_reseed_are_right(page: int) -> None:
    """KV from P, an append on D over it, KV from P again (only the missing suffix travels): page sizes change nothing."""
    async with paired(page_tokens=page) as pair:
        history = numbers(300)
        first, second = await pair.generate(history, 20, session_id="s")
        assert (first.status, second.status) == (200, 200)
        assert second.body["output_ids"] == pair.decode.expected(history, 20)
        assert first.body["output_ids"] == second.body["output_ids"][:1]
        meta = second.body["meta_info"]
        assert (meta["cached_tokens"], meta["kvc_prefill_tokens"]) == (0, 300)
        history += [*second.body["output_ids"], *numbers(40, 5000)]
        history += [*await pair.decode.checked(history, 20, session_id="s"), *numbers(200, 9000)]
        _, third = await pair.generate(history, 10, session_id="s")
        assert third.body["output_ids"] == pair.decode.expected(history, 10)
        meta = third.body["meta_info"]
        resident = (300 + 20 + 40 + 20 - 1) // page * page
        assert meta["kvc_resident_tokens"] == resident
        assert meta["cached_tokens"] == 300 // page * page, "what P had cached is what nobody prefilled"
        assert meta["kvc_transfer_s"] < 0.002
        await balanced(pair)


async def test_modelled_times_add_up_over_both_engines() -> None:
    """TTFT = wait and prefill on P + transfer; wall time and scale do not enter."""
    for scale in (20.0, 500.0):
        async with paired(preset="h100-tcp", time_scale=scale, kv_tokens=40_000) as pair:
            _, answer = await pair.generate(numbers(20_000), 50)
            cost, meta = pair.decode.engine.config.costs, answer.body["meta_info"]
            prefill = 2 * cost.prefill_s(8192) + cost.prefill_s(20_000 - 2 * 8192)
            transfer = cost.transfer_s(20_000) + cost.transfer_latency_s
            assert meta["kvc_transfer_s"] == pytest.approx(transfer)
            assert meta["kvc_ttft_s"] == pytest.approx(prefill + transfer)
            assert meta["kvc_latency_s"] == pytest.approx(prefill + transfer + cost.decode_s(1, 20_001, 49))
            assert meta["kvc_queue_s"] == 0.0


async def test_corrupt_kv_on_the_prefill_engine_is_visible() -> None:
    """Reused pages of P count as well: a stray write into P's cache changes D's reply."""
    async with paired() as pair:
        prompt = numbers(320)
        await pair.checked(prompt, 5)
        tree = pair.prefill.engine.tree
        tree.corrupt(next(iter(tree.nodes())).hashes[2])
        await pair.decode.post("/flush_cache", {})
        _, answer = await pair.generate([*prompt, 1, 2, 3], 5)
        assert answer.status == 200
        assert answer.body["output_ids"] != pair.decode.expected([*prompt, 1, 2, 3], 5)


async def test_two_hundred_seeds_end_to_end() -> None:
    """F16: random KV bytes, checksummed on the way and checked by every reply; caches on both sides are evicted meanwhile."""
    async with paired(kv_tokens=3000, time_scale=1000.0) as pair:
        outputs = await asyncio.gather(*(pair.checked(numbers(100 + 7 * index % 300, 997 * index), 5) for index in range(200)))
        assert len(outputs) == 200
        assert pair.prefill.engine.pool.evicted_pages > 0
        await balanced(pair)


async def test_same_room_twice_at_once() -> None:
    """F8: the second pair is refused by name, the first is served, both processes live."""
    async with paired(**SLOW) as pair:
        fields = pair.fields(room=42)
        first = asyncio.create_task(pair.generate(numbers(300), 3, **fields))
        await until(lambda: bool(pair.prefill.engine.scheduler.prefilling))
        second = await pair.generate(numbers(300, 9000), 3, **fields)
        assert {(answer.status, answer.kind, answer.param) for answer in second} == {(409, "room-in-use", "bootstrap_room")}
        pair.prefill.engine.clock.scale = pair.decode.engine.clock.scale = 100.0
        assert [answer.status for answer in await first] == [200, 200]
        await pair.checked(numbers(100), 5)
        await pair.checked(numbers(120), 5, **fields)
        await balanced(pair)


async def test_room_that_the_prefill_engine_never_hears_of() -> None:
    """D's half alone: a typed error after the bootstrap timeout, and its memory is back."""
    async with paired(bootstrap_timeout_s=0.1) as pair:
        answer = await pair.decode.generate(numbers(100), 5, **pair.fields())
        assert (answer.status, answer.kind, answer.param) == (504, "unknown-room", "bootstrap_room")
        await balanced(pair)
        await pair.checked(numbers(100), 5)


async def test_room_that_no_decode_engine_asks_for() -> None:
    """P's half alone: nothing is allocated, and it ends typed after the bootstrap timeout."""
    async with paired(bootstrap_timeout_s=0.1) as pair:
        task = asyncio.create_task(pair.prefill.generate(numbers(100), 5, **pair.fields()))
        await until(lambda: bool(pair.prefill.engine.bootstrap))
        assert pair.prefill.engine.pool.used_pages == 0
        answer = await task
        assert (answer.status, answer.kind) == (504, "bootstrap-timeout")
        await balanced(pair)
        await pair.checked(numbers(100), 5)


async def test_halves_that_do_not_belong_together() -> None:
    """Different prompts under one room: no KV is taken from a foreign prompt."""
    async with paired(bootstrap_timeout_s=0.3) as pair:
        fields = pair.fields()
        answers = await asyncio.gather(pair.prefill.generate(numbers(100), 5, **fields), pair.decode.generate(numbers(100, 1), 5, **fields))
        assert answers[1].kind == "prompt-mismatch"
        assert answers[0].kind in {"bootstrap-timeout", "prompt-mismatch"}, "whichever half came first"
        await balanced(pair)
    async with serving(config(role="prefill", page_tokens=16)) as first, serving(config(role="decode", page_tokens=1)) as second:
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": first.running.bootstrap_port, "bootstrap_room": 1}
        task = asyncio.create_task(first.generate(numbers(50), 5, **fields))
        answer = await second.generate(numbers(50), 5, **fields)
        assert answer.kind == "prompt-mismatch"
        assert "page_tokens" in answer.body["error"]["message"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await first.idle()


async def test_too_long_a_prompt_opens_no_transfer() -> None:
    """F10: both halves refuse by the same limit, nothing waits for the other."""
    async with paired() as pair:
        for answer in await pair.generate(numbers(4700), 5):
            assert (answer.status, answer.kind) == (400, "context-too-long")
        assert not pair.prefill.engine.bootstrap
        await balanced(pair)


async def test_a_prompt_too_long_for_the_prefill_engine_alone_fails_on_both_sides_at_once() -> None:
    async with paired(prefill={"kv_tokens": 960}, bootstrap_timeout_s=0.2) as pair:
        first, second = await pair.generate(numbers(2000), 5)
        assert (first.status, first.kind) == (400, "context-too-long")
        assert (second.status, second.kind) == (504, "unknown-room")
        await balanced(pair)


def moments(pair: Pair) -> dict[str, Callable[[], bool]]:
    prefill, decode = pair.prefill.engine.scheduler, pair.decode.engine.scheduler
    return {
        "joined, before prefill": lambda: bool(prefill.prefilling) and bool(decode.pulling),
        "mid prefill": lambda: any(one.kv_tokens > 100 for one in prefill.prefilling),
        "kv on the link": lambda: bool(prefill.sending) and prefill.next_timer_s() is not None,
        "decode": lambda: any(len(one.output) > 2 for one in decode.running),
    }


MOMENTS = ["joined, before prefill", "mid prefill", "kv on the link", "decode"]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_decode_client_goes_away(moment: str) -> None:
    """F11, F4: D's disconnect frees P's memory at once, in every state."""
    async with paired(**(CRAWLING if moment == "kv on the link" else SLOW)) as pair:
        fields = pair.fields()
        prefill = asyncio.create_task(pair.prefill.generate(numbers(400), 100, **fields))
        decode = asyncio.create_task(pair.decode.generate(numbers(400), 100, **fields))
        await until(moments(pair)[moment])
        decode.cancel()
        answer = await prefill
        if moment == "decode":
            assert answer.status == 200
        else:
            assert (answer.status, answer.kind) == (502, "decode-gone")
        await balanced(pair)


@pytest.mark.parametrize("moment", MOMENTS[:3])
@pytest.mark.parametrize("how", ["disconnect", "abort"])
async def test_the_prefill_client_goes_away(moment: str, how: str) -> None:
    """P's half ends: D hears of it at once and fails typed, long before any timeout."""
    async with paired(**(CRAWLING if moment == "kv on the link" else SLOW)) as pair:
        fields = pair.fields()
        prefill = asyncio.create_task(pair.prefill.generate(numbers(400), 5, rid="x", **fields))
        decode = asyncio.create_task(pair.decode.generate(numbers(400), 5, rid="x", **fields))
        await until(moments(pair)[moment])
        if how == "disconnect":
            prefill.cancel()
        else:
            await pair.prefill.post("/abort_request", {"rid": "x"})
        async with asyncio.timeout(1.0):
            answer = await decode
        assert (answer.status, answer.kind) == (502, "prefill-failed")
        await asyncio.gather(prefill, return_exceptions=True)
        await balanced(pair)


async def test_a_fault_of_the_prefill_engine_reaches_the_decode_engine_at_once() -> None:
    """F32: P's failure cancels D within 1 s, with the reason."""
    async with paired(**SLOW) as pair:
        task = asyncio.create_task(pair.generate(numbers(400), 5))
        await until(moments(pair)["mid prefill"])
        request = next(iter(pair.prefill.engine.inflight.values()))
        pair.prefill.engine.end(request, error=Internal("broken on purpose"))
        async with asyncio.timeout(1.0):
            first, second = await task
        assert (first.status, first.kind) == (500, "internal")
        assert (second.status, second.kind) == (502, "prefill-failed")
        assert "broken on purpose" in second.body["error"]["message"]
        await balanced(pair)


async def test_fifty_pairs_cancelled_in_random_order_leave_nothing() -> None:
    """F4: an abort storm; slots and memory of both engines are back within 1 s."""
    async with paired(time_scale=1.0, chunk_tokens=128) as pair:

        async def impatient(half: Any, index: int, delay_s: float, fields: dict[str, Any]) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await half.generate(numbers(200 + index, 1000 * index), 50, **fields)

        tasks = []
        for index in range(50):
            fields = pair.fields()
            tasks.append(impatient(pair.prefill, index, 0.002 * (index * 7 % 50), fields))
            tasks.append(impatient(pair.decode, index, 0.002 * (index * 11 % 50), fields))
        await asyncio.gather(*tasks)
        async with asyncio.timeout(1.0):
            await balanced(pair)
        pair.prefill.engine.clock.scale = pair.decode.engine.clock.scale = 100.0
        await pair.checked(numbers(100), 5)


async def test_memory_is_acquired_on_the_decode_engine_first(tmp_path: Path) -> None:
    """R29, R23: a fallback that waits for D's memory holds none on P, does not time out there, and runs when D has room."""
    async with paired(tmp_path / "d.sock", {"bootstrap_timeout_s": 0.05}, bootstrap_timeout_s=5.0) as pair:
        ticket = await pair.decode.admit("other", numbers(4000, 90_000), 400)
        task = asyncio.create_task(pair.generate(numbers(1000), 5))
        await until(lambda: bool(pair.decode.engine.scheduler.waiting) and bool(pair.prefill.engine.bootstrap))
        await asyncio.sleep(0.15)  # three bootstrap timeouts of P: D is there, so P's half must not end
        assert pair.prefill.engine.pool.used_pages == 0
        assert not task.done()
        await pair.decode.client.call(link.Release(ticket.ticket))
        first, second = await task
        assert (first.status, second.status) == (200, 200)
        assert second.body["output_ids"] == pair.decode.expected(numbers(1000), 5)
        await balanced(pair)


async def test_admitted_seed_uses_its_ticket(tmp_path: Path) -> None:
    """A seed by ticket: the same rid goes to both halves; D consumes the ticket, P does not look at it."""
    params = params_for("default", tau_append_tokens=100, executor="prefill")
    async with (
        serving(config(role="prefill")) as first,
        serving(config(role="decode", link_path=tmp_path / "d.sock"), params) as second,
    ):
        offer = link.Offer(0.0, 1e5, 1e5)
        admitted = await second.admit("s", numbers(500), 20, offer=offer)
        assert (admitted.mode, admitted.executor) == ("seed", "prefill")
        assert second.engine.desk.facts().pending_transfers == 1
        fields = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": first.running.bootstrap_port,
            "bootstrap_room": 7,
            "rid": admitted.ticket,
        }
        await asyncio.gather(first.generate(numbers(500), 20, **fields), second.checked(numbers(500), 20, **fields))
        assert second.engine.desk.facts().pending_transfers == 0
        record = await second.session("s")
        assert record is not None
        assert (record.committed_tokens, record.busy) == (519, False)
        await first.idle()
        await second.idle()


async def test_decode_engine_whose_prefill_engine_is_not_there() -> None:
    async with serving(config(role="decode")) as subject:
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
        answer = await subject.generate(numbers(50), 5, **fields)
        assert (answer.status, answer.kind) == (502, "prefill-failed")
        await subject.idle()


def _good(ready: Ready, values: bytes) -> Kv:
    return Kv(ready.first_page, values, 5, checksum(values, 5, ready.first_page), 0.0, 1.0, 1.0, 0, 100)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (lambda ready: _good(ready, bytes(8 * 6)), None),
        (lambda ready: msgspec.structs.replace(_good(ready, bytes(8 * 6)), checksum=1), "kv-checksum"),
        (lambda ready: msgspec.structs.replace(_good(ready, bytes(8 * 6)), values=b"\x01" + bytes(8 * 6 - 1)), "kv-checksum"),
        (lambda ready: msgspec.structs.replace(_good(ready, bytes(8 * 6)), tail=6), "kv-checksum"),
        (lambda ready: _good(ready, bytes(8 * 5)), "kv-checksum"),
        (lambda ready: _good(ready, bytes(8 * 5 + 3)), "kv-checksum"),
        (lambda ready: _good(Ready(ready.first_page + 1), bytes(8 * 5)), "kv-checksum"),
        (lambda _: b"\x02\x00\x00\x00\xc1\xc1", "prefill-failed"),
        (lambda _: b"\xff\xff\xff\xff", "prefill-failed"),
        (lambda _: b"\x10\x00\x00\x00ab", "prefill-failed"),
        (lambda _: b"", "prefill-failed"),
    ],
    ids=["good", "checksum", "value", "tail", "too few", "odd bytes", "other pages", "garbage", "oversize", "truncated", "closed"],
)
async def test_damaged_kv_is_never_taken(reply: Callable[[Ready], Kv | bytes], kind: str | None) -> None:
    """F16: whatever a prefill engine sends, D takes the right KV or fails typed, and its memory is back."""

    async def prefill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        assert isinstance(await wire.from_decode(), Join)
        ready = await wire.from_decode()
        assert isinstance(ready, Ready)
        answer = reply(ready)
        if isinstance(answer, bytes):
            writer.write(answer)
            writer.write_eof()
        else:
            await wire.send(answer)
        with contextlib.suppress(Exception):
            await wire.from_decode()
        await wire.close()

    server = await asyncio.start_server(prefill, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with serving(config(role="decode", page_tokens=16)) as subject:
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
        answer = await subject.generate(numbers(100), 5, **fields)
        assert (answer.status, None if kind is None else answer.kind) == (200 if kind is None else 502, kind)
        await subject.idle()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xc1\xc1", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["nothing", "short", "oversize", "garbage", "http"],
)
async def test_strangers_on_the_bootstrap_port(data: bytes) -> None:
    async with paired() as pair:
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.prefill.running.bootstrap_port)
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await pair.checked(numbers(100), 5)
        await balanced(pair)


async def test_a_protocol_breaker_gets_no_kv() -> None:
    """A decode engine that asks for pages that do not exist, or sends Ready first, ends its own room only."""
    async with paired(**SLOW) as pair:
        port = pair.prefill.running.bootstrap_port
        wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
        await wire.send(Ready(0))
        refused = await wire.from_prefill()
        assert isinstance(refused, Refused)
        assert refused.reason == "DECODE_GONE"
        await wire.close()
        task = asyncio.create_task(pair.prefill.generate(numbers(100), 5, **pair.fields(room=5)))
        await until(lambda: bool(pair.prefill.engine.bootstrap))
        wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
        request = next(iter(pair.prefill.engine.inflight.values()))
        salt = pair.prefill.engine.salt
        await wire.send(Join(TRANSFER_VERSION, 5, "x", salt, 16, 100, prompt_digest(request)))
        await wire.send(Ready(99))
        answer = await task
        assert (answer.status, answer.kind) == (502, "decode-gone")
        await wire.close()
        await balanced(pair)


@contextlib.asynccontextmanager
async def engine_process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """`kvc engine` as a process, and what its log says of where it is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvc.engine.reference.main", "--preset", "tiny", *flags, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            line: dict[str, Any] = {}
            while line.get("event") != "engine_ready":
                line = msgspec.json.decode(await process.stderr.readline())
        yield process, line
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
async def test_the_prefill_engine_dies_mid_prefill(kill: signal.Signals) -> None:
    """F32: P is killed while it prefills for D: D fails typed within 1 s and serves on."""
    async with engine_process("--role", "prefill", "--time-scale", "0.05", "--chunk-tokens", "64") as (process, line):
        async with serving(config(role="decode")) as subject:
            info = await subject.http.get(line["url"] + "/server_info")
            port = (await info.json())["disaggregation_bootstrap_port"]
            fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1}
            body = {"input_ids": numbers(4000), "sampling_params": {"max_new_tokens": 5}, **fields}
            prefill = asyncio.create_task(subject.http.post(line["url"] + "/generate", json=body))
            decode = asyncio.create_task(subject.generate(numbers(4000), 5, **fields))
            pool: dict[str, int] = {}
            while not pool.get("held_tokens"):
                pool = await (await subject.http.get(line["url"] + "/kv_pool")).json()
            process.send_signal(kill)
            async with asyncio.timeout(1.0 if kill is signal.SIGKILL else 5.0):
                answer: Answer = await decode
            assert (answer.status, answer.kind) == (502, "prefill-failed")
            await asyncio.gather(prefill, return_exceptions=True)
            await subject.idle()
            await subject.checked(numbers(100), 5)
        assert await process.wait() == (-9 if kill is signal.SIGKILL else 0)


async def test_restart_under_the_same_address_is_another_life(tmp_path: Path) -> None:
    """F40: epochs grow from life to life, so what was learnt of an earlier one is void."""
    flags = ["--link-path", str(tmp_path / "e.sock"), "--worker-id", "w"]
    epochs = []
    port = "0"
    for _ in range(2):
        async with engine_process(*flags, "--port", port) as (process, line):
            port = line["url"].rpartition(":")[2]
            client = await LinkClient.connect(tmp_path / "e.sock")
            epochs.append(client.welcome.epoch)
            await client.close()
            process.kill()
            await process.wait()
    assert epochs[0] < epochs[1]


WRONG_SETTINGS = [
    (["--page-tokens", "0"], "page_tokens"),
    (["--kv-tokens", "16"], "kv_tokens"),
    (["--preset", "x"], "preset"),
    (["--params-rho", "1.5"], "params.rho"),
    (["--params-ticket-ttl-s", "0"], "params.ticket_ttl_s"),
]


@pytest.mark.parametrize(("flags", "name"), WRONG_SETTINGS, ids=[name for _, name in WRONG_SETTINGS])
def test_wrong_settings_are_one_line(flags: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(flags)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert len(said.splitlines()) == 1
    assert name in said
