"""What is asked of every system: how fast the engine is, and how the load comes."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

REQUESTS_PER_SECOND: Final = 20
"""A paired scenario that is cut short keeps this many requests a second."""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of one kind, by a closed loop: a connection sends its next request when it has the last reply.

    Attributes:
        paired: one request at a time goes to each target in turn, in random order; otherwise all connections work at once.
        connections: of each target, when not paired.
        seconds: how long, when not paired.
        requests: of each connection, of each target when paired; 0: as many as there is time for.
        max_tokens: chunks of one reply.
        stream: server-sent events, otherwise one document.
        turns: of a session; each repeats the prompt before it and appends to it.
        turn_bytes: what a turn appends; 64 bytes are about 16 tokens.
        pause_ms: between two paired requests.
        path: where requests go.
        timeout_s: longest time for one reply.
    """

    paired: bool = False
    connections: int = 1
    seconds: float = 600.0
    requests: int = 0
    max_tokens: int = 1
    stream: bool = True
    turns: int = 1
    turn_bytes: int = 64
    pause_ms: float = 0.0
    path: Literal["/v1/chat/completions", "/generate"] = "/v1/chat/completions"
    timeout_s: float = 30.0


class Scenario(msgspec.Struct, frozen=True):
    """A load and the engine's pace under it.

    Attributes:
        name: its name.
        what: what it is, for readers.
        load: the load.
        first_token_ms: the engine's time to the first token.
        gap_ms: the engine's time between two tokens; 0: as fast as it can.
    """

    name: str
    what: str
    load: Load
    first_token_ms: float = 0.0
    gap_ms: float = 0.0

    def within(self, seconds: float) -> Scenario:
        """The same scenario, cut to about `seconds`: for a quick look, whose numbers are noisier."""
        load = self.load
        tokens, requests = load.max_tokens, load.requests
        if self.gap_ms:
            tokens = max(2, min(tokens, int(seconds * 1e3 / self.gap_ms)))
        if load.paired:
            requests = max(load.turns, min(requests, int(seconds * REQUESTS_PER_SECOND)))
        shorter = msgspec.structs.replace(load, seconds=min(load.seconds, seconds), max_tokens=tokens, requests=requests)
        return msgspec.structs.replace(self, load=shorter)


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario("hot", "one connection, 16 tokens of prompt, one chunk", Load(connections=1, seconds=1.5)),
        Scenario("short", "32 connections, 16 tokens of prompt, one chunk", Load(connections=32, seconds=2.5)),
        Scenario(
            "large",
            "2 connections, sessions of 10 turns that grow by 40 KB to 400 KB, one chunk",
            Load(connections=2, seconds=2.5, turns=10, turn_bytes=40_000),
        ),
        Scenario("paced", "48 streams of 256 chunks, 10 ms apart", Load(connections=48, requests=1, max_tokens=256), gap_ms=10.0),
        Scenario(
            "stream",
            "32 connections, streams of 256 chunks, as fast as they go",
            Load(connections=32, seconds=3.0, max_tokens=256),
        ),
        Scenario("latency", "one request at a time to each system in turn", Load(paired=True, requests=250, pause_ms=1.0)),
        Scenario(
            "turns",
            "one at a time, sessions of 10 turns that grow by 40 KB to 400 KB",
            Load(paired=True, requests=60, turns=10, turn_bytes=40_000),
        ),
        Scenario(
            "ttft50",
            "one at a time, first token after 50 ms, 8 chunks 10 ms apart",
            Load(paired=True, requests=40, max_tokens=8),
            first_token_ms=50.0,
            gap_ms=10.0,
        ),
    )
}
STANDARD: Final = ("hot", "short", "large", "paced", "stream")
"""The scenarios that bars are set for, and `stream`."""
