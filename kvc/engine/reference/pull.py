"""The decode engine's side of a transfer: joins the room at once, asks for the KV when its memory is granted, takes it in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvc.engine.link_io import LinkError
from kvc.engine.reference.faults import PrefillFailed, PromptMismatch, RoomInUse, UnknownRoom
from kvc.engine.reference.request import Phase
from kvc.engine.reference.transfer import TRANSFER_VERSION, Done, Join, Kv, Ready, Wire, checksum, prompt_digest, unpack_values
from kvc.errors import KvcError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from kvc.engine.reference.request import Request
    from kvc.engine.reference.scheduler import Scheduler
    from kvc.engine.reference.transfer import FromPrefill

_SAME_ERROR: dict[str, type[KvcError]] = {"ROOM_IN_USE": RoomInUse, "UNKNOWN_ROOM": UnknownRoom, "PROMPT_MISMATCH": PromptMismatch}


class Puller:
    """Pulls KV for the requests of one decode engine. A pull is a task that ends with its request."""

    def __init__(self, scheduler: Scheduler, wake: Callable[[], None], salt: int, timeout_s: float, transfer_timeout_s: float) -> None:
        """Idle.

        Args:
            scheduler: owns the requests.
            wake: tells the engine's loop that there is work.
            salt: KV state of the empty context, which names the model.
            timeout_s: longest wait for a connection, wall seconds.
            transfer_timeout_s: longest wait for the KV, wall seconds.
        """
        self._scheduler = scheduler
        self._wake = wake
        self._salt = salt
        self._timeout_s = timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: Request) -> None:
        """Starts the pull of a request that has just been submitted."""
        moved = asyncio.Event()
        request.on_move = moved.set
        task = asyncio.create_task(self._guard(request, moved), name="kv-pull")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cuts every pull."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(self, request: Request, moved: asyncio.Event) -> None:
        """Turns whatever goes wrong into the request's error."""
        assert request.bootstrap is not None
        try:
            await self._pull(request, moved)
        except KvcError as error:
            self._scheduler.end(request, error=error)
        except (LinkError, OSError) as error:
            host, port, _ = request.bootstrap
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            self._scheduler.end(request, error=PrefillFailed(f"prefill engine {host}:{port}: {why}"))
        finally:
            self._wake()

    async def _pull(self, request: Request, moved: asyncio.Event) -> None:
        assert request.bootstrap is not None
        async with asyncio.timeout(self._timeout_s):
            wire = Wire(*await asyncio.open_connection(request.bootstrap.host, request.bootstrap.port))
        incoming = asyncio.create_task(wire.from_prefill(), name="kv-frame")
        incoming.add_done_callback(lambda _: moved.set())
        try:
            await wire.send(self._join(request))
            while request.phase is Phase.QUEUED and not incoming.done():
                moved.clear()
                await moved.wait()
            if request.phase is Phase.PULL:
                assert request.lease is not None
                await wire.send(Ready(request.lease.locked_pages))
                async with asyncio.timeout(self._transfer_timeout_s):
                    while request.phase is Phase.PULL and not incoming.done():
                        moved.clear()
                        await moved.wait()
            if request.phase is Phase.DONE:
                return
            self._take(request, await incoming)
            await wire.send(Done())
        finally:
            incoming.cancel()
            await asyncio.gather(incoming, return_exceptions=True)
            await wire.close()

    def _join(self, request: Request) -> Join:
        assert request.bootstrap is not None
        return Join(
            version=TRANSFER_VERSION,
            room=request.bootstrap.room,
            rid=request.rid,
            model_salt=self._salt,
            page_tokens=self._scheduler.pool.tree.page_tokens,
            input_tokens=request.input_tokens,
            prompt_digest=prompt_digest(request),
        )

    def _take(self, request: Request, message: FromPrefill) -> None:
        """Takes the KV in.

        Raises:
            KvcError: there is none, or it is not what was asked for.
        """
        if not isinstance(message, Kv):
            kind = _SAME_ERROR.get(message.reason)
            if kind is not None:
                raise kind(message.message, field="bootstrap_room")
            raise PrefillFailed(f"prefill engine refused: {message.message} ({message.reason})")
        values = self._checked_values(request, message)
        request.cached_tokens = message.cached_tokens
        request.prefill_tokens = message.prefill_tokens
        times = request.times
        times.transfer_s = message.transfer_s
        times.elapsed_s = times.queue_s + message.prefill_s + message.transfer_s
        times.queue_s += message.queue_s
        self._scheduler.kv_arrived(request, values, message.tail)

    def _checked_values(self, request: Request, message: Kv) -> array[int]:
        if request.phase is not Phase.PULL or request.lease is None:
            raise PrefillFailed("KV came unasked", reason="KV_CHECKSUM")
        first, page = request.lease.locked_pages, self._scheduler.pool.tree.page_tokens
        if message.checksum != checksum(message.values, message.tail, message.first_page):
            raise PrefillFailed("the KV does not match its checksum", reason="KV_CHECKSUM")
        try:
            values = unpack_values(message.values)
        except ValueError as error:
            raise PrefillFailed(f"malformed KV: {error}", reason="KV_CHECKSUM") from error
        if message.first_page != first or len(values) != request.input_tokens // page - first:
            raise PrefillFailed("the KV is not the one that was asked for", reason="KV_CHECKSUM")
        return values
