"""Prompts of a replayed session, turn by turn.

A trace says how long each prompt is and which blocks it shares, not what was in it. Two ways to fill in the tokens:

* `outputs="trace"`: tokens follow the block ids alone. Equal ids at the front of two prompts <=> equal tokens there.
* `outputs="actual"` (default): a turn that only appends (it begins with all blocks of the previous prompt and is long enough to hold
  the previous reply) is the previous prompt, the reply that the engine really gave, then new tokens: what a real client sends, so
  that an engine that kept the KV of its own reply reuses it. A turn that rewrites history keeps the common blocks only. A block's
  tokens are fixed for the session when its id is first seen, reply or not, so a turn that goes back to an earlier branch finds it.

Between sessions only blocks of first prompts and of rewrites are shared (system prompts, tool schemas): replies are each session's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvc.core.blocks import TOKEN_BYTES
from kvc.evaluation.tokens import block_pattern, tail_tokens
from kvc.evaluation.traces import block_count, block_ids, common_blocks, full_blocks

if TYPE_CHECKING:
    from kvc.evaluation.traces import TraceRequest

Outputs = Literal["actual", "trace"]


class SessionPrompts:
    """Makes the prompts of one session. Mutated by every call of `prompt`.

    Attributes:
        kept_tokens: tokens that the latest prompt has in common with the one before and its reply.
    """

    def __init__(self, block_tokens: int, outputs: Outputs = "actual") -> None:
        """Starts a session.

        Args:
            block_tokens: tokens a native block of the trace; 0 when it has no ids.
            outputs: whose tokens stand for replies.
        """
        self.kept_tokens = 0
        self._block_tokens = block_tokens
        self._pattern = block_pattern(block_tokens) if block_tokens else None
        self._actual = outputs == "actual"
        self._own: dict[int, bytes] = {}  # blocks whose tokens are not those of their ids
        self._seen: set[int] = set()
        self._last: TraceRequest | None = None
        self._prompt = b""

    def prompt(self, request: TraceRequest, reply: bytes = b"") -> bytes:
        """The packed prompt of the session's next turn.

        Args:
            request: the turn.
            reply: packed tokens the engine gave for the previous turn; empty when it failed.

        Returns:
            `request.input_tokens` little-endian u32 ids.
        """
        history = self._prompt + reply if self._actual else self._prompt
        common = self._common(request)
        if self._appends(request, common, len(history) // TOKEN_BYTES):
            kept = len(history) // TOKEN_BYTES
            prompt = history + self._rest(request, kept)
            self._remember(request, prompt, kept)
        else:
            kept = common * self._block_tokens
            prompt = self._prompt[: kept * TOKEN_BYTES] + self._rest(request, kept)
        self.kept_tokens = kept
        if self._actual:
            self._seen.update(block_ids(request.blocks, common))
        self._last, self._prompt = request, prompt
        return prompt

    def _appends(self, request: TraceRequest, common: int, history_tokens: int) -> bool:
        """True when the turn is the history as it was sent and received, plus new tokens."""
        if self._last is None or not self._actual or request.input_tokens < history_tokens:
            return False
        grows = common == full_blocks(self._last, self._block_tokens)
        return grows and next(block_ids(request.blocks, common), None) not in self._seen

    def _common(self, request: TraceRequest) -> int:
        if self._last is None:
            return 0
        shared = common_blocks(self._last.blocks, request.blocks)
        return min(shared, full_blocks(self._last, self._block_tokens), full_blocks(request, self._block_tokens))

    def _rest(self, request: TraceRequest, start: int) -> bytes:
        """Tokens from `start` to the end of the prompt: by block id as far as there are ids, then the request's own."""
        covered = min(block_count(request.blocks) * self._block_tokens, request.input_tokens)
        rest = b""
        if start < covered and self._pattern is not None:
            first = start // self._block_tokens
            made, own = self._pattern.tokens, self._own
            blocks = b"".join([own.get(number) or made(number) for number in block_ids(request.blocks, first)])
            skipped = first * self._block_tokens
            rest = blocks[(start - skipped) * TOKEN_BYTES : (covered - skipped) * TOKEN_BYTES]
        tail = tail_tokens(request.request_id, request.input_tokens - covered)
        return rest + tail[max(0, start - covered) * TOKEN_BYTES :]

    def _remember(self, request: TraceRequest, prompt: bytes, kept: int) -> None:
        """Blocks whose tokens come from the history instead of their ids."""
        if self._last is None or not self._block_tokens:
            return
        start = full_blocks(self._last, self._block_tokens)
        stop = min(full_blocks(request, self._block_tokens), -(-kept // self._block_tokens))
        width = self._block_tokens * TOKEN_BYTES
        for index, number in zip(range(start, stop), block_ids(request.blocks, start), strict=False):
            self._own[number] = prompt[index * width : (index + 1) * width]
