# SPDX-License-Identifier: Apache-2.0
"""Results that requests share: those kept in memory, those that all workers of the router remember,
and those of work in progress.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import msgspec

from ecshare.router.siblings import Siblings

ON_ITS_WAY_S = 10.0
"""So long after an engine's report what it tells of may be on its way. Later it is stored, or
lost."""
KEPT_S = 3600.0
"""An engine is asked again after so long: the store may have lost what it has reported."""
_MAX_REPORTS = 1_000_000

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


class ReportIndex(BoundedCache[bytes, V]):
    """What engines have reported to be stored, by digest. Belongs to the event loop's thread."""

    def __init__(
        self,
        topic: str,
        kind: type[V],
        size_of: Callable[[V], int],
        max_bytes: int,
        siblings: Siblings,
    ) -> None:
        """`topic`: what siblings call it. `kind`: of a report, for msgpack. `size_of`: returns how
        much memory one takes, about."""
        super().__init__(_MAX_REPORTS, max_bytes)
        self._topic = topic
        self._kind = kind
        self._size_of = size_of
        self._siblings = siblings
        siblings.hear(topic, self._hear)

    def remember(self, key: bytes, report: V) -> None:
        """Keep a report, in place of a former one, and tell the siblings."""
        self.put(key, report, self._size_of(report))
        self.announce(key, report)

    def announce(self, key: bytes, report: V) -> None:
        """Tell the siblings of a report that is kept, and may have changed."""
        if self._siblings.are_there:
            self._siblings.tell(self._topic, key, msgspec.msgpack.encode(report))

    def forget(self, key: bytes) -> None:
        """Forget a report, if there is one, and tell the siblings."""
        self.discard(key)
        self._siblings.tell(self._topic, key, None)

    def status(self) -> dict[str, int]:
        """Return counts for the status page."""
        return {
            "remembered": len(self),
            "memory": self.num_bytes,
            "evicted": self.num_evicted,
        }

    def _hear(self, key: bytes, told: bytes | None) -> None:
        if told is None:
            self.discard(key)
        else:
            report = msgspec.msgpack.decode(told, type=self._kind)
            self.put(key, report, self._size_of(report))


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
