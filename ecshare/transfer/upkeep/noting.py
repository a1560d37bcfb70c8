# SPDX-License-Identifier: Apache-2.0
"""Notes in the store which objects an engine uses, so that a cleaner keeps them.

A note is written every few minutes, and only while the store has a cleaner: otherwise notes would
pile up. A process that ends loses the uses of the last minutes.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator

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
from ecshare.store.objects import ObjectStore
from ecshare.upkeep.record import MOST_PENDING, Name, UseRecord
from ecshare.upkeep.uses import Uses, pack

logger = logging.getLogger(__name__)

INTERVAL_S = 300.0
_CHECK_S = 15.0
# A store whose last clean-up is longer ago has no cleaner. Weeks apart are usual. By this host's
# clock: hours do not matter.
_CLEANED_WITHIN_S = 8 * 86_400.0
# Hashing names holds the interpreter's lock. So few at a time delay no hook.
_SLICE = 256
_REST_S = 0.005


async def note_uses(  # noqa: PLR0913 — what it writes, and where
    store: ObjectStore,
    record: UseRecord,
    kind: Kind,
    namespace: str,
    integrity: Integrity | None,
    timeout_s: float,
) -> None:
    """Write what `record` holds every few minutes, or earlier if it is half full, until cancelled.

    Runs on the I/O thread; raises nothing.
    """
    # Random, so that engines that started together do not always write at the same time.
    due_s = time.monotonic() + INTERVAL_S * random.uniform(0.2, 1)
    while True:
        await asyncio.sleep(_CHECK_S)
        if time.monotonic() < due_s and len(record) < MOST_PENDING // 2:
            continue
        due_s = time.monotonic() + INTERVAL_S
        try:
            await write_note(store, record, kind, namespace, integrity, timeout_s)
        except StoreDenied as exc:
            logger.info("uses of stored objects are not noted: %s", exc)
            record.stop()
            return
        except (StoreError, TimeoutError) as exc:
            logger.debug("uses of stored objects cannot be noted now: %s", exc)


async def write_note(  # noqa: PLR0913 — as above
    store: ObjectStore,
    record: UseRecord,
    kind: Kind,
    namespace: str,
    integrity: Integrity | None,
    timeout_s: float,
) -> None:
    """Write what `record` holds as one note, if the store has a cleaner; `record` is empty then.

    This bypasses StoreClient, as renewals do: no request waits for it.

    Raises:
        StoreError, TimeoutError: it could not be written, and is lost.
    """
    taken = record.take()
    if not taken:
        return
    async with asyncio.timeout(timeout_s):
        if not await _has_cleaner(store):
            return
    rows = [row async for row in _rows(taken, kind, namespace)]
    key = new_uses_key(kind)
    async with asyncio.timeout(timeout_s):
        await store.put(key, pack(Uses.of(rows), key, integrity))


async def _has_cleaner(store: ObjectStore) -> bool:
    async for info in store.list(CLEANED_PREFIX):
        if info.key == CLEANED_KEY:
            return time.time() - info.modified_s < _CLEANED_WITHIN_S
    return False


async def _rows(
    taken: list[tuple[Name, int, int]], kind: Kind, namespace: str
) -> AsyncIterator[tuple[int, int, int]]:
    for start in range(0, len(taken), _SLICE):
        for name, age, position in taken[start : start + _SLICE]:
            key = name if isinstance(name, Key) else object_key(kind, namespace, name)
            yield use_id_of(key), age, position
        await asyncio.sleep(_REST_S)
