"""Whatever is asked of an engine in whatever order, its books balance, promises stay within rho K, and its replies are right."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvc.core.blocks import hash_chain, pack_hashes, pack_tokens
from kvc.core.params import params_for
from kvc.engine import kvvalue, link
from kvc.engine.reference.engine import Engine
from kvc.engine.reference.request import Phase, Request
from kvc.errors import KvcError
from kvc.runtime.clock import ManualClock
from tests.support.engines import config

SESSIONS = 4


class Driver:
    """Drives an engine by hand: no loop, no sockets, time by hand."""

    def __init__(self, seed: int, page: int) -> None:
        self.random = random.Random(seed)
        self.wall = ManualClock()
        settings_ = config(kv_tokens=600, page_tokens=page, block_tokens=8, chunk_tokens=64, queue_limit=5, max_running_requests=6)
        self.engine = Engine(settings_, params_for("default", block_tokens=8, tau_append_tokens=100, ticket_ttl_s=3.0), self.wall)
        self.history: dict[str, list[int]] = {}
        self.open: list[Request] = []
        self.admitted: list[tuple[str, str, list[int], int]] = []
        self.count = 0
        self.checked = 0

    def prompt(self, session: str) -> list[int]:
        before = self.history.get(session, [])
        if len(before) > 350 or self.random.random() < 0.1:
            before = before[: self.random.randint(0, len(before))][:200]
        return before + [self.random.randint(1, 50) for _ in range(self.random.randint(1, 60))]

    def admit(self) -> None:
        session, self.count = f"s{self.random.randrange(SESSIONS)}", self.count + 1
        ids, reserve = self.prompt(session), self.random.randint(1, 40)
        chain = hash_chain(pack_tokens(ids), 8, self.engine.hash_seed)
        answer = self.engine.desk.admit(link.Admit(f"r{self.count}", 0, session, 0, len(ids), reserve, pack_hashes(chain)))
        if isinstance(answer, link.Admitted):
            self.admitted.append((answer.ticket, session, ids, reserve))

    def arrive(self) -> None:
        if self.admitted:
            rid, session, ids, reserve = self.admitted.pop(self.random.randrange(len(self.admitted)))
            open_before = rid in self.engine.desk.tickets and self.engine.desk.tickets[rid].expires_s > self.wall.now_s()
            assert self.submit(rid, session, ids, self.random.randint(1, reserve)) == open_before, "a ticket is worth its promise"

    def plain(self) -> None:
        self.count += 1
        session = f"s{self.random.randrange(SESSIONS)}" if self.random.random() < 0.7 else ""
        self.submit(f"plain-{self.count}", session, self.prompt(session), self.random.randint(1, 40))

    def submit(self, rid: str, session: str, ids: list[int], count: int) -> bool:
        request = Request(rid, pack_tokens(ids), count, kvvalue.IDS_VOCAB, session)
        try:
            self.engine.submit(request)
        except KvcError:
            return False
        self.open.append(request)
        return True

    def release(self) -> None:
        if self.admitted:
            self.engine.desk.release(self.admitted.pop()[0])

    def abort(self) -> None:
        if self.open:
            request = self.random.choice(self.open)
            record = self.engine.sessions.get(request.session_id)
            before = record and (record.committed_tokens, record.generation)
            self.engine.end(request, aborted="test")
            after = self.engine.sessions.get(request.session_id)
            assert before == (after and (after.committed_tokens, after.generation)), "F70: an aborted turn commits nothing"

    def step(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            scheduler = self.engine.scheduler
            scheduler.start_waiting()
            if scheduler.busy:
                scheduler.step(self.random.choice([0.0, 0.01, 1.0]))
            if self.random.random() < 0.7:
                scheduler.settle(self.wall.now_s(), 0.0)
            self.reap()

    def expire(self) -> None:
        self.wall.advance(self.random.choice([0.5, 4.0]))
        self.engine.desk.expire()

    def flush(self) -> None:
        if not self.engine.inflight and not self.engine.desk.tickets:
            self.engine.flush()

    def reap(self) -> None:
        for request in [request for request in self.open if request.phase is Phase.DONE]:
            self.open.remove(request)
            self.engine.forget(request)
            ids = list(memoryview(request.prompt).cast("I"))
            expected = kvvalue.expected_output(request.prompt, len(request.output), request.vocab, self.engine.salt)
            assert request.output == expected, "the reply is a function of the whole context"
            self.checked += 1
            if not request.aborted and request.session_id:
                self.history[request.session_id] = ids + request.output

    def check(self) -> None:
        self.engine.pool.check()
        facts = self.engine.desk.facts()
        assert facts.held_tokens + facts.reserved_tokens <= 0.95 * facts.capacity_tokens
        assert self.engine.pool.leases == self.engine.scheduler.active + len(self.engine.desk.tickets)
        assert self.engine.pool.leases <= self.engine.config.max_running_requests

    def finish(self) -> None:
        self.wall.advance(10.0)
        self.engine.desk.expire()
        for _ in range(2000):
            self.engine.scheduler.start_waiting()
            if not self.open:
                break
            if self.engine.scheduler.busy:
                self.engine.scheduler.step(1.0)
            self.engine.scheduler.settle(self.wall.now_s(), 0.0)
            self.reap()
        assert not self.open, "everything that has not been aborted completes"
        assert self.engine.pool.used_pages == self.engine.pool.leases == 0
        assert not any(self.engine.sessions.owner(f"s{index}") for index in range(SESSIONS))


OPERATIONS = ("admit", "admit", "arrive", "arrive", "plain", "step", "step", "step", "release", "abort", "expire", "flush")


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), page=st.sampled_from([1, 4, 16]), steps=st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=60))
def test_books_balance_after_any_operations(seed: int, page: int, steps: list[str]) -> None:
    """F18, F58, F69 at the level of one engine: no order of events leaks memory, over-commits, wedges, or answers wrongly."""
    driver = Driver(seed, page)
    for name in steps:
        getattr(driver, name)()
        driver.reap()
        driver.check()
    driver.finish()
    driver.check()


def test_long_random_run_reuses_and_evicts() -> None:
    """F16: 1,500 operations with reuse, divergence and eviction; every reply is checked against the pure function."""
    driver = Driver(seed=11, page=16)
    choose = random.Random(5)
    for _ in range(1500):
        getattr(driver, choose.choice(("admit", "arrive", "plain", "step", "step", "expire")))()
        driver.check()
    driver.finish()
    assert driver.checked > 200
    assert driver.engine.pool.evicted_pages > 50
