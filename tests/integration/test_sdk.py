"""The official OpenAI and Anthropic clients against a mesh of real processes: what agents do all day, reply by reply."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import anthropic
import openai
import pytest
import pytest_asyncio

from kvc.core.blocks import TOKEN_BYTES
from kvc.core.types import Mode
from kvc.engine import kvvalue
from kvc.engine.reference.config import DEFAULT_MODEL
from kvc.engine.tokens import decode_tokens, encode_chat
from tests.support.live_mesh import LiveMesh, live_mesh
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = 10
REPLY_TOKENS = 40
SYSTEM = "You are a careful engineer. " * 60
TASK = "Find out why the build is slow. " * 100
RESULT = "module.py:12: took 0.4 s\n" * 12
SETTLE_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live() -> AsyncIterator[LiveMesh]:
    """One mesh for the module. Pages of the engines are blocks of the mesh, so that what is promised can be compared to the token."""
    async with live_mesh("1P2D", time_scale=20.0, page_tokens=24) as mesh:
        yield mesh


@dataclass
class Reply:
    """A turn as the client saw it."""

    mode: str
    worker: str
    promised_tokens: int
    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    usage: dict[str, Any]


@dataclass
class Talk:
    """A conversation, and how one kind of client has it."""

    client: Any
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[Any] = field(default_factory=list)
    calls: int = 0

    def begin(self, task: str = TASK) -> None:
        raise NotImplementedError

    def answer_tool(self, reply: str, result: str) -> None:
        """The assistant called a tool, and this is what the tool said."""
        raise NotImplementedError

    def follow_up(self, reply: str, question: str) -> None:
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]

    def packed(self) -> bytes:
        """The prompt's tokens as the engine must see them."""
        raise NotImplementedError

    async def stream(self, tokens: int = REPLY_TOKENS, started: asyncio.Event | None = None) -> Reply:
        raise NotImplementedError

    async def whole(self, tokens: int = REPLY_TOKENS) -> str:
        raise NotImplementedError

    def expected(self, tokens: int = REPLY_TOKENS) -> str:
        return decode_tokens(kvvalue.expected_output(self.packed(), tokens, kvvalue.TEXT_VOCAB, kvvalue.salt(DEFAULT_MODEL)))

    def call_id(self) -> str:
        self.calls += 1
        return f"call_{self.calls}"


class OpenAiTalk(Talk):
    def begin(self, task: str = TASK) -> None:
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]

    def answer_tool(self, reply: str, result: str) -> None:
        call = self.call_id()
        used = {"id": call, "type": "function", "function": {"name": "run", "arguments": '{"command": "make -d"}'}}
        self.messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": None, "tool_calls": [used]},
            {"role": "tool", "tool_call_id": call, "content": result},
        ]

    def packed(self) -> bytes:
        return encode_chat(self.messages)

    def arguments(self, tokens: int) -> dict[str, Any]:
        body = {"model": DEFAULT_MODEL, "messages": self.messages, "max_tokens": tokens, "extra_headers": self.headers}
        return body | self.fields

    async def stream(self, tokens: int = REPLY_TOKENS, started: asyncio.Event | None = None) -> Reply:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        raw = await self.client.chat.completions.with_raw_response.create(**self.arguments(tokens), **options)
        texts, usage = [], None
        async for chunk in raw.parse():
            if started is not None:
                started.set()
            texts += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert usage is not None
        cached = usage.prompt_tokens_details.cached_tokens
        counted = (usage.prompt_tokens, cached, usage.completion_tokens, usage.model_dump(exclude_unset=True))
        return Reply(*_told(raw.headers), "".join(texts), *counted)

    async def whole(self, tokens: int = REPLY_TOKENS) -> str:
        answer = await self.client.chat.completions.create(**self.arguments(tokens))
        return cast("str", answer.choices[0].message.content)


