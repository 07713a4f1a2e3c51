"""Which session a request belongs to, and the block hashes of its prompt, at the cost of what the turn appends.

Identity, in this order: the header `x-session-id`; SGLang's `session_id`; else the longest known conversation. `prompt_cache_key`
(OpenAI) and `metadata.user_id` (Anthropic) name a group: conversations are only compared inside one. A request continues a
conversation when its messages begin with all messages of that conversation's last request, token by token; anything else (a fork, a
compaction, a rewrite, a second turn while the first is in flight) is a session of its own, and finds the KV it shares through its
block hashes.

A conversation remembers one key a message and the tokens before it, so a turn costs its new messages: one digest over the old
messages' bytes proves that they are unchanged.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import xxhash

from kvc.core.blocks import TOKEN_BYTES, common_blocks, extend_blocks, extend_chain
from kvc.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Container

    from kvc.core.blocks import Chain

_decode_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode
_digest = xxhash.xxh3_128_digest
MAX_MESSAGES = 65_536
MOST_SAID = 131_072
"""Messages whose tokens are known by a digest: some 25 MB. Those beyond are tokenized once more when they come again."""
_ENTRY_BYTES = 1200
_MESSAGE_BYTES = 64


class MessageTokenizer(Protocol):
    """Tokens of a chat prompt, message by message: special tokens separate messages, so the prompt is their concatenation."""

    def message(self, raw: bytes) -> bytes:
        """Packed tokens of one message, given as JSON.

        Raises:
            InvalidField: it is no chat message.
        """
        ...

    def generation_prompt(self) -> bytes:
        """Packed tokens after the last message, before the reply."""
        ...

    def text(self, text: str) -> bytes:
        """Packed tokens of plain text."""
        ...


@dataclass(slots=True)
class Conversation:
    """A session's last prompt.

    Attributes:
        session_id: the session.
        group: what its identity is compared inside.
        preamble: digest of what else shapes the prompt (model, tools, system).
        of_tokens: it was given as text or token ids, not as messages.
        raw_bytes: length of the last request's messages without the closing bracket, or of its full blocks of tokens.
        raw_digest: digest of those bytes.
        keys: one a message, chained: a key names the conversation up to and including its message.
        tokens_before: tokens before message i, and after the last.
        chain: hashes of the full blocks of the messages, without the generation prompt.
        tail: packed tokens after the last full block.
        index_key: under which the index finds it.
    """

    session_id: str
    group: bytes
    preamble: bytes
    of_tokens: bool = False
    raw_bytes: int = 0
    raw_digest: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    tokens_before: array[int] = field(default_factory=lambda: array("q", (0,)))
    chain: Chain = field(default_factory=lambda: array("Q"))
    tail: bytes = b""
    index_key: bytes = b""

    @property
    def held_bytes(self) -> int:
        """What remembering it costs, roughly."""
        return _ENTRY_BYTES + 8 * len(self.chain) + _MESSAGE_BYTES * len(self.keys)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What routing needs to know of a request."""

    session_id: str
    chain: Chain
    input_tokens: int


