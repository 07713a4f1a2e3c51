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

WIDE = 110
"""Columns that the full tables need."""
_ROOMY = 120
_MODES = (Mode.DIRECT, Mode.SEED, Mode.RESEED, Mode.FALLBACK)


def as_json(message: Message) -> str:
    """A message as one JSON object with the names of its proto, fields of value 0 included."""
    return json.dumps(MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True), indent=2) + "\n"


def fitted(table: Table, width: int) -> Table:
    """The table, without its frame when the frame leaves no room for it: headings are wrapped before numbers are cut. Mutates."""
    if width < WIDE:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    return table


def workers_table(listed: router_pb2.ListWorkersResponse, title: str = "", *, width: int = WIDE) -> Table:
    """One row a worker: role, state, KV use in tokens, sessions, turns in flight, shares of modes.

    Args:
        listed: the workers.
        title: above the table.
        width: columns there are; below 110 the table has fewer.
    """
    wide = width >= WIDE
    names = "/".join(mode.value for mode in _MODES)
    table = _table(title if wide else f"{title}; modes: {names}".removeprefix("; "), width)
    for heading in ("worker", "role", "state"):
        table.add_column(heading, no_wrap=True)
    narrow = ("KV use", "evicted", "sessions", "in flight", "modes %")
    for heading in ("held KV", "cached", "of K_d", *narrow[1:-1], *(mode.value for mode in _MODES)) if wide else narrow:
        table.add_column(heading, justify="right", no_wrap=True)
    for status in listed.workers:
        table.add_row(*_cells(status, wide=wide))
    reasons = [f"{status.info.worker.worker_id}: {status.why_not}" for status in listed.workers if ":" in status.why_not]
    table.caption = "\n".join(reasons) or None
    return table


def _table(title: str, width: int) -> Table:
    gap = 2 if width >= _ROOMY else 1
    return Table(title=title or None, title_justify="left", caption_justify="left", box=None, padding=(0, gap, 0, 0), pad_edge=False)


def _cells(status: router_pb2.WorkerStatus, *, wide: bool) -> list[str]:
    facts, capacity = status.load.facts, status.info.capacity_tokens
    held = facts.held_tokens + facts.reserved_tokens
    use = f"{(held + facts.evictable_tokens) / capacity:.0%}" if capacity else "-"
    turns = {entry.mode: entry.turns for entry in status.modes}
    total = sum(turns.values())
    shares = [f"{turns.get(wire.MODE_TO_PB[mode], 0) / total:.0%}" if total else "-" for mode in _MODES]
    return [
        status.info.worker.worker_id,
        wire.ROLE_FROM_PB[status.info.role].value if status.info.role in wire.ROLE_FROM_PB else "?",
        "ready" if status.eligible else status.why_not.partition(":")[0],
        *([f"{held:,}", f"{facts.evictable_tokens:,}"] if wide else []),
        use,
        f"{status.load.evicted_tokens:,}",
        str(status.load.sessions),
        str(status.inflight),
        *(shares if wide else ["/".join(share.rstrip("%") for share in shares)]),
    ]


def candidates_table(response: router_pb2.RouteResponse, *, width: int = WIDE) -> Table:
    """Every decode worker with the parts of its score, the chosen one first.

    Args:
        response: the candidates.
        width: columns there are; below 110 what the score repeats is left out.
    """
    wide = width >= WIDE
    table = _table(f"{response.prompt_blocks} blocks in the prompt, {response.shared_blocks} of them shared by many sessions", width)
    table.add_column("worker", no_wrap=True)
    parts = ("overlap", "resident", *(("sticky", "load") if wide else ()), "in flight", "assigned", "rejects", "score")
    for heading in parts:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for row in response.candidates:
        chosen = response.HasField("worker") and row.worker == response.worker
        note = row.excluded or ("chosen: least rejected" if chosen and response.degenerate else "chosen" if chosen else "")
        table.add_row(
            row.worker.worker_id,
            str(row.overlap_blocks),
            str(row.resident_blocks),
            *(("yes" if row.sticky else "no", f"{row.placement_load:.3f}") if wide else ()),
            str(row.inflight),
            str(row.assigned),
            str(row.rejects),
            "(" + ", ".join(f"{part + 0.0:.3g}" for part in row.score) + ")",  # -0 plus 0 is 0
            note,
        )
    return table


def session_lines(session_id: str, status: router_pb2.RouterServiceGetSessionStatusResponse) -> list[str]:
    """What a router knows of a session, a line each."""
    if not status.known:
        return [f"{session_id}: not known to this router"]
    pin = status.pin.worker_id if status.HasField("pin") else "no worker"
    busy = ", a turn in flight" if status.busy else ""
    lines = [f"{session_id}: pinned to {pin}; {_count(status.turns, 'turn')}, {_count(status.context_tokens, 'token')}{busy}"]
    resident = [entry for entry in status.residency if entry.resident_blocks]
    lines += [f"  {entry.worker_id}: {_count(entry.resident_blocks, 'block')} resident" for entry in resident]
    if not resident:
        lines.append("  no whole block is resident anywhere")
    lines += [f"  {entry.worker_id}: {_count(entry.rejects, 'refusal')} since the last success" for entry in status.rejects]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
