# SPDX-License-Identifier: Apache-2.0
"""Removes damaged objects from the store, and only those that are proven to be damaged there.

An object that an engine reads may have been damaged on the way: by a proxy that answers with a web
page, by a network card, by this host's memory. Such an engine finds every object damaged, and must
not empty the store for all others.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from ecshare.store.errors import ObjectCorrupt, ObjectMissing, StoreError
from ecshare.store.format import unseal
from ecshare.store.integrity import Integrity
from ecshare.store.objects import MOST_HASHED_BYTES, ObjectStat, proof_missing, read
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.jobs import Fetch

logger = logging.getLogger(__name__)

# A sound store has hardly any damaged objects. If this many are found within a minute, the cause is
# not in single objects: none is removed until a whole minute has passed without one.
_MANY = 10
_MANY_WITHIN_S = 60.0
# In any case, one process removes no more than this.
_MOST_AN_HOUR = 20
_HOUR_S = 3600.0


class DeletionBudget:
    """Limits how many objects this process removes: none while many are damaged, and few an hour.

    Ownership: the I/O thread.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Start without damaged objects. `clock_s`: monotonic seconds."""
        self._clock_s = clock_s
        self._found: deque[tuple[float, str]] = deque(maxlen=_MANY)
        self._removed_s: deque[float] = deque(maxlen=_MOST_AN_HOUR)
        self.is_paused = False
        """True while so many objects are damaged that none may be removed."""

    def found(self, key: str) -> None:
        """Record that the object under `key` was found damaged."""
        now_s = self._clock_s()
        self.is_paused = self.is_paused and now_s - self._found[-1][0] < _MANY_WITHIN_S
        others = [each for each in self._found if each[1] != key]
        self._found = deque([*others, (now_s, key)], maxlen=_MANY)
        if self.is_paused or len(self._found) < _MANY:
            return
        if now_s - self._found[0][0] < _MANY_WITHIN_S:
            self.is_paused = True
            logger.warning(
                "store: %d objects were found damaged within a minute, so the damage may happen on "
                "the way to this host. Damaged objects count as missing, and none is removed until "
                "a minute has passed without one. Run `ecshare doctor` on another host to see "
                "whether they are damaged there too",
                _MANY,
            )

    def denial_reason(self) -> str | None:
        """Return why no object may be removed now; None: one may be."""
        if self.is_paused:
            return "many objects were found damaged at the same time"
        if len(self._removed_s) < _MOST_AN_HOUR:
            return None
        if self._clock_s() - self._removed_s[0] >= _HOUR_S:
            return None
        return f"this process has removed {_MOST_AN_HOUR} objects within an hour"

    def removed(self) -> None:
        """Record that an object was removed."""
        self._removed_s.append(self._clock_s())


class Removal:
    """Decides about objects that a Fetch has found damaged, and removes them.

    Ownership: the I/O thread; objects are hashed and verified on `loads`.
    """

    def __init__(
        self,
        client: StoreClient,
        loads: Executor,
        integrity: Integrity | None,
        budget: DeletionBudget,
    ) -> None:
        """Use what the engine owns."""
        self._client = client
        self._loads = loads
        self._integrity = integrity
        self._budget = budget

    async def remove_if_proven(self, job: Fetch, deadline_s: float) -> bool:
        """Remove the object of `job` if it is proven to be damaged in the store.

        Return whether the object is gone. Never raises; logs the result.
        """
        self._budget.found(job.key)
        if self._budget.is_paused:
            return False  # the pause was logged
        try:
            reason = self._budget.denial_reason() or await self._proof_missing(job, deadline_s)
            if reason is None:
                self._budget.removed()
                await self._client.ask(
                    lambda store: store.delete([job.key]), Priority.SAVE, 0, deadline_s
                )
        except ObjectMissing:
            return True  # another process has removed it
        except (StoreError, TimeoutError) as exc:
            reason = str(exc) or "the store did not answer in time"
        if reason is not None:
            logger.warning("store: the damaged object %s is not removed: %s", job.key, reason)
            return False
        logger.warning("store: the damaged object %s was removed", job.key)
        return True

    async def _proof_missing(self, job: Fetch, deadline_s: float) -> str | None:
        """Return why the object may be valid in the store; None if it is proven to be damaged.

        Raises:
            StoreError, TimeoutError: the store did not answer by `deadline_s`.
        """
        stated = await self._client.ask(
            lambda store: store.stat(job.key), Priority.LOAD, 0, deadline_s
        )
        if stated.num_bytes > job.limit_bytes:
            return None  # the store itself states a size that is too large
        if stated.num_bytes > MOST_HASHED_BYTES:
            return "it is too large to be examined"
        body = await self._client.ask(
            lambda store: read(store, job.key, stated.num_bytes),
            Priority.LOAD,
            stated.num_bytes,
            deadline_s,
        )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loads, self._examine, job, stated, body)

    def _examine(self, job: Fetch, stated: ObjectStat, body: memoryview) -> str | None:
        """Return why the object, read again as `body`, may be valid in the store; None: it is not.

        Load thread.
        """
        try:
            sealed = unseal(body, job.key, integrity=self._integrity)
        except ObjectCorrupt:
            return proof_missing(stated, body)
        # The checksum is right: the object arrived as it is stored.
        is_usable = job.accepts is None or job.accepts(sealed.spec)
        return "it is valid when read once more" if is_usable else None
