# SPDX-License-Identifier: Apache-2.0
"""Looks at a host cache in memory that a hook takes itself: few enough to cost little."""

from collections.abc import Iterable

from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key
from ecshare.transfer.fetch import look
from ecshare.transfer.jobs import Fetch, StoredObject

# So many are less than a millisecond, whatever they find.
LOOKS_A_STEP = 16
# So many questions for a name are half a millisecond.
NAMES_A_STEP = 64


class QuickLooks:
    """Looks at the host cache on the caller's thread, if it is in memory.

    In one step there are LOOKS_A_STEP looks for an object and NAMES_A_STEP questions for a name.
    When they are used up, everything counts as unknown.

    Ownership: the thread whose steps they are.
    """

    def __init__(self, host: HostCache) -> None:
        """Look at `host`. The first step has begun."""
        self._host = host
        self.begin_step()

    def begin_step(self) -> None:
        """Allow as many looks and questions as a step may take."""
        self._looks_left, self._names_left = LOOKS_A_STEP, NAMES_A_STEP

    def open(self, job: Fetch) -> StoredObject | None:
        """Return what `job` asks for, pinned; None: this host does not have it, or it is unknown.

        It takes some 40 us.
        """
        if not self._host.is_in_memory or not self._looks_left:
            return None
        self._looks_left -= 1
        return look(self._host, job)

    def has_all(self, keys: Iterable[Key]) -> bool:
        """Return whether this host has all these objects; False also if it is unknown.

        It takes some 5 us a key, up to the first that is missing.
        """
        if not self._host.is_in_memory:
            return False
        for key in keys:
            if not self._names_left:
                return False
            self._names_left -= 1
            if not self._host.has(key):
                return False
        return True
