# SPDX-License-Identifier: Apache-2.0
"""Results that requests share: those kept in memory, and those of work in progress."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Keeps the entries that were used last. Belongs to one thread."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0
        """The sum of what `put` was told."""
        self.num_evicted = 0
        """Entries that had to make room."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Return the value, now the last used one; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep a value that takes `num_bytes` of memory, in place of a former one.

        The entries that were not used for longest make room. One above the limit is not kept.
        """
        self.discard(key)
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self.num_bytes -= freed_bytes
            self.num_evicted += 1

    def discard(self, key: K) -> None:
        """Forget a value, if there is one."""
        if key in self._entries:
            self.num_bytes -= self._entries.pop(key)[1]


class SingleFlight(Generic[K, V]):
    """Lets one caller work while the others wait for its result.

    The work is part of the caller's own task: it ends with it, and uses its memory. If that caller
    is cancelled or its work fails, one of those that wait works instead, so that nobody gets a
    failure that is another's. Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._flights: dict[K, asyncio.Future[V]] = {}
        self.num_waiting = 0
        """Callers that wait for another one now."""

    async def run(self, key: K, work: Callable[[], Awaitable[V]], patience_s: float) -> V:
        """Return what `work` returns, here or in another task that works under `key` now.

        Waits for others no longer than `patience_s` in all, then works by itself.

        Raises:
            Exception: what `work` raises here.
        """
        loop = asyncio.get_running_loop()
        latest_s = loop.time() + patience_s
        while (flight := self._flights.get(key)) is not None:
            await self._wait(flight, latest_s - loop.time())
            if not flight.done():
                return await work()
            if not flight.cancelled():
                return flight.result()
        return await self._lead(key, work, loop.create_future())

    async def _wait(self, flight: "asyncio.Future[V]", patience_s: float) -> None:
        self.num_waiting += 1
        try:
            await asyncio.wait((flight,), timeout=max(0.0, patience_s))
        finally:
            self.num_waiting -= 1

    async def _lead(
        self, key: K, work: Callable[[], Awaitable[V]], flight: "asyncio.Future[V]"
    ) -> V:
        self._flights[key] = flight
        try:
            result = await work()
        except BaseException:
            flight.cancel()  # without the error: its traceback would keep this request's memory
            raise
        else:
            flight.set_result(result)
            return result
        finally:
            del self._flights[key]