class AnthropicTalk(Talk):
    def begin(self, task: str = TASK) -> None:
        self.messages = [{"role": "user", "content": task}]

    def answer_tool(self, reply: str, result: str) -> None:
        call = self.call_id()
        used = {"type": "tool_use", "id": call, "name": "run", "input": {"command": "make -d"}}
        told = {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": result}]}
        self.messages += [
            {"role": "assistant", "content": [{"type": "text", "text": reply}, used]},
            {"role": "user", "content": [told]},
        ]

    def packed(self) -> bytes:
        return encode_chat([{"role": "system", "content": SYSTEM}, *self.messages])

    def arguments(self, tokens: int) -> dict[str, Any]:
        system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        body = {"model": DEFAULT_MODEL, "system": system, "messages": _marked(self.messages), "max_tokens": tokens}
        return body | {"extra_headers": self.headers} | self.fields

    async def stream(self, tokens: int = REPLY_TOKENS, started: asyncio.Event | None = None) -> Reply:
        raw = await self.client.messages.with_raw_response.create(**self.arguments(tokens), stream=True)
        events = []
        async for event in await raw.parse():
            if started is not None:
                started.set()
            events.append(event)
        kinds = [event.type for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert events[-2].delta.stop_reason == "max_tokens"
        text = "".join(event.delta.text for event in events[2:-3])
        first, last = events[0].message.usage, events[-2].usage
        assert first.input_tokens == last.input_tokens
        cached = first.cache_read_input_tokens
        counted = (first.input_tokens + cached, cached, last.output_tokens, last.model_dump(exclude_unset=True))
        return Reply(*_told(raw.headers), text, *counted)

    async def whole(self, tokens: int = REPLY_TOKENS) -> str:
        answer = await self.client.messages.create(**self.arguments(tokens))
        return "".join(block.text for block in answer.content)


def _marked(messages: list[Any]) -> list[Any]:
    """As coding agents send them: the mark for caching is on the last part of the last message, turn by turn on another one."""
    content = messages[-1]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    parts[-1] = parts[-1] | {"cache_control": {"type": "ephemeral"}}
    return [*messages[:-1], messages[-1] | {"content": parts}]


def _told(headers: Any) -> tuple[str, str, int]:
    return headers["x-kvc-mode"], headers["x-kvc-worker"], int(headers["x-kvc-cached-tokens"])


def _engines_usage(kind: type[Talk], prompt: int, cached: int, output: int) -> dict[str, Any]:
    """Usage as the engine writes it, field by field."""
    if kind is OpenAiTalk:
        details = {"cached_tokens": cached}
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, "prompt_tokens_details": details}
    told = {"input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return told | {"output_tokens": output}


KINDS = pytest.mark.parametrize("kind", [OpenAiTalk, AnthropicTalk], ids=["openai", "anthropic"])


@pytest_asyncio.fixture(loop_scope="module")
async def client(live: LiveMesh, kind: type[Talk]) -> AsyncIterator[Any]:
    """The official client, as its documentation says."""
    url = live.mesh.http_url
    made: Any = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    if kind is AnthropicTalk:
        made = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    async with made:
        yield made


async def sessions(live: LiveMesh) -> int:
    async with live.http.get(f"{live.mesh.http_url}/kvc/state") as response:
        return int((await response.json())["sessions"])


@KINDS
@pytest.mark.parametrize("named", [True, False], ids=["header", "prefix"])
async def test_ten_streamed_turns_with_tools(live: LiveMesh, client: Any, kind: type[Talk], *, named: bool) -> None:
    """Turns from the second on are Direct on the session's worker, whether the session has a name or is known by its prefix."""
    name = f"agent-{kind.__name__}"
    talk = kind(client, {"x-session-id": name} if named else {})
    talk.begin(f"{kind.__name__} {named} {TASK}")
    before = await sessions(live)
    replies: list[Reply] = []
    for turn in range(TURNS):
        right = talk.expected()
        reply = await talk.stream()
        assert reply.text == right
        assert reply.prompt_tokens == len(talk.packed()) // TOKEN_BYTES
        assert reply.output_tokens == REPLY_TOKENS
        assert reply.promised_tokens == reply.cached_tokens
        assert reply.usage == _engines_usage(kind, reply.prompt_tokens, reply.cached_tokens, REPLY_TOKENS)
        replies.append(reply)
        if turn % 3 == 2:
            talk.follow_up(reply.text, "What did you change, and why?")
        else:
            talk.answer_tool(reply.text, f"{turn}: {RESULT}")
    assert [reply.mode for reply in replies[1:]] == [Mode.DIRECT.value] * (TURNS - 1)
    assert len({reply.worker for reply in replies}) == 1
    assert all(later.cached_tokens >= earlier.prompt_tokens - 24 for earlier, later in pairwise(replies))
    assert await sessions(live) == before + 1
    if named:
        status = await live.session(name)
        assert (status.known, status.turns, status.pin.worker_id) == (True, TURNS, replies[-1].worker)
        assert status.context_tokens == replies[-1].prompt_tokens + REPLY_TOKENS


@KINDS
async def test_without_streaming(live: LiveMesh, client: Any, kind: type[Talk]) -> None:
    talk = kind(client)
    talk.begin("Say something.")
    for _ in range(2):
        right = talk.expected(8)
        assert await talk.whole(8) == right
        talk.follow_up(right, "And again.")


@KINDS
async def test_diverging_turns_are_two_sessions_and_neither_waits(live: LiveMesh, client: Any, kind: type[Talk]) -> None:
    """A sub-agent that shares its parent's prefix talks while the parent does."""
    parent = kind(client)
    parent.begin(f"fork {TASK}")
    before = await sessions(live)
    reply = await parent.stream()
    child = kind(client, messages=list(parent.messages))
    parent.follow_up(reply.text, "Look into the linker.")
    child.follow_up(reply.text, "Look into the compiler.")
    rights = parent.expected(3_000), child.expected()
    started = asyncio.Event()
    long_turn = asyncio.create_task(parent.stream(3_000, started))
    try:
        await asyncio.wait_for(started.wait(), SETTLE_S)
        answers = [await child.stream()]
        assert not long_turn.done(), "the short turn waited for the long one"
    finally:
        answers = [await long_turn, *answers]
    assert [answer.text for answer in answers] == list(rights)
    assert await sessions(live) == before + 2
    parent.follow_up(answers[0].text, "Thanks.")
    child.follow_up(answers[1].text, "Thanks.")
    for talk, answer in zip((parent, child), answers, strict=True):
        right = talk.expected()
        again = await talk.stream()
        assert (again.text, again.mode, again.worker) == (right, Mode.DIRECT.value, answer.worker)
    assert await sessions(live) == before + 2


@KINDS
async def test_groups_keep_equal_conversations_apart(live: LiveMesh, client: Any, kind: type[Talk]) -> None:
    """OpenAI's prompt_cache_key and Anthropic's metadata.user_id."""
    before = await sessions(live)
    for user in ("ann", "bob", "ann"):
        talk = kind(client, fields={"metadata": {"user_id": user}} if kind is AnthropicTalk else {"prompt_cache_key": user})
        talk.begin(f"group {kind.__name__} {TASK}")
        right = talk.expected()
        assert (await talk.stream()).text == right
    assert await sessions(live) == before + 2


@KINDS
async def test_errors_are_the_clients_own(live: LiveMesh, client: Any, kind: type[Talk]) -> None:
    """F76: what is wrong with a request reaches the program as its SDK's exception, with the field's name."""
    sdk: Any = openai if kind is OpenAiTalk else anthropic
    talk = kind(client, messages=[{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(sdk.BadRequestError, match=r"messages"):
        await talk.stream()
    talk = kind(client, messages=[{"role": "user", "content": "x" * 200_000}])
    with pytest.raises(sdk.APIStatusError, match="fit on no worker") as caught:
        await talk.whole()
    assert caught.value.status_code == 413
    talk = kind(client, {"x-session-id": "x" * 300})
    talk.begin()
    with pytest.raises(sdk.BadRequestError, match="x-session-id"):
        await talk.whole()


async def test_the_mesh_comes_to_rest(live: LiveMesh) -> None:
    """After everything above, no engine holds anything for anybody."""
    await eventually(live.at_rest, SETTLE_S)
