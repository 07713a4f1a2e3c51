"""Sessions over the HTTP front door whose every reply is checked against what its prompt calls for."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from kvc.engine import kvvalue
from kvc.engine.reference.config import DEFAULT_MODEL
from kvc.engine.tokens import decode_tokens, encode_chat

if TYPE_CHECKING:
    from collections.abc import Callable

_SALT = kvvalue.salt(DEFAULT_MODEL)


@dataclass
class HttpTurn:
    """One turn as its client saw it. Times by the monotonic clock."""

    sent_s: float
    status: int = 0
    mode: str = ""
    worker: str = ""
    text: str = ""
    finished: bool = False
    error: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0
    ended_s: float = 0.0

    @property
    def ok(self) -> bool:
        """The whole reply came."""
        return self.status == 200 and self.finished


class HttpConversation:
    """An OpenAI chat whose history is what was sent and received in turns that completed."""

    def __init__(self, http: aiohttp.ClientSession, url: str, name: str, *, named: bool = True) -> None:
        """Says nothing yet.

        Args:
            http: the client.
            url: base URL of the door.
            name: makes the prompts unlike anybody else's.
            named: the session is named in a header; otherwise its prefix tells.
        """
        self._http = http
        self._url = f"{url}/v1/chat/completions"
        self._headers = {"x-session-id": name} if named else {}
        self.name = name
        self.messages: list[dict[str, str]] = []
        self.turns: list[HttpTurn] = []

    async def turn(
        self, append_bytes: int, tokens: int, *, on_first: Callable[[], None] | None = None, timeout_s: float = 120.0
    ) -> HttpTurn:
        """A streamed turn to its end; an error is in the result. A wrong reply fails the test."""
        words = f"{self.name} {len(self.turns)} "
        asked = [*self.messages, {"role": "user", "content": (words * (append_bytes // len(words) + 1))[:append_bytes]}]
        turn = HttpTurn(time.monotonic())
        self.turns.append(turn)
        body = {"model": DEFAULT_MODEL, "messages": asked, "max_tokens": tokens, "stream": True}
        try:
            async with self._http.post(
                self._url, json=body, headers=self._headers, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                await self._read(response, turn, on_first)
        except aiohttp.ClientError as error:
            turn.error = {"type": type(error).__name__, "message": str(error)}
        turn.ended_s = time.monotonic()
        right = decode_tokens(kvvalue.expected_output(encode_chat(asked), tokens, kvvalue.TEXT_VOCAB, _SALT))
        assert right.startswith(turn.text), f"wrong reply in {self.name} from {turn.worker}"
        if turn.ok:
            assert turn.text == right
            self.messages = [*asked, {"role": "assistant", "content": turn.text}]
        return turn

    async def _read(self, response: aiohttp.ClientResponse, turn: HttpTurn, on_first: Callable[[], None] | None) -> None:
        turn.status = response.status
        if response.status != 200:
            turn.error = (await response.json())["error"]
            return
        turn.mode, turn.worker = response.headers["x-kvc-mode"], response.headers["x-kvc-worker"]
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                turn.finished = True
                continue
            told = json.loads(line[6:])
            if "error" in told:
                turn.error = told["error"]
                return
            if not turn.first_s:
                turn.first_s = time.monotonic()
                if on_first is not None:
                    on_first()
            turn.text += "".join(choice["delta"].get("content") or "" for choice in told["choices"])
