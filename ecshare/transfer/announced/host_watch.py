# SPDX-License-Identifier: Apache-2.0
"""Wakes those who wait for an entry of the host cache, with one look at its folder for all."""

import asyncio
import time

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key

# Between two looks: short after somebody has come, as most entries come soon, then ever longer.
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.01
# The part of a core that looks may take, however many wait.
_MOST_OF_A_CORE = 0.01
# The kernel's clock for files ticks this seldom at the worst: two changes may bear one time.
_TICK_NS = 20_000_000


class HostWatch:
    """Tells when keys appear in the host cache.

    An entry that comes changes the time of the folder. Only then is it asked for each key.

    Ownership: the I/O thread.
    """

    def __init__(self, host: HostCache) -> None:
        """Watch `host` while somebody waits."""
        self._host = host
        self._waiting: dict[asyncio.Future[bool], Key] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._changed_ns = self._looked_ns = 0
        self._task: asyncio.Task[None] | None = None

    async def appears(self, key: Key, timeout_s: float) -> bool:
        """Return whether `key` is in the host cache, as soon as it is, or after `timeout_s`."""
        if self._is_there(key):
            return True
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _settle, answer, False)
        self._waiting[answer] = key
        self._pause_s = _FIRST_PAUSE_S
        if self._task is None:
            self._task = loop.create_task(self._watch())
        try:
            return await answer
        finally:
            timer.cancel()
            del self._waiting[answer]
            if not self._waiting and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _watch(self) -> None:
        """Look, until it is cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            begun_s = time.perf_counter()
            self._look()
            spent_s = time.perf_counter() - begun_s
            self._pause_s = max(min(2 * self._pause_s, _LONGEST_PAUSE_S), spent_s / _MOST_OF_A_CORE)

    def _look(self) -> None:
        changed_ns = self._host.changed_ns()
        is_changed = changed_ns != self._changed_ns
        if not is_changed and self._looked_ns - changed_ns > _TICK_NS:
            return
        self._changed_ns, self._looked_ns = changed_ns, time.time_ns()
        for answer, key in self._waiting.items():
            if self._is_there(key):
                _settle(answer, True)

    def _is_there(self, key: Key) -> bool:
        entry = self._host.open(key) if self._host.has(key) else None
        if entry is not None:
            entry.close()
        return entry is not None


def _settle(answer: asyncio.Future[bool], value: bool) -> None:  # noqa: FBT001
    if not answer.done():
        answer.set_result(value)
