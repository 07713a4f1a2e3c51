"""A mesh in Σ as a router sees it after hours of work: every pool full, sessions at home on one worker and in part on another."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvc.core import events as ev
from kvc.core.params import params_for
from kvc.core.state import Sigma
from kvc.core.types import Attempt, Executor, Facts, Mode, Role, WorkerInfo, WorkerRef

if TYPE_CHECKING:
    import random

    from kvc.core.blocks import Chain
    from kvc.core.types import Turn

BLOCK_TOKENS = 24
RESERVE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MeshSize:
    """How large the mesh is.

    Attributes:
        decoders: |D|.
        prefillers: |P|.
        capacity_tokens: K_d, every pool.
        sessions_each: sessions at home on each decode worker.
        prefix_blocks: length of a session's prompt.
        shared_blocks: leading blocks that all sessions share (system prompt, tools).
        append_blocks: last blocks of the prompt, which are new and resident nowhere.
    """

    decoders: int = 8
    prefillers: int = 1
    capacity_tokens: int = 400_000
    sessions_each: int = 2
    prefix_blocks: int = 4167
    shared_blocks: int = 500
    append_blocks: int = 83

    @property
    def pool_blocks(self) -> int:
        """Blocks a worker holds when full."""
        return self.capacity_tokens // BLOCK_TOKENS


def random_chain(rng: random.Random, blocks: int, after: Chain | None = None) -> Chain:
    """`blocks` distinct hashes behind a prefix; what they are hashes of does not matter to routing."""
    chain = array("Q", after if after is not None else ())
    chain.frombytes(rng.randbytes(8 * blocks))
    return chain


class Mesh:
    """Σ with full pools, and the sessions in it."""

    def __init__(self, size: MeshSize, rng: random.Random) -> None:
        """Fills Σ through its events."""
        self.size = size
        self.rng = rng
        self.sigma = Sigma(params_for("default"))
        self.shared = random_chain(rng, size.shared_blocks)
        self.decoders = [WorkerRef(f"d{number}", 1) for number in range(size.decoders)]
        self.chains: dict[str, Chain] = {}
        self._resident: list[dict[int, None]] = [dict.fromkeys(self.shared) for _ in self.decoders]
        for ref in self.decoders:
            self.sigma.apply(ev.WorkerJoined(self._info(ref, Role.DECODE)))
        for number in range(size.prefillers):
            self.sigma.apply(ev.WorkerJoined(self._info(WorkerRef(f"p{number}", 1), Role.PREFILL)))

    def add_sessions(self) -> None:
        """Sessions that were served before: all of the old prompt at home, some of it on another worker."""
        for number in range(self.size.sessions_each * len(self.decoders)):
            name = f"session-{number}"
            home = number % len(self.decoders)
            chain = random_chain(self.rng, self.size.prefix_blocks - self.size.shared_blocks, self.shared)
            old = len(chain) - self.size.append_blocks
            self.hold(home, chain, old)
            elsewhere = (home + 1 + self.rng.randrange(max(1, len(self.decoders) - 1))) % len(self.decoders)
            self.hold(elsewhere, chain, self.rng.randrange(self.size.shared_blocks, old))
            self.serve(name, chain[:old], self.decoders[home])
            self.chains[name] = chain

    def hold(self, worker: int, chain: Chain, blocks: int) -> None:
        """Makes the first `blocks` blocks of a chain resident on a worker; counts after `fill`."""
        self._resident[worker].update(dict.fromkeys(chain[:blocks]))

    def fill(self) -> None:
        """Fills every pool to K_d with blocks of sessions that are over, and reports the load of each."""
        size = self.size
        for ref, held in zip(self.decoders, self._resident, strict=True):
            blocks = list(held) + random_chain(self.rng, max(0, size.pool_blocks - len(held))).tolist()
            self.rng.shuffle(blocks)
            self.sigma.apply(ev.ResidencyReset(ref, tuple(blocks)))
            self.sigma.apply(ev.LoadReported(ref, Facts(size.capacity_tokens, held_tokens=size.capacity_tokens // 4)))

    def serve(self, name: str, chain: Chain, ref: WorkerRef) -> None:
        """One completed turn of a session on a worker."""
        tokens = len(chain) * BLOCK_TOKENS
        attempt = Attempt(name, 0)
        self.sigma.apply(ev.TurnArrived(name, chain, tokens))
        self.sigma.apply(ev.Started(attempt, name, ref, Mode.SEED, Executor.LOCAL, tokens))
        self.sigma.apply(ev.TurnEnded(attempt, ev.End.COMPLETED, tokens, 100))

    def turn(self, name: str, chain: Chain) -> Turn:
        """The session's next turn, arrived."""
        tokens = len(chain) * BLOCK_TOKENS + BLOCK_TOKENS // 2
        self.sigma.apply(ev.TurnArrived(name, chain, tokens))
        return self.sigma.turn(name, chain, tokens, RESERVE_TOKENS)

    def _info(self, ref: WorkerRef, role: Role) -> WorkerInfo:
        return WorkerInfo(
            ref=ref,
            role=role,
            model="bench",
            capacity_tokens=self.size.capacity_tokens,
            page_tokens=16,
            block_tokens=BLOCK_TOKENS,
            engine_url="http://127.0.0.1:1",
        )
