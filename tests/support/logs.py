"""Hypothesis strategies for event logs of a small mesh: four decode workers, two prefill workers, six sessions, two epochs each."""

from __future__ import annotations

from hypothesis import strategies as st

from kvc.core import events as ev
from kvc.core.types import Attempt, Executor, Facts, Mode, Reason, Role, WorkerRef
from tests.support.builders import blocks, worker

DECODE = ("D0", "D1", "D2", "D3")
PREFILL = ("P0", "P1")
SESSIONS = ("session-1", "session-12", "a", "b", "c", "d")

decode_refs = st.builds(WorkerRef, st.sampled_from(DECODE), st.sampled_from([1, 1, 1, 2]))
prefill_refs = st.builds(WorkerRef, st.sampled_from(PREFILL), st.sampled_from([1, 1, 1, 2]))
refs = decode_refs | prefill_refs
sessions = st.sampled_from(SESSIONS)
attempts = st.builds(Attempt, st.sampled_from([f"r{number}" for number in range(8)]), st.integers(0, 1))
# Two words make prefixes that many sessions and workers share.
chains = st.lists(st.sampled_from("xy"), max_size=7).map(lambda words: blocks(*words))
residency = st.lists(chains, max_size=3).map(lambda paths: tuple(sorted({block for path in paths for block in path})))
facts = st.builds(Facts, capacity_tokens=st.just(1000), held_tokens=st.integers(0, 1000), queued_tokens=st.integers(0, 500))


@st.composite
def joins(draw: st.DrawFn) -> ev.WorkerJoined:
    ref = draw(refs)
    role = Role.PREFILL if ref.worker_id in PREFILL else draw(st.sampled_from([Role.DECODE, Role.MONOLITHIC]))
    capacity = draw(st.sampled_from([1000, 2000]))
    return ev.WorkerJoined(worker(ref.worker_id, ref.epoch, role=role, capacity_tokens=capacity, draining=draw(st.integers(0, 9)) == 0))


@st.composite
def starts(draw: st.DrawFn) -> ev.Started:
    remote = draw(st.booleans())
    return ev.Started(
        attempt=draw(attempts),
        session_id=draw(sessions),
        ref=draw(decode_refs),
        mode=draw(st.sampled_from(Mode)),
        executor=Executor.PREFILL if remote else Executor.LOCAL,
        tokens=draw(st.integers(0, 900)),
        prefill=draw(prefill_refs) if remote else None,
        prefill_tokens=draw(st.integers(0, 900)) if remote else 0,
    )


rare_events = st.one_of(
    joins(),
    st.builds(ev.WorkerLeft, st.sampled_from(DECODE + PREFILL)),
    st.builds(ev.WorkerHealth, refs, st.booleans()),
    st.builds(ev.WorkerDraining, st.sampled_from(DECODE + PREFILL), st.booleans()),
    st.builds(ev.WorkerUnreachable, refs, st.booleans()),
    st.builds(ev.SessionClosed, sessions),
)
common_events = st.one_of(
    st.builds(ev.ResidencyReset, refs, residency),
    st.builds(ev.LoadReported, refs, facts),
    st.builds(ev.TurnArrived, sessions, chains, st.integers(0, 500)),
    st.builds(ev.Assigned, decode_refs),
    st.builds(ev.Asked, attempts, decode_refs, st.booleans()),
    st.builds(ev.Answered, attempts, st.none() | facts),
    starts(),
    starts(),
    st.builds(ev.PrefillDone, attempts),
    st.builds(ev.Refused, sessions, decode_refs, st.sampled_from(Reason)),
    st.builds(ev.Refused, sessions, decode_refs, st.just(Reason.NO_D_CAPACITY)),
    st.builds(ev.TurnEnded, attempts, st.sampled_from(ev.End), st.integers(0, 500), st.integers(0, 100)),
)
events = st.integers(0, 9).flatmap(lambda number: rare_events if number == 0 else common_events)


@st.composite
def logs(draw: st.DrawFn, max_size: int = 40) -> list[ev.Event]:
    """A mesh of all workers with fresh residency and some sessions, then anything."""
    opening: list[ev.Event] = []
    for worker_id in DECODE + PREFILL:
        role = Role.PREFILL if worker_id in PREFILL else Role.DECODE
        opening.append(ev.WorkerJoined(worker(worker_id, role=role, capacity_tokens=1000)))
        opening.append(ev.ResidencyReset(WorkerRef(worker_id, 1), draw(residency)))
    opening += [ev.TurnArrived(session, draw(chains), 24) for session in SESSIONS[:4]]
    return opening + draw(st.lists(events, max_size=max_size))
