"""Engines over HTTP: SGLang's /generate, streamed as server-sent events.

Engines must stream what is new in each event (SGLang: incremental streaming), not the output so far.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Self

import aiohttp
import msgspec

from services.router.engines import KEEP_ALIVE_S, OUT_OF_FILES, out_of_files
from services.router.ports import EngineCall, EngineChunk, EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from services.router.config import EnginesConfig

MAX_EVENT_BYTES = 8 * 1024 * 1024
MAX_ERROR_BYTES = 1 << 16
DRAIN_S = 1.0
"""How long the rest of a reply, or the body of an error, may take."""
_DONE = b"[DONE]"

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class _FinishReason(msgspec.Struct):
    type: str = ""
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    prompt_tokens: U32 = 0
    completion_tokens: U32 = 0
    cached_tokens: U32 = 0
    kvc_ttft_s: Seconds = 0.0
    kvc_latency_s: Seconds = 0.0


class _Reply(msgspec.Struct):
    text: str = ""
    output_ids: list[U32] = msgspec.field(default_factory=list)
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode
_encode = msgspec.json.Encoder().encode


class HttpEngines:
    """EnginePort over one connection pool. Use as an async context manager.

    The pool has no bound of its own: a turn holds up to two connections, and turns that hold one while they wait for another would
    wait for ever. The router bounds turns instead (`requests.max_turns`).
    """

    def __init__(self, config: EnginesConfig) -> None:
        """Opens nothing yet."""
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Opens the pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
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
        async with self._post(call, stream=True) as response, aclosing(_events(response)) as payloads:
            try:
                async for payload in payloads:
                    chunk = _chunk(_decode_reply(payload))
                    finished = finished or bool(chunk.finish_reason)
                    yield chunk
            except EngineError:
                if not finished:  # what happens to the connection after the last token is no fault of the turn
                    raise
        if not finished:
            raise EngineError(0, "stream-truncated", "the engine closed the stream before the end of the turn")

    async def prefill(self, call: EngineCall) -> None:
        """Runs the prefill half of a turn; of the answer only its failure is of interest."""
        async with self._post(call, stream=False) as response:
            try:
                raw = await _read(response, MAX_EVENT_BYTES)
            except (aiohttp.ClientError, ConnectionError) as error:
                raise EngineError(0, "connection-lost", str(error), gone=True) from error
            if _chunk(_decode_reply(raw)).finish_reason == "abort":
                raise EngineError(0, "prefill-aborted", "the prefill engine aborted its half of the turn")

    @asynccontextmanager
    async def _post(self, call: EngineCall, *, stream: bool) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "used outside its context"
        headers = {"content-type": "application/json"}
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        url = call.url.rstrip("/") + "/generate"
        try:
            response = await self._session.post(url, data=_body(call, stream=stream), headers=headers, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            if out_of_files(error):
                raise EngineError(503, "router-out-of-files", OUT_OF_FILES) from error
            raise EngineError(0, "connection-refused", str(error), gone=True) from error
        except aiohttp.ServerTimeoutError as error:
            raise EngineError(0, "connect-timeout", str(error), gone=True) from error
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


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
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
                    await _drain(response)
                    return
                yield payload
            if len(buffer) > MAX_EVENT_BYTES:
                raise EngineError(0, "bad-reply", f"an event of more than {MAX_EVENT_BYTES} bytes")
    except (aiohttp.ClientError, ConnectionError) as error:
        raise EngineError(0, "connection-lost", str(error) or type(error).__name__, gone=True) from error


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Reads the end of a reply, so that its connection can be used again; one that does not come is not worth a wait."""
    try:
        async with asyncio.timeout(DRAIN_S):
            await response.content.readany()
    except TimeoutError:
        return


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body.

    Raises:
        EngineError: it is longer than `most` bytes.
    """
    parts, size = [], 0
    async for data in response.content.iter_any():
        parts.append(data)
        size += len(data)
        if size > most:
            raise EngineError(0, "bad-reply", f"a body of more than {most} bytes")
    return b"".join(parts)


def _decode_reply(payload: bytes) -> _Reply:
    try:
        reply = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(0, "bad-reply", f"not an engine event: {error}") from error
    if reply.error is not None:
        body = reply.error if isinstance(reply.error, dict) else {"message": str(reply.error)}
        raise _described(_status(body.get("code")), body, "engine-error")
    return reply


def _chunk(reply: _Reply) -> EngineChunk:
    meta = reply.meta_info
    end = meta.finish_reason
    if end is not None and end.type == "abort" and end.status_code is not None:
        raise EngineError(_status(end.status_code), "engine-abort", end.message)
    return EngineChunk(
        text=reply.text,
        output_ids=tuple(reply.output_ids),
        finish_reason=end.type if end is not None else "",
        prompt_tokens=meta.prompt_tokens,
        completion_tokens=meta.completion_tokens,
        cached_tokens=meta.cached_tokens,
        engine_ttft_s=meta.kvc_ttft_s,
        engine_latency_s=meta.kvc_latency_s,
    )


async def _refusal(response: aiohttp.ClientResponse) -> EngineError:
    """The engine's error body as an EngineError; whatever the body is."""
    try:
        async with asyncio.timeout(DRAIN_S):
            body = msgspec.json.decode(await _read(response, MAX_ERROR_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, EngineError, aiohttp.ClientError, ConnectionError, TimeoutError):
        body = None  # the status alone says what happened
    error = body.get("error") if isinstance(body, dict) else None
    fallback = {"message": response.reason or ""}
    found = error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else fallback
    return _described(response.status, found, f"http-{response.status}", _retry_after_s(response.headers.get("retry-after", "")))


def _described(status: int, body: dict[str, Any], reason: str, retry_after_s: float = 0.0) -> EngineError:
    """An error in OpenAI's shape, as the reference engine and SGLang send it."""
    return EngineError(
        status,
        str(body.get("type") or reason),
        str(body.get("message") or ""),
        field=str(body.get("param") or ""),
        retry_after_s=retry_after_s,
    )


def _status(code: object) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 500  # noqa: PLR2004 - HTTP


def _retry_after_s(header: str) -> float:
    try:
        hint_s = float(header)
    except ValueError:  # absent, or a date
        return 0.0
    return hint_s if math.isfinite(hint_s) and hint_s > 0 else 0.0
