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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from ecshare.router.engines import Engine, EnginePool

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


class PendingRequest:
    """A request that waits for its first byte, or has received it."""

    def __init__(
        self,
        watched: "_Watched",
        limit_s: float,
        is_last_resort: Callable[[], bool],
        timeout: asyncio.Timeout,
    ) -> None:
        self._watched = watched
        self.limit_s = limit_s
        self._is_last_resort = is_last_resort
        self._timeout: asyncio.Timeout | None = timeout
        self._num_received_before = watched.num_received
        self._began_s = asyncio.get_running_loop().time()

    @property
    def is_late(self) -> bool:
        """Whether it has waited longer than it may."""
        return asyncio.get_running_loop().time() - self._began_s >= self.limit_s

    @property
    def went_unanswered(self) -> bool:
        """Whether it is late, and the engine has sent nothing to anybody meanwhile."""
        return self.is_late and self._watched.num_received == self._num_received_before

    def note_received(self) -> None:
        """Note that part of the answer has arrived."""
        self._watched.note_received()
        if self in self._watched.waits:
            self._watched.waits.remove(self)
            self._reschedule(None)

    def give_up_if_late(self) -> None:
        """Cancel the request, so that another engine gets it, if it need not wait any longer."""
        may_move = self._watched.engine.is_hung or self.is_late
        if may_move and not self._is_last_resort():
            self._reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Note that nobody waits any more.

        A time limit refers to its task. The task's error refers to frames, and they to this: that
        cycle would keep the request's memory.
        """
        self._timeout = None

    def _reschedule(self, when_s: float | None) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(when_s)


@dataclass(eq=False)
class _Watched:
    """The state of one engine. Belongs to the event loop's thread."""

    engine: Engine
    engines: EnginePool
    waits: set[PendingRequest] = field(default_factory=set)
    num_received: int = 0
    was_abandoned: bool = False
    """Whether a request ended without a first byte after the last sign of life."""
    patience_used: float = 0.0
    """The fraction of the allowed time that it has been silent while requests waited; 1 is all."""
    watching: asyncio.Task[None] | None = None

    def exclude(self, reason: str) -> None:
        self.patience_used = 0.0
        if not self.engine.is_hung:
            self.engines.mark_hung(self.engine)
            logger.warning("the engine %s %s: it is left out", self.engine.url, reason)

    def note_received(self) -> None:
        self.num_received += 1
        self.was_abandoned = False
        self.patience_used = 0.0
        self.engines.mark_alive(self.engine)

    @property
    def needs_watching(self) -> bool:
        may_be_used = self.is_current and (self.was_abandoned or self.engine.is_hung)
        return bool(self.waits) or may_be_used

    @property
    def is_current(self) -> bool:
        """Whether the engine has not been removed."""
        return self.engine in set(self.engines)


class HealthMonitor:
    """Watches all engines of a router. Belongs to the event loop's thread."""

    def __init__(
        self, is_healthy: Callable[[Engine], Awaitable[bool]], shortest_limit_s: float
    ) -> None:
        """`is_healthy` asks an engine's /health and takes a few seconds at most."""
        self._is_healthy = is_healthy
        self._every_s = min(ASK_EVERY_S, shortest_limit_s)
        self._watched_engines: dict[Engine, _Watched] = {}

    @property
    def watched(self) -> set[Engine]:
        """The engines that are being watched: requests wait for them, or they may hang."""
        engines = self._watched_engines.items()
        return {engine for engine, each in engines if each.watching is not None}

    @asynccontextmanager
    async def waiting(
        self,
        engine: Engine,
        engines: EnginePool,
        limit_s: float,
        is_last_resort: Callable[[], bool],
    ) -> AsyncIterator[PendingRequest]:
        """Watch `engine`, one of `engines`, while the block waits for its answer.

        `limit_s` is for the first byte; `is_last_resort` is as in `TimeLimits`.

        Raises:
            SilentError: the engine hangs, or the request waits for too long, before `note_received`
                is called on the yielded request.
        """
        if engine not in self._watched_engines:
            self._forget_removed()
            self._watched_engines[engine] = _Watched(engine, engines)
        watched = self._watched_engines[engine]
        try:
            async with asyncio.timeout(None) as timeout:
                wait = PendingRequest(watched, limit_s, is_last_resort, timeout)
                with self._watched(watched, wait):
                    yield wait
        except TimeoutError as exc:
            if not timeout.expired():
                raise
            raise SilentError("does not begin to answer") from exc

    @contextmanager
    def _watched(self, watched: _Watched, wait: PendingRequest) -> Iterator[None]:
        watched.waits.add(wait)
        if watched.watching is None:
            watched.watching = asyncio.create_task(self._watch(watched))
        is_gone = False
        try:
            yield
        except Exception as exc:
            # One that refuses or breaks connections is not silent. It rests, and may be back soon.
            is_gone = not isinstance(exc.__cause__, TimeoutError)
            raise
        finally:
            wait.end()
            if wait in watched.waits:
                watched.waits.remove(wait)
                watched.was_abandoned = watched.was_abandoned or not is_gone
                if wait.went_unanswered:
                    watched.exclude("does not answer")

    def _forget_removed(self) -> None:
        self._watched_engines = {
            engine: watched
            for engine, watched in self._watched_engines.items()
            if watched.is_current or watched.watching is not None
        }

    async def close(self) -> None:
        """Stop watching."""
        tasks = [
            watched.watching
            for watched in self._watched_engines.values()
            if watched.watching is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, watched: _Watched) -> None:
        try:
            while watched.needs_watching:
                num_received = watched.num_received
                await asyncio.sleep(self._every_s)
                if watched.needs_watching and watched.num_received == num_received:
                    await self._ask(watched)
                for wait in list(watched.waits):
                    wait.give_up_if_late()
        finally:
            watched.watching = None

    async def _ask(self, watched: _Watched) -> None:
        """Poll the health of an engine that has been silent for a while."""
        engine, num_received = watched.engine, watched.num_received
        is_healthy = await self._is_healthy(engine)
        if engine.is_hung:
            if is_healthy and watched.engines.try_recover(engine):
                logger.info("the engine %s answers its /health again and is tried", engine.url)
            return
        if watched.num_received != num_received:
            return
        watched.was_abandoned = False
        limit_s = min((wait.limit_s for wait in watched.waits), default=math.inf)
        watched.patience_used += self._every_s / limit_s
        if not is_healthy:
            watched.exclude("answers neither requests nor /health")
        elif watched.patience_used >= 1:
            watched.exclude("does not answer")
