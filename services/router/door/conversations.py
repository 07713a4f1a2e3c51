"""Which session a request belongs to, and the block hashes of its prompt, at the cost of what the turn appends.

Identity, in this order: the header `x-session-id`; SGLang's `session_id`; else the longest known conversation. `prompt_cache_key`
(OpenAI) and `metadata.user_id` (Anthropic) name a group: conversations are only compared inside one. A request continues a
conversation when its messages begin with all messages of that conversation's last request, token by token; anything else (a fork, a
compaction, a rewrite, a second turn while the first is in flight) is a session of its own, and finds the KV it shares through its
block hashes.

A conversation remembers one key a message, the tokens before it and how its last body began, so a turn costs its new messages: one
digest over the old ones' bytes proves that they are unchanged. What a session said after the last message of its last request is kept
until it says something else there: a client that goes back some turns and comes the same way again costs no tokens either.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import xxhash

from kvc.core.blocks import HASH_BYTES, TOKEN_BYTES, Chain, chain_seed, common_blocks, extend_blocks, extend_chain
from kvc.errors import InvalidField
from services.router.door.payload import Written

if TYPE_CHECKING:
    from collections.abc import Container


_decode_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode
_digest = xxhash.xxh3_128_digest
MAX_MESSAGES = 65_536
MOST_SAID = 131_072
"""Messages whose tokens are known by a digest: some 25 MB. Those beyond are tokenized once more when they come again."""
FIRST_TOKENS_A_BYTE = 0.25
LEAST_TOKENS_A_BYTE = 1 / 64
MOST_TOKENS_A_BYTE = 4.0
LEARNT = 0.1
"""Of what a completed turn says about the model's tokens a byte, the share that is believed."""
_ENTRY_BYTES = 1500
_MESSAGE_BYTES = 160


