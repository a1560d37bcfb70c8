# SPDX-License-Identifier: Apache-2.0
"""Detects engines that accept requests and never answer them.

An engine owes a first byte for every request it has accepted. While it owes one and sends nothing
at all, its /health is polled. The engine hangs if /health does not answer either, or if it stays
silent for longer than its requests may wait: vLLM's /health may well answer while the GPU hangs,
and so does its server send comments in streams. Neither is a sign of life. A hung engine gets no
more requests, and those that wait for it move to another engine.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ecshare.router.fleet.engines import Engine, EnginePool

logger = logging.getLogger(__name__)

ASK_EVERY_S = 2.0


class SilentError(Exception):
    """An engine has not begun to answer. Another engine may get the request."""


@dataclass(frozen=True)
class TimeLimits:
    """How long a request waits for an engine; None: as long as its client does."""

    total_s: float | None = None
    first_byte_s: float | None = None
    """The wait for the first byte of a whole answer, or for the first event of a stream. Only
    requests with this limit detect hung engines."""
    is_last_resort: Callable[[], bool] = lambda: False
    """Whether no other engine could answer. The request then keeps waiting."""


@dataclass(eq=False, slots=True)
class Wait:
    """A request that waits for its first byte."""

    began_s: float
    limit_s: float
    num_heard_before: int
    may_give_up: Callable[[], bool]
    """Whether another engine could answer."""
    give_up: Callable[[SilentError], None]
    """Ends the request with this error."""

    def is_late(self, now_s: float) -> bool:
        """Tell whether it has waited for longer than it may."""
        return now_s - self.began_s >= self.limit_s


@dataclass(eq=False)
class _Watched:
    """An engine for which requests wait, or which may hang."""

    engine: Engine
    pool: EnginePool
    waits: set[Wait] = field(default_factory=set)
    abandoned_at: int = -1
    """`num_heard` of the engine when a request ended without a first byte."""
    patience_used: float = 0.0
    """The fraction of the allowed time that it has been silent while requests waited; 1 is all."""
    patience_at: int = 0
    """`num_heard` of the engine when `patience_used` was counted."""
    watching: asyncio.Task[None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the engine has not been removed."""
        return self.engine in set(self.pool)

    @property
    def needs_watching(self) -> bool:
        """Whether requests wait, or the engine may be asked to serve some and may hang."""
        was_abandoned = self.abandoned_at == self.engine.num_heard
        return bool(self.waits) or (self.is_current and (was_abandoned or self.engine.is_hung))

    def exclude(self, reason: str) -> None:
        """Take the engine for one that hangs."""
        self.patience_used = 0.0
        if not self.engine.is_hung:
            self.pool.mark_hung(self.engine)
            logger.warning("the engine %s %s: it is left out", self.engine.url, reason)


class HealthWatch:
    """Watches all engines of a router. Belongs to the event loop's thread."""

    def __init__(
        self, is_healthy: Callable[[Engine], Awaitable[bool]], shortest_limit_s: float
    ) -> None:
        """`is_healthy` asks an engine's /health and takes a few seconds at most."""
        self._is_healthy = is_healthy
        self._every_s = min(ASK_EVERY_S, shortest_limit_s)
        self._watched: dict[Engine, _Watched] = {}

    @property
    def watched(self) -> set[Engine]:
        """The engines that are being watched: requests wait for them, or they may hang."""
        return {engine for engine, each in self._watched.items() if each.watching is not None}

    def begin(self, engine: Engine, pool: EnginePool, wait: Wait) -> None:
        """Watch `engine`, one of `pool`, until `wait` ends."""
        watched = self._watched.get(engine)
        if watched is None:
            self._forget_removed()
            watched = self._watched[engine] = _Watched(engine, pool)
        watched.waits.add(wait)
        if watched.watching is None:
            watched.watching = asyncio.create_task(self._watch(watched))

    def end(self, engine: Engine, wait: Wait, *, is_silent: bool) -> None:
        """Note that `wait` ends. `is_silent`: the engine was left without a first byte, and has
        not refused or broken the connection: one that does so rests, and may be back soon.
        """
        watched = self._watched[engine]
        watched.waits.discard(wait)
        if not is_silent:
            return
        watched.abandoned_at = engine.num_heard
        if wait.is_late(_now_s()) and engine.num_heard == wait.num_heard_before:
            watched.exclude("does not answer")

    async def close(self) -> None:
        """Stop watching."""
        tasks = [each.watching for each in self._watched.values() if each.watching is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget_removed(self) -> None:
        self._watched = {
            engine: watched
            for engine, watched in self._watched.items()
            if watched.is_current or watched.watching is not None
        }

    async def _watch(self, watched: _Watched) -> None:
        engine = watched.engine
        try:
            while watched.needs_watching:
                num_heard = engine.num_heard
                await asyncio.sleep(self._every_s)
                if watched.needs_watching and engine.num_heard == num_heard:
                    await self._ask(watched)
                for wait in list(watched.waits):
                    if (engine.is_hung or wait.is_late(_now_s())) and wait.may_give_up():
                        wait.give_up(SilentError("does not begin to answer"))
        finally:
            watched.watching = None

    async def _ask(self, watched: _Watched) -> None:
        """Poll the health of an engine that has been silent for a while."""
        engine, num_heard = watched.engine, watched.engine.num_heard
        is_healthy = await self._is_healthy(engine)
        if engine.is_hung:
            if is_healthy and watched.pool.try_recover(engine):
                logger.info("the engine %s answers its /health again and is tried", engine.url)
            return
        if engine.num_heard != num_heard:
            return
        watched.abandoned_at = -1
        if watched.patience_at != num_heard:
            watched.patience_at, watched.patience_used = num_heard, 0.0
        limit_s = min((wait.limit_s for wait in watched.waits), default=math.inf)
        watched.patience_used += self._every_s / limit_s
        if not is_healthy:
            watched.exclude("answers neither requests nor /health")
        elif watched.patience_used >= 1:
            watched.exclude("does not answer")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
