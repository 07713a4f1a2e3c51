"""An engine behind the agent's link port: pages in memory, scripted answers, and every way to fail on command."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvc.core.blocks import chain_seed, hash_chain, pack_tokens
from kvc.engine import link
from kvc.errors import DeadlineExceeded, KvcError, Unavailable, error_for

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

SEED = chain_seed("m")
Path = tuple[int, ...]


def welcome(**fields: Any) -> link.Welcome:
    """A decode worker "d0" of the model "m" with pages of 4 tokens."""
    values: dict[str, Any] = {
        "version": link.LINK_VERSION,
        "worker_id": "d0",
        "epoch": 1,
        "role": "decode",
        "model": "m",
        "capacity_tokens": 100_000,
        "page_tokens": 4,
        "max_input_tokens": 90_000,
        "engine_url": "http://127.0.0.1:30000",
        "bootstrap_host": "",
        "bootstrap_port": 0,
        "prefill_tokens_per_s": 7000.0,
        "transfer_tokens_per_s": 20_000.0,
        "hash_seed": SEED,
        "capabilities": ["admit", "residency"],
    } | fields
    return link.Welcome(**values)


def facts(**fields: Any) -> link.LinkFacts:
    """What the fake reports: a pool that is half full."""
    values: dict[str, Any] = {"capacity_tokens": 100_000, "held_tokens": 20_000, "evictable_tokens": 30_000} | fields
    return link.LinkFacts(**values)


def page_id(path: Path) -> int:
    """The engine's own hash of the page that ends `path`; anything but the mesh's hash."""
    return 0 if not path else 1 + hash_chain(pack_tokens([*path, len(path)]), len(path) + 1, 7)[0] // 2


@dataclass(slots=True)
class Pages:
    """Resident pages as token paths, parents before children; makes the events for each change."""

    page_tokens: int = 4
    resident: dict[Path, None] = field(default_factory=dict)

    def store(self, tokens: Sequence[int]) -> link.PageStored | None:
        """Makes the full pages of a prompt resident: one run under the longest resident prefix; None when all are."""
        width, path = self.page_tokens, tuple(tokens)
        ends = range(width, len(path) + 1, width)
        start = 0
        while start + width <= len(path) and path[: start + width] in self.resident:
            start += width
        run = [path[:end] for end in ends if end > start]
        self.resident.update(dict.fromkeys(run))
        if not run:
            return None
        return link.PageStored(
            [page_id(page) for page in run], page_id(path[:start]), pack_tokens(list(path[start : start + len(run) * width]))
        )

    def remove(self, tokens: Sequence[int]) -> link.PageRemoved:
        """Removes the page that ends at `tokens` and its descendants; the root is no page."""
        path = tuple(tokens)
        if path:
            self.resident = dict.fromkeys(page for page in self.resident if page[: len(path)] != path)
        return link.PageRemoved([page_id(path)])

    def clear(self) -> link.AllCleared:
        """Removes everything."""
        self.resident = {}
        return link.AllCleared()

    def snapshot(self, sequence: int, parts: int = 1) -> list[link.Snapshot]:
        """Everything resident, each page a run of its own, in `parts` messages."""
        runs = [
            link.PageStored([page_id(page)], page_id(page[: -self.page_tokens]), pack_tokens(list(page[-self.page_tokens :])))
            for page in self.resident
        ]
        size = max(1, -(-len(runs) // parts))
        cut = [runs[index * size : (index + 1) * size] for index in range(parts)]
        return [link.Snapshot(sequence, stored, last=index == parts - 1) for index, stored in enumerate(cut)]

    def blocks(self, block_tokens: int, seed: int = SEED) -> set[int]:
        """The blocks that are resident, found the slow way."""
        return {block for path in self.resident for block in hash_chain(pack_tokens(list(path)), block_tokens, seed)}


class FakeLink:
    """One connection to a `FakeEngine`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.welcome = engine.welcome
        self.queue: asyncio.Queue[link.Snapshot | link.Delta | Exception] = asyncio.Queue()
        self.lost = asyncio.Event()
        self.subscribed = False

    def ask(self, body: link.RequestBody, answered: Callable[[link.ReplyBody | KvcError], None], timeout_s: float) -> asyncio.Task[None]:
        async def asking() -> None:
            try:
                answered(await self.call(body, timeout_s))
            except KvcError as error:
                answered(error)

        return asyncio.ensure_future(asking())

    async def call(self, body: link.RequestBody, timeout_s: float) -> link.ReplyBody:
        if self.lost.is_set():
            raise Unavailable("engine: connection lost", reason="ENGINE_AWAY")
        self.engine.calls.append(body)
        answer = asyncio.ensure_future(self.engine.answer(body))
        lost = asyncio.ensure_future(self.lost.wait())
        self.engine.pending += 1
        try:
            await asyncio.wait({answer, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                reply = answer.result()
            elif lost.done():
                raise Unavailable("engine: connection lost", reason="ENGINE_AWAY")
            else:
                raise DeadlineExceeded(f"engine: no answer within {timeout_s} s", reason="ENGINE_TIMEOUT")
        finally:
            self.engine.pending -= 1
            for task in (answer, lost):
                task.cancel()
            await asyncio.gather(answer, lost, return_exceptions=True)
        if isinstance(reply, link.Failed):
            raise error_for(reply.code, reply.message, field=reply.field)
        return reply

    async def events(self, timeout_s: float) -> AsyncGenerator[link.Snapshot | link.Delta, None]:
        await self.call(link.Subscribe(), timeout_s)
        self.subscribed = True
        for part in self.engine.snapshot():
            self.queue.put_nowait(part)
        while True:
            event = await self.queue.get()
            if isinstance(event, Exception):
                raise event
            yield event

    async def close(self) -> None:
        self.lose()

    def lose(self) -> None:
        """The connection breaks."""
        self.subscribed = False
        self.lost.set()
        self.queue.put_nowait(Unavailable("engine: connection lost", reason="ENGINE_AWAY"))
        self.engine.links.discard(self)


class FakeEngine:
    """The engine. Also the connector: `connect` fails while `up` is False."""

    def __init__(self, page_tokens: int = 4, **fields: Any) -> None:
        self.welcome = welcome(page_tokens=page_tokens, **fields)
        self.pages = Pages(page_tokens)
        self.up = True
        self.connects = 0
        self.sequence = 0
        self.parts = 1
        self.pending = 0
        self.links: set[FakeLink] = set()
        self.calls: list[link.RequestBody] = []
        self.sessions: dict[str, link.SessionRecord] = {}
        self.open_tickets: set[str] = set()
        self.on_admit: Callable[[link.Admit], Awaitable[link.ReplyBody]] = self._admit
        self.on_load: Callable[[], Awaitable[link.ReplyBody]] = self._load

    async def connect(self) -> FakeLink:
        self.connects += 1
        await asyncio.sleep(0)
        if not self.up:
            raise Unavailable("engine: nobody listens", reason="ENGINE_AWAY")
        made = FakeLink(self)
        self.links.add(made)
        return made

    async def answer(self, body: link.RequestBody) -> link.ReplyBody:
        """The reply to one call."""
        match body:
            case link.Admit():
                return await self.on_admit(body)
            case link.Load():
                return await self.on_load()
            case link.Release():
                was_open = body.ticket in self.open_tickets
                self.open_tickets.discard(body.ticket)
                return link.Released(was_open)
            case link.ListSessions():
                found = [record for name, record in self.sessions.items() if body.session_id in {"", name}]
                return link.Sessions(found[: body.limit], len(self.sessions))
            case link.Drain():
                return link.Drained(0)
            case link.Subscribe():
                return link.Subscribed()
        return link.Failed("UNIMPLEMENTED", type(body).__name__)

    async def _admit(self, body: link.Admit) -> link.ReplyBody:
        ticket = f"{body.request_id}-{body.attempt_number}"
        self.open_tickets.add(ticket)
        return link.Admitted("direct", "local", ticket, 5.0, 7, body.input_tokens, facts(matched_tokens=24))

    async def _load(self) -> link.ReplyBody:
        return link.LoadReport(facts(), sessions=len(self.sessions), open_tickets=len(self.open_tickets), evicted_tokens=9, peak_use=0.5)

    def snapshot(self) -> list[link.Snapshot]:
        """What a new subscriber gets."""
        return self.pages.snapshot(self.sequence, self.parts)

    def publish(self, *changes: link.Change) -> None:
        """Sends one delta to every subscriber."""
        self.sequence += 1
        self.send(link.Delta(self.sequence, list(changes)))

    def send(self, event: link.Snapshot | link.Delta) -> None:
        """Sends an event as it is."""
        for one in self.links:
            if one.subscribed:
                one.queue.put_nowait(event)

    def store(self, *prompts: Sequence[int]) -> None:
        """Makes prompts resident, in one delta."""
        self.publish(*[run for run in map(self.pages.store, prompts) if run is not None])

    def die(self) -> None:
        """Every connection breaks and nobody listens any more."""
        self.up = False
        for one in list(self.links):
            one.lose()

    def restart(self, **fields: Any) -> None:
        """A new life with nothing resident, under the next epoch unless told."""
        self.die()
        values = {name: getattr(self.welcome, name) for name in self.welcome.__struct_fields__} | {"epoch": self.welcome.epoch + 1} | fields
        self.welcome = link.Welcome(**values)
        self.pages = Pages(self.pages.page_tokens)
        self.sequence = 0
        self.open_tickets.clear()
        self.up = True
