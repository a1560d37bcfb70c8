# SPDX-License-Identifier: Apache-2.0
"""Keys that need not be saved, because they were recently seen in the store."""

from collections.abc import Callable, Collection, Hashable
from math import inf
from typing import Generic, TypeVar

from ecshare.store.recent import Recent

# A key that was seen in the store is not saved again for so long. After that it is, because the
# store may have lost it. Writes are create-only, so this costs little if it has not.
_TRUST_S = 600.0
# About 20 MB.
MAX_CHUNKS = 100_000

K = TypeVar("K", bound=Hashable)


class RecentKeys(Generic[K]):
    """Names of objects that were recently seen in the store; a limited number, the latest ones.

    Objects that were ordered to be saved count too, until a save has failed. Ownership: one thread.
    """

    def __init__(
        self,
        clock_s: Callable[[], float],
        on_lost: Callable[[Collection[K]], None] | None = None,
    ) -> None:
        """`clock_s`: monotonic seconds. `on_lost`: told what the store was found not to have."""
        self._clock_s = clock_s
        self._seen_s: Recent[K, float] = Recent(MAX_CHUNKS)
        self._on_lost = on_lost

    def __contains__(self, key: K) -> bool:
        return self._clock_s() - self._seen_s.get(key, -inf) < _TRUST_S

    def add(self, key: K) -> None:
        """Note that the store has it now."""
        self._seen_s[key] = self._clock_s()

    def lost(self, keys: Collection[K]) -> None:
        """Note that the store does not have these."""
        for key in keys:
            self.discard(key)
        if self._on_lost is not None:
            self._on_lost(keys)

    def discard(self, key: K) -> None:
        """Note that the store may not have it."""
        self._seen_s.pop(key, None)
