# SPDX-License-Identifier: Apache-2.0
"""Pins of embeddings that no request needs any more, but that a step may still be loading."""

import heapq
import time

from ecshare.store.hostcache.cache import Entry

# A request may end before the workers have run the step that loads its item. So a pin outlives the
# request by far longer than any step takes. Once a worker has reported the load, only other ranks
# may still be loading, in the same step.
_UNREPORTED_S = 60.0
_REPORTED_S = 5.0


class LatePins:
    """Holds each pin for a limited time. If there are too many, those due next are released early.

    Ownership: vLLM's scheduler thread.
    """

    def __init__(self, limit: int) -> None:
        """Hold no pin yet. `limit`: the largest number of pins."""
        self._limit = limit
        # A heap by the time of release. The number breaks ties, so that entries are not compared.
        self._pins: list[tuple[float, int, Entry]] = []
        self._num_added = 0

    def add(self, pin: Entry, *, is_reported: bool) -> None:
        """Own `pin` from now on. `is_reported`: a worker has reported the load of the item."""
        self._num_added += 1
        release_s = time.monotonic() + (_REPORTED_S if is_reported else _UNREPORTED_S)
        heapq.heappush(self._pins, (release_s, self._num_added, pin))

    def let_go(self) -> None:
        """Close the pins that are due and, if there are too many, those due next."""
        self._close_due(time.monotonic())

    def close(self) -> None:
        """Close all pins."""
        self._close_due(float("inf"))

    def _close_due(self, now_s: float) -> None:
        num_excess = len(self._pins) - self._limit
        while self._pins and (self._pins[0][0] <= now_s or num_excess > 0):
            num_excess -= 1
            heapq.heappop(self._pins)[2].close()
