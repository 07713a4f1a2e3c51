"""The front door over scripted engines and agents that answer as a test wants, and a client that counts every byte."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CollectorRegistry

from kvc.core import events as ev
from kvc.core.types import Executor, Mode, Role, WorkerRef
from kvc.runtime.clock import SystemClock
from services.router.door.config import DoorConfig
from services.router.door.door import Door
from services.router.door.observer import DoorObserver
from services.router.door.tokenizers import ReferenceTokenizer
from services.router.janitor import Janitor
from services.router.metrics import RouterMetrics
from services.router.router import Router
from tests.support.builders import worker
from tests.support.door_engine import Engine, chunk, engine, good
from tests.support.fake_ports import FakeAdmission, config
from tests.support.waiting import until

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from kvc.core.dispatch import Admitted, Ask, Refused, Unreachable
    from kvc.core.dispatch import Answer as Told
    from kvc.core.types import Decision
    from kvc.errors import KvcError
    from services.router.door.exchange import Exchange
    from services.router.door.spans import Tracing
    from services.router.ports import EnginePort
    from tests.support.door_engine import Answer

DEADLINE_S = 5.0
COMPLETED, FAILED, CANCELLED = ev.End.COMPLETED, ev.End.FAILED, ev.End.CANCELLED
HI = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 8}


class FakeAsking:
    """Agents: they answer at once, unless they are held."""

    def __init__(self, admission: FakeAdmission) -> None:
        self.admission = admission
        self.hold = False
        self.held: list[tuple[Ask, Callable[[Told], None]]] = []
        self.mode = Mode.SEED
        self.traceparents: list[str] = []

    def ask(self, ask: Ask, answered: Callable[[Told], None], traceparent: str = "") -> None:
        """Asks."""
        self.admission.asked.append(ask)
        self.traceparents.append(traceparent)
        if self.hold:
            self.held.append((ask, answered))
        else:
            answered(self._answer(ask))

    def go(self) -> None:
        """Answers all that are held, and holds nobody any more."""
        self.hold = False
        held, self.held = self.held, []
        for ask, answered in held:
            answered(self._answer(ask))

    def _answer(self, ask: Ask) -> Admitted | Refused | Unreachable:
        return self.admission.answer(ask) or self.admission.yes(ask, self.mode)


class Ends(DoorObserver):
    """Everything an observer is told about ends."""

    def __init__(self, metrics: RouterMetrics) -> None:
        super().__init__(metrics, 0.0)
        self.ends: list[tuple[str, ev.End, str]] = []
        self.retries: list[str] = []

    def retried(self, exchange: Exchange, decision: Decision, reason: str, problem: str) -> None:
        self.retries.append(reason)
        super().retried(exchange, decision, reason, problem)

    def ended(self, exchange: Exchange, decision: Decision | None, end: ev.End, error: KvcError | None) -> None:
        self.ends.append((exchange.request_id, end, error.reason if error is not None else ""))
        super().ended(exchange, decision, end, error)


@dataclass
class Front:
    """A door, its engines, and its books."""

    door: Door
    router: Router
    admission: FakeAdmission
    asking: FakeAsking
    observer: Ends
    janitor: Janitor
    stack: AsyncExitStack
    port: int = 0
    tls: ssl.SSLContext | None = None
    engines: dict[str, Engine] = field(default_factory=dict)

    async def worker(self, worker_id: str = "d0", *answers: Answer, **fields: Any) -> Engine:
        """A healthy worker with nothing resident, and its engine."""
        made = await self.stack.enter_async_context(engine(*answers))
        made.arrived = lambda asked: self.admission.open.pop(_rid(asked.body), None)
        self.engines[worker_id] = made
        self.join(worker_id, made.url, **fields)
        return made

    def join(self, worker_id: str, url: str, epoch: int = 1, **fields: Any) -> WorkerRef:
        """A worker whose engine is somewhere else."""
        info = worker(worker_id, epoch, engine_url=url, **fields)
        self.router.apply(ev.WorkerJoined(info))
        self.router.apply(ev.WorkerHealth(info.ref, healthy=True))
        self.router.apply(ev.ResidencyReset(info.ref, ()))
        return info.ref

    async def prefill(self, worker_id: str = "p0", *answers: Answer) -> Engine:
        """A prefill worker."""
        return await self.worker(worker_id, *answers, role=Role.PREFILL, bootstrap_host="127.0.0.1", bootstrap_port=9000)

    async def pair(self, prefill: Answer = good, decode: Answer = good) -> tuple[Engine, Engine]:
        """A prefill and a decode worker, and agents that want both."""
        self.admission.executor = Executor.PREFILL
        return await self.prefill("p0", prefill), await self.worker("d0", decode)

    @property
    def ends(self) -> list[ev.End]:
        """How the routed requests ended, in order."""
        return [end for _, end, _ in self.observer.ends]

    async def client(self) -> Wire:
        """A connection to the door."""
        server_hostname = "localhost" if self.tls is not None else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls, server_hostname=server_hostname, limit=1 << 24)
        made = Wire(reader, writer)
        self.stack.push_async_callback(made.close)
        return made

    async def ask(self, body: Any = None, path: str = "/v1/chat/completions", **headers: str) -> Response:
        """One request on a connection of its own."""
        wire = await self.client()
        await wire.send(post(HI if body is None else body, path, **headers))
        answer = await wire.response()
        await wire.close()
        return answer

    def left(self) -> dict[str, int]:
        """What is in flight, by where."""
        sigma = self.router.sigma
        counts = {
            "engines": sum(engine.live for engine in self.engines.values()),
            "exchanges": len(self.door.exchanges),
            "tickets": len(self.admission.open),
            "open turns": len(sigma.open),
            "sessions held": len(self.router.gate),
            "waiting": len(self.router.room),
            "places": len(self.router.room._claims),
            "releases": self.janitor.pending,
            "asks": len(self.asking.held),
            "inflight": sum(abs(state.inflight) for state in sigma.workers.values()),
            "sessions with turns": sum(session.open_turns != 0 for session in sigma.sessions.values()),
            "bytes of bodies": self.door.held_bytes if not self.door.clients else 0,
            "exchanges of clients": sum(client._exchange is not None for client in self.door.clients),
        }
        return {place: count for place, count in counts.items() if count}

    async def check(self, ends: int | None = None) -> None:
        """Nothing is in flight, every count says so, and each request that was routed has ended once.

        Raises:
            AssertionError: something is left.
        """
        async with asyncio.timeout(DEADLINE_S):
            await self.janitor.drained()
        await until(lambda: not self.left(), DEADLINE_S, f"nothing is left of {self.left()}")
        self.router.sigma.check_integrity()
        names = [name for name, _, _ in self.observer.ends]
        assert len(set(names)) == len(names)
        assert ends is None or len(names) == ends, self.observer.ends


_RID = re.compile(rb'"rid":"([^"]*)"')


def _rid(body: bytes) -> str:
    found = _RID.search(body)
    return found[1].decode() if found is not None else ""


def post(body: Any, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """A request; `body` is bytes, or becomes JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: door", "Content-Type: application/json", f"Content-Length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + raw


