"""A mesh without a network: it keeps every session's KV and answers as the reference engine would."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from kvc.core.blocks import pack_tokens
from kvc.engine import kvvalue
from kvc.evaluation.ports import TurnResult

TAU_APPEND_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """One call."""

    session_id: str
    request_id: str
    prompt: bytes
    count: int
    last: bool
    at_s: float


@dataclass
class FakeMesh:
    """Answers rightly after `delay_s`; `answers` maps a request id to changes of the result, or to an error to raise."""

    model: str = "m"
    delay_s: float = 0.0
    answers: dict[str, TurnResult | BaseException] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    live: int = 0
    most_live: int = 0
    held: dict[str, bytes] = field(default_factory=dict)

    async def turn(self, session_id: str, packed_prompt: bytes, max_new_tokens: int, *, request_id: str, last: bool) -> TurnResult:
        """Serves Direct what appends little to what it holds of the session, else Seed."""
        at_s = asyncio.get_running_loop().time()
        self.asked.append(Asked(session_id, request_id, packed_prompt, max_new_tokens, last, at_s))
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.live -= 1
        special = self.answers.get(request_id)
        if isinstance(special, BaseException):
            raise special
        if special is not None:
            return special
        return self._answer(session_id, packed_prompt, max_new_tokens)

    def right(self, packed_prompt: bytes, count: int) -> bytes:
        """The reply that the prompt calls for."""
        return pack_tokens(kvvalue.expected_output(packed_prompt, count, kvvalue.IDS_VOCAB, kvvalue.salt(self.model)))

    def wrong(self, packed_prompt: bytes, count: int) -> TurnResult:
        """A reply with its last token changed."""
        right = self.right(packed_prompt, count)
        return TurnResult(ok=True, mode="direct", output=right[:-4] + pack_tokens([300]))

    def _answer(self, session_id: str, prompt: bytes, count: int) -> TurnResult:
        cached = _common_tokens(self.held.get(session_id, b""), prompt)
        direct = cached > 0 and len(prompt) // 4 - cached <= TAU_APPEND_TOKENS
        reply = self.right(prompt, count)
        self.held[session_id] = prompt + reply
        result = TurnResult(
            ok=True,
            mode="direct" if direct else "seed",
            worker="d0",
            executor="local",
            output=reply,
            cached_tokens=cached,
            ttft_s=0.05,
            latency_s=0.5,
            mesh_s=0.001,
            probes=1,
            finish_reason="length",
        )
        return result if direct else replace(result, ttft_s=1.0, latency_s=1.5)


def _common_tokens(one: bytes, other: bytes) -> int:
    """Equal tokens at the front, by bisection."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[: 4 * middle] == other[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
