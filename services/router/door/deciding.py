"""Drives Algorithm 3 for one exchange: feeds the dispatch generator with answers, and performs what it asks for next.

    Ask                 a hot turn takes its question along (hop.py): the reply begins, _land; refused, _ask_after_all; lost, _hop_failed
                        any other is asked through the admission port
    WaitForRoom, Pause  a task waits
    its return          _decided

Answers come back through _advance, at once or later.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Final

from kvc.core.dispatch import Admitted, Ask, Pause, Resumed, Unreachable, WaitForRoom
from kvc.engine.hop import hop_rid
from kvc.errors import KvcError
from services.router.door.hop import promise

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvc.core.dispatch import Answer, Dispatch, Effect
    from kvc.core.types import Attempt, Decision, GaveUp, Turn, WorkerInfo, WorkerRef
    from services.router.door.door import Door
    from services.router.door.halves import DecodeHalf


_NOBODY: Final[frozenset[WorkerRef]] = frozenset()


class Deciding:
    """The part of an exchange that decides. What most requests never set is a default of the class."""

    sent_s = 0.0
    _turn: Turn
    _avoid: frozenset[WorkerRef]
    _attempt = 0
    _steps: Dispatch | None = None
    _asked: Ask | None = None
    _answer: Answer | None
    _asking = False
    _may_hop = True
    _promise: Admitted | None = None
    _landed: DecodeHalf | None = None
    _hop_attempt: Attempt | None = None
    _decode_half: DecodeHalf | None = None
    _task: asyncio.Task[None] | None = None
    _over = False

    def __init__(self, door: Door) -> None:
        """Nothing is decided yet."""
        self._door = door
        self._avoid = _NOBODY
        self._answer = None
        self.request_id = f"{random.getrandbits(128):032x}"
        self.arrived_s = door.clock.now_s()

    # --- what the exchange does about it ------------------------------------------------------------------------------------------

    def _decided(self, outcome: Decision | GaveUp) -> None:
        """Algorithm 3 returned."""
        raise NotImplementedError

    def _send(self, rid: str, decode: WorkerInfo, prefill: WorkerInfo | None) -> None:
        """Sends the request to its workers."""
        raise NotImplementedError

    def _refuse(self, error: KvcError) -> None:
        """Ends the exchange with an error."""
        raise NotImplementedError

    # --- driving ------------------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._steps = self._door.router.steps(self._turn, self.request_id, self._attempt, self._avoid)
        self._step(None)

    def _advance(self, answer: Answer) -> None:
        """Feeds one answer to the dispatch generator, and performs what it asks for next."""
        asked, self._asked = self._asked, None
        if self._over:
            if asked is not None and isinstance(answer, Admitted):  # nobody waits for it any more, but there is a ticket in it
                self._door.janitor.release(asked.attempt, asked.worker, answer.admission)
        elif self._asking:
            self._answer = answer
        else:
            try:
                self._step(answer)
            except Exception as error:  # noqa: BLE001 - as `guarded`
                self._refuse(self._door.fault(error))

    def guarded(self, step: Callable[[], None]) -> None:
        """Runs a step that nobody else looks after: a fault of ours answers this client and is logged; the others go on."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - as said
            self._refuse(self._door.fault(error))

    def _step(self, answer: Answer | None) -> None:
        """As `_advance`; answers that come at once are a loop, not a recursion as deep as there are workers."""
        steps = self._steps
        assert steps is not None
        while True:
            try:
                effect = next(steps) if answer is None else steps.send(answer)
            except StopIteration as stop:
                self._steps = None
                self._decided(stop.value)
                return
            if not isinstance(effect, Ask):
                self._spawn(partial(self._wait, effect))
                return
            self._attempt = effect.attempt.attempt_number + 1
            self._asked = effect
            if self._may_hop and self._door.one_hop and self._hops(effect):
                return
            answer = self._answered_at_once(effect)
            if answer is None:
                return

    def _answered_at_once(self, ask: Ask) -> Answer | None:
        """Asks; the answer, when it comes before this returns."""
        self._asking = True
        try:
            self._ask(ask)
        finally:
            self._asking = False
        answer, self._answer = self._answer, None
        return answer

    def _ask(self, ask: Ask) -> None:
        """Asks for admission."""
        self._door.admission.ask(ask, self._advance)

    def _hops(self, ask: Ask) -> bool:
        """Sends a turn on hot KV with its question in the rid. False when the question must be asked first."""
        sigma = self._door.sigma
        decode = sigma.worker(ask.worker)
        promised = promise(ask, decode, sigma) if decode is not None else None
        if promised is None or decode is None:
            return False
        self._may_hop, self._promise, self._hop_attempt = False, promised, ask.attempt
        self._send(hop_rid(ask.worker.epoch, ask.attempt), decode.info, None)
        return True

    def _land(self) -> bool:
        """The reply to a hop begins, which is the worker's yes. False when Algorithm 3 does not want it any more."""
        half, self._decode_half = self._decode_half, None
        promised, self._promise = self._promise, None
        assert half is not None and promised is not None  # noqa: PT018 - a hop has both
        self._landed = half
        self._advance(promised)
        self._landed = None
        if self._replying() is half:
            self._door.observer.hopped("landed")
            return True
        half.cancel()
        return False

    def _replying(self) -> DecodeHalf | None:
        """The half whose reply is the client's, as it is now."""
        return self._decode_half

    def _ask_after_all(self, outcome: str) -> None:
        """The hop was refused: the question is asked, and its answer is the worker's."""
        self._door.observer.hopped(outcome)
        self._promise = self._decode_half = None
        assert self._asked is not None
        self.guarded(partial(self._ask, self._asked))

    async def _wait(self, effect: Effect) -> None:
        door = self._door
        deadline_s = self.arrived_s + door.timeout_s
        if isinstance(effect, WaitForRoom):
            self._advance(await door.room.wait(self.request_id, effect, deadline_s))
            return
        assert isinstance(effect, Pause)
        pause_s = effect.at_least_s + random.uniform(0.0, effect.jitter_s)  # noqa: S311 - spreads retries, guards nothing
        await asyncio.sleep(pause_s)
        self._advance(Resumed("room", pause_s))

    def _hop_failed(self, *, gone: bool) -> None:
        """The worker could not be reached, or is lost: that is its answer to the question."""
        self._door.observer.hopped("failed")
        half, self._decode_half, self._promise = self._decode_half, None, None
        if half is not None:
            half.cancel()
        self._advance(Unreachable("UNAVAILABLE", gone=gone))

    # --- waiting ------------------------------------------------------------------------------------------------------------------

    def _spawn(self, wait: Callable[[], Coroutine[None, None, None]]) -> None:
        """Runs one wait as a task of this exchange."""
        self._task = asyncio.get_running_loop().create_task(self._guarded(wait))
        self._task.add_done_callback(self._waited)

    async def _guarded(self, wait: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await wait()
        except KvcError as error:
            self._refuse(error)
        except Exception as error:  # noqa: BLE001 - a fault of ours answers this client and is logged; the others go on
            self._refuse(self._door.fault(error))

    def _waited(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # only now it is out of the queue
            self._leave_room()

    def _leave_room(self) -> None:
        """Gives up the place in the queue; the chance that woke us is the next one's."""
        room = self._door.room
        room.leave(self.request_id)
        if room.waiting:
            room.notify()
