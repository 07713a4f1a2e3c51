"""Keeps the agent connected to its engine: connect, check, follow, poll; and again after a pause when any of it fails.

A life of the engine uses two connections. One carries calls; the other carries residency events and is opened anew after a gap,
while calls go on. Both have to reach the same epoch: an engine that restarted between them is a new life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from kvc.engine.link import Drain, Load
from kvc.errors import DeadlineExceeded, Internal, KvcError, Unavailable, leaf
from kvc.runtime.backoff import pause_s
from kvc.runtime.logs import event
from services.admission_agent.life import ADMIT, RESIDENCY, Life, accept
from services.admission_agent.replies import load_of
from services.admission_agent.residency import Gap

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.admission_agent.config import AgentConfig
    from services.admission_agent.ports import EngineConnector, EngineLink
    from services.admission_agent.residency import Residency

logger = logging.getLogger(__name__)

ENGINE_AWAY = "ENGINE_AWAY"
MAX_STRIKES = 3
SILENCE_S = 1.0


class EngineConnection:
    """The current life of the engine, if there is one."""

    def __init__(
        self,
        connector: EngineConnector,
        config: AgentConfig,
        residency: Residency,
        on_change: Callable[[bool], None],
    ) -> None:
        """Does nothing until `run`.

        Args:
            connector: where the engine is.
            config: all settings.
            residency: fed with the engine's events.
            on_change: told whether there is a life whenever that changes.
        """
        self._connector = connector
        self._config = config
        self._residency = residency
        self._on_change = on_change
        self._life: Life | None = None
        self._cause: KvcError = Unavailable("the engine has not been reached yet", reason=ENGINE_AWAY)
        self._dirty = asyncio.Event()
        self.lives = 0
        self.failures = 0

    @property
    def life(self) -> Life | None:
        """The current life; None while the engine is away or refused."""
        return self._life

    def require(self) -> Life:
        """The current life.

        Raises:
            Unavailable: there is none; `reason` says why.
        """
        if self._life is None:
            raise Unavailable(self._cause.message, reason=self._cause.reason, retry_after_s=self._config.engine.backoff_base_s)
        return self._life

    def why_not(self) -> str | None:
        """Why there is no life, in one line; None when there is one."""
        return None if self._life is not None else f"{self._cause.reason}: {self._cause.message}"

    async def run(self) -> None:
        """Connects again and again, until cancelled."""
        in_a_row = 0
        while True:
            lives = self.lives
            try:
                await self._live()
            except Exception as error:  # noqa: BLE001 - whatever an engine sends, the agent lives and tries again
                cause = leaf(error)
                if not isinstance(cause, KvcError):
                    event(logger, "engine_connection_fault", level=logging.ERROR, error=error)
                    cause = Internal(f"a fault while serving the engine: {type(cause).__name__}", reason="AGENT_FAULT")
                self._note(cause)
            in_a_row = 1 if self.lives > lives else in_a_row + 1
            await asyncio.sleep(self._pause_s(in_a_row))

    def _pause_s(self, in_a_row: int) -> float:
        engine = self._config.engine
        return pause_s(in_a_row, engine.backoff_base_s, engine.backoff_cap_s)

    def _note(self, cause: KvcError) -> None:
        """Remembers why there is no life; logs what is new."""
        self.failures += 1
        if (cause.reason, cause.message) != (self._cause.reason, self._cause.message) or self.failures == 1:
            away = cause.reason == ENGINE_AWAY
            event(
                logger,
                "engine_away" if away else "engine_refused",
                level=logging.WARNING if away else logging.ERROR,
                reason=cause.reason,
                message=str(cause),
            )
        self._cause = cause

    async def _live(self) -> None:
        """One life, from connecting to losing it. Raises always: a KvcError, alone or in a group."""
        link = await self._connector.connect()
        try:
            life = Life(accept(link.welcome, self._config), link)
            if life.offers(ADMIT):
                await link.call(Drain(draining=self._config.admit.draining), self._config.engine.call_timeout_s)
            self._residency.begin(life.ref, life.info.hash_seed, life.info.page_tokens)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed(life), name="residency-feed")
                tasks.create_task(self._flush(), name="residency-flush")
                await self._wait_for_residency()
                tasks.create_task(self._poll(life), name="load-poll")
                self._enter(life)
        finally:
            self._leave()
            await link.close()

    def _enter(self, life: Life) -> None:
        self._life = life
        self.lives += 1
        event(
            logger,
            "engine_connected",
            worker_id=life.ref.worker_id,
            epoch=life.ref.epoch,
            role=life.info.role.value,
            capacity_tokens=life.info.capacity_tokens,
            resident_blocks=self._residency.resident_blocks,
        )
        self._on_change(True)  # noqa: FBT003 - the only argument there is

    def _leave(self) -> None:
        had_one = self._life is not None
        self._life = None
        self._residency.end(Unavailable("the engine is away", reason=ENGINE_AWAY, retry_after_s=self._config.engine.backoff_base_s))
        if had_one:
            self._on_change(False)  # noqa: FBT003 - the only argument there is

    async def _wait_for_residency(self) -> None:
        try:
            async with asyncio.timeout(self._config.engine.snapshot_timeout_s):
                await self._residency.wait_installed()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no whole residency snapshot within {self._config.engine.snapshot_timeout_s} s", reason="ENGINE_TIMEOUT"
            ) from None

    async def _poll(self, life: Life) -> None:
        """Asks for the load at the configured pace, and reports it when it has changed or a second would pass in silence.

        An engine that does not answer is away.
        """
        loop, interval_s = asyncio.get_running_loop(), self._config.residency.load_interval_s
        reported, reported_s = None, 0.0
        while True:
            load = load_of(await life.link.call(Load(), self._config.engine.call_timeout_s))
            if load != reported or loop.time() - reported_s + interval_s > SILENCE_S:
                self._residency.report(load)
                reported, reported_s = load, loop.time()
            await asyncio.sleep(interval_s)

    async def _flush(self) -> None:
        """Sends changes on, those of `coalesce_s` together."""
        while True:
            await self._dirty.wait()
            await asyncio.sleep(self._config.residency.coalesce_s)
            self._dirty.clear()
            self._residency.flush()

    async def _feed(self, life: Life) -> None:
        """Follows the engine's events; after a gap or a lost connection anew, from a snapshot."""
        if not life.offers(RESIDENCY):
            self._residency.install_empty()
            return
        strikes = 0
        while strikes < MAX_STRIKES:
            deltas = self._residency.events["delta"]
            link = await self._connector.connect()
            try:
                if (link.welcome.worker_id, link.welcome.epoch) != life.ref:
                    raise Unavailable("the engine restarted", reason=ENGINE_AWAY)
                cause = await self._pump(link)
            finally:
                await link.close()
            strikes = 1 if self._residency.events["delta"] > deltas + 1 else strikes + 1
            self._residency.resyncs[cause] += 1
            await asyncio.sleep(self._pause_s(strikes))
        raise Unavailable(f"the engine's events could not be followed {strikes} times in a row", reason="RESIDENCY_UNUSABLE")

    async def _pump(self, link: EngineLink) -> str:
        """Feeds events in until they stop coming ("link") or stop making sense ("gap")."""
        self._residency.expect_snapshot()
        try:
            async with contextlib.aclosing(link.events(self._config.engine.call_timeout_s)) as events:
                async for one in events:
                    for _ in self._residency.apply(one):
                        self._mark()
                        await asyncio.sleep(0)
                    self._mark()
        except Gap as gap:
            event(logger, "residency_gap", level=logging.WARNING, message=str(gap))
            return "gap"
        except Unavailable as error:
            event(logger, "residency_link_lost", level=logging.WARNING, message=str(error))
        return "link"

    def _mark(self) -> None:
        if self._residency.has_news:
            self._dirty.set()
