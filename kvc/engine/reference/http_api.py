"""The engine's HTTP door in SGLang's, OpenAI's and Anthropic's shapes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from opentelemetry.trace import SpanKind, Status, StatusCode

from kvc.engine.hop import CACHED_HEADER
from kvc.engine.reference import schema
from kvc.engine.reference.faults import HopRefused
from kvc.engine.reference.messages_api import MESSAGES_PATH, MessagesShape
from kvc.engine.reference.openai_api import ChatShape, CompletionShape
from kvc.engine.reference.replies import DataEvents, error_body, meta_info, pieces
from kvc.engine.tokens import VOCAB_SIZE, decode_tokens
from kvc.errors import Internal, InvalidField, KvcError, NotFound, TooLarge, messages_body
from kvc.runtime.logs import event
from kvc.runtime.telemetry import context_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp.typedefs import Handler

    from kvc.engine.reference.engine import Engine
    from kvc.engine.reference.replies import Piece, Shape
    from kvc.engine.reference.request import Request
    from kvc.runtime.telemetry import Telemetry

logger = logging.getLogger(__name__)

JSON = "application/json"


class GenerateShape(DataEvents):
    """Answers of /generate."""

    def __init__(self, worker_id: str) -> None:
        """`worker_id` goes into meta_info."""
        self._worker_id = worker_id

    def chunks(self, request: Request, piece: Piece, completed: int) -> list[Any]:
        """What a stream says about one piece of output."""
        return [self._body(request, piece.token_ids, completed, last=piece.last)]

    def whole(self, request: Request) -> Any:
        """The answer without streaming."""
        return self._body(request, request.output, len(request.output), last=True)

    def _body(self, request: Request, token_ids: list[int], completed: int, *, last: bool) -> dict[str, Any]:
        meta = meta_info(request, completed, self._worker_id, last=last)
        return {"text": decode_tokens(token_ids), "output_ids": token_ids, "meta_info": meta}


class HttpApi:
    """Routes of one engine."""

    def __init__(self, engine: Engine, telemetry: Telemetry) -> None:
        """Serves `engine`."""
        self._engine = engine
        self._telemetry = telemetry
        self._started_s = time.time()

    def application(self) -> web.Application:
        """The routes, with every failure as a typed JSON answer."""
        app = web.Application(client_max_size=self._engine.config.max_body_bytes, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post(MESSAGES_PATH, self._messages),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/health_generate", self._health),
                web.get("/get_model_info", self._model_info),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.post("/abort_request", self._abort),
                web.post("/flush_cache", self._flush),
                web.get("/flush_cache", self._flush),
                web.get("/kv_pool", self._kv_pool),
            ]
        )
        if self._engine.config.allow_corruption:
            app.add_routes([web.post("/debug/corrupt", self._corrupt)])
        return app

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = schema.decode(await http.read(), schema.Generate)
        request = schema.generate_request(body, self._engine.config.default_max_new_tokens)
        return await self._answer(http, request, GenerateShape(self._engine.config.worker_id), stream=bool(body.stream))

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = schema.decode(await http.read(), schema.Chat)
        request = schema.chat_request(body, self._engine.config.default_max_new_tokens)
        return await self._answer(http, request, ChatShape(body, self._engine.config), stream=bool(body.stream))

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        body = schema.decode(await http.read(), schema.Completion)
        request = schema.completion_request(body, self._engine.config.default_max_new_tokens)
        return await self._answer(http, request, CompletionShape(body, self._engine.config), stream=bool(body.stream))

    async def _messages(self, http: web.Request) -> web.StreamResponse:
        body = schema.decode(await http.read(), schema.Messages)
        return await self._answer(http, schema.messages_request(body), MessagesShape(body), stream=bool(body.stream))

    async def _answer(self, http: web.Request, request: Request, shape: Shape, *, stream: bool) -> web.StreamResponse:
        """Runs a request; whatever ends this handler, the client's disconnect included, ends the request with it."""
        engine = self._engine
        with self._span(http, request) as finish:
            engine.submit(request)
            try:
                if stream:
                    return await self._stream(http, request, shape)
                async for _ in pieces(request):
                    pass
                response = _json(shape.whole(request))
                response.headers[CACHED_HEADER] = str(request.cached_tokens)
                return response
            finally:
                engine.forget(request)
                finish()

    async def _stream(self, http: web.Request, request: Request, shape: Shape) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        completed = 0
        try:
            async for piece in pieces(request):
                if not response.prepared:
                    response.headers[CACHED_HEADER] = str(request.cached_tokens)
                    await response.prepare(http)
                completed += len(piece.token_ids)
                chunks = b"".join(shape.framed(chunk) for chunk in shape.chunks(request, piece, completed))
                await response.write(chunks + shape.done if piece.last else chunks)
        except KvcError as error:
            if not response.prepared:
                raise
            await response.write(shape.framed(shape.failure(error)) + shape.done)
        await response.write_eof()
        return response

    @contextlib.contextmanager
    def _span(self, http: web.Request, request: Request) -> Iterator[Callable[[], None]]:
        """One span a request, the child of the caller's; built only when somebody collects."""
        if not self._telemetry.enabled:
            yield lambda: None
            return
        refusal: HopRefused | None = None
        context = context_from(http.headers.get("traceparent", ""))
        with self._telemetry.tracer.start_as_current_span("engine.request", context, SpanKind.SERVER) as span:

            def finish() -> None:
                if request.error is not None:
                    span.set_status(Status(StatusCode.ERROR, request.error.reason))
                span.set_attributes(
                    {
                        "kvc.worker_id": self._engine.config.worker_id,
                        "kvc.rid": request.rid,
                        "kvc.session_id": request.session_id,
                        "kvc.input_tokens": request.input_tokens,
                        "kvc.cached_tokens": request.cached_tokens,
                        "kvc.prefill_tokens": request.prefill_tokens,
                        "kvc.output_tokens": len(request.output),
                        "kvc.queue_s": request.times.queue_s,
                        "kvc.transfer_s": request.times.transfer_s,
                        "kvc.ttft_s": request.times.ttft_s,
                    }
                )

            try:
                yield finish
            except HopRefused as error:  # an answer: the span is no failed one
                span.set_attribute("kvc.refused", error.answer["reason"])
                refusal = error
        if refusal is not None:
            raise refusal

    async def _models(self, _http: web.Request) -> web.Response:
        model = self._engine.config.model
        entry = {"id": model, "object": "model", "created": int(self._started_s), "owned_by": "kvc", "root": model}
        return _json({"object": "list", "data": [entry | {"max_model_len": self._engine.max_input_tokens}]})

    async def _health(self, _http: web.Request) -> web.Response:
        """Never touches the KV pool: a probe that generates would leave KV behind."""
        if self._engine.stopping:
            return _json({"status": "stopping"}, status=503)
        return _json({"status": "ok"})

    async def _model_info(self, _http: web.Request) -> web.Response:
        model = self._engine.config.model
        return _json({"model_path": model, "tokenizer_path": "byte", "is_generation": True, "vocab_size": VOCAB_SIZE})

    async def _server_info(self, _http: web.Request) -> web.Response:
        engine, config = self._engine, self._engine.config
        return _json(
            {
                "model_path": config.model,
                "served_model_name": config.model,
                "disaggregation_mode": {"prefill": "prefill", "decode": "decode"}.get(config.role, "null"),
                "disaggregation_bootstrap_port": engine.bootstrap.port,
                "max_total_num_tokens": engine.pool.capacity_pages * config.page_tokens,
                "page_size": config.page_tokens,
                "chunked_prefill_size": config.chunk,
                "max_running_requests": config.max_running_requests,
                "max_req_input_len": engine.max_input_tokens,
                "vocab_size": VOCAB_SIZE,
                "version": "reference",
                "role": config.role,
                "worker_id": engine.identity.worker_id,
                "epoch": engine.identity.epoch,
                "block_tokens": config.block_tokens,
                "preset": config.preset,
                "time_scale": config.time_scale,
            }
        )

    async def _abort(self, http: web.Request) -> web.Response:
        body = schema.decode(await http.read(), schema.Abort)
        if not body.rid and not body.abort_all:
            raise InvalidField("rid or abort_all is needed", field="rid")
        return _json({"aborted": self._engine.abort(body.rid, everything=body.abort_all)})

    async def _flush(self, _http: web.Request) -> web.Response:
        return _json({"flushed_tokens": self._engine.flush()})

    async def _kv_pool(self, _http: web.Request) -> web.Response:
        return _json(pool_report(self._engine))

    async def _corrupt(self, http: web.Request) -> web.Response:
        body = schema.decode(await http.read(), schema.Corrupt)
        session = self._engine.sessions.get(body.session_id)
        if session is None:
            raise NotFound("no such session", field="session_id")
        resident = self._engine.tree.resident_prefix(session.pages)
        if not 0 <= body.page < resident:
            raise InvalidField(f"the session has {resident} resident pages", field="page")
        self._engine.tree.corrupt(session.pages[body.page])
        return _json({"corrupted_page": body.page})


