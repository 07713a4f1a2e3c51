"""Algorithm 2: the decision alone, and the whole admission path of the reference engine (parse, match, decide, ticket)."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.report import Row
from bench.timing import always, repeated, time_calls
from bench.world import BLOCK_TOKENS, RESERVE_TOKENS, random_chain
from kvc.core.admit import admit
from kvc.core.blocks import hash_chain, pack_hashes
from kvc.core.params import params_for
from kvc.core.types import Facts, PrefillOffer, Turn
from kvc.engine import link
from kvc.engine.reference.config import EngineConfig
from kvc.engine.reference.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.core.blocks import Chain

NAME = "admit"
BATCH = 100


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    prompt_tokens: int = 100_000
    append_tokens: int = 2_000
    capacity_tokens: int = 400_000
    calls: int = 200
    rounds: int = 5


def measure(size: Size | None = None) -> list[Row]:
    """All rows."""
    size = size or Size()
    turn = Turn(
        session_id="session",
        turn_index=3,
        chain=random_chain(random.Random(1), size.prompt_tokens // BLOCK_TOKENS),
        input_tokens=size.prompt_tokens,
        output_reserve_tokens=RESERVE_TOKENS,
        known_session=True,
    )
    params = params_for("default")
    offer = PrefillOffer(0.1, 7000.0, 20000.0)
    direct = Facts(size.capacity_tokens, evictable_tokens=size.prompt_tokens, matched_tokens=size.prompt_tokens - size.append_tokens)
    empty = Facts(size.capacity_tokens)
    full = Facts(size.capacity_tokens, held_tokens=size.capacity_tokens)
    cases = (("direct", direct), ("reseed, executor by cost", empty), ("refused, no room", full))
    nothing = time_calls(always(repeated(partial(_nothing, direct, turn, params, offer), BATCH)), size.calls, size.rounds, BATCH)
    rows = []
    core_us = 0.0
    for name, facts in cases:
        timing = time_calls(always(repeated(partial(admit, facts, turn, params, offer), BATCH)), size.calls, size.rounds, BATCH)
        core_us = core_us or timing.p50_us
        rows.append(Row(NAME, f"core, {name}, p50", timing.p50_us, "µs", baseline=nothing.p50_us, baseline_name="a call that does nothing"))
    return rows + _engine_rows(size, core_us)


def _nothing(*_: object) -> None:
    """The baseline."""


def _engine_rows(size: Size, core_us: float) -> list[Row]:
    engine = Engine(EngineConfig(role="decode", kv_tokens=size.capacity_tokens), params_for("default"))
    tokens = random.Random(2).randbytes(4 * size.prompt_tokens)
    chain = hash_chain(tokens, BLOCK_TOKENS, engine.hash_seed)
    cold = time_calls(_ready(engine, chain, size), size.calls, size.rounds)
    pages = (size.prompt_tokens - size.append_tokens) // engine.config.page_tokens
    engine.tree.insert(tokens, pages, 0, array("Q", bytes(8 * pages)))
    warm = time_calls(_ready(engine, chain, size), size.calls, size.rounds)
    blocks = f"{len(chain):,} blocks"
    return [
        Row(
            NAME,
            f"engine, {blocks}, {name}, p50",
            timing.p50_us,
            "µs",
            baseline=core_us,
            baseline_name="core, direct",
            detail=timing.detail,
        )
        for name, timing in (("direct", warm), ("nothing resident", cold))
    ]


def _ready(engine: Engine, chain: Chain, size: Size) -> Callable[[int], Callable[[], object]]:
    """Prepares one Admit at the engine's desk; the ticket of the one before is given back first."""
    packed = pack_hashes(chain)
    requests = 0

    def prepare(_: int) -> Callable[[], object]:
        nonlocal requests
        requests += 1
        for rid in list(engine.desk.tickets):
            engine.desk.release(rid)
        body = link.Admit(f"request-{requests}", 0, "session", 1, size.prompt_tokens, RESERVE_TOKENS, packed, known_session=True)
        return partial(_admitted, engine, body)

    return prepare


def _admitted(engine: Engine, body: link.Admit) -> None:
    answer = engine.desk.admit(body)
    assert isinstance(answer, link.Admitted), f"an idle engine takes the turn: {answer}"
