# SPDX-License-Identifier: Apache-2.0
"""Cleans the store from within engines: one engine at a time, on a thread of its own.

Time is divided into slots, by the store's clock. Who first creates the lease of a slot cleans in
it. A lease is never renewed: if its engine dies or stops, another one gets the next slot. Then two
may clean at once, which is safe.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from contextlib import suppress

from ecshare.store.errors import StoreError
from ecshare.store.integrity import Integrity
from ecshare.store.keys import CLOCK_PREFIX, Kind, lease_key, new_clock_key
from ecshare.store.objects import ObjectStore
from ecshare.transfer.device.affinity import start_unbound
from ecshare.upkeep.budget import Budget
from ecshare.upkeep.clean import Cleaner, Pace

logger = logging.getLogger(__name__)

SLOT_S = 1200.0
# A tenth of a core at most: vLLM's threads need the interpreter's lock.
_REST = 9.0
# What an engine has planned long ago, and was then stopped, is no longer true.
_MOST_SLOTS = 3
_CLOSE_S = 1.0


class ElectedCleaner:
    """Takes part in the elections of one kind until `close`. Logs what it does; raises nothing."""

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        kind: Kind,
        budget: Budget,
        integrity: Integrity | None,
        timeout_s: float,
    ) -> None:
        """Start the thread. `open_store`: a store for it alone. `timeout_s`: of each call."""
        self._open_store = open_store
        self._kind = kind
        self._budget = budget
        self._integrity = integrity
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._run())
        self._thread: threading.Thread = start_unbound("ecshare-gc", self._serve)

    def close(self) -> None:
        """End the thread, soon. What it was doing is left undone."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _run(self) -> None:
        store = self._open_store()
        try:
            while True:
                # At least once a slot. Random, so that engines do not all ask at the same time.
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
            pace=Pace(_REST),
            most_s=_MOST_SLOTS * SLOT_S,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                is_elected = await elected(store, self._kind)
            if not is_elected:
                return
            report = await cleaner.run()
        except Exception as exc:  # noqa: BLE001 — the next turn may go well, and the engine goes on
            num = cleaner.report.num_removed
            logger.warning("the store could not be cleaned (%d objects removed): %s", num, exc)
            return
        logger.info(
            "cleaned the store: removed %d of %d objects to remove, merged %d notes of use",
            report.num_removed,
            report.num_to_remove,
            report.num_notes,
        )


async def elected(store: ObjectStore, kind: Kind) -> bool:
    """Return whether this process is to clean objects of `kind` now: True once in a slot.

    Raises:
        StoreError: the store failed.
    """
    slot = int(await store_time_s(store) // SLOT_S)
    key = lease_key(kind, slot)
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
        found = [info.modified_s async for info in store.list(CLOCK_PREFIX) if info.key == key]
    finally:
        await store.delete([key])
    if not found:
        raise StoreError("a listing of the store lacks an object that was just stored")
    return found[0]
