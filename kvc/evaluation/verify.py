"""Whether a reply is what its whole prompt calls for: the client's check of the KV that produced it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc.core.blocks import pack_tokens
from kvc.engine import kvvalue

if TYPE_CHECKING:
    from kvc.engine.kvvalue import Vocab


@dataclass(frozen=True, slots=True)
class _Known:
    """A prompt, its reply, and the KV state after each."""

    prompt: bytes
    reply: bytes
    prompt_state: int
    reply_state: int


class KvValueVerifier:
    """Replies of the reference engine. A turn that appends costs its append; the state of the rest is remembered."""

    def __init__(self, model: str, vocab: Vocab = kvvalue.IDS_VOCAB) -> None:
        """Starts with no session.

        Args:
            model: the model name the engines serve; its salt begins every context.
            vocab: range of the output ids.
        """
        self._salt = kvvalue.salt(model)
        self._vocab = vocab
        self._known: dict[str, _Known] = {}

    def expected(self, session_id: str, packed_prompt: bytes, count: int) -> bytes:
        """The packed first `count` reply tokens."""
        state, covered = self._start(session_id, packed_prompt)
        state = kvvalue.advance(state, packed_prompt[covered:])
        tokens, reply_state = kvvalue.generate(state, count, self._vocab)
        reply = pack_tokens(tokens)
        self._known[session_id] = _Known(packed_prompt, reply, state, reply_state)
        return reply

    def forget(self, session_id: str) -> None:
        """Drops what is remembered of a session; unknown ones are fine."""
        self._known.pop(session_id, None)

    def _start(self, session_id: str, packed_prompt: bytes) -> tuple[int, int]:
        """The furthest known state on the way to a prompt, and the bytes it covers."""
        known = self._known.get(session_id)
        if known is None or not packed_prompt.startswith(known.prompt):
            return self._salt, 0
        if packed_prompt.startswith(known.reply, len(known.prompt)):
            return known.reply_state, len(known.prompt) + len(known.reply)
        return known.prompt_state, len(known.prompt)