class Conversations:
    """Live conversations, least recently used first out. Lives on one event loop; every method but the readers mutates."""

    def __init__(
        self, tokenizer: MessageTokenizer, block_tokens: int, seed: int, max_conversations: int = 100_000, max_bytes: int = 1 << 29
    ) -> None:
        """Starts empty.

        Args:
            tokenizer: of the served model.
            block_tokens: tokens a block.
            seed: chain seed of the served model.
            max_conversations: those beyond are forgotten.
            max_bytes: cap on what is remembered of all of them; the newest one always stays.
        """
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._seed = seed
        self._most = max_conversations
        self._most_bytes = max_bytes
        self.held_bytes = 0
        self._by_session: dict[str, Conversation] = {}
        self._by_key: dict[bytes, str] = {}
        self._said: dict[bytes, bytes] = {}  # by digest of a message as written: digest of its tokens

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._by_session)

    def chat(self, messages: bytes, preamble: bytes, session_id: str | None, group: bytes, busy: Container[str]) -> Prompt:
        """The prompt of a chat request.

        Args:
            messages: the JSON array of its messages.
            preamble: digest of what else shapes the prompt.
            session_id: the session, when the client names it.
            group: what identity is compared inside.
            busy: sessions with a turn in flight, which a request without a name cannot continue.

        Raises:
            InvalidField: `messages` is no array of chat messages.
        """
        known = self._by_session.get(session_id) if session_id is not None else None
        if known is not None and (known.of_tokens or known.preamble != preamble or known.group != group):
            known = None
        raws = self._unchanged(known, messages) if known is not None else None
        if raws is not None and known is not None:
            keys, runs = self._keyed(known.keys[-1] if known.keys else _root(preamble, group), raws)
            tokens = self._tokens(raws, runs, 0)
            self.forget(known.session_id)
            return self._extended(known, messages, keys, tokens)
        raws = _split(messages)
        keys, runs = self._keyed(_root(preamble, group), raws)
        if session_id is None:
            known = self._continued(keys, busy)
        if known is None:
            known = Conversation(session_id or uuid.uuid4().hex, group, preamble)
        kept = common_blocks(known.keys, keys)
        tokens = self._tokens(raws, runs, kept)  # may fail: before anything changes
        self.forget(known.session_id)
        self._cut(known, raws, kept)
        return self._extended(known, messages, keys[kept:], tokens)

    def text(self, text: str, preamble: bytes, session_id: str | None, group: bytes, busy: Container[str]) -> Prompt:
        """The prompt of a text request: one message of plain text, whose continuation is a longer text."""
        return self.tokens(self._tokenizer.text(text), preamble, session_id, group, busy)

    def tokens(self, packed: bytes, preamble: bytes, session_id: str | None, group: bytes, busy: Container[str]) -> Prompt:
        """The prompt of a request given as packed token ids."""
        chain: Chain = array("Q")
        known = self._by_session.get(session_id) if session_id is not None else None
        if known is not None and known.of_tokens and known.raw_bytes <= len(packed):
            covered = memoryview(packed)[: known.raw_bytes]
            if _digest(covered) == known.raw_digest:
                chain = known.chain[:]
        extend_chain(chain, packed, self._block_tokens, self._seed)
        if session_id is None:
            known = self._continued([_block_key(block, preamble, group) for block in chain], busy)
            session_id = known.session_id if known is not None else uuid.uuid4().hex
        covered_bytes = len(chain) * self._block_tokens * TOKEN_BYTES
        digest = _digest(memoryview(packed)[:covered_bytes])
        known = Conversation(session_id, group, preamble, of_tokens=True, raw_bytes=covered_bytes, raw_digest=digest, chain=chain)
        self._remember(known, _block_key(chain[-1], preamble, group) if chain else b"")
        return Prompt(session_id, chain, len(packed) // TOKEN_BYTES)

    def forget(self, session_id: str) -> None:
        """Drops a session; an unknown one is fine."""
        known = self._by_session.pop(session_id, None)
        if known is not None:
            self.held_bytes -= known.held_bytes
            if self._by_key.get(known.index_key) == session_id:
                del self._by_key[known.index_key]

    def _keyed(self, key: bytes, raws: list[msgspec.Raw]) -> tuple[list[bytes], dict[int, bytes]]:
        """Keys of messages after the one with `key`, and the tokens of those that were not seen before.

        A key names what messages say, not how they are written: clients move marks for caching from message to message, and write
        one message as a text in one turn and as a list of parts in the next.
        """
        keys: list[bytes] = []
        runs: dict[int, bytes] = {}
        for index, raw in enumerate(raws):
            written = _digest(raw)
            said = self._said.get(written)
            if said is None:
                run = runs[index] = self._tokenizer.message(bytes(raw))
                said = self._said[written] = _digest(run)
                if len(self._said) > MOST_SAID:
                    del self._said[next(iter(self._said))]
            key = _digest(key + said)
            keys.append(key)
        return keys, runs

    def _tokens(self, raws: list[msgspec.Raw], runs: dict[int, bytes], first: int) -> list[bytes]:
        """Tokens of the messages from `first` on; `runs` has some of them."""
        return [runs.get(index) or self._tokenizer.message(bytes(raws[index])) for index in range(first, len(raws))]

    def _unchanged(self, known: Conversation, messages: bytes) -> list[msgspec.Raw] | None:
        """The messages after the known ones, when those are byte for byte the same; None when they are not."""
        size = known.raw_bytes
        if not size or len(messages) <= size or _digest(memoryview(messages)[:size]) != known.raw_digest:
            return None
        rest = messages[size:].lstrip(b" \t\r\n")
        if rest[:1] == b"]":
            return []
        return _split(b"[" + rest[1:]) if rest[:1] == b"," else None

    def _continued(self, keys: list[bytes], busy: Container[str]) -> Conversation | None:
        """The longest known conversation that the messages with these keys continue."""
        for key in reversed(keys):
            session_id = self._by_key.get(key)
            if session_id is not None and session_id not in busy:
                return self._by_session[session_id]
        return None

    def _cut(self, known: Conversation, raws: list[msgspec.Raw], kept: int) -> None:
        """Keeps the first `kept` messages of a conversation, which are `raws[:kept]`."""
        if kept == len(known.keys):
            return
        del known.keys[kept:]
        del known.tokens_before[kept + 1 :]
        total = known.tokens_before[-1]
        known.chain = known.chain[: total // self._block_tokens]
        wanted = total % self._block_tokens * TOKEN_BYTES
        tail = b""
        while len(tail) < wanted:
            kept -= 1
            tail = self._tokenizer.message(bytes(raws[kept])) + tail
        known.tail = tail[len(tail) - wanted :] if wanted else b""

    def _extended(self, known: Conversation, messages: bytes, keys: list[bytes], tokens: list[bytes]) -> Prompt:
        """Appends messages by their keys and tokens; the result's chain also covers the generation prompt."""
        total = known.tokens_before[-1]
        for run in tokens:
            total += len(run) // TOKEN_BYTES
            known.tokens_before.append(total)
        known.keys += keys
        # Turns in flight hold the old chain: a copy is extended (a memcpy of 8 bytes a block).
        known.chain, known.tail = self._grown(known.chain, b"".join([known.tail, *tokens]))
        suffix = self._tokenizer.generation_prompt()
        whole, _ = self._grown(known.chain, known.tail + suffix)
        known.raw_bytes = messages.rindex(b"]")
        known.raw_digest = _digest(memoryview(messages)[: known.raw_bytes])
        self._remember(known, known.keys[-1] if known.keys else b"")
        return Prompt(known.session_id, whole, total + len(suffix) // TOKEN_BYTES)

    def _grown(self, chain: Chain, tokens: bytes) -> tuple[Chain, bytes]:
        """`chain` with the blocks that `tokens`, which begin where it ends, make full; and what is left of them."""
        step = self._block_tokens * TOKEN_BYTES
        full = len(tokens) // step * step
        if not full:
            return chain, tokens
        grown = chain[:]
        extend_blocks(grown, tokens[:full], self._block_tokens, self._seed)
        return grown, tokens[full:]

    def _remember(self, known: Conversation, index_key: bytes) -> None:
        """Puts a conversation in the place of what was known of its session. One that changes must be forgotten first."""
        self.forget(known.session_id)
        known.index_key = index_key
        if index_key:
            self._by_key[index_key] = known.session_id
        self._by_session[known.session_id] = known
        self.held_bytes += known.held_bytes
        while len(self._by_session) > self._most or (self.held_bytes > self._most_bytes and len(self._by_session) > 1):
            self.forget(next(iter(self._by_session)))


def _split(messages: bytes) -> list[msgspec.Raw]:
    try:
        raws = _decode_messages(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"not an array of messages: {error}", field="messages") from None
    if len(raws) > MAX_MESSAGES:
        raise InvalidField(f"at most {MAX_MESSAGES} messages are taken", field="messages")
    return raws


def _root(preamble: bytes, group: bytes) -> bytes:
    return _digest(preamble + b"\0" + group)


def _block_key(block: int, preamble: bytes, group: bytes) -> bytes:
    return _root(preamble, group) + block.to_bytes(8, "little")
