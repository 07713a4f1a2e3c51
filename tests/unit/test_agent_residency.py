"""The agent's residency: from the engine's pages to what followers are told."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import pytest

from kvc.core.blocks import HASH_BYTES, TOKEN_BYTES, hash_chain, pack_tokens, resident_blocks
from kvc.core.types import WorkerRef
from kvc.engine import link
from kvc.errors import Exhausted, Unavailable
from kvc.v1 import types_pb2
from services.admission_agent.config import ResidencyConfig
from services.admission_agent.fold import ChangeFold
from services.admission_agent.residency import STEP_PAGES, Gap, Residency
from tests.support.fake_engine import SEED, Pages
from tests.support.follower_model import FollowerModel

if TYPE_CHECKING:
    from services.admission_agent.follower import Follower

PROMPT = list(range(1, 241))


def feed(residency: Residency, *events: link.Snapshot | link.Delta) -> None:
    for event in events:
        for _ in residency.apply(event):
            pass


def living(pages: Pages | None = None, epoch: int = 1, **settings: int) -> Residency:
    """Residency of a life whose snapshot is `pages`, at engine sequence 0."""
    pages = pages or Pages()
    residency = Residency(ResidencyConfig(**settings))
    residency.begin(WorkerRef("d0", epoch), SEED, pages.page_tokens)
    feed(residency, *pages.snapshot(0))
    return residency


def drain(follower: Follower, model: FollowerModel | None = None) -> FollowerModel:
    model = model or FollowerModel()
    while (message := follower.take()) is not None:
        model.apply(message)
    return model


def chain(tokens: list[int]) -> array[int]:
    return hash_chain(pack_tokens(tokens), 24, SEED)


def stored(pages: Pages, *prompts: list[int]) -> list[link.Change]:
    return [run for run in map(pages.store, prompts) if run is not None]


def test_snapshot_then_deltas() -> None:
    pages = Pages()
    pages.store(PROMPT[:96])
    residency = living(pages)
    with residency.follow() as follower:
        model = drain(follower)
        assert (model.epoch, model.sequence, model.snapshots) == (1, 1, 1)
        assert model.blocks == set(chain(PROMPT[:96]))
        feed(residency, link.Delta(1, stored(pages, PROMPT)))
        residency.flush()
        feed(residency, link.Delta(2, [pages.remove(PROMPT[:48])]))
        residency.flush()
        drain(follower, model)
        assert (model.sequence, model.deltas) == (3, 2)
        assert model.blocks == set(chain(PROMPT[:24]))


def test_changes_between_two_flushes_travel_as_one_delta() -> None:
    pages = Pages()
    residency = living(pages)
    with residency.follow() as follower:
        model = drain(follower)
        feed(residency, link.Delta(1, stored(pages, PROMPT)), link.Delta(2, [pages.remove(PROMPT[:48])]), link.Delta(3, []))
        residency.flush()
        drain(follower, model)
        assert model.deltas == 1
        assert model.blocks == set(chain(PROMPT[:24]))


def test_nothing_is_sent_when_nothing_changed() -> None:
    pages = Pages()
    residency = living(pages)
    with residency.follow() as follower:
        drain(follower)
        feed(residency, link.Delta(1, [*stored(pages, PROMPT), pages.remove(PROMPT[:4])]))
        residency.flush()
        assert not residency.has_news
        assert follower.take() is None


def test_a_block_that_went_and_came_back_is_no_change() -> None:
    fold = ChangeFold()
    fold.removed([1, 2])
    fold.stored([1, 3])
    delta = fold.take()
    assert delta.removed == array("Q", [2]).tobytes()
    assert delta.stored == array("Q", [3]).tobytes()
    assert not fold


def test_f41_clear_all_empties_the_follower() -> None:
    """F41: a clear event, then Route: overlap 0."""
    pages = Pages()
    pages.store(PROMPT)
    residency = living(pages)
    with residency.follow() as follower:
        model = drain(follower)
        assert resident_blocks(chain(PROMPT), model.blocks) == 10
        feed(residency, link.Delta(1, [pages.clear()]))
        residency.flush()
        message = follower.take()
        assert message is not None
        assert message.delta.cleared
        model.apply(message)
        assert resident_blocks(chain(PROMPT), model.blocks) == 0
        assert residency.resident_blocks == 0


@pytest.mark.parametrize("page_tokens", [1, 8, 16, 24, 48, 64])
def test_f43_runs_that_are_partly_stored_chain_right(page_tokens: int) -> None:
    """F43: blocks 0-4 are cached, 5-9 are stored under the page before them: overlap 10. Whatever the page size."""
    prompt = list(range(1, 64 * 24 + 1))
    cut = 64 * 12
    pages = Pages(page_tokens)
    residency = living(pages)
    first = pages.store(prompt[:cut])
    assert first is not None
    feed(residency, link.Delta(1, [first]))
    whole = Pages(page_tokens).store(prompt)
    assert whole is not None
    known = len(first.page_hashes)
    rest = link.PageStored(whole.page_hashes[known:], whole.page_hashes[known - 1], whole.token_ids[known * page_tokens * TOKEN_BYTES :])
    feed(residency, link.Delta(2, [rest]))
    with residency.follow() as follower:
        assert resident_blocks(chain(prompt), drain(follower).blocks) == 64
    feed(residency, link.Delta(3, [whole]))  # the whole run again, with pages that are known: nothing new
    assert residency.resident_blocks == 64
    assert not residency.has_news


def test_f40_a_new_epoch_starts_empty_and_from_one() -> None:
    """F40: the same address under a new epoch: nothing of the old life is credited."""
    pages = Pages()
    pages.store(PROMPT)
    residency = living(pages)
    with residency.follow() as follower:
        drain(follower)
        residency.end(Unavailable("the engine is away", reason="ENGINE_AWAY"))
        with pytest.raises(Unavailable, match="away"):
            follower.take()
    assert residency.resident_blocks == 0
    assert residency.view() is None
    residency.begin(WorkerRef("d0", 2), SEED, 4)
    with residency.follow() as follower:
        assert follower.take() is None, "no view of the old life"
        feed(residency, link.Snapshot(0, []))
        model = drain(follower)
    assert (model.epoch, model.sequence, model.blocks) == (2, 1, set())


def test_the_same_epoch_counts_on_after_a_lost_connection() -> None:
    residency = living()
    residency.end(Unavailable("away"))
    residency.begin(WorkerRef("d0", 1), SEED, 4)
    feed(residency, link.Snapshot(0, []))
    with residency.follow() as follower:
        assert drain(follower).sequence == 2


def test_a_large_snapshot_comes_in_parts_below_a_mebibyte() -> None:
    """200,000 blocks in messages of at most 1 MiB each, parents first across parts."""
    prompt = pack_tokens(list(range(200_000 * 2)))
    residency = Residency(ResidencyConfig(block_tokens=2))
    residency.begin(WorkerRef("d0", 1), SEED, 2)
    feed(residency, link.Snapshot(0, [link.PageStored(list(range(1, 200_001)), 0, prompt)]))
    with residency.follow() as follower:
        messages = []
        while (message := follower.take()) is not None:
            messages.append(message)
    assert len(messages) == 4
    assert all(message.ByteSize() <= 1024 * 1024 for message in messages)
    assert [message.snapshot.more for message in messages] == [True, True, True, False]
    assert b"".join(message.snapshot.block_hashes for message in messages) == hash_chain(prompt, 2, SEED).tobytes()


def test_the_largest_part_setting_keeps_messages_below_a_mebibyte() -> None:
    residency = Residency(ResidencyConfig(block_tokens=1, part_bytes=1_040_000))
    residency.begin(WorkerRef("d" * 128, 2**64 - 1), SEED, 1)
    count = 140_000
    feed(residency, link.Snapshot(0, [link.PageStored(list(range(1, count + 1)), 0, pack_tokens(list(range(count))))]))
    with residency.follow() as follower:
        first = follower.take()
    assert first is not None
    assert first.snapshot.more
    assert first.ByteSize() <= 1024 * 1024


def test_a_slow_follower_gets_a_fresh_snapshot_and_others_do_not() -> None:
    pages = Pages()
    residency = living(pages, buffer_bytes=600)
    with residency.follow() as slow, residency.follow() as quick:
        lagging, current = drain(slow), drain(quick)
        for index in range(20):
            feed(residency, link.Delta(index + 1, stored(pages, [1000 + index] * 48)))
            residency.flush()
            drain(quick, current)
            assert slow.held_bytes <= 600
        drain(slow, lagging)
    assert lagging.blocks == current.blocks == pages.blocks(24)
    assert (current.snapshots, current.deltas) == (1, 20)
    assert lagging.snapshots == 2
    assert residency.resyncs["overflow"] == 1
    assert lagging.sequence == current.sequence == 21


def test_a_change_too_large_for_a_message_becomes_a_snapshot() -> None:
    pages = Pages()
    residency = living(pages, part_bytes=5 * HASH_BYTES)
    with residency.follow() as follower:
        model = drain(follower)
        feed(residency, link.Delta(1, stored(pages, PROMPT)))
        residency.flush()
        drain(follower, model)
    assert (model.snapshots, model.deltas) == (2, 0)
    assert model.blocks == pages.blocks(24)
    assert residency.resyncs["oversize"] == 1


def test_a_snapshot_under_way_is_finished_before_the_next() -> None:
    pages = Pages()
    pages.store(PROMPT)
    residency = living(pages, part_bytes=2 * HASH_BYTES, buffer_bytes=200)
    with residency.follow() as follower:
        model = FollowerModel()
        message = follower.take()
        assert message is not None
        model.apply(message)
        for index in range(5):
            feed(residency, link.Delta(index + 1, stored(pages, [2000 + index] * 24)))
            residency.flush()
        drain(follower, model)
    assert model.snapshots == 2
    assert model.blocks == pages.blocks(24)


def test_only_the_latest_load_is_kept_and_comes_after_the_snapshot() -> None:
    residency = living()
    residency.report(types_pb2.WorkerLoad(sessions=1))
    with residency.follow() as follower:
        residency.report(types_pb2.WorkerLoad(sessions=2))
        residency.report(types_pb2.WorkerLoad(sessions=3))
        kinds = []
        while (message := follower.take()) is not None:
            kinds.append((message.WhichOneof("event"), message.load.sessions, message.sequence))
    assert kinds == [("snapshot", 0, 1), ("load", 3, 1)]


def test_a_new_follower_hears_the_load_at_once() -> None:
    residency = living()
    residency.report(types_pb2.WorkerLoad(sessions=4))
    with residency.follow() as follower:
        assert drain(follower).loads == 1


def test_followers_are_bounded() -> None:
    residency = living(max_followers=2)
    with residency.follow(), residency.follow():
        with pytest.raises(Exhausted) as caught, residency.follow():
            pass
        assert caught.value.reason == "TOO_MANY_FOLLOWERS"
    with residency.follow():
        assert residency.followers == 1
    assert residency.followers == 0


@pytest.mark.parametrize("sequence", [0, 1, 3, 2**64 - 1])
def test_a_hole_or_a_repetition_is_a_gap(sequence: int) -> None:
    residency = living()
    feed(residency, link.Delta(1, []))
    with pytest.raises(Gap, match="instead of 2"):
        feed(residency, link.Delta(sequence, []))


def test_after_a_gap_the_old_view_stays_until_the_new_snapshot_is_whole() -> None:
    pages = Pages()
    pages.store(PROMPT[:48])
    residency = living(pages)
    with residency.follow() as follower:
        model = drain(follower)
        with pytest.raises(Gap):
            feed(residency, link.Delta(9, []))
        residency.expect_snapshot()
        pages.store(PROMPT)
        first, second = pages.snapshot(20, parts=2)
        feed(residency, link.Delta(10, [link.AllCleared()]), first)
        assert drain(follower, model).snapshots == 1
        assert residency.resident_blocks == 2
        feed(residency, second, link.Delta(21, stored(pages, [5] * 24)))
        residency.flush()
        drain(follower, model)
    assert (model.snapshots, model.sequence, model.blocks) == (2, 3, pages.blocks(24))


def test_parts_of_two_snapshots_and_deltas_between_parts_are_gaps() -> None:
    residency = Residency(ResidencyConfig())
    residency.begin(WorkerRef("d0", 1), SEED, 4)
    feed(residency, link.Snapshot(5, [], last=False))
    with pytest.raises(Gap, match="inside snapshot 5"):
        feed(residency, link.Snapshot(6, [], last=True))
    with pytest.raises(Gap, match="between two parts"):
        feed(residency, link.Delta(6, []))
    assert residency.view() is None


@pytest.mark.parametrize("token_bytes", [0, 15, 17, 32])
def test_tokens_that_are_no_whole_pages_are_a_gap(token_bytes: int) -> None:
    """F76: an engine that reports nonsense is asked for a snapshot, and no page is cut wrong."""
    residency = living()
    with pytest.raises(Gap, match="1 pages of 4 tokens"):
        feed(residency, link.Delta(1, [link.PageStored([7], 0, bytes(token_bytes))]))
    assert residency.resident_blocks == 0


def test_a_long_run_is_taken_in_steps() -> None:
    pages, count = Pages(1), STEP_PAGES * 2 + 5
    run = pages.store(list(range(count)))
    assert run is not None
    residency = living(Pages(1))
    assert len(list(residency.apply(link.Delta(1, [run])))) == 3
    assert residency.resident_blocks == count // 24
    assert set(residency._blocks.blocks()) == set(chain(list(range(count))))


def test_pages_under_an_unknown_parent_are_not_credited() -> None:
    residency = living()
    feed(residency, link.Delta(1, [link.PageStored([7], 12345, pack_tokens([1, 2, 3, 4]) * 1)]))
    assert residency.resident_blocks == 0
    assert not residency.has_news


async def test_a_follower_waits_for_news_and_hears_the_end() -> None:
    pages = Pages()
    residency = living(pages)
    with residency.follow() as follower:
        model = FollowerModel()
        model.apply(await anext(follower))
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        assert not waiting.done()
        feed(residency, link.Delta(1, stored(pages, PROMPT)))
        residency.flush()
        model.apply(await waiting)
        assert model.blocks == pages.blocks(24)
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        residency.end(Unavailable("the engine is away", reason="ENGINE_AWAY"))
        with pytest.raises(Unavailable, match="away"):
            await waiting


async def test_a_follower_that_came_before_the_snapshot_is_woken_by_it() -> None:
    residency = Residency(ResidencyConfig())
    residency.begin(WorkerRef("p0", 1), SEED, 4)
    with residency.follow() as follower:
        waiting = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        residency.install_empty()
        message = await waiting
    assert message.snapshot.block_hashes == b""
    assert not message.snapshot.more
