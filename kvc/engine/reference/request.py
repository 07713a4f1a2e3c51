"""One request's life.

    phase     holds            next
    NEW       nothing          QUEUED, or PREFILL/PULL at once with a ticket
    QUEUED    nothing          PREFILL or PULL when its memory is granted
    PULL      its memory       DECODE when the KV has arrived (decode engines)
    PREFILL   its memory       DECODE after the last chunk; SEND on prefill engines
    SEND      its prompt's KV  DONE when the decode engine has it
    DECODE    its memory       ENDING after the last token
    ENDING    its memory       DONE once its time has passed
    DONE      nothing

Every phase may go to DONE by abort or failure, which gives the memory back and commits nothing.
"""

from __future__ import annotations

import asyncio
import enum
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvc.core.blocks import TOKEN_BYTES, pack_tokens
from kvc.engine import kvvalue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvc.engine.kvvalue import Vocab
    from kvc.engine.reference.lease import Lease
    from kvc.engine.reference.radix import RadixTree
    from kvc.errors import KvcError


class Phase(enum.Enum):
    """Where a request is; see the table above."""

    NEW = "new"
    QUEUED = "queued"
    PULL = "pull"
    PREFILL = "prefill"
    SEND = "send"
    DECODE = "decode"
    ENDING = "ending"
    DONE = "done"


class Bootstrap(NamedTuple):
    """Where the two halves of a request meet."""

    host: str
    port: int
    room: int


@dataclass(slots=True)
class Times:
    """Modelled seconds of a request, and where they began.

    Attributes:
        arrival_s: virtual time of arrival.
        since_s: virtual time from which the clock of this engine counts for the request.
        elapsed_s: modelled seconds before `since_s`: what was spent on another engine and on the link.
        queue_s: waiting for memory and for the first prefill chunk, on all engines.
        transfer_s: KV on its way.
        ttft_s: until the first token.
        latency_s: until the last token so far.
    """

    arrival_s: float = 0.0
    since_s: float = 0.0
    elapsed_s: float = 0.0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0

    def at(self, now_s: float) -> float:
        """Modelled seconds since arrival."""
        return self.elapsed_s + now_s - self.since_s


@dataclass(slots=True, eq=False)
class Request:
    """A request and everything the engine keeps about it while it is in flight.

    Attributes:
        rid: request id; a ticket id for admitted turns.
        prompt: packed tokens.
        max_new_tokens: tokens to generate; always exactly so many.
        vocab: where output tokens come from.
        session_id: session, or empty.
        bootstrap: where the KV comes from or goes to, or None.
        aborted: why it was aborted, or empty.
        error: why it failed, or None.
        output_ready: set when the client's handler should look.
        on_move: called when the phase has changed.
        cached_tokens: prompt tokens that nobody prefilled for this request.
        resident_tokens: prompt tokens whose KV was here when it got its memory.
        prefill_tokens: prompt tokens prefilled for it, here or on the prefill engine.
        flushed_s: wall time of the last output the client was told of.
        visible: output tokens the client may see.
        kv_tokens: prompt tokens whose KV exists.
        tail: KV value of the prompt's tokens after its last full page, once its KV is complete.
    """

    rid: str
    prompt: bytes
    max_new_tokens: int
    vocab: Vocab
    session_id: str = ""
    bootstrap: Bootstrap | None = None
    phase: Phase = Phase.NEW
    lease: Lease | None = None
    output: list[int] = field(default_factory=list)
    aborted: str = ""
    error: KvcError | None = None
    output_ready: asyncio.Event = field(default_factory=asyncio.Event)
    on_move: Callable[[], None] | None = None
    times: Times = field(default_factory=Times)
    cached_tokens: int = 0
    resident_tokens: int = 0
    prefill_tokens: int = 0
    flushed_s: float = -1.0
    visible: int = 0
    kv_tokens: int = 0
    tail: int = 0
    _page_state: int = 0
    _tip: int = 0
    _values: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def input_tokens(self) -> int:
        """Prompt length."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def context_tokens(self) -> int:
        """Tokens a decode step attends to."""
        return self.input_tokens + len(self.output)

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to generate."""
        return self.max_new_tokens - len(self.output)

    def move(self, phase: Phase) -> None:
        """Changes the phase and tells who waits for that. Mutates."""
        self.phase = phase
        if self.on_move is not None:
            self.on_move()

    def begin(self, tree: RadixTree, salt: int) -> None:
        """Reads the KV of the locked prefix: every page of it counts. Mutates."""
        assert self.lease is not None
        self.resident_tokens = self.cached_tokens = self.kv_tokens = self.lease.locked_pages * tree.page_tokens
        self._page_state = tree.state(self.lease.node, self.lease.locked_pages, salt)

    def prefill(self, tokens: int, page_tokens: int) -> None:
        """Computes the KV of the next prompt tokens. Mutates."""
        assert self.lease is not None
        before = self.kv_tokens // page_tokens * page_tokens
        self.kv_tokens += tokens
        self.prefill_tokens += tokens
        self.lease.write(-(-self.kv_tokens // page_tokens))
        full = self.kv_tokens // page_tokens * page_tokens
        values, self._page_state = kvvalue.page_values(self._page_state, self._run(before, full), page_tokens)
        self._values.extend(values)
        if self.kv_tokens == self.input_tokens:
            self._prompt_done(full, page_tokens, kvvalue.advance(self._page_state, self.prompt[full * TOKEN_BYTES :]))

    def receive(self, values: array[int], tail: int, page_tokens: int) -> None:
        """Takes the KV that a prefill engine computed: pages from the locked prefix on, and what follows the last full page. Mutates."""
        assert self.lease is not None
        self.lease.write(-(-self.input_tokens // page_tokens))
        self.kv_tokens = self.input_tokens
        self._values = values
        self._page_state = kvvalue.state_of(self._page_state, values)
        self._prompt_done(self.input_tokens // page_tokens * page_tokens, page_tokens, (self._page_state + tail) % kvvalue.PRIME)

    def generate(self, count: int, page_tokens: int) -> None:
        """Generates tokens. Mutates."""
        assert self.lease is not None
        tokens, self._tip = kvvalue.generate(self._tip, count, self.vocab)
        self.output += tokens
        # The last token's own KV is written when the next one is computed, so one is always missing.
        self.lease.write(-(-(self.context_tokens - 1) // page_tokens))

    def finish(self, page_tokens: int) -> int:
        """Publishes the KV of the output. Mutates.

        Returns:
            The tokens committed: prompt and output less one.
        """
        assert self.lease is not None
        committed = self.context_tokens - 1
        whole = self.prompt + pack_tokens(self.output[:-1])
        first = self.lease.locked_pages * page_tokens
        values, _ = kvvalue.page_values(self._page_state, whole[first * TOKEN_BYTES :], page_tokens)
        self.lease.publish(whole, committed // page_tokens, values)
        return committed

    def _prompt_done(self, full: int, page_tokens: int, tip: int) -> None:
        assert self.lease is not None
        self._tip = tip
        self.tail = (tip - self._page_state) % kvvalue.PRIME
        self.lease.publish(self.prompt, full // page_tokens, self._values)
        self._values = array("Q")

    def _run(self, first: int, last: int) -> bytes:
        return self.prompt[first * TOKEN_BYTES : last * TOKEN_BYTES]
