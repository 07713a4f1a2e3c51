"""docs/spec.md, Who prefills: one example a line."""

from __future__ import annotations

from typing import Any

import pytest

from kvc.core import events as ev
from kvc.core.cost import choose_executor, local_cost_s, remote_cost_s
from kvc.core.params import params_for
from kvc.core.prefill import prefill_offer
from kvc.core.state import Sigma
from kvc.core.types import Attempt, Executor, Facts, Mode, PrefillOffer, Role, WorkerRef
from tests.support.builders import run, turn, worker

PARAMS = params_for("default", tau_append_tokens=100)
OFFER = PrefillOffer(backlog_s=0.0, prefill_tokens_per_s=1000.0, transfer_tokens_per_s=10_000.0)


def facts(**fields: Any) -> Facts:
    return Facts(10_000, prefill_tokens_per_s=1000.0, **fields)


def test_cost_1() -> None:
    """COST-1: "Without a prefill worker, or on a monolithic worker: local"."""
    assert choose_executor(facts(prefill_backlog_s=99.0), 5000, PARAMS, None) is Executor.LOCAL
    assert choose_executor(facts(), 5000, params_for("paper"), None) is Executor.LOCAL
    sigma = Sigma(PARAMS)
    sigma.apply(ev.WorkerJoined(worker("D", role=Role.MONOLITHIC)))
    assert prefill_offer(turn(), sigma, sigma.workers["D"]) == (None, None)
    sigma.apply(ev.WorkerJoined(worker("P", role=Role.PREFILL)))
    assert prefill_offer(turn(), sigma, sigma.workers["D"]) == (None, None)


def test_cost_2() -> None:
    """COST-2: "append ≤ τ_append: local"."""
    busy = facts(prefill_backlog_s=99.0, matched_tokens=400, host_matched_tokens=500)
    assert choose_executor(busy, 1000, PARAMS, OFFER) is Executor.LOCAL
    assert choose_executor(busy, 1001, PARAMS, OFFER) is Executor.PREFILL


def test_cost_3() -> None:
    """COST-3: "own backlog + append ÷ speed · (1 + `interference` · running) + load-back"; "Only the suffix that d lacks travels"."""
    here = facts(prefill_backlog_s=1.0, running=2, load_back_s=0.25, matched_tokens=1000, host_matched_tokens=500)
    assert local_cost_s(here, 2000, PARAMS) == pytest.approx(1.0 + 2.0 * 1.6 + 0.25)
    there = PrefillOffer(0.5, 2000.0, 10_000.0, matched_tokens=1500)
    assert remote_cost_s(there, 3500, 1000, PARAMS) == pytest.approx(0.5 + 1.0 + 0.25 + 0.030)


@pytest.mark.parametrize(
    ("backlog_s", "executor"), [(0.0, Executor.LOCAL), (0.129, Executor.LOCAL), (0.1299, Executor.LOCAL), (0.1301, Executor.PREFILL)]
)
def test_cost_3_the_cheaper_side_wins(backlog_s: float, executor: Executor) -> None:
    """COST-3: equal speeds: P costs 0.1 s of transfer and 0.03 s of hand-over more, so D may have that much backlog."""
    assert choose_executor(facts(prefill_backlog_s=backlog_s), 1000, PARAMS, OFFER) is executor


def mesh(**overrides: Any) -> Sigma:
    sigma = Sigma(params_for("default", **overrides))
    sigma.apply(ev.WorkerJoined(worker("D", transfer_tokens_per_s=500.0)))
    for name in ("P0", "P1", "P2"):
        sigma.apply(ev.WorkerJoined(worker(name, role=Role.PREFILL, prefill_tokens_per_s=100.0, transfer_tokens_per_s=900.0)))
    sigma.apply(ev.TurnArrived("s", run("p", 10), 240))
    return sigma


def test_cost_4() -> None:
    """COST-4: "The offer comes from the prefill worker that would be done first"."""
    sigma = mesh()
    asked = sigma.turn("s", run("p", 10), 240, 0)
    sigma.apply(ev.LoadReported(WorkerRef("P0", 1), Facts(1, prefill_backlog_s=1.0)))
    sigma.apply(ev.LoadReported(WorkerRef("P2", 1), Facts(1, prefill_backlog_s=1.0)))
    chosen, offer = prefill_offer(asked, sigma, sigma.workers["D"])
    assert chosen is sigma.workers["P1"]
    assert offer == PrefillOffer(0.0, 100.0, 500.0, 0), "the slower end limits the transfer"
    # 1 s of backlog is less than the 1.92 s that eight resident blocks save.
    sigma.apply(ev.ResidencyReset(WorkerRef("P2", 1), tuple(run("p", 8))))
    chosen, offer = prefill_offer(asked, sigma, sigma.workers["D"])
    assert chosen is sigma.workers["P2"]
    assert offer == PrefillOffer(1.0, 100.0, 500.0, 192)
    chosen, _ = prefill_offer(asked, sigma, sigma.workers["D"], frozenset({WorkerRef("P2", 1)}))
    assert chosen is sigma.workers["P1"]
    sigma.apply(ev.WorkerHealth(WorkerRef("P1", 1), healthy=False))
    sigma.apply(ev.WorkerDraining("P2", draining=True))
    assert prefill_offer(asked, sigma, sigma.workers["D"])[0] is sigma.workers["P0"]


def test_f10_a_prefill_worker_that_takes_no_such_prompt_is_no_offer() -> None:
    """F10, COST-4: "among those that take prompts of this length"."""
    sigma = mesh()
    sigma.apply(ev.WorkerJoined(worker("P0", role=Role.PREFILL, max_input_tokens=239)))
    sigma.apply(ev.WorkerJoined(worker("P1", role=Role.PREFILL, max_input_tokens=240)))
    sigma.apply(ev.WorkerJoined(worker("P2", role=Role.PREFILL, max_input_tokens=0)))
    chosen, _ = prefill_offer(sigma.turn("s", run("p", 10), 240, 0), sigma, sigma.workers["D"])
    assert chosen is sigma.workers["P1"]
    longer = sigma.preview("s", run("p", 10), 241)
    assert prefill_offer(longer, sigma, sigma.workers["D"]) == (None, None)


def test_cost_4_paper() -> None:
    """COST-4: "`executor=prefill`: round robin, and P always prefills"."""
    sigma = mesh(executor="prefill")
    asked = sigma.turn("s", run("p", 10), 240, 0)
    names = []
    for number in range(4):
        chosen, offer = prefill_offer(asked, sigma, sigma.workers["D"])
        assert chosen is not None
        assert choose_executor(facts(), 240, sigma.params, offer) is Executor.PREFILL
        names.append(chosen.ref.worker_id)
        attempt = Attempt(f"r{number}", 0)
        sigma.apply(ev.Started(attempt, "s", WorkerRef("D", 1), Mode.SEED, Executor.PREFILL, 240, chosen.ref, 240))
        sigma.apply(ev.TurnEnded(attempt, ev.End.COMPLETED))
    assert names == ["P0", "P1", "P2", "P0"]


def test_r22_transfer_is_bytes_over_bandwidth() -> None:
    """R22: 98,304 B of KV a token at 200 Gb/s are 4 µs a token: 50K tokens take 0.2 s, not 0.2 ms."""
    speed = 200e9 / 8 / 98_304
    offer = PrefillOffer(0.0, 1e12, speed)
    assert remote_cost_s(offer, 50_000, 0, params_for("default", transfer_overhead_s=0.0)) == pytest.approx(0.2, rel=0.02)
