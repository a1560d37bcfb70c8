# SPDX-License-Identifier: Apache-2.0
"""Wakes tasks that wait for entries of the host cache; one poll of its folder serves them all."""

import asyncio
import time

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key

# Between two polls: short after a wait has begun, as most entries arrive soon, then ever longer.
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.01
# The share of a core that polls may take, for any number of waits.
_CORE_SHARE = 0.01
# The longest tick of the kernel's clock for files: two changes within it may have the same time.
_TICK_NS = 20_000_000


class HostWatch:
    """Reports when keys appear in the host cache.

    A new entry changes the folder's modification time. Only then is each key looked up.

    Ownership: the I/O thread.
    """

    def __init__(self, host: HostCache) -> None:
        """Watch `host` while at least one task waits."""
        self._host = host
        self._waiting: dict[asyncio.Future[bool], Key] = {}
        self._pause_s = _FIRST_PAUSE_S
        self._changed_ns = self._polled_ns = 0
        self._task: asyncio.Task[None] | None = None

    async def appears(self, key: Key, timeout_s: float) -> bool:
        """Return True as soon as `key` is in the host cache, or False after `timeout_s`."""
        if self._has(key):
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
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            begun_s = time.perf_counter()
            self._poll()
            spent_s = time.perf_counter() - begun_s
            self._pause_s = max(min(2 * self._pause_s, _LONGEST_PAUSE_S), spent_s / _CORE_SHARE)

    def _poll(self) -> None:
        changed_ns = self._host.changed_ns()
        is_changed = changed_ns != self._changed_ns
        if not is_changed and self._polled_ns - changed_ns > _TICK_NS:
            return
        self._changed_ns, self._polled_ns = changed_ns, time.time_ns()
        for answer, key in self._waiting.items():
            if self._has(key):
                _settle(answer, True)

    def _has(self, key: Key) -> bool:
        entry = self._host.open(key) if self._host.has(key) else None
        if entry is not None:
            entry.close()
        return entry is not None


def _settle(answer: asyncio.Future[bool], value: bool) -> None:  # noqa: FBT001
    if not answer.done():
        answer.set_result(value)