def chunked(*parts: bytes, trailers: bytes = b"", **headers: str) -> bytes:
    """A chat request in chunks."""
    lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
    first = b"POST /v1/chat/completions HTTP/1.1\r\nHost: door\r\nTransfer-Encoding: chunked\r\n" + b"".join(lines) + b"\r\n"
    return first + b"".join(map(chunk, parts)) + b"0\r\n" + trailers + b"\r\n"


def get(path: str = "/health", method: str = "GET", **headers: str) -> bytes:
    """A request without a body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: door", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass(frozen=True)
class Response:
    """A reply, taken apart."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    raw: bytes
    version: str = "HTTP/1.1"

    def header(self, name: str) -> str | None:
        """The value of a header that must not come twice."""
        values = [value for key, value in self.headers if key.lower() == name]
        assert len(values) < 2, (name, values)
        return values[0] if values else None

    @property
    def json(self) -> Any:
        """The body decoded."""
        return json.loads(self.body)

    @property
    def kind(self) -> str:
        """The type of an error."""
        error: dict[str, Any] = self.json["error"]
        assert error["code"] == self.status
        return str(error["type"])


class Wire:
    """A client's end of a connection: a strict reader of replies."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *parts: bytes) -> None:
        """Sends bytes, each part in a packet of its own."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            if len(parts) > 1:
                await asyncio.sleep(0.002)

    async def head(self) -> tuple[str, int, list[tuple[str, str]], bytes]:
        """The head of a reply: version, status, headers, bytes."""
        async with asyncio.timeout(DEADLINE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        assert b"\n" not in raw.replace(b"\r\n", b"")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        version, status, _ = first.split(" ", 2)
        headers = [(line.partition(":")[0], line.partition(":")[2].strip()) for line in lines]
        return version, int(status), headers, raw

    async def response(self, *, method: str = "POST") -> Response:
        """The next reply; interim ones are skipped."""
        async with asyncio.timeout(DEADLINE_S):
            version, status, headers, raw = await self.head()
            while status < 200:
                version, status, headers, raw = await self.head()
            body = b"" if method == "HEAD" or status in (204, 304) else await self._body({name.lower(): value for name, value in headers})
        return Response(status, headers, body, raw, version)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "transfer-encoding" in headers:
            assert "content-length" not in headers
            body = b""
            while True:
                size = int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16)
                if not size:
                    while await self.reader.readuntil(b"\r\n") != b"\r\n":
                        pass
                    return body
                body += await self.reader.readexactly(size)
                assert await self.reader.readexactly(2) == b"\r\n"
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        return await self.reader.read()

    async def rest(self) -> bytes:
        """Everything until the connection ends, whichever way."""
        data = b""
        async with asyncio.timeout(DEADLINE_S):
            try:
                while more := await self.reader.read(1 << 16):
                    data += more
            except ConnectionError:
                return data
        return data

    async def ended(self) -> bool:
        """True when the connection ends, and nothing else comes."""
        return await self.rest() == b""

    async def works(self) -> None:
        """A good request gets its own right answer.

        Raises:
            AssertionError: it does not.
        """
        await self.send(get("/health"))
        answer = await self.response(method="GET")
        assert (answer.status, answer.body) == (200, b'{"status":"ok"}'), answer

    async def close(self) -> None:
        """Goes away."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, TimeoutError, OSError):
            return


@asynccontextmanager
async def front(
    *,
    http: dict[str, Any] | None = None,
    tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    tracing: Tracing | None = None,
    **fields: Any,
) -> AsyncIterator[Front]:
    """A door without workers. `http` changes its settings, `fields` the router's (as for fake_ports.config)."""
    token = fields.pop("token", None)
    settings = config(**fields)
    settings = replace(settings, server=replace(settings.server, auth_token=token))
    admission = FakeAdmission()
    clock = SystemClock()
    janitor = Janitor(admission, clock)
    router = Router(settings, admission, cast("EnginePort", None), clock, janitor)
    registry = CollectorRegistry()
    observer = Ends(RouterMetrics(registry))
    asking = FakeAsking(admission)
    door = Door(DoorConfig(**(http or {})), router, asking, ReferenceTokenizer(), observer, registry, lambda: None, tracing)
    tasks = [asyncio.create_task(janitor.run()), asyncio.create_task(door.sweep())]
    async with AsyncExitStack() as stack:
        made = Front(door, router, admission, asking, observer, janitor, stack, tls=client_tls)
        try:
            made.port = await door.start("127.0.0.1", 0, tls)
            yield made
        finally:
            await door.stop(0.0)
            router.room.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
