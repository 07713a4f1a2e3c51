"""Settings of the front door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvc.runtime.config import setting
from services.router.prompts import MAX_NEW_TOKENS


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """HTTP: addresses, limits, admission."""

    host: str = setting("127.0.0.1", help="address to bind")
    port: int = setting(0, help="HTTP port; 0 = any free one", minimum=0, maximum=65535, flag="--http-port")
    admission: Literal["stream", "unary", "off"] = setting(
        "stream", help="how workers are asked; off: the router's own copy of their numbers decides"
    )
    one_hop: bool = setting(default=True, help="a turn on hot KV takes its question along, where the engine decides on arrival")
    tokenizer: Literal["reference", "none"] = setting(
        "reference", help="of chat prompts; none: prompts are compared by their bytes, lengths are estimates that engines' counts correct"
    )
    default_output_tokens: int = setting(1024, help="reserved for a reply whose request sets no limit", minimum=1, maximum=MAX_NEW_TOKENS)
    max_connections: int = setting(16_384, help="client connections; further ones are told so and closed", minimum=1, maximum=1_000_000)
    max_requests: int = setting(8192, help="requests in flight", minimum=1, maximum=1_000_000)
    max_conversations: int = setting(100_000, help="conversations remembered", minimum=1, maximum=100_000_000)
    max_head_bytes: int = setting(65_536, help="longest request head", minimum=1024, maximum=1 << 24)
    max_headers: int = setting(100, help="most headers of a request", minimum=1, maximum=10_000)
    max_body_bytes: int = setting(67_108_864, help="longest request body", minimum=1024, maximum=1 << 32)
    max_held_bytes: int = setting(
        4_294_967_296,
        help="request bodies held at once, of all connections; beyond it those on their way are refused",
        minimum=1 << 20,
        maximum=1 << 50,
    )
    request_timeout_s: float = setting(30.0, help="longest time from a request's first byte to its last", minimum=0.01, maximum=3600.0)
    idle_timeout_s: float = setting(75.0, help="idle connections close after this long", minimum=0.01, maximum=86_400.0)
    idle_upstream: int = setting(256, help="idle connections kept to each engine", minimum=0, maximum=100_000)
