"""An engine by hand: no loop, no sockets, wall time by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from kvc.core.blocks import hash_chain, pack_hashes, pack_tokens
from kvc.core.params import params_for
from kvc.engine import kvvalue, link
from kvc.engine.reference.engine import Engine
from kvc.engine.reference.request import Phase, Request
from kvc.runtime.clock import ManualClock
from tests.support.engines import config


class Desk:
    """An engine by hand and its wall clock."""

    def __init__(self, profile: Any = "default", **fields: Any) -> None:
        self.wall = ManualClock()
        params = params_for(profile, ticket_ttl_s=5.0, tau_append_tokens=1000)
        self.engine = Engine(config(**({"kv_tokens": 6000, "page_tokens": 1} | fields)), params, self.wall)
        self.count = 0

    def admit(self, session: str, ids: list[int], reserve: int = 0, **fields: Any) -> link.Admitted | link.Refused:
        self.count += 1
        chain = hash_chain(pack_tokens(ids), self.engine.config.block_tokens, self.engine.hash_seed)
        body = link.Admit(f"r{self.count}", 0, session, 0, len(ids), reserve, pack_hashes(chain))
        return self.engine.desk.admit(msgspec.structs.replace(body, **fields))

    def admitted(self, session: str, ids: list[int], reserve: int = 0, **fields: Any) -> link.Admitted:
        answer = self.admit(session, ids, reserve, **fields)
        assert isinstance(answer, link.Admitted), answer
        return answer

    def refused(self, session: str, ids: list[int], reserve: int = 0, **fields: Any) -> link.Refused:
        answer = self.admit(session, ids, reserve, **fields)
        assert isinstance(answer, link.Refused), answer
        return answer

    def arrive(self, rid: str, ids: list[int], count: int, session: str = "") -> Request:
        request = Request(rid, pack_tokens(ids), count, kvvalue.IDS_VOCAB, session)
        self.engine.submit(request)
        return request

    def run(self, request: Request) -> Request:
        scheduler = self.engine.scheduler
        while request.phase is not Phase.DONE:
            scheduler.start_waiting()
            scheduler.step(1.0)
            scheduler.settle(0.0, 0.0)
        self.engine.forget(request)
        return request

    @property
    def used(self) -> int:
        self.engine.pool.check()
        return self.engine.pool.used_pages
