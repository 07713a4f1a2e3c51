"""The prefill engine's side of a transfer: rooms in which an HTTP request and a decode engine's connection meet.

A room exists from the first half's arrival to the end of both. A request waits for its decode engine, and a connection for its
request, for a bounded time; once both are there, the prompt is prefilled when the decode engine says that it is ready. Until then the
request holds no memory (R29).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvc.engine.link_io import FrameMalformed, LinkError
from kvc.engine.reference.faults import BootstrapTimeout, DecodeGone, PromptMismatch, RoomInUse, UnknownRoom
from kvc.engine.reference.request import Phase
from kvc.engine.reference.transfer import TRANSFER_VERSION, Done, Join, Kv, Ready, Refused, Wire, checksum, pack_values, prompt_digest
from kvc.errors import KvcError
from kvc.runtime.logs import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.engine.reference.request import Request
    from kvc.engine.reference.scheduler import Scheduler
    from kvc.engine.reference.transfer import FromDecode

logger = logging.getLogger(__name__)

MAX_FRAMES = 3
"""After Join come Ready and Done; a third message is one too many."""


@dataclass(slots=True, eq=False)
class _Room:
    """Where two halves meet. `changed` wakes the connection's task: the request came or moved, a frame or the KV arrived."""

    number: int
    request: Request | None = None
    wire: Wire | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Both halves are here, or none is any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class BootstrapServer:
    """Serves the rooms of one prefill engine."""

    def __init__(self, scheduler: Scheduler, wake: Callable[[], None], salt: int, timeout_s: float, transfer_timeout_s: float) -> None:
        """Not listening yet.

        Args:
            scheduler: prefills.
            wake: tells the engine's loop that there is work.
            salt: KV state of the empty context, which names the model.
            timeout_s: longest wait of one half for the other, wall seconds.
            transfer_timeout_s: longest wait for a decode engine to take its KV, wall seconds.
        """
        self._scheduler = scheduler
        self._wake = wake
        self._salt = salt
        self._timeout_s = timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._rooms: dict[int, _Room] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    def __len__(self) -> int:
        """Rooms open."""
        return len(self._rooms)

    async def start(self, host: str, port: int) -> None:
        """Listens.

        Raises:
            OSError: the address cannot be bound.
        """
        self._server = await asyncio.start_server(self._accept, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops listening and cuts every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def enter(self, request: Request) -> None:
        """Puts a request into its room, where it waits for its decode engine.

        Raises:
            RoomInUse: another request is in it (F8).
        """
        assert request.bootstrap is not None
        number = request.bootstrap.room
        room = self._rooms.setdefault(number, _Room(number))
        if room.request is not None:
            raise RoomInUse(f"room {number} is in use", field="bootstrap_room")
        room.request = request
        request.on_move = functools.partial(self._request_moved, room)
        if room.wire is None:
            room.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._nobody_came, room)
        room.changed.set()

    def _request_moved(self, room: _Room) -> None:
        room.changed.set()
        if room.wire is None and room.request is not None and room.request.phase is Phase.DONE:
            self._close(room)

    def _nobody_came(self, room: _Room) -> None:
        if room.wire is None and room.request is not None:
            message = f"no decode engine asked for room {room.number} within {self._timeout_s} s"
            self._scheduler.end(room.request, error=BootstrapTimeout(message, field="bootstrap_room"))

    def _close(self, room: _Room) -> None:
        room.stop_timer()
        if self._rooms.get(room.number) is room:
            del self._rooms[room.number]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(Wire(reader, writer)), name="bootstrap-peer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, wire: Wire) -> None:
        room: _Room | None = None
        inbox: _Inbox | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                join = await wire.from_decode()
            if not isinstance(join, Join):
                raise DecodeGone("the first message of a connection is Join")
            room = self._take_place(join, wire)
            inbox = _Inbox(wire, room.changed)
            await self._pair(join, room, inbox)
            await self._hand_over(room, wire, inbox)
        except KvcError as error:
            await _refuse(wire, error)
            self._fail(room, error)
        except (LinkError, OSError) as error:
            event(logger, "transfer_lost", room=room.number if room else None, cause=str(error))
            self._fail(room, DecodeGone("the decode engine went away"))
        finally:
            if room is not None:
                self._close(room)
            if inbox is not None:
                await inbox.close()
            await wire.close()
            self._wake()

    def _fail(self, room: _Room | None, error: KvcError) -> None:
        """Ends the request of a connection that failed; its memory is free at once (F11)."""
        if room is not None and room.request is not None:
            self._scheduler.end(room.request, error=error)

    def _take_place(self, join: Join, wire: Wire) -> _Room:
        room = self._rooms.setdefault(join.room, _Room(join.room))
        if room.wire is not None:
            raise RoomInUse(f"room {join.room} is in use", field="bootstrap_room")
        if room.request is not None:
            self._check(join, room.request)  # a stranger leaves the room to its rightful half
        room.wire = wire
        room.stop_timer()
        return room

    async def _pair(self, join: Join, room: _Room, inbox: _Inbox) -> None:
        """Waits for the room's request."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while room.request is None:
                    await inbox.next_change()
        except TimeoutError:
            raise UnknownRoom(f"no request for room {join.room} within {self._timeout_s} s", field="bootstrap_room") from None
        self._check(join, room.request)

    def _check(self, join: Join, request: Request) -> None:
        mine = (TRANSFER_VERSION, self._salt, self._scheduler.pool.tree.page_tokens, request.input_tokens, prompt_digest(request))
        theirs = (join.version, join.model_salt, join.page_tokens, join.input_tokens, join.prompt_digest)
        names = ("version", "model", "page_tokens", "input_tokens", "prompt")
        for name, one, other in zip(names, mine, theirs, strict=True):
            if one != other:
                raise PromptMismatch(f"room {join.room}: {name} of the prefill and the decode engine differ", field="bootstrap_room")

    async def _hand_over(self, room: _Room, wire: Wire, inbox: _Inbox) -> None:
        """From Ready to Done."""
        request = room.request
        assert request is not None
        await _until(request, inbox, lambda: bool(inbox.frames))
        first_page = self._first_page(inbox.frames.popleft(), request)
        self._scheduler.submit(request)
        self._wake()
        await _until(request, inbox, lambda: request.phase is Phase.SEND)
        await self._transfer(room, inbox, request.input_tokens - first_page * self._scheduler.pool.tree.page_tokens)
        await wire.send(self._kv(request, first_page))
        async with asyncio.timeout(self._transfer_timeout_s):
            await _until(request, inbox, lambda: bool(inbox.frames))
        if not isinstance(inbox.frames.popleft(), Done):
            raise DecodeGone("the decode engine broke the protocol")
        self._scheduler.sent(request)

    async def _transfer(self, room: _Room, inbox: _Inbox, tokens: int) -> None:
        """Waits as long as the KV of some tokens takes on the link."""
        assert room.request is not None
        arrived: list[bool] = []

        def deliver() -> None:
            arrived.append(True)
            room.changed.set()

        self._scheduler.send(room.request, tokens, deliver)
        self._wake()
        await _until(room.request, inbox, lambda: bool(arrived))

    def _first_page(self, ready: FromDecode, request: Request) -> int:
        most = request.input_tokens // self._scheduler.pool.tree.page_tokens
        if not isinstance(ready, Ready) or not 0 <= ready.first_page <= most:
            raise DecodeGone("the decode engine broke the protocol")
        return ready.first_page

    def _kv(self, request: Request, first_page: int) -> Kv:
        assert request.lease is not None
        lease, times, tail = request.lease, request.times, request.tail
        values = pack_values(self._scheduler.pool.tree.path_values(lease.node, first_page, lease.locked_pages))
        return Kv(
            first_page=first_page,
            values=values,
            tail=tail,
            checksum=checksum(values, tail, first_page),
            queue_s=times.queue_s,
            prefill_s=times.ttft_s,
            transfer_s=times.transfer_s,
            cached_tokens=request.cached_tokens,
            prefill_tokens=request.prefill_tokens,
        )


class _Inbox:
    """What a decode engine says, read all the time, so that one that goes away is noticed in every state (F11)."""

    def __init__(self, wire: Wire, changed: asyncio.Event) -> None:
        """Reads until the connection ends; sets `changed` with every frame and at the end."""
        self.frames: deque[FromDecode] = deque()
        self._wire = wire
        self._changed = changed
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._read(), name="bootstrap-inbox")

    async def next_change(self) -> None:
        """Returns when something has changed.

        Raises:
            LinkError: the connection has ended.
        """
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """Stops reading."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            for _ in range(MAX_FRAMES):
                self.frames.append(await self._wire.from_decode())
                self._changed.set()
            self._error = FrameMalformed("more messages than the protocol has")
        except (LinkError, OSError) as error:
            self._error = error
        finally:
            self._changed.set()


async def _until(request: Request, inbox: _Inbox, reached: Callable[[], bool]) -> None:
    """Waits for a condition.

    Raises:
        KvcError: the request ended before.
        LinkError: the decode engine went away before.
    """
    while not reached():
        if request.phase is Phase.DONE:
            raise request.error or DecodeGone("the request was aborted on the prefill engine", reason="ABORTED")
        await inbox.next_change()


async def _refuse(wire: Wire, error: KvcError) -> None:
    try:
        await wire.send(Refused(error.code, error.reason, error.message))
    except OSError as gone:
        event(logger, "refusal_undelivered", reason=error.reason, cause=str(gone))
