# SPDX-License-Identifier: Apache-2.0
"""Keys that need not be saved, because they were recently seen in the store."""

from collections.abc import Callable, Collection, Hashable
from math import inf
from typing import Generic, TypeVar

from ecshare.store.recent import Recent

# A key that was seen in the store is not saved again for this long. After that it is, because the
# store may have lost the object. If not, the save costs little, because writes are create-only.
_TRUST_S = 600.0
# They take about 20 MB.
MAX_CHUNKS = 100_000

K = TypeVar("K", bound=Hashable)


class RecentKeys(Generic[K]):
    """Keys of objects that were recently seen in the store: the latest `MAX_CHUNKS` of them.

    Keys of ordered saves count as seen until a save fails. Ownership: one thread.
    """

    def __init__(
        self,
        clock_s: Callable[[], float],
        on_lost: Callable[[Collection[K]], None] | None = None,
    ) -> None:
        """`clock_s`: monotonic seconds. `on_lost`: called with the keys that `lost` removes."""
        self._clock_s = clock_s
        self._seen_s: Recent[K, float] = Recent(MAX_CHUNKS)
        self._on_lost = on_lost

    def __contains__(self, key: K) -> bool:
        return self._clock_s() - self._seen_s.get(key, -inf) < _TRUST_S

    def add(self, key: K) -> None:
        """Record that the store has the object now."""
        self._seen_s[key] = self._clock_s()

    def lost(self, keys: Collection[K]) -> None:
        """Remove these keys, because the store lacks the objects, and call `on_lost`."""
        for key in keys:
            self.discard(key)
        if self._on_lost is not None:
            self._on_lost(keys)

    def clear(self) -> None:
        """Do `lost` for all keys."""
        self.lost([*self._seen_s])

    def discard(self, key: K) -> None:
        """Remove the key, because the store may lack the object."""
        self._seen_s.pop(key, None)
