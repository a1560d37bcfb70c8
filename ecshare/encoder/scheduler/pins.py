# SPDX-License-Identifier: Apache-2.0
"""Pins of embeddings that no request needs any more, and that a step may still be loading."""

import heapq
import time

from ecshare.store.hostcache.cache import Entry

# A request may end while a step that loads its item is still on its way to a worker, so a pin
# outlives the request by far more than any step lasts. Once a worker has reported the load, only
# the other ranks may still be at it, in the same step.
_UNREPORTED_S = 60.0
_REPORTED_S = 5.0


class LatePins:
    """Lets go of each pin after its time, or earlier where there are too many.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: so many pins are kept at most."""
        self._limit = limit
        # A heap by the time to let go; the number keeps equal times from comparing objects.
        self._pins: list[tuple[float, int, Entry]] = []
        self._num_added = 0

    def add(self, pin: Entry, *, is_reported: bool) -> None:
        """Own `pin` from now on. `is_reported`: a worker has said that it loaded the item."""
        self._num_added += 1
        let_go_s = time.monotonic() + (_REPORTED_S if is_reported else _UNREPORTED_S)
        heapq.heappush(self._pins, (let_go_s, self._num_added, pin))

    def let_go(self) -> None:
        """Close the pins whose time is over and, where there are too many, those that are next."""
        self._close_until(time.monotonic())

    def close(self) -> None:
        """Close all pins."""
        self._close_until(float("inf"))

    def _close_until(self, now_s: float) -> None:
        num_spare = len(self._pins) - self._limit
        while self._pins and (self._pins[0][0] <= now_s or num_spare > 0):
            num_spare -= 1
            heapq.heappop(self._pins)[2].close()
