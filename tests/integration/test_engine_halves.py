"""A prefill and a decode engine: every way in which one half of a turn can be missing, or go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from kvc.errors import Internal
from tests.support.engines import CRAWLING, SLOW, config, numbers, paired, serving, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.engines import Pair


async def test_room_that_the_prefill_engine_never_hears_of() -> None:
    """D's half alone: a typed error after the bootstrap timeout, and its memory is back."""
    async with paired(bootstrap_timeout_s=0.1) as pair:
        answer = await pair.decode.generate(numbers(100), 5, **pair.fields())
        assert (answer.status, answer.kind, answer.param) == (504, "unknown-room", "bootstrap_room")
        await pair.idle()
        await pair.checked(numbers(100), 5)


async def test_room_that_no_decode_engine_asks_for() -> None:
    """P's half alone: nothing is allocated, and it ends typed after the bootstrap timeout."""
    async with paired(bootstrap_timeout_s=0.1) as pair:
        task = asyncio.create_task(pair.prefill.generate(numbers(100), 5, **pair.fields()))
        await until(lambda: bool(pair.prefill.engine.bootstrap))
        assert pair.prefill.engine.pool.used_pages == 0
        answer = await task
        assert (answer.status, answer.kind) == (504, "bootstrap-timeout")
        await pair.idle()
        await pair.checked(numbers(100), 5)


async def test_halves_that_do_not_belong_together() -> None:
    """Different prompts under one room: no KV is taken from a foreign prompt."""
    async with paired(bootstrap_timeout_s=0.3) as pair:
        fields = pair.fields()
        answers = await asyncio.gather(pair.prefill.generate(numbers(100), 5, **fields), pair.decode.generate(numbers(100, 1), 5, **fields))
        assert answers[1].kind == "prompt-mismatch"
        assert answers[0].kind in {"bootstrap-timeout", "prompt-mismatch"}, "whichever half came first"
        await pair.idle()
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
        await pair.idle()


async def test_a_prompt_too_long_for_the_prefill_engine_alone_fails_on_both_sides_at_once() -> None:
    async with paired(prefill={"kv_tokens": 960}, bootstrap_timeout_s=0.2) as pair:
        first, second = await pair.generate(numbers(2000), 5)
        assert (first.status, first.kind) == (400, "context-too-long")
        assert (second.status, second.kind) == (504, "unknown-room")
        await pair.idle()


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
        await pair.idle()


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
        await pair.idle()


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
        await pair.idle()


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
            await pair.idle()
        pair.prefill.engine.clock.scale = pair.decode.engine.clock.scale = 100.0
        await pair.checked(numbers(100), 5)


async def test_decode_engine_whose_prefill_engine_is_not_there() -> None:
    async with serving(config(role="decode")) as subject:
        fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
        answer = await subject.generate(numbers(50), 5, **fields)
        assert (answer.status, answer.kind) == (502, "prefill-failed")
        await subject.idle()
