# SPDX-License-Identifier: Apache-2.0
"""Brings objects from this host to the store, by way of its cache."""

import asyncio
import time
from concurrent.futures import Executor

from ecshare.store.errors import ObjectMissing
from ecshare.store.format import seal
from ecshare.store.hostcache.cache import Entry, HostCache
from ecshare.store.hostcache.single_flight import Claim
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key
from ecshare.store.objects import ObjectStore
from ecshare.transfer.jobs import Backfill, Moved, Put, Tier
from ecshare.transfer.priority import Priority
from ecshare.transfer.store_client import StoreClient


class Saver:
    """Serves Put and Backfill jobs.

    While an object is on its way to the store, the processes of its host see that by a claim.
    Ownership: the I/O thread; slabs are sealed and published on `copies`.
    """

    def __init__(
        self, host: HostCache, client: StoreClient, copies: Executor, integrity: Integrity | None
    ) -> None:
        """Use what the engine owns."""
        self._host = host
        self._client = client
        self._copies = copies
        self._integrity = integrity

    async def put(self, job: Put) -> tuple[Moved, ...]:
        """Publish the slab's object to this host and store it; return what was moved for it.

        There is no deadline: a queue of saves must not expire unsent.

        Raises:
            StoreError, TimeoutError: it is not stored.
        """
        loop, body = asyncio.get_running_loop(), job.slab.body
        entry, published = await loop.run_in_executor(self._copies, self._prepare, job, body)
        claim = self._claim(job.key)
        started_s = time.monotonic()
        replace = self._client.damaged.must_replace(job.key)
        try:
            await self._client.ask(
                lambda store: store.put(job.key, body, replace=replace), Priority.SAVE, len(body)
            )
            self._client.damaged.repaired(job.key)
        except Exception:
            # What was there before may well be in the store.
            if entry is not None and entry.is_new and not job.keeps_unstored:
                await loop.run_in_executor(self._copies, self._host.discard, job.key)
            raise
        finally:
            if claim is not None:
                claim.release()
            if entry is not None:
                entry.close()
        return published, _stored(len(body), started_s)

    async def backfill(self, job: Backfill) -> tuple[bool, tuple[Moved, ...]]:
        """Store what this host has and the store lacks: whether it had to be, and what was moved.

        Raises:
            ObjectMissing: this host does not have it.
            StoreError, TimeoutError: it is not known to be stored.
        """
        entry = self._host.open(job.key)
        if entry is None:
            raise ObjectMissing(job.key)
        with entry:
            claim = self._claim(job.key)
            if claim is None:
                return False, ()  # somebody here is storing it already
            with claim:
                return await self._store_again(job.key, entry)

    async def _store_again(self, key: Key, entry: Entry) -> tuple[bool, tuple[Moved, ...]]:
        started_s, num_bytes = time.monotonic(), entry.num_bytes
        replace = self._client.damaged.must_replace(key)

        async def put_if_lost(store: ObjectStore) -> bool:
            (is_stored,) = await store.exists([key])
            if is_stored and not replace:
                return False
            await store.put(key, entry.body, replace=replace)
            return True

        # One operation: that the store answers the question does not mean that saves work.
        if not await self._client.ask(put_if_lost, Priority.SAVE, num_bytes):
            return False, ()
        self._client.damaged.repaired(key)
        return True, (_stored(num_bytes, started_s),)

    def _claim(self, key: Key) -> Claim | None:
        """Tell the processes of this host that the object is on its way to the store."""
        return self._host.claim(Key(f"{key}.storing"))

    def _prepare(self, job: Put, body: memoryview) -> tuple[Entry | None, Moved]:
        """Seal the slab, whose memory is `body`, and publish it to this host. Copy thread."""
        job.slab.wait()
        started_s = time.monotonic()
        seal(body, job.slab.facts, job.key, self._integrity)
        entry = self._host.publish(job.key, body)
        seconds = time.monotonic() - started_s
        num_bytes = len(body) if entry else 0
        return entry, Moved("write", Tier.HOST, num_bytes, seconds)


def _stored(num_bytes: int, started_s: float) -> Moved:
    return Moved("write", Tier.STORE, num_bytes, time.monotonic() - started_s)
