# SPDX-License-Identifier: Apache-2.0
"""An imaginary store with limited bandwidth, per connection and in total. No I/O."""

import asyncio
import heapq
import random
from dataclasses import dataclass
from itertools import count

_ROUNDING_BYTES = 1.0


@dataclass(frozen=True)
class Link:
    """The bandwidth of all connections together and of each, in bytes per second; mean latency."""

    total: float
    connection: float
    latency_s: float


class ThrottledStore:
    """Waits as long as a transfer over `link` would take, by the event loop's clock.

    Each call is one connection; all get equal shares of the bandwidth. The latency of a call is
    random, between half and one and a half times the mean, and the same in each run.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.moved_bytes = 0
        self.in_flight = 0
        # The bytes that a connection has moved until `_then_s` if it was always busy.
        self._moved_each = 0.0
        self._then_s = 0.0
        self._moving: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._chance = random.Random(0)
        self._timer: asyncio.TimerHandle | None = None

    async def move(self, num_bytes: int) -> None:
        """Wait until `num_bytes` are transferred."""
        self.in_flight += 1
        try:
            await asyncio.sleep(self._link.latency_s * self._chance.uniform(0.5, 1.5))
            self._advance()
            moved = asyncio.get_running_loop().create_future()
            heapq.heappush(self._moving, (self._moved_each + num_bytes, next(self._order), moved))
            self._wait()
            await moved
            self.moved_bytes += num_bytes
        finally:
            self.in_flight -= 1

    def become(self, link: Link) -> None:
        """Use another link from now on."""
        self._advance()
        self._link = link
        self._wait()

    @property
    def _speed(self) -> float:
        return min(self._link.connection, self._link.total / max(1, len(self._moving)))

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._moved_each += self._speed * (now_s - self._then_s)
        self._then_s = now_s

    def _wait(self) -> None:
        """Call `_end` when the next transfer is complete."""
        if self._timer is not None:
            self._timer.cancel()
        if self._moving:
            left_s = (self._moving[0][0] - self._moved_each) / self._speed
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._end)

    def _end(self) -> None:
        self._advance()
        while self._moving and self._moving[0][0] <= self._moved_each + _ROUNDING_BYTES:
            _, _, moved = heapq.heappop(self._moving)
            if not moved.done():
                moved.set_result(None)
        self._wait()
