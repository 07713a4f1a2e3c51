"""Engines over HTTP: SGLang's /generate, streamed as server-sent events."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec

from services.router.ports import EngineCall, EngineChunk, EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from services.router.config import EnginesConfig

MAX_EVENT_BYTES = 8 * 1024 * 1024
_DONE = b"[DONE]"


class _FinishReason(msgspec.Struct):
    type: str = ""


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    kvc_ttft_s: float = 0.0
    kvc_latency_s: float = 0.0


class _Reply(msgspec.Struct):
    text: str = ""
    output_ids: list[int] = msgspec.field(default_factory=list)
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode
_encode = msgspec.json.Encoder().encode


class HttpEngines:
    """EnginePort over one connection pool. Use as an async context manager."""

    def __init__(self, config: EnginesConfig) -> None:
        """Opens nothing yet."""
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Opens the pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._config.connections, limit_per_host=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            auto_decompress=False,
            read_bufsize=1 << 18,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the pool and every stream on it."""
        if self._session is not None:
            await self._session.close()

    async def generate(self, call: EngineCall) -> AsyncGenerator[EngineChunk, None]:
        """Streams a turn. Closing the iterator closes the connection, which makes the engine abort the request."""
        finished = False
        async with self._post(call, stream=True) as response:
            async for payload in _events(response):
                chunk = _chunk(_decode_reply(payload))
                finished = finished or bool(chunk.finish_reason)
                yield chunk
        if not finished:
            raise EngineError(0, "stream-truncated", "the engine closed the stream before the end of the turn", gone=True)

    async def prefill(self, call: EngineCall) -> None:
        """Runs the prefill half of a turn; what the engine answers is dropped once its status is known."""
        async with self._post(call, stream=False) as response:
            try:
                async for _ in response.content.iter_chunked(1 << 16):
                    pass
            except (aiohttp.ClientError, ConnectionError) as error:
                raise EngineError(0, "connection-lost", str(error), gone=True) from error

    @asynccontextmanager
    async def _post(self, call: EngineCall, *, stream: bool) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "used outside its context"
        headers = {"content-type": "application/json"}
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        try:
            response = await self._session.post(call.url + "/generate", data=_body(call, stream=stream), headers=headers)
        except aiohttp.ClientConnectorError as error:
            raise EngineError(0, "connection-refused", str(error), gone=True) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise EngineError(0, "connection-lost", str(error) or type(error).__name__, gone=True) from error
        try:
            if response.status != 200:  # noqa: PLR2004 - HTTP
                raise await _refusal(response)
            yield response
        finally:
            # A connection whose reply was not read to its end must not go back to the pool: closing it is what aborts the turn.
            if response.content.at_eof():
                response.release()
            else:
                response.close()


def _body(call: EngineCall, *, stream: bool) -> bytes:
    body: dict[str, Any] = {
        "rid": call.rid,
        "session_id": call.session_id,
        "sampling_params": {"max_new_tokens": call.max_new_tokens, "temperature": call.temperature},
        "stream": stream,
    }
    if call.text is not None:
        body["text"] = call.text
    else:
        ids = array("I")
        ids.frombytes(call.tokens)
        body["input_ids"] = ids.tolist()
    if call.bootstrap is not None:
        body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"] = call.bootstrap
    return _encode(body)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Payloads of `data:` lines until [DONE] or the end."""
    buffer = b""
    try:
        async for data in response.content.iter_any():
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == _DONE:
                    # Reads what is left of the reply, so that the connection can be used again.
                    await response.content.read()
                    return
                yield payload
            if len(buffer) > MAX_EVENT_BYTES:
                raise EngineError(0, "bad-reply", f"an event of more than {MAX_EVENT_BYTES} bytes", gone=False)
    except (aiohttp.ClientError, ConnectionError) as error:
        raise EngineError(0, "connection-lost", str(error) or type(error).__name__, gone=True) from error


def _decode_reply(payload: bytes) -> _Reply:
    try:
        reply = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(0, "bad-reply", f"not an engine event: {error}") from error
    if reply.error is not None:
        body = reply.error if isinstance(reply.error, dict) else {"message": str(reply.error)}
        code = body.get("code")
        raise EngineError(
            code if isinstance(code, int) else 500,
            str(body.get("type") or "engine-error"),
            str(body.get("message") or ""),
            field=str(body.get("param") or ""),
        )
    return reply


def _chunk(reply: _Reply) -> EngineChunk:
    meta = reply.meta_info
    return EngineChunk(
        text=reply.text,
        output_ids=tuple(reply.output_ids),
        finish_reason=meta.finish_reason.type if meta.finish_reason is not None else "",
        prompt_tokens=meta.prompt_tokens,
        completion_tokens=meta.completion_tokens,
        cached_tokens=meta.cached_tokens,
        engine_ttft_s=meta.kvc_ttft_s,
        engine_latency_s=meta.kvc_latency_s,
    )


async def _refusal(response: aiohttp.ClientResponse) -> EngineError:
    """The engine's error body as an EngineError; whatever the body is."""
    try:
        async with asyncio.timeout(2.0):
            raw = await response.content.read(1 << 16)
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, aiohttp.ClientError, TimeoutError):
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {}
    hint = response.headers.get("retry-after", "0")
    return EngineError(
        response.status,
        str(error.get("type") or f"http-{response.status}"),
        str(error.get("message") or response.reason or ""),
        field=str(error.get("param") or ""),
        retry_after_s=float(hint) if hint.replace(".", "", 1).isdigit() else 0.0,
    )
