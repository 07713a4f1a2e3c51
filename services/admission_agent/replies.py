"""What the engine answers, checked: a reply of the wrong kind or out of range is the engine's fault, never the caller's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvc import checks
from kvc.engine import link
from kvc.engine.convert import check_outcome, facts_from_link
from kvc.errors import Internal, InvalidField
from kvc.v1 import admission_pb2
from kvc.wire import load_to_pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvc.v1 import types_pb2

ENGINE_PROTOCOL = "ENGINE_PROTOCOL"


def decision_of(reply: link.ReplyBody) -> link.Admitted | link.Refused:
    """The answer to Admit.

    Raises:
        Internal: it is none, or a field of it is out of its range.
    """
    if not isinstance(reply, (link.Admitted, link.Refused)):
        raise _odd("Admit", reply)
    try:
        check_outcome(reply)
    except InvalidField as error:
        raise _fault(error) from error
    return reply


def released_of(reply: link.ReplyBody) -> bool:
    """The answer to Release.

    Raises:
        Internal: it is none.
    """
    if isinstance(reply, link.Released):
        return reply.released
    raise _odd("Release", reply)


def load_of(reply: link.ReplyBody) -> types_pb2.WorkerLoad:
    """The answer to Load.

    Raises:
        Internal: it is none.
    """
    if isinstance(reply, link.LoadReport):
        with _engine_fault():
            return load_to_pb(
                facts_from_link(reply.facts),
                sessions=checks.count(reply.sessions, "sessions", 0, checks.MAX_U32),
                open_tickets=checks.count(reply.open_tickets, "open_tickets", 0, checks.MAX_U32),
                evicted_tokens=checks.count(reply.evicted_tokens, "evicted_tokens", 0, checks.MAX_U64),
                peak_use=checks.amount(reply.peak_use, "peak_use"),
            )
    raise _odd("Load", reply)


def sessions_of(reply: link.ReplyBody) -> tuple[list[admission_pb2.SessionResidency], int]:
    """The answer to ListSessions: records and how many there are in all.

    Raises:
        Internal: it is none.
    """
    if isinstance(reply, link.Sessions):
        with _engine_fault():
            total = checks.count(reply.total, "total", 0, checks.MAX_U32)
            return [_session(record) for record in reply.sessions], total
    raise _odd("ListSessions", reply)


def _session(record: link.SessionRecord) -> admission_pb2.SessionResidency:
    return admission_pb2.SessionResidency(
        session_id=checks.session_id(record.session_id),
        committed_tokens=checks.count(record.committed_tokens, "committed_tokens", 0, checks.MAX_U32),
        resident_tokens=checks.count(record.resident_tokens, "resident_tokens", 0, checks.MAX_U32),
        generation=checks.count(record.generation, "generation", 0, checks.MAX_U32),
        busy=record.busy,
    )


@contextlib.contextmanager
def _engine_fault() -> Iterator[None]:
    try:
        yield
    except InvalidField as error:
        raise _fault(error) from error


def _fault(error: InvalidField) -> Internal:
    return Internal(f"the engine's answer: {error}", reason=ENGINE_PROTOCOL)


def _odd(call: str, reply: object) -> Internal:
    return Internal(f"the engine answered {call} with {type(reply).__name__}", reason=ENGINE_PROTOCOL)
