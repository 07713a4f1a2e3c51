"""What a replay needs from outside: a mesh to ask and a judge of its replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The mesh's answer to one turn.

    Attributes:
        ok: a complete reply came.
        error: one line when not ok: a reason or status name, then what happened.
        mode: "direct", "seed", "reseed" or "fallback"; empty when no decision was had.
        worker: decode worker.
        executor: "local" or "prefill": who prefilled.
        output: packed reply tokens.
        prompt_tokens: prompt length as the engine counted it; 0 when it does not say.
        cached_tokens: prompt tokens whose KV was reused, as the engine reports them.
        ttft_s: modelled engine seconds to the first token.
        latency_s: modelled engine seconds to the last token.
        mesh_s: measured seconds the mesh took before the first token, without engine time and without queued_s.
        queued_s: measured seconds the turn waited in the router for capacity: engine time in disguise, scaled like it.
        probes: Admit questions asked.
        finish_reason: as the engine gives it.
    """

    ok: bool
    error: str = ""
    mode: str = ""
    worker: str = ""
    executor: str = ""
    output: bytes = b""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    mesh_s: float = 0.0
    queued_s: float = 0.0
    probes: int = 0
    finish_reason: str = ""


class MeshClient(Protocol):
    """A mesh, or a baseline that serves the same turns."""

    async def turn(self, session_id: str, packed_prompt: bytes, max_new_tokens: int, *, request_id: str, last: bool) -> TurnResult:
        """Runs one turn to its end, under the client's own deadline.

        Args:
            session_id: the session.
            packed_prompt: little-endian u32 token ids of the whole prompt.
            max_new_tokens: reply length; the reply has exactly this many tokens.
            request_id: unique in the replay.
            last: the session ends with this turn.

        Raises:
            KvcError: counts as a failed turn, as does a result that is not ok.
        """


class Verifier(Protocol):
    """Knows the right reply to a prompt."""

    def expected(self, session_id: str, packed_prompt: bytes, count: int) -> bytes:
        """The packed first `count` reply tokens. Prompts of one session come in order."""

    def forget(self, session_id: str) -> None:
        """The session is over."""
