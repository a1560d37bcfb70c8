# SPDX-License-Identifier: Apache-2.0
"""Reads of a host cache in memory that a hook makes itself: few enough to cost little."""

from collections.abc import Iterable

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key
from ecshare.transfer.fetch import look
from ecshare.transfer.jobs import Fetch, StoredObject

# This many take less than a millisecond, whether or not they find an object.
OPENS_PER_STEP = 16
# This many take half a millisecond.
CHECKS_PER_STEP = 64


class InlineReads:
    """Reads the host cache on the caller's thread, if the cache is in memory.

    Each step may open OPENS_PER_STEP objects and check CHECKS_PER_STEP keys. After that, everything
    counts as unknown until the next step.

    Ownership: the caller's thread.
    """

    def __init__(self, host: HostCache) -> None:
        """Read `host`. The first step has begun."""
        self._host = host
        self.begin_step()

    def begin_step(self) -> None:
        """Allow the reads and checks of another step."""
        self._opens_left, self._checks_left = OPENS_PER_STEP, CHECKS_PER_STEP

    def open(self, job: Fetch) -> StoredObject | None:
        """Return the object of `job`, pinned; None: this host does not have it, or it is unknown.

        Takes about 40 us.
        """
        if not self._host.is_in_memory or not self._opens_left:
            return None
        self._opens_left -= 1
        return look(self._host, job)

    def has_all(self, keys: Iterable[Key]) -> bool:
        """Return whether this host has all these objects; False also if it is unknown.

        Takes about 5 us a key, up to the first that is missing.
        """
        if not self._host.is_in_memory:
            return False
        for key in keys:
            if not self._checks_left:
                return False
            self._checks_left -= 1
            if not self._host.has(key):
                return False
        return True
