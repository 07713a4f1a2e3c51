"""One request through the door: decided, sent, spliced back, accounted. Callbacks on one event loop; a task only where it must wait.

    start -> gate (R21) -> TurnArrived -> dispatch generator -> admission -> engine(s) -> first byte -> ... -> end
                                              ^                                 |
                                              +------- before the first byte ---+   another worker, at most `retries` times

The end reaches Σ exactly once, whoever ends the exchange: the engine, the client, the deadline, or shutdown.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from kvc.core import events as ev
from kvc.core.types import Decision, GaveUp
from kvc.errors import DeadlineExceeded, KvcError, Unavailable
from services.router.door.deciding import Deciding
from services.router.door.halves import CONFLICT, DecodeHalf, PrefillHalf
from services.router.door.request import message_for, output_tokens_of, payload_of, prompt_of
from services.router.door.usage import aborted, counts
from services.router.engines import MAX_ROOM
from services.router.failures import gave_up, guilty, lost
from services.router.ports import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvc.core.blocks import Chain
    from kvc.core.types import Turn, WorkerInfo, WorkerRef
    from services.router.door.client import Client
    from services.router.door.conversations import Prompt
    from services.router.door.door import Door
    from services.router.door.payload import Payload
    from services.router.door.request import HttpRequest
    from services.router.door.upstream import Pool

_encode = msgspec.json.Encoder().encode
_ERROR = 400
_NO_COUNTS: Final[Mapping[bytes, int]] = MappingProxyType({})
_COUNTED = b'_tokens"'
_REASON = re.compile(rb'"type"\s*:\s*"([a-z-]{1,64})"')


class Exchange(Deciding):
    """One routed request. What most requests never set is a default of the class."""

    session_id = ""
    input_tokens = 0
    _prompt: Prompt | None = None
    first_s = 0.0
    usage: Mapping[bytes, int]
    _payload: Payload | None = None
    _reserve = 0
    _decision: Decision | None = None
    _prefill_half: PrefillHalf | None = None
    _inside = False

    def __init__(self, door: Door, client: Client, request: HttpRequest) -> None:
        """Does nothing yet."""
        super().__init__(door)
        self.usage = _NO_COUNTS
        self._client = client
        self.request = request
        self.clock = door.clock
        self._tries_left = door.retries

    def prompt_tokens(self) -> int:
        """Prompt length by the engine, else as reckoned here. OpenAI's count includes what was cached, Anthropic's does not."""
        usage = self.usage
        if b"input_tokens" in usage:
            cached = usage.get(b"cache_read_input_tokens", 0) + usage.get(b"cache_creation_input_tokens", 0)
            return usage[b"input_tokens"] + cached
        return usage.get(b"prompt_tokens") or self.input_tokens

    def output_tokens(self) -> int:
        """Reply length as the engine reports it; 0 when it does not."""
        return self.usage.get(b"completion_tokens") or self.usage.get(b"output_tokens") or 0

    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused, as the engine reports; 0 when it does not."""
        return self.usage.get(b"cached_tokens") or self.usage.get(b"cache_read_input_tokens") or 0

    def mesh_s(self, decision: Decision) -> float:
        """Seconds before engines were asked that were not spent waiting for room."""
        return max(0.0, self.sent_s - self.arrived_s - decision.queued_s)

    # --- deciding -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Routes the request, or answers with a typed error."""
        door = self._door
        try:
            door.check_room()
            conversations = door.conversations()
            payload = self._payload = payload_of(self.request, conversations)
            self._reserve = output_tokens_of(self.request, payload, door.default_output_tokens)
            prompt = prompt_of(self.request, payload, conversations, door.gate.sessions())
            payload.name_session(prompt.session_id)
            door.check_length(prompt.input_tokens)
        except KvcError as error:
            self._client.respond_error(error)
            return
        self.session_id, self.input_tokens = prompt.session_id, prompt.input_tokens
        if prompt.estimated_bytes:
            self._prompt = prompt
        door.exchanges.add(self)
        if not door.gate.try_enter(self.session_id):
            self._spawn(partial(self._wait_turn, prompt.chain))
            return
        try:
            self._entered(prompt.chain)
        except Exception as error:  # noqa: BLE001 - as `guarded`
            self._refuse(door.fault(error))

    async def _wait_turn(self, chain: Chain) -> None:
        await self._door.gate.enter(self.session_id, self.arrived_s + self._door.timeout_s)
        self._entered(chain)

    def _entered(self, chain: Chain) -> None:
        """The session is ours until the end."""
        self._inside = True
        estimated = self._prompt is not None
        self._turn: Turn = self._door.router.arrive(self.session_id, chain, self.input_tokens, self._reserve, estimated=estimated)
        self._decide()

    def _decided(self, outcome: Decision | GaveUp) -> None:
        door = self._door
        if isinstance(outcome, Decision):
            self._decision = outcome  # at once: its attempt is open in Σ from here on
            self._attempt = outcome.attempt.attempt_number + 1
        landed, self._landed = self._landed, None
        decide_s = (self.sent_s if landed is not None else door.clock.now_s()) - self.arrived_s
        door.observer.decided(outcome, decide_s, estimated=self._prompt is not None)
        if isinstance(outcome, GaveUp):
            self._refuse(gave_up(outcome, self._turn, len(door.room)))
            return
        if door.room.waiting:
            door.room.notify()
        if landed is not None and outcome.attempt == self._hop_attempt:
            self._decode_half = landed
            return
        decode = door.sigma.worker(outcome.decode)
        prefill = door.sigma.worker(outcome.prefill) if outcome.prefill is not None else None
        if decode is None or (outcome.prefill is not None and prefill is None):
            left = outcome.decode if decode is None or outcome.prefill is None else outcome.prefill
            self._failed("worker-left", "the worker left before the turn reached it", guilty=left, gone=False)
            return
        ticket = outcome.admission.ticket if outcome.admission is not None else ""
        rid = ticket or f"{self.request_id}.{outcome.attempt.attempt_number}"
        self._send(rid, decode.info, prefill.info if prefill is not None else None)

    # --- sending ------------------------------------------------------------------------------------------------------------------

    def _send(self, rid: str, decode: WorkerInfo, prefill: WorkerInfo | None) -> None:
        added = b""
        assert self._payload is not None
        if "session_id" not in self._payload.fields:
            added = b',"session_id":' + _encode(self.session_id)
        if prefill is not None:
            room = secrets.randbelow(MAX_ROOM)
            host = _encode(prefill.bootstrap_host)
            added += b',"bootstrap_host":%b,"bootstrap_port":%d,"bootstrap_room":%d' % (host, prefill.bootstrap_port, room)
            self._prefill_half = PrefillHalf(self)
            self._prefill_half.send(*self._message(prefill, f"{self.request_id}.p{self._attempt}", added))
        self.sent_s = self._door.clock.now_s()
        self._decode_half = DecodeHalf(self, self._client)
        self._decode_half.send(*self._message(decode, rid, added))

    def _message(self, worker: WorkerInfo, rid: str, added: bytes) -> tuple[Pool, bytes]:
        """The request as an engine gets it, and where: the client's body with the mesh's own keys appended."""
        assert self._payload is not None
        body = self._payload.parts(b'"rid":"%b"%b' % (rid.encode(), added))
        pool = self._door.upstreams.pool(worker.engine_url)
        return pool, message_for(pool, self.request, body, self._carried(worker, rid))

    def _carried(self, worker: WorkerInfo, rid: str) -> bytes:  # noqa: ARG002 - a recorded exchange notes whom it sends what
        """The trace context that a worker gets."""
        return self._client.traceparent

    # --- what the decode worker's half tells ---------------------------------------------------------------------------------------

    def begins(self, cached_tokens: int) -> bytes | None:
        """The reply begins.

        Args:
            cached_tokens: prompt tokens that nobody prefills, as the engine says; -1: it does not, and the admission's number is told.

        Returns:
            The lines that the door adds to its head; None: the reply is not wanted, and was cut off.
        """
        if self._promise is not None and not self._land():
            return None
        decision = self._decision
        assert decision is not None
        self.first_s = self._door.clock.now_s()
        self._payload, self.request.body = None, b""
        cached = cached_tokens
        if cached < 0:
            cached = 0 if decision.admission is None else max(0, self.input_tokens - decision.admission.append_tokens)
        return b"x-kvc-mode: %b\r\nx-kvc-worker: %b\r\nx-kvc-cached-tokens: %d\r\ntraceparent: %b\r\n" % (
            decision.mode.encode(), decision.decode.worker_id.encode(), cached, self._client.traceparent,
        )  # fmt: skip

    def completed(self, tail: bytes) -> None:
        """The reply is complete; `tail` is its end."""
        if _COUNTED in tail:
            self.usage = counts(tail)
            if self._prompt is not None:
                self._door.conversations().confirm(self._prompt, self.prompt_tokens(), self.output_tokens())
        self._finish(ev.End.FAILED if self._client.status >= _ERROR else ev.End.CANCELLED if aborted(tail) else ev.End.COMPLETED)
        self._client.finished()

    def rejected(self, status: int, body: bytearray) -> bool:
        """The engine answered with an error that another one may not have; true when the request is tried again."""
        if self._promise is not None:
            self._ask_after_all("refused" if status == CONFLICT else "failed")
            return True
        if self._tries_left <= 0:
            return False
        decision = self._decision
        assert decision is not None
        said = _REASON.search(body)
        reason = said[1].decode() if said is not None else f"http-{status}"
        blamed = guilty(decision, EngineError(status, reason, ""))
        if blamed is not None and status != CONFLICT:  # a ticket that expired is nobody's fault
            self._avoid |= {blamed}
        self._retry(reason, f"the engine answered {status}")
        return True

    def decode_failed(self, reason: str, problem: str, *, gone: bool) -> None:
        """The decode worker failed before the first byte."""
        if self._promise is not None:
            self._hop_failed(gone=gone)
            return
        assert self._decision is not None
        self._failed(reason, problem, guilty=self._decision.decode, gone=gone)

    def broken(self, problem: str) -> None:
        """The decode worker failed in the middle of the reply."""
        self._refuse(Unavailable(f"the engine failed in mid-reply: {problem}", reason="ENGINE_FAILED"))

    # --- failures and ends --------------------------------------------------------------------------------------------------------

    def prefill_failed(self, reason: str, problem: str, *, gone: bool) -> None:
        """The prefill worker will not deliver: the decode worker must not wait for it (F32)."""
        decision = self._decision
        if not self._has_started() and decision is not None and decision.prefill is not None:
            self._failed(reason, f"prefill: {problem}", guilty=decision.prefill, gone=gone)

    def prefill_done(self) -> None:
        """The prefill worker has done its half."""
        if self._decision is not None:
            self._door.sigma.apply(ev.PrefillDone(self._decision.attempt))
            if self._door.room.waiting:
                self._door.room.notify()

    def _failed(self, reason: str, problem: str, *, guilty: WorkerRef, gone: bool) -> None:
        """A worker failed before the first byte: another one is tried."""
        if gone:
            self._door.sigma.apply(ev.WorkerUnreachable(guilty, gone=True))
        self._avoid |= {guilty}
        if self._tries_left > 0:
            self._retry(reason, problem)
        else:
            self._refuse(Unavailable(f"{reason}: {problem}", reason="ENGINE_FAILED", retry_after_s=0.1))

    def _retry(self, reason: str, problem: str) -> None:
        self._tries_left -= 1
        if self._decision is not None:
            self._door.observer.retried(self, self._decision, reason, problem)
        self._end_attempt(ev.End.FAILED)
        self.guarded(self._decide)

    def _refuse(self, error: KvcError) -> None:
        """The end with an error; a reply that has begun breaks off, because it cannot become another one."""
        if self._over:
            return
        started = self._has_started()
        self._finish(ev.End.FAILED, error)
        if started:
            self._client.cut_off()
        else:
            self._client.respond_error(error)

    def _has_started(self) -> bool:
        return self._decode_half is not None and self._decode_half.started

    def check(self, now_s: float) -> None:
        """Called a few times a second: the request's deadline."""
        if now_s >= self.arrived_s + self._door.timeout_s:
            self._refuse(DeadlineExceeded(f"the request took more than {self._door.timeout_s} s"))
        elif self._decode_half is not None and not self._decode_half.started:
            self._check_workers()

    def _check_workers(self) -> None:
        """A turn without its first byte moves on when nobody hears of a worker that owes it, as in services/router/owed.py."""
        owed, decision = self._door.router.owed, self._decision
        if self._promise is not None:
            if self._asked is not None and owed.is_lost(self._asked.worker):
                self._hop_failed(gone=True)
        elif decision is not None:
            for ref in (decision.decode, decision.prefill):
                if ref is not None and owed.is_lost(ref):
                    error = lost(decision, ref)
                    self._failed(error.reason, error.message, guilty=ref, gone=error.gone)
                    return

    def cancel(self) -> None:
        """The client is gone: everything stops, and is accounted."""
        self._finish(ev.End.CANCELLED)

    def pause(self) -> None:
        """The client reads slowly."""
        if self._decode_half is not None:
            self._decode_half.pause()

    def resume(self) -> None:
        """The client reads again."""
        if self._decode_half is not None:
            self._decode_half.resume()

    def _finish(self, end: ev.End, error: KvcError | None = None) -> None:
        """The end of the exchange; only the first call counts."""
        if self._over:
            return
        self._over = True
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        decision = self._decision
        self._end_attempt(end)
        if self._inside:
            if end is ev.End.FAILED:
                self._door.router.close_unserved(self.session_id)
            self._door.gate.leave(self.session_id)
        self._door.exchanges.discard(self)
        task, self._task = self._task, None
        if task is not None and not task.done() and task is not asyncio.current_task():
            task.cancel()
        else:
            self._leave_room()
        try:
            self._door.observer.ended(self, decision, end, error)
        except Exception as fault:  # noqa: BLE001 - the turn is over whatever becomes of its line
            self._door.fault(fault)

    def _end_attempt(self, end: ev.End) -> None:
        """Ends what runs on engines, and tells Σ."""
        decision, self._decision = self._decision, None
        prefill, self._prefill_half = self._prefill_half, None
        if prefill is not None:
            (prefill.finish if end is ev.End.COMPLETED else prefill.cancel)()
        decode, self._decode_half = self._decode_half, None
        if decode is not None:
            decode.cancel()
        if decision is None:
            return
        self._door.sigma.apply(ev.TurnEnded(decision.attempt, end, self.prompt_tokens(), self.output_tokens()))
        if end is not ev.End.COMPLETED and decision.admission is not None:
            self._door.janitor.release(decision.attempt, decision.decode, decision.admission)
