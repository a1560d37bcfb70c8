# SPDX-License-Identifier: Apache-2.0
"""Equal work of several requests, done once."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[K, T]):
    """Lets one caller work while the others wait for its result.

    The work is part of the caller's own task: it ends with it, and uses its memory. If that caller
    is cancelled or its work fails, one of those that wait works instead, so that nobody gets a
    failure that is another's. Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._flights: dict[K, asyncio.Future[T]] = {}
        self.num_waiting = 0
        """Callers that wait for another one now."""

    async def run(self, key: K, work: Callable[[], Awaitable[T]], patience_s: float) -> T:
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

    async def _wait(self, flight: "asyncio.Future[T]", patience_s: float) -> None:
        self.num_waiting += 1
        try:
            await asyncio.wait((flight,), timeout=max(0.0, patience_s))
        finally:
            self.num_waiting -= 1

    async def _lead(
        self, key: K, work: Callable[[], Awaitable[T]], flight: "asyncio.Future[T]"
    ) -> T:
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
