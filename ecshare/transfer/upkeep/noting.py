# SPDX-License-Identifier: Apache-2.0
"""Writes notes of use to the store, so that a cleaner keeps the objects that an engine uses.

A note is written every few minutes and at the end, and only while the store has a cleaner:
otherwise notes would pile up. The uses of the last minutes of a process that is killed are lost.
"""

import asyncio
import logging
import random
import time

from ecshare.store.errors import StoreDenied, StoreError
from ecshare.store.integrity import Integrity
from ecshare.store.keys import (
    CLEANED_KEY,
    CLEANED_PREFIX,
    Key,
    Kind,
    new_uses_key,
    object_key,
    use_id_of,
)
from ecshare.store.objects import ObjectStore, stored_at
from ecshare.upkeep.notes import joined
from ecshare.upkeep.record import MOST_PENDING, Name, UseRecord
from ecshare.upkeep.uses import Uses, pack

logger = logging.getLogger(__name__)

INTERVAL_S = 300.0
_CHECK_S = 15.0
# A store that was not cleaned for longer has no cleaner: people may clean once a week. By this
# host's clock, whose error of hours does not matter.
_CLEANED_WITHIN_S = 8 * 86_400.0
# Hashing names holds the interpreter's lock.
_REST_S = 0.005


class NoteWriter:
    """Writes what a `UseRecord` holds, from time to time. All runs on the I/O thread.

    It bypasses StoreClient, as renewals do: no request waits for it.
    """

    def __init__(  # noqa: PLR0913 — what it writes, and where
        self,
        store: ObjectStore,
        record: UseRecord,
        kind: Kind,
        namespace: str,
        integrity: Integrity | None,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._record = record
        self._kind = kind
        self._namespace = namespace
        self._integrity = integrity
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Write a note every few minutes, or earlier if the record is half full, until cancelled.

        Raises nothing.
        """
        # Random, so that engines that started together do not always write at the same time.
        due_s = time.monotonic() + INTERVAL_S * random.uniform(0.2, 1)
        level = logging.INFO
        while True:
            await asyncio.sleep(_CHECK_S)
            if time.monotonic() < due_s and len(self._record) < MOST_PENDING // 2:
                continue
            due_s = time.monotonic() + INTERVAL_S
            try:
                await self.write()
            except StoreDenied as exc:  # for good, or until a quota has room again
                logger.log(level, "uses of stored objects are not noted: %s", exc)
                level = logging.DEBUG
            except (StoreError, TimeoutError) as exc:
                logger.debug("uses of stored objects cannot be noted now: %s", exc)

    async def write(self, rest_s: float = _REST_S) -> None:
        """Empty the record, and write its uses as one note if the store has a cleaner.

        `rest_s`: the pause after some hundred uses, for other threads.

        Raises:
            StoreError, TimeoutError: the note could not be written; its uses are lost.
        """
        async with self._turn:
            if not len(self._record):
                return
            taken = self._record.take()
            async with asyncio.timeout(self._timeout_s):
                # 0 for a store that has no cleaner.
                cleaned_s = await stored_at(self._store, CLEANED_PREFIX, CLEANED_KEY)
            if time.time() - cleaned_s >= _CLEANED_WITHIN_S:
                return
            parts = []
            for some in taken:
                parts.append(Uses.of(self._row(*use) for use in some))
                await asyncio.sleep(rest_s)
            key = new_uses_key(self._kind)
            async with asyncio.timeout(self._timeout_s):
                await self._store.put(key, pack(joined(parts), key, self._integrity))

    async def end(self, timeout_s: float) -> None:
        """Write a last note, within `timeout_s`. Raises nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.write(rest_s=0)
        except (StoreError, TimeoutError) as exc:
            logger.debug("the last uses of stored objects are not noted: %s", exc)

    def _row(self, name: Name, age: int, position: int) -> tuple[int, int, int]:
        key = name if isinstance(name, Key) else object_key(self._kind, self._namespace, name)
        return use_id_of(key), age, position
