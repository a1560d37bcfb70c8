# SPDX-License-Identifier: Apache-2.0
"""What needs no saving, because the store has it, as far as one can know."""

from collections.abc import Callable, Collection, Hashable
from math import inf
from typing import Generic, TypeVar

from ecshare.transfer.recent import Recent

# What was seen in the store is not saved again for so long. Then it is, in case the store has lost
# it: writes are create-only, so that costs little where it has not.
_TRUST_S = 600.0
# About 20 MB.
_MAX_CHUNKS = 100_000

K = TypeVar("K", bound=Hashable)


class RecentKeys(Generic[K]):
    """Names of what was seen in the store lately; holds a bounded number, the latest ones.

    What was ordered to be saved counts, until it is known to have failed. Ownership: one thread.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """`clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._seen_s: Recent[K, float] = Recent(_MAX_CHUNKS)
        self.on_lost: Callable[[Collection[K]], None] = lambda _: None
        """Called with what the store was found not to have."""

    def __contains__(self, key: K) -> bool:
        return self._clock_s() - self._seen_s.get(key, -inf) < _TRUST_S

    def add(self, key: K) -> None:
        """Note that the store has it now."""
        self._seen_s[key] = self._clock_s()

    def lost(self, keys: Collection[K]) -> None:
        """Note that the store does not have these."""
        for key in keys:
            self.discard(key)
        self.on_lost(keys)

    def discard(self, key: K) -> None:
        """Note that the store may not have it."""
        self._seen_s.pop(key, None)
