"""Tables that people see: workers of a mesh, a session, the candidates of a route."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict
from rich.table import Table

from kvc import wire
from kvc.core.types import Mode

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvc.v1 import router_pb2

_MODES = (Mode.DIRECT, Mode.SEED, Mode.RESEED, Mode.FALLBACK)


def as_json(message: Message) -> str:
    """A message as one JSON object with the names of its proto, fields of value 0 included."""
    return json.dumps(MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True), indent=2) + "\n"


def workers_table(listed: router_pb2.ListWorkersResponse, title: str = "") -> Table:
    """One row a worker: role, state, KV use, sessions, turns in flight, shares of modes."""
    table = Table(title=title or None, title_justify="left")
    table.add_column("worker")
    table.add_column("role")
    table.add_column("state")
    for heading in ("KV held", "cached", "of K_d", "evicted", "sessions", "in flight", *(mode.value for mode in _MODES)):
        table.add_column(heading, justify="right")
    for status in listed.workers:
        table.add_row(*_worker_cells(status))
    return table


def _worker_cells(status: router_pb2.WorkerStatus) -> list[str]:
    facts = status.load.facts
    capacity = status.info.capacity_tokens
    used = facts.held_tokens + facts.reserved_tokens + facts.evictable_tokens
    turns = {entry.mode: entry.turns for entry in status.modes}
    total = sum(turns.values())
    shares = [f"{turns.get(wire.MODE_TO_PB[mode], 0) / total:.0%}" if total else "-" for mode in _MODES]
    return [
        status.info.worker.worker_id,
        wire.ROLE_FROM_PB[status.info.role].value if status.info.role in wire.ROLE_FROM_PB else "?",
        "ready" if status.eligible else status.why_not,
        f"{facts.held_tokens + facts.reserved_tokens:,}",
        f"{facts.evictable_tokens:,}",
        f"{used / capacity:.0%}" if capacity else "-",
        f"{status.load.evicted_tokens:,}",
        str(status.load.sessions),
        str(status.inflight),
        *shares,
    ]


def candidates_table(response: router_pb2.RouteResponse) -> Table:
    """Every decode worker with the parts of its score, the chosen one first."""
    title = f"{response.prompt_blocks} blocks in the prompt, {response.shared_blocks} of them shared by many sessions"
    table = Table(title=title, title_justify="left")
    table.add_column("worker")
    for heading in ("overlap", "resident", "sticky", "load", "in flight", "assigned", "rejects", "score"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in response.candidates:
        chosen = response.HasField("worker") and row.worker == response.worker
        note = row.excluded or ("chosen: least rejected" if chosen and response.degenerate else "chosen" if chosen else "")
        table.add_row(
            row.worker.worker_id,
            str(row.overlap_blocks),
            str(row.resident_blocks),
            "yes" if row.sticky else "",
            f"{row.placement_load:.3f}",
            str(row.inflight),
            str(row.assigned),
            str(row.rejects),
            "(" + ", ".join(f"{part:g}" for part in row.score) + ")",
            note,
        )
    return table


def session_lines(session_id: str, status: router_pb2.RouterServiceGetSessionStatusResponse) -> list[str]:
    """What a router knows of a session, a line each."""
    if not status.known:
        return [f"{session_id}: not known to this router"]
    pin = status.pin.worker_id if status.HasField("pin") else "no worker"
    busy = ", a turn in flight" if status.busy else ""
    lines = [f"{session_id}: pinned to {pin}; {status.turns} turns, {status.context_tokens:,} tokens{busy}"]
    lines += [f"  {entry.worker_id}: {entry.resident_blocks:,} blocks resident" for entry in status.residency]
    lines += [f"  {entry.worker_id}: {entry.rejects} refusals since the last success" for entry in status.rejects]
    return lines
