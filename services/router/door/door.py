"""The front door: what its connections share, what it answers itself, and its start and stop."""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from kvc.errors import Exhausted, Internal, KvcError, NotFound, TooLarge, Unauthenticated, Unavailable
from kvc.runtime.config import ConfigError
from kvc.runtime.logs import event
from kvc.runtime.ops import exposition
from kvc.runtime.tls import server_context
from services.router.door.answers import REASONS, refusal_of
from services.router.door.client import Client
from services.router.door.conversations import Conversations
from services.router.door.counts import DoorCounts
from services.router.door.exchange import Exchange
from services.router.door.request import ROUTED
from services.router.door.traced import TracedExchange
from services.router.door.upstream import Upstreams
from services.router.door.watch import Watch

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

    from prometheus_client import CollectorRegistry

    from services.router.door.admission import Asking
    from services.router.door.config import DoorConfig
    from services.router.door.conversations import MessageTokenizer
    from services.router.door.observer import DoorObserver
    from services.router.door.request import HttpRequest
    from services.router.door.spans import Tracing
    from services.router.router import Router

logger = logging.getLogger(__name__)

BACKLOG: Final = 4096
SWEEP_S: Final = 0.25
CLOSE_S: Final = 1.0
"""How long connections that were cut off may take to be gone."""
_POST: Final = b"POST"
_READ: Final = frozenset({b"GET", b"HEAD"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Of requests: bytes, counts and seconds."""

    head_bytes: int
    headers: int
    body_bytes: int
    request_s: float
    idle_s: float


class Door:
    """Everything connections share."""

    def __init__(
        self,
        config: DoorConfig,
        router: Router,
        admission: Asking,
        tokenizer: MessageTokenizer,
        observer: DoorObserver,
        registry: CollectorRegistry,
        not_ready: Callable[[], str | None],
        tracing: Tracing | None = None,
    ) -> None:
        """Listens to nothing yet. Without `tracing` no request is recorded."""
        self.limits = Limits(
            config.max_head_bytes, config.max_headers, config.max_body_bytes, config.request_timeout_s, config.idle_timeout_s
        )
        self.admission = admission
        self.observer = observer
        self.router = router
        self.sigma = router.sigma
        self.room = router.room
        self.gate = router.gate
        self.janitor = router.janitor
        self.clock = router.clock
        self.one_hop = config.one_hop and config.admission != "off" and router.config.policy == "kvc"
        self.retries = router.config.engines.retries
        self.timeout_s = router.config.requests.timeout_s
        self.default_output_tokens = config.default_output_tokens
        self.upstreams = Upstreams(router.config.engines.connect_timeout_s, config.idle_upstream)
        self.tracing = tracing
        self.watch = Watch()
        self.clients: set[Client] = set()
        self.turned_away: set[Client] = set()
        self.counts = DoorCounts(registry, REASONS, lambda: len(self.clients))
        self.responses = self.counts.responses
        self.exchanges: set[Exchange] = set()
        self.held_bytes = 0
        self.stopping = False
        self._config = config
        self._tokenizer = tokenizer
        self._registry = registry
        self._not_ready = not_ready
        self._conversations: Conversations | None = None
        self._seed: int | None = None
        self._server: asyncio.Server | None = None
        self._token = router.config.server.auth_token

    @property
    def is_full(self) -> bool:
        """True while the bodies of requests, of all connections together, are more than may be held."""
        return self.held_bytes > self._config.max_held_bytes

    @property
    def is_crowded(self) -> bool:
        """True while as many connections are served as may be."""
        return len(self.clients) - len(self.turned_away) >= self._config.max_connections

    # --- for exchanges ------------------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Refuses what is too much.

        Raises:
            Exhausted: too many requests are in flight.
            Unavailable: the router is stopping.
        """
        if self.stopping:
            raise Unavailable("the router is stopping", reason="SHUTTING_DOWN", retry_after_s=1.0)
        if len(self.exchanges) >= self._config.max_requests:
            raise Exhausted(f"{self._config.max_requests} requests are in flight", reason="TOO_MANY_REQUESTS", retry_after_s=1.0)

    def conversations(self) -> Conversations:
        """Conversations under the hash seed of the mesh's model.

        Raises:
            Unavailable: no worker was ever seen, so nothing is known about the model.
        """
        seed = self.router.chains.seed
        if seed is None:
            raise Unavailable("no worker is known yet", reason="NO_WORKER", retry_after_s=1.0)
        if self._conversations is None or seed != self._seed:
            block_tokens, most_bytes = self.sigma.params.block_tokens, self.router.config.requests.chain_bytes
            self._conversations = Conversations(self._tokenizer, block_tokens, seed, self._config.max_conversations, most_bytes)
            self._seed = seed
        return self._conversations

    def check_length(self, input_tokens: int) -> None:
        """Refuses a prompt that is too long.

        Raises:
            TooLarge: more than `requests.max_prompt_tokens`.
        """
        most = self.router.config.requests.max_prompt_tokens
        if input_tokens > most:
            raise TooLarge(f"{input_tokens} tokens are more than the {most} that are taken", field="prompt")

    def fault(self, error: BaseException) -> KvcError:
        """Logs a fault of this program under an incident id, which is all the client is told."""
        incident = uuid.uuid4().hex[:12]
        event(logger, "door_fault", level=logging.ERROR, error=error, incident=incident)
        return Internal(f"internal error, incident {incident}")

    # --- requests -----------------------------------------------------------------------------------------------------------------

    def handle(self, client: Client, request: HttpRequest) -> None:
        """A complete request."""
        try:
            if self._token:
                if not self.allows(request.path, request.headers):
                    client.respond_error(Unauthenticated("a bearer token is needed", field="authorization"))
                    return
                request.headers = [header for header in request.headers if header[0] not in _CREDENTIALS]
            if request.path not in ROUTED:
                self._own(client, request)
            elif request.method == _POST:
                trace = client.trace
                client.run(Exchange(self, client, request) if trace is None else TracedExchange(self, client, request, trace))
            else:
                client.respond(405, _NOT_ALLOWED, extra=b"allow: POST\r\n")
        except KvcError as error:
            client.respond_error(error)
        except Exception as error:  # noqa: BLE001 - a fault of ours answers this client and is logged; the others go on
            client.respond_error(self.fault(error))

    def allows(self, path: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        """True when the request has the token that it needs."""
        if not self._token or path in _OPEN:
            return True
        given = [(name, value) for name, value in headers if name in _CREDENTIALS]
        if len(given) != 1:
            return False  # none, or two that need not agree
        name, token = given[0]
        if name == _AUTHORIZATION:
            kind, _, token = token.partition(b" ")
            if kind.lower() != b"bearer":
                return False
        return hmac.compare_digest(token.strip(), self._token.encode())

    def _own(self, client: Client, request: HttpRequest) -> None:
        """What the door answers itself."""
        answer = self._pages().get(request.path)
        if answer is None:
            raise NotFound("no such path", field="path")
        if request.method in _READ:
            client.respond(*answer(request))
        else:
            client.respond(405, _NOT_ALLOWED, extra=b"allow: GET, HEAD\r\n")

    def _pages(self) -> dict[bytes, Callable[[HttpRequest], tuple[int, bytes, bytes]]]:
        return {
            b"/health": self._health,
            b"/ready": self._ready,
            b"/metrics": self._metrics,
            b"/v1/models": self._models,
            b"/kvc/state": self._state,
            b"/": self._page,
        }

    def _health(self, _request: HttpRequest) -> tuple[int, bytes, bytes]:
        return 200, b'{"status":"ok"}', _JSON

    def _ready(self, _request: HttpRequest) -> tuple[int, bytes, bytes]:
        reason = "stopping" if self.stopping else self._not_ready()
        return (200, b'{"ready":true}', _JSON) if reason is None else (503, msgspec.json.encode({"ready": False, "reason": reason}), _JSON)

    def _metrics(self, request: HttpRequest) -> tuple[int, bytes, bytes]:
        body, content_type = exposition(self._registry, (request.header(b"accept") or b"").decode("latin-1"))
        return 200, body, content_type.encode()

    def _models(self, _request: HttpRequest) -> tuple[int, bytes, bytes]:
        names = sorted({worker.info.model for worker in self.sigma.decode_workers()})
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "kvc"} for name in names]
        return 200, msgspec.json.encode({"object": "list", "data": data}), _JSON

    def _state(self, _request: HttpRequest) -> tuple[int, bytes, bytes]:
        return 200, msgspec.json.encode(self.observer.state(self)), _JSON

    def _page(self, _request: HttpRequest) -> tuple[int, bytes, bytes]:
        return 200, self.observer.page(), b"text/html; charset=utf-8"

    # --- life ---------------------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listens.

        Returns:
            The port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            hands_s = self.limits.request_s if tls is not None else None
            self._server = await loop.create_server(
                lambda: Client(self), host, port, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=hands_s
            )
        except OSError as error:
            raise ConfigError(f"http.port: cannot listen on {host}:{port}: {error.strerror or error}") from None
        bound: int = cast("Any", self._server).sockets[0].getsockname()[1]
        event(logger, "door_open", host=host, port=bound, tls=tls is not None)
        return bound

    async def sweep(self) -> None:
        """Looks after deadlines a few times a second, for all connections and exchanges together, until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._sweep(self.clock.now_s())
            except Exception as error:  # noqa: BLE001 - deadlines of all others must still be looked after
                self.fault(error)

    def _sweep(self, now_s: float) -> None:
        for client in list(self.clients):
            client.check(now_s)
        for exchange in list(self.exchanges):
            exchange.check(now_s)
        if len(self.upstreams) > len(self.sigma.workers):
            self.upstreams.keep_only({worker.info.engine_url for worker in self.sigma.workers.values()})

    async def stop(self, grace_s: float) -> None:
        """No new requests; those in flight get `grace_s` seconds, then are cut off."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.close_when_idle()
        await self._until(lambda: not self.exchanges and not self.clients, grace_s)
        for client in list(self.clients):
            client.cut_off()
        for exchange in list(self.exchanges):
            exchange.cancel()
        self.upstreams.close()
        self.watch.close()
        await self._until(lambda: not self.clients, CLOSE_S)

    async def _until(self, condition: Callable[[], bool], at_most_s: float) -> None:
        deadline_s = self.clock.now_s() + at_most_s
        while not condition() and self.clock.now_s() < deadline_s:  # noqa: ASYNC110 - an event for each end would cost every request
            await asyncio.sleep(_STOP_POLL_S)


_STOP_POLL_S = 0.02
_OPEN: Final = frozenset({b"/", b"/health", b"/ready"})  # the page asks for the token itself, to read /kvc/state
_JSON: Final = b"application/json"
_AUTHORIZATION: Final = b"authorization"
_CREDENTIALS: Final = frozenset({_AUTHORIZATION, b"x-api-key"})  # OpenAI's clients send the first, Anthropic's the second
_NOT_ALLOWED: Final = refusal_of(405, "method not allowed")


def tls_context(cert: Path | None, key: Path | None, client_ca: Path | None) -> ssl.SSLContext | None:
    """The server's TLS context; None without a certificate.

    Raises:
        ConfigError: a file cannot be used.
    """
    return server_context(cert, key, client_ca, "http/1.1") if cert is not None and key is not None else None
