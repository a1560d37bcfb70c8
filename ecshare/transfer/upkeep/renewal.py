# SPDX-License-Identifier: Apache-2.0
"""Renews a writer's manifest and mark, so that they do not expire.

An expiry rule removes objects by their age. Embeddings and KV may expire: they are computed again.
The manifest and the mark are small, are written by engines alone, and must stay as long as an
engine of their namespace runs: from them, other engines learn why they find nothing, and which
sizes to look up.
"""

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ecshare.store.epochs import FACT
from ecshare.store.errors import StoreError
from ecshare.store.keys import Key, Kind, namespace_digest
from ecshare.store.manifest import write_manifest, write_mark
from ecshare.store.objects import ObjectStore

logger = logging.getLogger(__name__)

# Rules count in days. A renewal is one or two small writes an engine.
RENEWAL_S = 6 * 3600.0
RETRY_S = 600.0


class Record(Struct, frozen=True):
    """A namespace and its facts: the manifest and the mark that its writers store."""

    kind: Kind
    namespace: str
    facts: Mapping[str, Any]
    mark: Key | None = None
    """The key of a small object of which only the existence matters; None: it needs none."""

    @property
    def name(self) -> str:
        """Return the name of the record in messages."""
        what = "manifest and the size mark" if self.mark else "manifest"
        return f"the {what} of namespace {self.namespace}"

    def in_epoch(self, number: int) -> "Record":
        """Return the record of the same engine's namespace in that epoch. `self` is that of 0."""
        if not number:
            return self
        facts = {**self.facts, FACT: number}
        digest = namespace_digest(facts)
        mark = Key(self.mark.replace(self.namespace, digest)) if self.mark else None
        return Record(self.kind, digest, facts, mark)

    async def put(self, store: ObjectStore) -> None:
        """Write the manifest and the mark, each even if the other fails.

        Raises:
            StoreError: a part could not be written.
        """
        writes = [write_manifest(store, self.kind, self.namespace, self.facts)]
        if self.mark:
            writes.append(write_mark(store, self.mark))
        for failure in await asyncio.gather(*writes, return_exceptions=True):
            if failure is not None:
                raise failure


async def renew(store: ObjectStore, record: Record, timeout_s: float, *, is_written: bool) -> None:
    """Write `record` every few hours until cancelled; for the first time soon, unless `is_written`.

    Runs on the I/O thread; raises nothing.
    """
    while True:
        pause_s = RENEWAL_S if is_written else RETRY_S
        # Random, so that engines that started together do not always write at the same time.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1))
        level = logging.WARNING if is_written else logging.DEBUG
        is_written = await write_record(store, record, timeout_s, level=level)


async def write_record(
    store: ObjectStore, record: Record, timeout_s: float, *, level: int = logging.WARNING
) -> bool:
    """Write `record` once; log a failure at `level`. Return whether it was written.

    This bypasses StoreClient: no request waits for it, so its failures must not open a breaker, and
    a long queue of saves must not delay it.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await record.put(store)
    except (StoreError, TimeoutError) as exc:
        why = str(exc) or f"no answer within {timeout_s:g} s"
        logger.log(level, "cannot store %s: %s", record.name, why)
        return False
    return True
