"""Engine link: the protocol between an engine and the admission agent beside it.

Frames on a unix stream socket: 4-byte little-endian length, then one msgpack message. The agent sends `Request` messages, each
with a `call` number; the engine answers with a `Reply` of the same number. After `Subscribe` the engine also sends `Event`
messages. The same protocol is served by the reference engine and by the SGLang plugin.

Residency events speak the engine's own pages and page hashes (as SGLang's KV events do: BlockStored, BlockRemoved,
AllBlocksCleared); the agent re-blocks them (kvc.core.reblock) and no engine hash leaves the agent (R17).
"""

from __future__ import annotations

import msgspec

LINK_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024


class Struct(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """Base of link messages."""


class Hello(Struct, frozen=True, tag="hello"):
    """First message of a connection; answered by `Welcome`."""

    version: int = LINK_VERSION


class Welcome(Struct, frozen=True, tag="welcome"):
    """What the engine is. Fields as in kvc.core.types.WorkerInfo; speeds in tokens per second.

    `block_tokens` is the size of the blocks whose hashes the engine takes in `Admit`; 0 when it does not say.
    """

    version: int
    worker_id: str
    epoch: int
    role: str
    model: str
    capacity_tokens: int
    page_tokens: int
    max_input_tokens: int
    engine_url: str
    bootstrap_host: str
    bootstrap_port: int
    prefill_tokens_per_s: float
    transfer_tokens_per_s: float
    hash_seed: int
    capabilities: list[str]
    block_tokens: int = 0


class Offer(Struct, frozen=True):
    """kvc.core.types.PrefillOffer."""

    backlog_s: float
    prefill_tokens_per_s: float
    transfer_tokens_per_s: float
    matched_tokens: int = 0


class Admit(Struct, frozen=True, tag="admit"):
    """Algorithm 2 for one turn; answered by `Admitted` or `Refused`. Idempotent by (request_id, attempt_number).

    `block_hashes` are packed little-endian u64 router hashes of `block_tokens` each; `now_s` is ignored by an engine with its own
    clock.
    """

    request_id: str
    attempt_number: int
    session_id: str
    turn_index: int
    input_tokens: int
    output_reserve_tokens: int
    block_hashes: bytes
    known_session: bool = False
    new_tokens: int = 0
    offer: Offer | None = None
    traceparent: str = ""


class LinkFacts(Struct, frozen=True):
    """kvc.core.types.Facts, the part that travels."""

    capacity_tokens: int
    held_tokens: int = 0
    reserved_tokens: int = 0
    evictable_tokens: int = 0
    matched_tokens: int = 0
    host_matched_tokens: int = 0
    load_back_s: float = 0.0
    prefill_backlog_s: float = 0.0
    running: int = 0
    pending_transfers: int = 0
    queued_tokens: int = 0


class Admitted(Struct, frozen=True, tag="admitted"):
    """Yes: `ticket` is the `rid` the request must carry."""

    mode: str
    executor: str
    ticket: str
    ttl_s: float
    append_tokens: int
    need_tokens: int
    facts: LinkFacts


class Refused(Struct, frozen=True, tag="refused"):
    """No. `reason` is a kvc.core.types.Reason value."""

    reason: str
    retry_after_s: float
    terminal: bool
    facts: LinkFacts


class Release(Struct, frozen=True, tag="release"):
    """Gives a ticket back; answered by `Released`."""

    ticket: str


class Released(Struct, frozen=True, tag="released"):
    """`released` is True when the ticket was open until now."""

    released: bool


class Load(Struct, frozen=True, tag="load"):
    """Asks for `LoadReport`."""


class LoadReport(Struct, frozen=True, tag="load_report"):
    """How busy the engine is."""

    facts: LinkFacts
    sessions: int = 0
    open_tickets: int = 0
    evicted_tokens: int = 0
    peak_use: float = 0.0


class ListSessions(Struct, frozen=True, tag="list_sessions"):
    """Asks for `Sessions`: one by name when `session_id` is set, else the most recently used `limit`."""

    session_id: str = ""
    limit: int = 1000


class SessionRecord(Struct, frozen=True):
    """A session as the engine knows it. Token counts; `generation` = turns completed here."""

    session_id: str
    committed_tokens: int
    resident_tokens: int
    generation: int
    busy: bool


class Sessions(Struct, frozen=True, tag="sessions"):
    """Session records; `total` counts all."""

    sessions: list[SessionRecord]
    total: int


class Drain(Struct, frozen=True, tag="drain"):
    """Stops or resumes admitting new sessions; answered by `Drained`."""

    draining: bool


class Drained(Struct, frozen=True, tag="drained"):
    """Turns still in flight."""

    inflight: int


class Subscribe(Struct, frozen=True, tag="subscribe"):
    """Asks for residency events on this connection: one `Snapshot`, then deltas. Answered by `Subscribed`."""


class Subscribed(Struct, frozen=True, tag="subscribed"):
    """The first event follows."""


class Failed(Struct, frozen=True, tag="failed"):
    """The request could not be answered. `code` is a gRPC status name; `field` names the field at fault."""

    code: str
    message: str
    field: str = ""


class PageStored(Struct, frozen=True, tag="stored"):
    """A run of pages under one parent: `parent` is 0 at the root; `token_ids` are packed little-endian u32, `page_tokens` a page."""

    page_hashes: list[int]
    parent: int
    token_ids: bytes


class PageRemoved(Struct, frozen=True, tag="removed"):
    """Pages that are gone, in any order; a removed page takes its descendants with it."""

    page_hashes: list[int]


class AllCleared(Struct, frozen=True, tag="cleared"):
    """Everything is gone."""


Change = PageStored | PageRemoved | AllCleared


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """Everything resident when the subscription began; parents come before children."""

    sequence: int
    stored: list[PageStored]
    last: bool = True


class Delta(Struct, frozen=True, tag="delta"):
    """What changed in one scheduler iteration; `sequence` is the previous one + 1."""

    sequence: int
    changes: list[Change]


RequestBody = Hello | Admit | Release | Load | ListSessions | Drain | Subscribe
ReplyBody = Welcome | Admitted | Refused | Released | LoadReport | Sessions | Drained | Subscribed | Failed
EventBody = Snapshot | Delta


class Request(Struct, frozen=True, tag="request"):
    """One call of the agent."""

    call: int
    body: RequestBody


class Reply(Struct, frozen=True, tag="reply"):
    """One answer of the engine."""

    call: int
    body: ReplyBody


class Event(Struct, frozen=True, tag="event"):
    """One residency event."""

    body: EventBody


FromEngine = Reply | Event
