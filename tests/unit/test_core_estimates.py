"""Σ and Algorithm 1 about prompts that are known by their bytes: only what a worker confirmed for the session counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvc.core import events as ev
from kvc.core.dispatch import Admitted, Ask
from kvc.core.params import Params
from kvc.core.prefill import matched_tokens
from kvc.core.route import route
from kvc.core.state import Sigma
from kvc.core.types import Attempt, Executor, Facts, Mode, WorkerRef
from kvc.wire import admit_request_to_pb
from services.router.door.admission import local_answer
from tests.support.builders import run, turn, worker

if TYPE_CHECKING:
    from array import array

    from kvc.core.types import Turn

D0, D1 = WorkerRef("D0", 1), WorkerRef("D1", 1)
HISTORY = run("p", 10)


def mesh() -> Sigma:
    sigma = Sigma(Params())
    for ref in (D0, D1):
        sigma.apply(ev.WorkerJoined(worker(ref.worker_id)))
        sigma.apply(ev.ResidencyReset(ref, ()))
        sigma.apply(ev.LoadReported(ref, Facts(92_104)))
    return sigma


def arrive(sigma: Sigma, chain: array[int], tokens: int, *, session: str = "s", estimated: bool = True) -> Turn:
    sigma.apply(ev.TurnArrived(session, chain, tokens, estimated))
    return sigma.turn(session, chain, tokens, 8)


def complete(sigma: Sigma, ref: WorkerRef = D0, *, session: str = "s", end: ev.End = ev.End.COMPLETED, number: int = 0) -> None:
    attempt = Attempt(session, number)
    sigma.apply(ev.Started(attempt, session, ref, Mode.SEED, Executor.LOCAL, 100))
    sigma.apply(ev.TurnEnded(attempt, end, 300, 7))
    sigma.check_integrity()


def overlap(sigma: Sigma, of: Turn, ref: WorkerRef) -> int:
    found = sigma.worker(ref)
    assert found is not None
    return matched_tokens(of, found)


def test_a_completed_turn_confirms_its_prompt() -> None:
    sigma = mesh()
    first = arrive(sigma, HISTORY, 300)
    assert (first.confirmed, first.new_tokens, overlap(sigma, first, D0)) == ({}, 300, 0)
    complete(sigma)
    following = arrive(sigma, run("q", 2, HISTORY), 360)
    assert following.confirmed == {D0: 10}
    assert overlap(sigma, following, D0) == 10 * 360 // 12, "a block of bytes is its share of the estimated length"
    assert following.new_tokens == 60
    assert overlap(sigma, following, D1) == 0
    assert route(following, sigma).ref == D0


@pytest.mark.parametrize("end", [ev.End.FAILED, ev.End.CANCELLED])
def test_what_was_not_completed_confirms_nothing(end: ev.End) -> None:
    sigma = mesh()
    arrive(sigma, HISTORY, 300)
    complete(sigma, end=end)
    assert arrive(sigma, HISTORY, 300).confirmed == {}


def test_a_rewrite_keeps_the_longest_common_prefix() -> None:
    sigma = mesh()
    arrive(sigma, HISTORY, 300)
    complete(sigma)
    rewritten = arrive(sigma, run("other", 6, HISTORY[:4]), 300)
    assert (rewritten.confirmed, rewritten.new_tokens) == ({D0: 4}, 180)
    complete(sigma, D1, number=1)
    again = arrive(sigma, HISTORY, 300)
    assert again.confirmed == {D0: 4, D1: 4}, "D0 may still hold all of it, but nobody says so"
    assert arrive(sigma, run("else", 5), 300).confirmed == {}


def test_residency_is_never_compared() -> None:
    """Not even by accident: a worker that reports these very hashes holds nothing of the prompt, and nothing is written among its own."""
    sigma = mesh()
    sigma.apply(ev.ResidencyReset(D1, tuple(HISTORY)))
    sigma.apply(ev.ResidencyStale(D0))
    first = arrive(sigma, HISTORY, 300)
    assert overlap(sigma, first, D1) == 0
    complete(sigma)
    assert sigma.workers["D0"].resident == set()
    following = arrive(sigma, run("q", 2, HISTORY), 360)
    assert route(following, sigma).ref == D0
    assert following.confirmed == {D0: 10}


def test_a_session_of_tokens_confirms_nothing_and_the_other_way_round() -> None:
    sigma = mesh()
    arrive(sigma, HISTORY, 240, estimated=False)
    complete(sigma)
    of_bytes = arrive(sigma, HISTORY, 300)
    assert of_bytes.confirmed == {}
    complete(sigma, number=1)
    of_tokens = arrive(sigma, HISTORY, 240, estimated=False)
    assert of_tokens.confirmed is None
    assert overlap(sigma, of_tokens, D0) == 0


@pytest.mark.parametrize(
    "lost",
    [
        (ev.ResidencyChanged(D0, cleared=True),),
        (ev.WorkerJoined(worker("D0", 2)),),
        (ev.WorkerLeft("D0"), ev.WorkerJoined(worker("D0"))),
    ],
    ids=["flushed", "new life", "left"],
)
def test_what_a_worker_has_lost_is_confirmed_no_more(lost: tuple[ev.Event, ...]) -> None:
    sigma = mesh()
    arrive(sigma, HISTORY, 300)
    complete(sigma)
    for event in lost:
        sigma.apply(event)
    assert arrive(sigma, HISTORY, 300).confirmed == {}


def test_a_forgotten_chain_confirms_nothing() -> None:
    sigma = mesh()
    arrive(sigma, HISTORY, 300)
    complete(sigma)
    sigma.forest.remove("s")
    assert arrive(sigma, HISTORY, 300).confirmed == {}


def test_the_next_turn_is_direct_by_the_routers_own_numbers() -> None:
    sigma = mesh()
    arrive(sigma, HISTORY, 300)
    complete(sigma)
    following = arrive(sigma, run("q", 2, HISTORY), 360)
    answer = local_answer(Ask(D0, Attempt("r", 1), following, None), sigma.workers["D0"], sigma.params)
    assert isinstance(answer, Admitted)
    assert (answer.admission.mode, answer.admission.append_tokens) == (Mode.DIRECT, 60)


def test_workers_are_told_lengths_only() -> None:
    estimated = turn(chain=HISTORY, input_tokens=300, confirmed={D0: 4}, new_tokens=180)
    told = admit_request_to_pb(Attempt("r", 0), D0, estimated, None).turn
    assert (told.block_hashes, told.input_tokens, told.new_tokens) == (b"", 300, 180)
    assert admit_request_to_pb(Attempt("r", 0), D0, turn(chain=HISTORY), None).turn.block_hashes == HISTORY.tobytes()