def pool_report(engine: Engine) -> dict[str, int]:
    """The books of the pool in tokens, and what is in flight: free + evictable + protected = capacity, always."""
    engine.desk.expire()
    pool, scheduler, page = engine.pool, engine.scheduler, engine.config.page_tokens
    return {
        "capacity_tokens": pool.capacity_pages * page,
        "limit_tokens": pool.limit_pages * page,
        "free_tokens": pool.free_pages * page,
        "evictable_tokens": engine.tree.evictable_pages * page,
        "protected_tokens": pool.protected_pages * page,
        "held_tokens": pool.held_pages * page,
        "reserved_tokens": pool.reserved_pages * page,
        "growth_tokens": pool.growth_pages * page,
        "queued_tokens": scheduler.queued_tokens(),
        "evicted_tokens": pool.evicted_pages * page,
        "peak_used_tokens": pool.peak_used_pages * page,
        "tickets": len(engine.desk.tickets),
        "inflight": len(engine.inflight),
        "active": scheduler.active,
        "running": len(scheduler.running),
        "prefilling": len(scheduler.prefilling),
        "pulling": len(scheduler.pulling),
        "sending": len(scheduler.sending),
        "waiting": len(scheduler.waiting),
        "rooms": len(engine.bootstrap),
        "sessions": len(engine.sessions),
    }


async def serve(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listens; a client that disconnects cancels its handler.

    Returns:
        The runner to clean up, and the bound port.

    Raises:
        OSError: the address cannot be bound.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, runner.addresses[0][1]


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON)


def _failure(error: KvcError, path: str) -> web.Response:
    body = msgspec.json.decode(messages_body(error)) if path == MESSAGES_PATH else error_body(error)
    if isinstance(error, HopRefused):
        body["kvc"] = error.answer
    response = _json(body, error.http_status)
    if error.retry_after_s:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure is a typed JSON answer; a fault of this program has an incident id and no details."""
    try:
        return await handler(request)
    except KvcError as error:
        return _failure(error, request.path)
    except web.HTTPRequestEntityTooLarge:
        return _failure(TooLarge("the request body is too large", field="body"), request.path)
    except web.HTTPException as error:
        body = {"error": {"message": error.reason, "type": "http-error", "param": None, "code": error.status}}
        return _json(body, error.status)
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001 - the boundary
        incident = uuid.uuid4().hex[:12]
        event(logger, "http_fault", level=logging.ERROR, error=error, incident=incident, path=request.path)
        return _failure(Internal(f"internal error, incident {incident}"), request.path)
