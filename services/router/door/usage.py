"""What the end of an engine's reply says about the turn: token counts, and whether the engine gave up. Read from the last bytes only."""

from __future__ import annotations

import re
from typing import Final

TAIL_BYTES: Final = 2048
# Quotes inside strings are escaped, so what a model writes never looks like these.
_USAGE = re.compile(
    rb'"(prompt_tokens|completion_tokens|input_tokens|output_tokens|cached_tokens|cache_read_input_tokens|cache_creation_input_tokens)"'
    rb"\s*:\s*(\d{1,10})(?!\d)"
)
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*(?:"abort"|\{\s*"type"\s*:\s*"abort")')


def tail_of(before: bytes, data: bytes) -> bytes:
    """The end of what came, after more of it; `before` is the end so far."""
    return data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (before + data)[-TAIL_BYTES:]


def counts(tail: bytes) -> dict[bytes, int]:
    """Token counts by the engine's names for them; of a name that occurs twice, the last."""
    return {name: int(value) for name, value in _USAGE.findall(tail)}


def aborted(tail: bytes) -> bool:
    """True when the engine aborted the turn."""
    return b'"abort"' in tail and _ABORTED.search(tail) is not None
