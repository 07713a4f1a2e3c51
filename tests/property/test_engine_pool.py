"""Whatever is asked of an engine in whatever order, its books balance, promises stay within rho K, and its replies are right."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc.core.blocks import hash_chain, pack_hashes, pack_tokens
from kvc.core.params import params_for
from kvc.core.types import Attempt
from kvc.engine import kvvalue, link
from kvc.engine.hop import hop_rid
from kvc.engine.reference.engine import Engine
from kvc.engine.reference.faults import HopRefused
from kvc.engine.reference.request import Phase, Request
from kvc.errors import KvcError
from kvc.runtime.clock import ManualClock
from tests.support.engines import config

SESSIONS = 4


class Driver:
    """Drives an engine by hand: no loop, no sockets, time by hand."""

    def __init__(self, seed: int, page: int, profile: Literal["paper", "default"] = "default") -> None:
        self.random = random.Random(seed)
        self.wall = ManualClock()
        settings_ = config(kv_tokens=600, page_tokens=page, block_tokens=8, chunk_tokens=64, queue_limit=5, max_running_requests=6)
        self.engine = Engine(settings_, params_for(profile, block_tokens=8, tau_append_tokens=100, ticket_ttl_s=3.0), self.wall)
        self.history: dict[str, list[int]] = {}
        self.open: list[Request] = []
        self.admitted: list[tuple[str, str, list[int], int]] = []
        self.count = 0
        self.checked = 0
        self.hops: dict[str, int] = {}

    def prompt(self, session: str) -> list[int]:
        before = self.history.get(session, [])
        if len(before) > 350 or self.random.random() < 0.1:
            before = before[: self.random.randint(0, len(before))][:200]
        return before + [self.random.randint(1, 50) for _ in range(self.random.randint(1, 60))]

    def admit(self) -> None:
        session = f"s{self.random.randrange(SESSIONS)}"
        ids, reserve = self.prompt(session), self.random.randint(1, 40)
        answer = self.ask(session, ids, reserve, known_session=False)
        if isinstance(answer, link.Admitted):
            self.admitted.append((answer.ticket, session, ids, reserve))

    def ask(self, session: str, ids: list[int], reserve: int, *, known_session: bool) -> link.Admitted | link.Refused:
        self.count += 1
        chain = pack_hashes(hash_chain(pack_tokens(ids), 8, self.engine.hash_seed))
        new = max(0, len(ids) - len(self.history.get(session, [])))
        return self.engine.desk.admit(link.Admit(f"r{self.count}", 0, session, 0, len(ids), reserve, chain, known_session, new))

    def hop(self) -> None:
        """TICKET-5: a request that asks for its own admission is taken if and only if Admit says Direct at that moment."""
        session = f"s{self.random.randrange(SESSIONS)}"
        ids, count = self.prompt(session), self.random.randint(1, 40)
        self.engine.desk.expire()
        self.engine.scheduler.start_waiting()
        answer = self.ask(session, ids, count, known_session=True)
        if isinstance(answer, link.Admitted):
            self.engine.desk.release(answer.ticket)
        before = self.books()
        request = Request(
            hop_rid(self.engine.identity.epoch, Attempt(f"r{self.count}", 1)), pack_tokens(ids), count, kvvalue.IDS_VOCAB, session
        )
        refused = None
        try:
            self.engine.submit(request)
        except HopRefused as error:
            refused = error.answer
        if refused is None:
            self.open.append(request)
        else:
            assert refused["append_tokens"] == len(ids) - answer.facts.matched_tokens
            assert self.books() == before, "a refusal holds nothing"
        outcome = "direct" if refused is None else refused["reason"]
        expected = answer.reason if isinstance(answer, link.Refused) else answer.mode
        assert outcome == (expected if expected == "direct" or isinstance(answer, link.Refused) else "not-direct")
        self.hops[outcome] = self.hops.get(outcome, 0) + 1

    def books(self) -> object:
        pool, sessions = self.engine.pool, self.engine.sessions
        owners = [sessions.owner(f"s{index}") for index in range(SESSIONS)]
        return pool.used_pages, pool.leases, len(self.engine.inflight), list(self.engine.desk.tickets), owners

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


OPERATIONS = ("admit", "admit", "arrive", "arrive", "plain", "step", "step", "step", "release", "abort", "expire", "flush", "hop", "hop")


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    page=st.sampled_from([1, 4, 16]),
    profile=st.sampled_from(["paper", "default"]),
    steps=st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=60),
)
def test_books_balance_after_any_operations(seed: int, page: int, profile: Literal["paper", "default"], steps: list[str]) -> None:
    """F18, F58, F69 at the level of one engine: no order of events leaks memory, over-commits, wedges, or answers wrongly."""
    driver = Driver(seed, page, profile)
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


@pytest.mark.parametrize("profile", ["paper", "default"])
def test_a_hop_is_decided_as_an_admit_is(profile: Literal["paper", "default"]) -> None:
    """TICKET-5: 1,500 operations; both answers and most reasons occur, and each is what Admit says at that moment."""
    driver = Driver(seed=3, page=16, profile=profile)
    choose = random.Random(8)
    for _ in range(1500):
        getattr(driver, choose.choice(("hop", "hop", "admit", "arrive", "plain", "step", "step", "abort", "expire")))()
        driver.check()
    driver.finish()
    assert driver.hops == {name: count for name, count in driver.engine.desk.hops.items() if count}
    assert {"direct", "not-direct", "session-busy", "no-d-capacity"} <= set(driver.hops), driver.hops
