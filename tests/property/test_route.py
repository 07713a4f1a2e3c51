"""Algorithm 1 against the paper's text over sets, for both profiles, and Theorem 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvc.core import events as ev
from kvc.core.admit import admit
from kvc.core.params import Params, params_for
from kvc.core.route import explain, route
from kvc.core.state import Sigma
from kvc.core.types import Admission, Attempt, Executor, Facts, Mode, Reason, WorkerRef
from tests.support.builders import run, worker
from tests.support.logs import DECODE, chains, decode_refs, logs, sessions
from tests.support.slow_sigma import fold

if TYPE_CHECKING:
    from array import array

pytestmark = pytest.mark.timeout(900)  # thousands of cases, on a shared machine

PROFILES = st.sampled_from(
    [
        params_for("paper"),
        params_for("default"),
        params_for("default", shared_after=1, alpha=2.5),
        params_for("default", overlap="full", load_floor_bonus=1.0),
        params_for("paper", alpha=0.0, tau_reject=1),
    ]
)


@settings(max_examples=1500)
@given(
    params=PROFILES,
    log=logs(),
    session=sessions,
    chain=chains,
    exclude=st.frozensets(decode_refs, max_size=3),
)
def test_route_equals_the_papers_text(
    params: Params, log: list[ev.Event], session: str, chain: array[int], exclude: frozenset[WorkerRef]
) -> None:
    """ROUTE-1 to ROUTE-8: the bisected, incremental Route chooses what Algorithm 1 chooses over plain sets."""
    log = [*log, ev.TurnArrived(session, chain, len(chain) * 24)]
    sigma, slow = Sigma(params), fold(params, log)
    for event in log:
        sigma.apply(event)
    asked = sigma.turn(session, chain, len(chain) * 24, 0)
    expected = slow.route(asked, exclude)
    routing = route(asked, sigma, exclude)
    assert routing.ref == expected
    if expected is None:
        assert slow.eligible() == [] or set(slow.eligible()) <= exclude
        return
    assert routing.overlap_blocks == slow.overlap(asked, expected)
    assert routing.degenerate == (slow.rejects[session, expected.worker_id] >= params.tau_reject)
    rows = explain(asked, sigma, exclude)
    assert {row.ref for row in rows} == {info.ref for info in slow.lives.values() if info.role.keeps_sessions}
    for row in rows:
        assert row.score == slow.score(asked, row.ref)
        assert row.rejects == slow.rejects[session, row.ref.worker_id]
    if not routing.degenerate:
        assert rows[0].excluded == ""
        assert rows[0].score == slow.score(asked, expected)
    candidates = {row.ref for row in rows if not row.excluded}
    assert candidates == {d for d in slow.eligible() if d not in exclude and slow.rejects[session, d.worker_id] < params.tau_reject}


@st.composite
def warm_sessions(draw: st.DrawFn) -> tuple[Sigma, str, array[int], WorkerRef]:
    """A Σ in which session s was served by d, which holds its whole prefix; anything is resident elsewhere; others share prefixes."""
    overlap = draw(st.sampled_from(["exclusive", "full"]))
    params = params_for("default", overlap=overlap, shared_after=draw(st.integers(1, 4)))
    sigma = Sigma(params)
    system = run("system", draw(st.integers(0, 4)))
    prefix = run("own", draw(st.integers(1, 12)), system)
    home = WorkerRef(draw(st.sampled_from(DECODE)), 1)
    sigma.apply(ev.TurnArrived("s", prefix, len(prefix) * 24))
    for worker_id in DECODE:
        sigma.apply(ev.WorkerJoined(worker(worker_id)))
        known = prefix if worker_id == home.worker_id else prefix[: draw(st.integers(0, len(prefix)))]
        sigma.apply(ev.ResidencyReset(WorkerRef(worker_id, 1), tuple(known) + tuple(run(f"noise{worker_id}", 3))))
        for _ in range(draw(st.integers(0, 3))):
            sigma.apply(
                ev.Refused("s", WorkerRef(worker_id, 1), draw(st.sampled_from([reason for reason in Reason if reason.counts_as_reject])))
            )
    for number in range(draw(st.integers(0, 6))):
        other = f"other{number}"
        sigma.apply(ev.TurnArrived(other, prefix[: draw(st.integers(0, len(prefix)))], 10))
        where = WorkerRef(draw(st.sampled_from(DECODE)), 1)
        sigma.apply(ev.Started(Attempt(other, 0), other, where, Mode.SEED, Executor.LOCAL, tokens=draw(st.integers(0, 90_000))))
    sigma.apply(ev.Started(Attempt("s", 0), "s", home, Mode.DIRECT, Executor.LOCAL, tokens=100))
    sigma.apply(ev.TurnEnded(Attempt("s", 0), ev.End.COMPLETED, prompt_tokens=len(prefix) * 24))
    return sigma, "s", prefix, home


@settings(max_examples=600)
@given(case=warm_sessions(), append=st.integers(0, 400), tail=st.integers(0, 23), evictable=st.integers(0, 40_000))
def test_theorem_2_a_warm_session_runs_direct_where_its_kv_is(
    case: tuple[Sigma, str, array[int], WorkerRef], append: int, tail: int, evictable: int
) -> None:
    """THM-2: prefix resident on the pinned, eligible, not blacklisted d; append at most tau_append; room on d: Direct(d)."""
    sigma, session, prefix, home = case
    chain = run("append", append, prefix)
    input_tokens = len(chain) * 24 + tail
    assume(input_tokens - len(prefix) * 24 <= sigma.params.tau_append_tokens)
    sigma.apply(ev.TurnArrived(session, chain, input_tokens))
    asked = sigma.turn(session, chain, input_tokens, 256)
    assert route(asked, sigma).ref == home
    facts = Facts(92_104, evictable_tokens=evictable + len(prefix) * 24, matched_tokens=len(prefix) * 24, session_resident=True)
    outcome = admit(facts, asked, sigma.params, None)
    assert isinstance(outcome, Admission)
    assert outcome.mode is Mode.DIRECT
