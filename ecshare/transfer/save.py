# SPDX-License-Identifier: Apache-2.0
"""Saves objects: publishes them in the host cache and puts them into the store."""

import asyncio
import time
from concurrent.futures import Executor
from contextlib import closing

from ecshare.store.errors import ObjectMissing
from ecshare.store.format import seal
from ecshare.store.hostcache.cache import Entry, HostCache
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.jobs import Backfill, Moved, Put, Tier
from ecshare.transfer.packing import Packing

# The purpose of the claim that a process holds while it stores an object.
_STORING = "storing"
# At most this many entries are backfilled at a time. Queued backfills hold neither descriptors nor
# pins: after a restart with a full host cache there are thousands.
_BACKFILLS = 8
# At most this many objects are packed or being stored at a time, so that those that wait take no
# memory beyond their slabs.
_MOST_PACKED = 16


class Saver:
    """Serves Put and Backfill jobs.

    While an object is being stored, a claim shows this to the processes of the host. Its entry is
    not pinned: hundreds of saves may wait for the store, and loads need room in the host cache.

    Ownership: the I/O thread; slabs are sealed, published and packed on `copies`.
    """

    def __init__(
        self,
        host: HostCache,
        client: StoreClient,
        copies: Executor,
        integrity: Integrity | None,
        packing: Packing | None = None,
    ) -> None:
        """Use what the engine owns. `packing`: how objects are packed for the store; None: not."""
        self._host = host
        self._client = client
        self._copies = copies
        self._integrity = integrity
        self._packing = packing
        self._backfills = asyncio.Semaphore(_BACKFILLS)
        self._packs = asyncio.Semaphore(_MOST_PACKED)

    async def put(self, job: Put) -> tuple[Moved, ...]:
        """Publish the slab's object on this host and store it. Return the transfers.

        There is no deadline: saves must not expire in the queue.

        Raises:
            StoreError: it is not stored.
        """
        loop = asyncio.get_running_loop()
        body, is_new, published = await loop.run_in_executor(self._copies, self._prepare, job)
        claim = self._host.claim(job.key, _STORING)
        started_s = time.monotonic()
        try:
            num_bytes = await self._store(job.key, body)
            stored = Moved("write", Tier.STORE, num_bytes, time.monotonic() - started_s)
        except Exception:
            # An entry that existed before may well be in the store: keep it.
            if is_new and not job.keeps_unstored:
                await loop.run_in_executor(self._copies, self._host.discard, job.key)
            raise
        finally:
            if claim is not None:
                claim.release()
        return published, stored

    async def _store(self, key: Key, body: memoryview) -> int:
        """Store an object; return the number of bytes that were sent to the store."""
        if self._packing is None:
            await self._client.put(key, body)
            return body.nbytes
        async with self._packs:
            packed = await self._packed(self._packing, key, body)
            await self._client.put(key, packed)
            return memoryview(packed).nbytes

    async def backfill(self, job: Backfill) -> tuple[bool, tuple[Moved, ...]]:
        """Store an entry of the host cache, unless the store has it.

        Return whether the store lacked it, and the transfers.

        Raises:
            ObjectMissing: this host does not have it.
            StoreError: it is not certain that the store has the object.
        """
        async with self._backfills:
            entry = self._host.open(job.key)
            if entry is None:
                raise ObjectMissing(job.key)
            with closing(entry):
                claim = self._host.claim(job.key, _STORING)
                if claim is None:
                    return False, ()  # another process of this host is storing it
                try:
                    return await self._store_again(job.key, entry)
                finally:
                    claim.release()

    async def _store_again(self, key: Key, entry: Entry) -> tuple[bool, tuple[Moved, ...]]:
        started_s, body = time.monotonic(), entry.body
        packed: Buffer = body
        if self._packing is not None:
            if await self._client.has(key):
                return False, ()  # checked first, so that packing is not wasted
            packed = await self._packed(self._packing, key, body)
        num_bytes = memoryview(packed).nbytes
        if not await self._client.put_if_lost(key, packed):
            return False, ()
        return True, (Moved("write", Tier.STORE, num_bytes, time.monotonic() - started_s),)

    async def _packed(self, packing: Packing, key: Key, body: memoryview) -> Buffer:
        """Return `body` as it is to be stored. Packs on a copy thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._copies, packing.pack, body, key, self._integrity
        )

    def _prepare(self, job: Put) -> tuple[memoryview, bool, Moved]:
        """Seal the slab and publish it on this host. Return the object, whether it is new to this
        host, and the transfer. Copy thread."""
        body = job.slab.arrived()
        started_s = time.monotonic()
        seal(body, job.slab.spec, job.key, self._integrity)
        entry = self._host.publish(job.key, body)
        seconds = time.monotonic() - started_s
        num_bytes = len(body) if entry else 0
        is_new = entry is not None and entry.is_new
        if entry is not None:
            entry.close()
        return body, is_new, Moved("write", Tier.HOST, num_bytes, seconds)
