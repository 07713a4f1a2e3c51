"""Prompts of sessions that grow, as JSON text ready for a request's body."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

_PHRASES: Final = (
    "def route(self, request):",
    "import json",
    "return best",
    "class Engine:",
    "for page in pages:",
    "if hit > longest:",
    "raise KeyError(name)",
    "y = 2",
)


def text(rng: random.Random, size: int) -> str:
    """`size` bytes of ASCII that look like code and hardly repeat."""
    pieces: list[str] = []
    length = 0
    while length < size:
        pieces.append(f"{rng.choice(_PHRASES)} {rng.randrange(10**6)} ")
        length += len(pieces[-1])
    return "".join(pieces)[:size]


def chat_turns(rng: random.Random, turns: int, turn_bytes: int) -> list[bytes]:
    """The messages of each turn of one session, without the brackets; a turn repeats the one before it, its reply, and appends."""
    messages: list[str] = []
    prompts: list[bytes] = []
    for _ in range(turns):
        messages.append(json.dumps({"role": "user", "content": text(rng, turn_bytes)}))
        prompts.append(",".join(messages).encode())
        messages.append(json.dumps({"role": "assistant", "content": "token"}))
    return prompts


def text_turns(rng: random.Random, turns: int, turn_bytes: int) -> list[bytes]:
    """The text of each turn of one session, without its quotes; a turn repeats the one before it and appends."""
    parts = [text(rng, turn_bytes) for _ in range(turns)]
    return ["".join(parts[: turn + 1]).encode() for turn in range(turns)]
