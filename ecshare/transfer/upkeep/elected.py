# SPDX-License-Identifier: Apache-2.0
"""Cleans the store from within engines: one engine at a time, on a thread of its own.

Time is divided into slots, by the store's clock. The engine that creates the lease of a slot cleans
in this slot. A lease is never renewed: if its engine dies or hangs, another one gets the next slot.
Then two may clean at once, which is safe.
"""

import asyncio
import logging
import random
from collections.abc import Callable

from ecshare.store.errors import StoreError, StoreUnavailable
from ecshare.store.integrity import Integrity
from ecshare.store.keys import CLOCK_PREFIX, Kind, lease_key, new_clock_key
from ecshare.store.objects import ObjectStore, stored_at
from ecshare.transfer.upkeep.background import MOST_OBJECTS, Background
from ecshare.upkeep.budget import Budget
from ecshare.upkeep.clean import Cleaner

logger = logging.getLogger(__name__)

SLOT_S = 1200.0
# A tenth of a core at most: vLLM's threads need the interpreter's lock.
_REST = 9.0
# A run ends after so many slots: if its engine was suspended, its plan is outdated.
_MOST_SLOTS = 3


class ElectedCleaner:
    """Takes part in the elections of one kind until `close`. Logs what it does; raises nothing."""

    def __init__(  # noqa: PLR0913 — the terms of its runs
        self,
        open_store: Callable[[], ObjectStore],
        kind: Kind,
        budget: Budget,
        integrity: Integrity | None,
        timeout_s: float,
        tenant: str = "",
    ) -> None:
        """Start the thread. `open_store`: opens a store for this thread alone. `timeout_s`: for
        each call. `tenant`: its engines take turns."""
        self._open_store = open_store
        self._kind = kind
        self._budget = budget
        self._integrity = integrity
        self._timeout_s = timeout_s
        self._tenant = tenant
        self._background = Background("ecshare-gc", self._run())

    def close(self) -> None:
        """Cancel a run, and end the thread."""
        self._background.close()

    async def _run(self) -> None:
        store = self._open_store()
        try:
            while True:
                # At least once a slot. Random, so that engines do not all call at the same time.
                await asyncio.sleep(SLOT_S * random.uniform(0.5, 1))
                await self._take_turn(store)
        finally:
            await store.close()

    async def _take_turn(self, store: ObjectStore) -> None:
        cleaner = Cleaner(
            store,
            self._budget,
            integrity=self._integrity,
            kinds=[self._kind],
            timeout_s=self._timeout_s,
            rest=_REST,
            most_s=_MOST_SLOTS * SLOT_S,
            most_objects=MOST_OBJECTS,
        )
        try:
            if not await self._is_elected(store):
                return
            report = await cleaner.run()
        except Exception as exc:  # noqa: BLE001 — the next turn may go well, and the engine goes on
            num = cleaner.report.num_removed
            logger.warning("the store could not be cleaned (%d objects removed): %s", num, exc)
            return
        logger.info(
            "cleaned the store: removed %d of %d objects to remove, merged %d notes of use%s",
            report.num_removed,
            report.num_to_remove,
            report.num_notes,
            f"; listed it in {report.num_parts} parts, because it has so many objects"
            if report.num_parts > 1
            else "",
        )

    async def _is_elected(self, store: ObjectStore) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await elected(store, self._kind, self._tenant)
        except StoreUnavailable as exc:
            # A full store accepts no lease, so all engines clean: several at once are safe.
            logger.debug("cleaning without a lease: %s", exc)
            return True


async def elected(store: ObjectStore, kind: Kind, tenant: str = "") -> bool:
    """Return whether this process is to clean objects of `kind` now: True for one process in each
    slot, for each tenant.

    Raises:
        StoreError: the store failed.
    """
    slot = int(await store_time_s(store) // SLOT_S)
    key = lease_key(kind, slot, tenant)
    if not store.creates_once and (await store.exists([key]))[0]:
        return False
    return await store.put(key, b"ecshare")


async def store_time_s(store: ObjectStore) -> float:
    """Return the time by the store's clock, in seconds since the epoch.

    Raises:
        StoreError: the store failed.
    """
    key = new_clock_key()
    await store.put(key, b"1")
    try:
        now_s = await stored_at(store, CLOCK_PREFIX, key)
    finally:
        await store.delete([key])
    if not now_s:
        raise StoreError("a listing of the store lacks an object that was just stored, or its time")
    return now_s
