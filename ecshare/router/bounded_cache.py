# SPDX-License-Identifier: Apache-2.0
"""A cache with limits on its number of entries and on their bytes. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
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
