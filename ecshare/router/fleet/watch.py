# SPDX-License-Identifier: Apache-2.0
"""Polls the /health of engines: of those that are silent, and for reports."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from weakref import WeakKeyDictionary

from ecshare.router.fleet.engines import Engine, EnginePool
from ecshare.router.fleet.health import Health
from ecshare.router.types import Stage
from ecshare.store.threads import end_all

POLL_EVERY_S = 2.0
_POLL_LIMIT_S = 4.0  # longer than for reports: requests move to other engines if it fails
_REPORT_LIMIT_S = 2.0
_FRESH_S = 1.0


class HealthWatch:
    """Watches all engines of a router. Belongs to the event loop's thread.

    Reports share one poll of an engine, and its result for a second: nobody can have engines asked
    more often.
    """

    def __init__(
        self,
        pools: Mapping[Stage, EnginePool],
        is_healthy: Callable[[Engine, float], Awaitable[bool]],
        shortest_limit_s: float,
        clock_s: Callable[[], float],
    ) -> None:
        """`is_healthy` asks an engine's /health, for so many seconds at most, and raises nothing.
        `shortest_limit_s`: of those for a first byte.
        """
        self._pools = pools
        self._is_healthy = is_healthy
        self._every_s = min(POLL_EVERY_S, shortest_limit_s)
        self._clock_s = clock_s
        self._watching: set[asyncio.Task[None]] = set()
        self._reports: WeakKeyDictionary[Engine, tuple[float, asyncio.Task[bool]]]
        self._reports = WeakKeyDictionary()

    def start(self, engine: Engine) -> None:
        """Watch `engine` as long as requests wait for its first byte, or it may hang."""
        engine.health.is_watched = True
        watching = asyncio.create_task(self._watch(engine))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)

    async def _watch(self, engine: Engine) -> None:
        health = engine.health
        try:
            while _needs_watching(engine):
                num_signs = health.num_signs
                await asyncio.sleep(self._every_s)
                if _needs_watching(engine) and health.num_signs == num_signs:
                    is_healthy = await self._is_healthy(engine, _POLL_LIMIT_S)
                    if health.num_signs == num_signs:
                        health.note_poll(is_healthy=is_healthy, silent_s=self._every_s)
                _end_late_waits(health)  # apart: this frame must not keep a request
        finally:
            health.is_watched = False

    async def reports(self) -> dict[Engine, bool]:
        """Return whether each engine answers its /health, within a few seconds."""
        polls = {each: self._polled(each) for pool in self._pools.values() for each in pool}
        if polls:
            await asyncio.wait(polls.values())
        return {engine: poll.result() for engine, poll in polls.items()}

    async def any_is_healthy(self, engines: Iterable[Engine]) -> bool:
        """Tell whether one of these engines answers, as soon as one does."""
        polls = {self._polled(each) for each in engines}
        while polls:
            done, polls = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
            if any(each.result() for each in done):
                return True
        return False

    def _polled(self, engine: Engine) -> "asyncio.Task[bool]":
        now_s = self._clock_s()
        began_s, poll = self._reports.get(engine, (now_s, None))
        if poll is None or (poll.done() and now_s - began_s >= _FRESH_S):
            poll = asyncio.create_task(self._poll(engine))
            self._reports[engine] = now_s, poll
        return poll

    async def _poll(self, engine: Engine) -> bool:
        # A hung engine is known to be unhealthy, and would take long to answer.
        return not engine.health.is_hung and await self._is_healthy(engine, _REPORT_LIMIT_S)

    async def close(self) -> None:
        """Stop."""
        await end_all([*self._watching, *(poll for _, poll in self._reports.values())])


def _end_late_waits(health: Health) -> None:
    for wait in list(health.waits):
        if (health.is_hung or wait.is_late) and not wait.is_last_resort():
            wait.give_up(TimeoutError("does not begin to answer"))


def _needs_watching(engine: Engine) -> bool:
    """Tell whether requests wait, or the engine may be asked to serve some and may hang."""
    health = engine.health
    return bool(health.waits) or (not engine.is_leaving and health.is_in_doubt)