class MessageTokenizer(Protocol):
    """Tokens of a chat prompt, message by message: special tokens separate messages, so the prompt is their concatenation.

    Attributes:
        estimates: they are no tokens of the model, but bytes in their place.
    """

    @property
    def estimates(self) -> bool: ...  # noqa: D102 - as said

    def message(self, raw: bytes | msgspec.Raw) -> bytes:
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
    """What a session said.

    Attributes:
        session_id: the session.
        group: what its identity is compared inside.
        preamble: digest of what else shapes the prompt (tools, arguments of the template).
        lead: digest of a message before the request's own; empty when there is none.
        written: how the last request's body began; None when nobody is going to ask.
        messages: in the last request, `lead` included. Keys, tokens and blocks of those after it are of earlier requests.
        keys: one a message, chained: a key names the conversation up to and including its message.
        tokens_before: tokens before message i, and after the last.
        tails: of those tokens the ones after the last full block, packed.
        tail_bytes: length of all tails together.
        chain: hashes of the full blocks of the messages, without the generation prompt.
        tokens_a_byte: of its last completed turn, as the engine counted; 0 before.
        least_tokens: prompt and reply of that turn, when the next prompt contains both.
        tokens_digest: of the full blocks' tokens, when they were given as a text or token ids; empty for messages.
        index_key: under which the index finds it.
        counted_bytes: `held_bytes` as it is in the books.
    """

    session_id: str
    group: bytes
    preamble: bytes
    lead: bytes = b""
    written: Written | None = None
    messages: int = 0
    keys: list[bytes] = field(default_factory=list)
    tokens_before: array[int] = field(default_factory=lambda: array("q", (0,)))
    tails: list[bytes] = field(default_factory=lambda: [b""])
    tail_bytes: int = 0
    chain: Chain = field(default_factory=lambda: array("Q"))
    tokens_a_byte: float = 0.0
    least_tokens: int = 0
    tokens_digest: bytes = b""
    index_key: bytes = b""
    counted_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """What remembering it costs, roughly."""
        return _ENTRY_BYTES + HASH_BYTES * len(self.chain) + _MESSAGE_BYTES * len(self.keys) + self.tail_bytes

    def may_become(self, preamble: bytes, group: bytes) -> bool:
        """True when a chat prompt of these is compared with this one."""
        return not self.tokens_digest and self.preamble == preamble and self.group == group

    def cut(self, messages: int, block_tokens: int) -> None:
        """Forgets all messages but the first ones."""
        del self.keys[messages:]
        del self.tokens_before[messages + 1 :]
        self.tail_bytes -= sum(map(len, self.tails[messages + 1 :]))
        del self.tails[messages + 1 :]
        del self.chain[self.tokens_before[-1] // block_tokens :]

    def append(self, key: bytes, tokens: bytes, block_tokens: int, seed: int) -> None:
        """Adds a message."""
        self.keys.append(key)
        self.tokens_before.append(self.tokens_before[-1] + len(tokens) // TOKEN_BYTES)
        tail = self.tails[-1] + tokens
        extend_blocks(self.chain, tail, block_tokens, seed)
        tail = tail[len(tail) - len(tail) % (block_tokens * TOKEN_BYTES) :]
        self.tails.append(tail)
        self.tail_bytes += len(tail)


class Prompt(NamedTuple):
    """What routing needs to know of a request. Nobody changes the chain.

    Attributes:
        session_id: whose turn it is.
        chain: hashes of its full blocks; of bytes when the length is an estimate.
        input_tokens: its length.
        estimated_bytes: what `input_tokens` was estimated from; 0 when it was counted.
    """

    session_id: str
    chain: Chain
    input_tokens: int
    estimated_bytes: int = 0


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
        self._generation_prompt = tokenizer.generation_prompt()
        self._block_tokens = block_tokens
        self._seed = seed
        self._estimates = tokenizer.estimates
        # Blocks of bytes are hashed in a space of their own: no worker's residency can match them.
        self._text_seed = chain_seed("", f"bytes\0{seed}") if self._estimates else seed
        self._tokens_a_byte = FIRST_TOKENS_A_BYTE
        self._most = max_conversations
        self._most_bytes = max_bytes
        self.held_bytes = 0
        self._by_session: dict[str, Conversation] = {}
        self._by_key: dict[bytes, str] = {}
        self._said: dict[bytes, bytes] = {}  # by digest of a message as written: digest of its tokens

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._by_session)

    def written(self, session_id: str) -> Written | None:
        """How a session's last body began; None when that is not known."""
        known = self._by_session.get(session_id)
        return known.written if known is not None else None

    def follows(self, written: Written, session_id: str, preamble: bytes, group: bytes, lead: bytes) -> bool:
        """True when a body that begins as `written` continues the session's messages."""
        known = self._by_session.get(session_id)
        return (
            known is not None
            and known.written is written
            and known.preamble == preamble
            and known.group == group
            and known.lead == (_digest(lead) if lead else b"")
        )

    def wrote(self, session_id: str, written: Written | None) -> None:
        """Remembers how the body of the session's last request began."""
        known = self._by_session.get(session_id)
        if known is not None:
            known.written = written

    def chat(
        self,
        messages: bytes | msgspec.Raw,
        preamble: bytes,
        session_id: str | None,
        group: bytes,
        busy: Container[str],
        *,
        lead: bytes = b"",
        follows: bool = False,
    ) -> Prompt:
        """The prompt of a chat request.

        Args:
            messages: the JSON array of its messages.
            preamble: digest of what else shapes the prompt.
            session_id: the session, when the client names it.
            group: what identity is compared inside.
            busy: sessions with a turn in flight, which a request without a name cannot continue.
            lead: JSON of a message before them, if there is one.
            follows: the first element of `messages` stands for the session's messages so far (`Payload.known`, `follows`).

        Raises:
            InvalidField: `messages` is no array of chat messages.
        """
        known = self._by_session.get(session_id) if session_id is not None else None
        raws = _split(messages)
        if follows:
            assert known is not None
            del raws[0]
            first, key = known.messages, known.keys[known.messages - 1]
        else:
            if lead and not raws:
                raise InvalidField("must not be empty", field="messages")
            if lead:
                raws.insert(0, msgspec.Raw(lead))
            first, key = 0, _root(preamble, group)
            known = known if known is not None and known.may_become(preamble, group) else None
        if first + len(raws) > MAX_MESSAGES:
            raise InvalidField(f"at most {MAX_MESSAGES} messages are taken", field="messages")
        keys, runs = self._keyed(key, raws)
        if session_id is None:
            known = self._continued(keys, busy)
        if known is None:
            known = Conversation(session_id or uuid.uuid4().hex, group, preamble)
        self._say(known, first, keys, raws, runs)
        known.lead, known.written = _digest(lead) if lead else b"", None
        self._remember(known, known.keys[known.messages - 1] if known.messages else b"")
        return self._prompt(known)

    def _say(self, known: Conversation, first: int, keys: list[bytes], raws: list[msgspec.Raw], runs: dict[int, bytes]) -> None:
        """The conversation now has the messages `raws` after its first ones, and no others.

        Raises:
            InvalidField: one is no message; nothing has changed.
        """
        same = common_blocks(known.keys[first:], keys) if keys else 0
        tokens = self._tokens(raws, runs, same)
        if tokens:
            known.cut(first + same, self._block_tokens)
            for key, run in zip(keys[same:], tokens, strict=True):
                known.append(key, run, self._block_tokens, self._text_seed)
        before, known.messages = known.messages, first + len(keys)
        if not before <= first + same or known.messages == before:
            known.least_tokens = 0

    def text(self, text: str, preamble: bytes, session_id: str | None, group: bytes, busy: Container[str]) -> Prompt:
        """The prompt of a text request: one message of plain text, whose continuation is a longer text."""
        return self._whole(self._tokenizer.text(text), preamble, session_id, group, busy, self._text_seed)

    def tokens(self, packed: bytes, preamble: bytes, session_id: str | None, group: bytes, busy: Container[str]) -> Prompt:
        """The prompt of a request given as packed token ids."""
        return self._whole(packed, preamble, session_id, group, busy, self._seed)

    def _whole(self, packed: bytes, preamble: bytes, session_id: str | None, group: bytes, busy: Container[str], seed: int) -> Prompt:
        chain: Chain = array("Q")
        step = self._block_tokens * TOKEN_BYTES
        known = self._by_session.get(session_id) if session_id is not None else None
        if known is not None and known.tokens_digest and len(known.chain) * step <= len(packed):
            covered = memoryview(packed)[: len(known.chain) * step]
            if _digest(covered) == known.tokens_digest:
                chain = known.chain[:]
        extend_chain(chain, packed, self._block_tokens, seed)
        if session_id is None:
            known = self._continued([_block_key(block, preamble, group) for block in chain], busy)
            session_id = known.session_id if known is not None else uuid.uuid4().hex
        digest = _digest(memoryview(packed)[: len(chain) * step])
        ratio = known.tokens_a_byte if known is not None else 0.0
        known = Conversation(session_id, group, preamble, chain=chain, tokens_digest=digest, tokens_a_byte=ratio)
        self._remember(known, _block_key(chain[-1], preamble, group) if chain else b"")
        if seed != self._seed:
            return self._estimated(known, chain, len(packed))
        return Prompt(session_id, chain, len(packed) // TOKEN_BYTES)

    def forget(self, session_id: str) -> None:
        """Drops a session; an unknown one is fine."""
        known = self._by_session.pop(session_id, None)
        if known is not None:
            self.held_bytes -= known.counted_bytes
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
                run = runs[index] = self._tokenizer.message(raw)
                said = self._said[written] = _digest(run)
                if len(self._said) > MOST_SAID:
                    del self._said[next(iter(self._said))]
            key = _digest(key + said)
            keys.append(key)
        return keys, runs

    def _tokens(self, raws: list[msgspec.Raw], runs: dict[int, bytes], first: int) -> list[bytes]:
        """Tokens of the messages from `first` on; `runs` has some of them."""
        return [runs.get(index) or self._tokenizer.message(raws[index]) for index in range(first, len(raws))]

    def _continued(self, keys: list[bytes], busy: Container[str]) -> Conversation | None:
        """The longest known conversation that the messages with these keys continue."""
        for key in reversed(keys):
            session_id = self._by_key.get(key)
            if session_id is not None and session_id not in busy:
                return self._by_session[session_id]
        return None

    def _prompt(self, known: Conversation) -> Prompt:
        """The prompt of a conversation's last request; its chain covers the generation prompt, too."""
        before = known.tokens_before[known.messages]
        chain = known.chain[: before // self._block_tokens]
        extend_blocks(chain, known.tails[known.messages] + self._generation_prompt, self._block_tokens, self._text_seed)
        if self._estimates:
            return self._estimated(known, chain, before * TOKEN_BYTES)
        return Prompt(known.session_id, chain, before + len(self._generation_prompt) // TOKEN_BYTES)

    def _estimated(self, known: Conversation, chain: Chain, size_bytes: int) -> Prompt:
        tokens = round(size_bytes * (known.tokens_a_byte or self._tokens_a_byte))
        return Prompt(known.session_id, chain, max(1, tokens, known.least_tokens), max(1, size_bytes))

    def confirm(self, prompt: Prompt, prompt_tokens: int, output_tokens: int) -> None:
        """A turn whose length was estimated is completed, and this is how long it was: corrects the next estimates."""
        known = self._by_session.get(prompt.session_id)
        ratio = min(max(prompt_tokens / prompt.estimated_bytes, LEAST_TOKENS_A_BYTE), MOST_TOKENS_A_BYTE)
        self._tokens_a_byte += (ratio - self._tokens_a_byte) * LEARNT
        if known is not None:
            known.tokens_a_byte, known.least_tokens = ratio, prompt_tokens + output_tokens

    def _remember(self, known: Conversation, index_key: bytes) -> None:
        """Puts a conversation in the place of what was known of its session."""
        self.forget(known.session_id)
        known.index_key = index_key
        if index_key:
            self._by_key[index_key] = known.session_id
        self._by_session[known.session_id] = known
        known.counted_bytes = known.held_bytes
        self.held_bytes += known.counted_bytes
        while len(self._by_session) > self._most or (self.held_bytes > self._most_bytes and len(self._by_session) > 1):
            self.forget(next(iter(self._by_session)))


def _split(messages: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    try:
        return _decode_messages(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidField(f"not an array of messages: {error}", field="messages") from None


def _root(preamble: bytes, group: bytes) -> bytes:
    return _digest(preamble + b"\0" + group)


def _block_key(block: int, preamble: bytes, group: bytes) -> bytes:
    return _root(preamble, group) + block.to_bytes(8, "little")
