# SPDX-License-Identifier: Apache-2.0
"""Fetches objects: from the host cache, or from the store, once for all processes of the host."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from ecshare.store.errors import (
    ObjectCorrupt,
    ObjectForeign,
    ObjectGivenUp,
    ObjectMissing,
    ObjectUnreadable,
    StoreError,
)
from ecshare.store.format import TensorSpec, unseal
from ecshare.store.hostcache.cache import Draft, Entry, HostCache
from ecshare.store.integrity import Integrity
from ecshare.store.keys import Key
from ecshare.transfer.announced.absence_notes import AbsenceNotes
from ecshare.transfer.announced.host_watch import HostWatch
from ecshare.transfer.announced.poll_rate import PollRate, Waiter
from ecshare.transfer.client.breaker import CircuitBreaker, Verdict, Verdicts
from ecshare.transfer.client.priority import Priority
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.jobs import Accepts, Fetch, Moved, StoredObject, Tier
from ecshare.transfer.packing import Packing
from ecshare.transfer.upkeep.removal import DeletionBudget, Removal

logger = logging.getLogger(__name__)

# Whether a download shows that the store's data arrives undamaged.
_SOUNDNESS: Verdicts = (
    (ObjectUnreadable, Verdict.UNKNOWN),
    (ObjectForeign, Verdict.WORKS),  # its checksum is right
    (ObjectCorrupt, Verdict.FAILED),
)

_Load = Callable[[], tuple[StoredObject, Moved]]
_Served = tuple[StoredObject | None, tuple[Moved, ...]]

# The pauses between checks whether the downloading process has released its claim.
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
# The share of a job's time limit for which it waits for another process's download.
_PATIENCE = 0.5
# The pauses between requests for an announced object that is not stored yet.
_FIRST_PAUSE_S = 0.01
_PAUSE_GROWTH = 1.6
# The store is also asked for a note that the object will not be stored: in one of this many rounds,
# and in every round once the pause is this long.
_NOTE_EVERY = 4
_LONG_PAUSE_S = 0.1
# How long to watch the host cache for a guessed object that is missing: another process may publish
# it meanwhile, and the engine may need a whole step to ask again.
_GUESS_WAIT_S = 0.02
# At most this many objects of this host are open and mapped while they wait for a load thread: one
# prompt may ask for thousands.
_MOST_LOADING = 16


def open_object(host: HostCache, key: Key, *, own: bool = False) -> StoredObject | None:
    """Open the object under `key` in the host cache, pinned; None if it is missing.

    It was verified when it was published, so the checksum is not computed again. `own`: the payload
    is private memory (see Entry.copy_on_write), as long as a view of it exists. Any thread; does no
    I/O on the store.
    """
    entry = host.open(key)
    return None if entry is None else _open_usable(host, entry, own=own)


def look(host: HostCache, job: Fetch) -> StoredObject | None:
    """Return the object of `job`, pinned, if the host cache has it and the job can use it.

    Changes nothing: a damaged entry is discarded by the next Fetch. Any thread.
    """
    entry = host.open(job.key)
    with suppress(ObjectCorrupt, OSError):
        return None if entry is None else _object_in(entry, job.accepts)
    return None


def _open_usable(
    host: HostCache, entry: Entry, accepts: Accepts | None = None, *, own: bool = False
) -> StoredObject | None:
    """Do what `_object_in` does, but return None for an object that cannot be used.

    A damaged entry is discarded from the host cache.
    """
    try:
        return _object_in(entry, accepts, own=own)
    except ObjectCorrupt as exc:
        logger.warning("host cache: dropping an entry that cannot be used: %s", exc)
        host.discard(entry.key)
    except OSError as exc:
        logger.warning("host cache: an entry cannot be mapped: %s", exc)
    return None


def _object_in(entry: Entry, accepts: Accepts | None = None, *, own: bool = False) -> StoredObject:
    """Return the object in `entry`, and let it own the entry; its checksum is not computed.

    Raises:
        ObjectCorrupt: it is damaged, or `accepts` refuses it.
        OSError: it cannot be mapped.
    """
    try:
        body = entry.copy_on_write() if own else entry.body
        sealed = unseal(body, entry.key, verify=False)
        if accepts is not None and not accepts(sealed.spec):
            raise _mismatch(entry.key, sealed.spec)
    except (ObjectCorrupt, OSError):
        entry.close()
        raise
    return StoredObject(entry.key, sealed.spec, sealed.payload, entry)


def _mismatch(key: Key, spec: TensorSpec) -> ObjectCorrupt:
    tensor = f"{spec.dtype} {list(spec.shape)}"
    return ObjectCorrupt(f"{key} contains a tensor that does not fit this engine: {tensor}")


async def _ended(work: asyncio.Future[Any]) -> None:
    """Wait until a thread has done `work`, even if this task is cancelled meanwhile: the thread
    cannot be stopped."""
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([work])


class Fetcher:
    """Serves Fetch jobs.

    One process of a host at a time downloads an object. The others wait until it is in the host
    cache. If the process dies, its claim ends.

    Ownership: the I/O thread; verification and `use` run on `loads`.
    """

    def __init__(  # noqa: PLR0913 — the parts of the engine that it uses
        self,
        host: HostCache,
        client: StoreClient,
        loads: Executor,
        integrity: Integrity | None,
        notes: AbsenceNotes,
        packing: Packing | None = None,
    ) -> None:
        """Use what the engine owns. `packing`: objects may be packed in the store; None: they are
        not."""
        self._host = host
        self._client = client
        self._loads = loads
        self._integrity = integrity
        self._notes = notes
        self._packing = packing
        # Opens when downloads arrive damaged: for the breakers of `client` such a store works.
        self._damage_breaker = CircuitBreaker("loads")
        self._removal = Removal(client, loads, integrity, DeletionBudget())
        self._poll_rate = PollRate()
        self._watch = HostWatch(host)
        self._loading = asyncio.Semaphore(_MOST_LOADING)

    @property
    def is_open(self) -> bool:
        """Return whether loads are paused because downloads arrive damaged. Any thread."""
        return self._damage_breaker.is_open

    async def serve(self, job: Fetch, deadline_s: float) -> _Served:
        """Return the object, pinned, and the transfers.

        If the job has a `use`, call it with the object, and return None in its place.

        Raises:
            StoreError, TimeoutError: it cannot be fetched by `deadline_s`.
        """
        if job.is_announced:
            with self._poll_rate.joined() as waiter:
                return await self._fetch_announced(job, deadline_s, waiter)
        try:
            return await self._fetch(job, deadline_s)
        except ObjectMissing:
            if not job.is_guess or not await self._watch.appears(job.key, _GUESS_WAIT_S):
                raise
            return await self._fetch(job, deadline_s)

    async def _fetch_announced(self, job: Fetch, deadline_s: float, waiter: Waiter) -> _Served:
        """Serve a job for an announced object: while it is missing, ask until the deadline.

        Raises:
            ObjectGivenUp: it will not be stored.
        """
        pause_s = _FIRST_PAUSE_S
        missing: ObjectMissing | None = None
        turn = 0
        while True:
            try:
                return await self._fetch(job, deadline_s)
            except ObjectCorrupt:
                raise  # it was stored, and is damaged
            except (StoreError, TimeoutError) as exc:
                if isinstance(exc, ObjectMissing):
                    missing = exc
                if time.monotonic() >= deadline_s:
                    raise missing or exc from None
            is_turn = turn % _NOTE_EVERY == 1 or pause_s >= _LONG_PAUSE_S
            asks_for_note = job.may_be_given_up and is_turn
            if await self._is_given_up(job, deadline_s, in_store=asks_for_note):
                raise ObjectGivenUp(f"{job.key} will not be stored") from None
            least_s = self._poll_rate.pause_s(waiter) * (1 + asks_for_note)
            await self._wait(job, max(pause_s, least_s), deadline_s)
            pause_s = min(pause_s * _PAUSE_GROWTH, job.longest_pause_s)
            turn += 1

    async def _wait(self, job: Fetch, pause_s: float, deadline_s: float) -> None:
        """Wait until the next attempt: until this host may have the object, or for `pause_s`, or
        until the deadline."""
        pause_s = max(0.0, min(pause_s, deadline_s - time.monotonic()))
        if job.in_store:
            await asyncio.sleep(pause_s)  # only the store shows whether it has arrived
        else:
            await self._watch.appears(job.key, pause_s)

    async def _is_given_up(self, job: Fetch, deadline_s: float, *, in_store: bool) -> bool:
        """Return whether there is a note that the job's object will not be stored: on this host or,
        with `in_store`, in the store."""
        if not job.may_be_given_up:
            return False
        if self._notes.is_on_host(job.key):
            return True
        return in_store and await self._notes.is_in_store(job.key, deadline_s)

    async def _fetch(self, job: Fetch, deadline_s: float) -> _Served:
        """Serve a job with one attempt."""
        started_s = time.monotonic()
        # The holder of the claim may be stopped; after this, download without a claim.
        patience_s = started_s + _PATIENCE * (deadline_s - started_s)
        while True:
            # Without a `use`, the receiver limits the number of objects that it holds.
            async with self._loading if job.use is not None else nullcontext():
                found = self._host.open_or_claim(job.key)
                if isinstance(found, Entry):
                    here = _open_usable(self._host, found, job.accepts)
                    if here is not None:
                        await self._check_store(job, here, deadline_s)
                        return await self._from_host(job, here, started_s)
                    found = self._host.claim(job.key)
            if found is not None or time.monotonic() >= patience_s:
                break
            await self._await_other_download(job, patience_s - time.monotonic())
        try:
            return await self._from_store(job, started_s, deadline_s)
        finally:
            if found is not None:
                found.release()

    async def _from_host(self, job: Fetch, here: StoredObject, started_s: float) -> _Served:
        moved = Moved("read", Tier.HOST, len(here.payload), time.monotonic() - started_s)
        if job.use is None:
            return here, (moved,)
        return await self._loaded(job, lambda: (here, moved))

    async def _check_store(self, job: Fetch, here: StoredObject, deadline_s: float) -> None:
        """Check that the store has the object, too, if the job asks for that; if not, unpin `here`.

        Raises:
            StoreError, TimeoutError: the store does not have it, or does not answer.
        """
        if not job.in_store:
            return
        priority = Priority.POLL if job.is_announced else Priority.LOOK_UP
        is_sound = False
        try:
            (is_stored,) = await self._client.ask(
                lambda store: store.exists([job.key]), priority, 0, deadline_s
            )
            is_sound = is_stored and not self._client.damaged.is_quarantined(job.key)
        finally:
            if not is_sound:
                here.release()
        if not is_sound:
            raise ObjectMissing(job.key)

    async def _await_other_download(self, job: Fetch, timeout_s: float) -> None:
        """Wait until the object is in the host cache, or the downloading process has released its
        claim, or for `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        poll_s = _FIRST_POLL_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            if await self._watch.appears(job.key, min(poll_s, left_s)):
                return
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            if (claim := self._host.claim(job.key)) is not None:
                claim.release()
                return

    async def _from_store(self, job: Fetch, started_s: float, deadline_s: float) -> _Served:
        damaged = self._client.damaged
        if damaged.is_quarantined(job.key):
            raise ObjectCorrupt(
                f"{job.key} was found damaged a moment ago, and is not read again yet"
            )
        try:
            with self._damage_breaker.attempt(_SOUNDNESS):
                served = await self._download_twice(job, started_s, deadline_s)
        except ObjectUnreadable:
            damaged.quarantine(job.key)
            raise
        except ObjectCorrupt:
            if await self._removal.remove_if_proven(job, deadline_s):
                damaged.removed(job.key)
            else:
                damaged.quarantine(job.key)
            # Even if it was removed: a store may report that and keep the object.
            damaged.replaceable[job.key] = None
            raise
        damaged.repaired(job.key)
        return served

    async def _download_twice(self, job: Fetch, started_s: float, deadline_s: float) -> _Served:
        """Download the object; once more if it is damaged, which may be an accident."""
        try:
            return await self._download(job, started_s, deadline_s)
        except (ObjectUnreadable, ObjectForeign):
            raise
        except ObjectCorrupt:
            return await self._download(job, started_s, deadline_s)

    async def _download(self, job: Fetch, started_s: float, deadline_s: float) -> _Served:
        incoming = self._host.receive(job.key, job.limit_bytes)
        try:
            await self._client.ask(
                lambda store: store.get(job.key, incoming),
                Priority.POLL if job.is_announced or job.is_guess else Priority.LOAD,
                job.limit_bytes,
                deadline_s,
            )
            return await self._loaded(job, partial(self._admit, job, incoming, started_s))
        except BaseException:
            incoming.discard()  # the traceback of this exception may refer to it
            raise

    async def _loaded(self, job: Fetch, load: _Load) -> _Served:
        """Call `load` and `job.use` on a load thread, and return the result.

        The thread has finished on return, also if this task was cancelled: `use` writes to memory
        that others own.
        """
        work = asyncio.get_running_loop().run_in_executor(self._loads, _used, job, load)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await _ended(work)
            if work.exception() is None and (stored := work.result()[0]):
                stored.release()
            raise

    def _admit(self, job: Fetch, incoming: Draft, started_s: float) -> tuple[StoredObject, Moved]:
        """Verify the downloaded object and publish it on this host. Load thread."""
        sealed = unseal(
            incoming.body, job.key, integrity=self._integrity, streamed=incoming.checksum
        )
        num_bytes, publish = len(sealed.payload), incoming.publish
        unpacked = None
        if self._packing is not None:
            unpacked = self._packing.unpack(sealed, job.key, job.limit_bytes, self._integrity)
        if unpacked is not None:
            incoming.discard()
            sealed = unseal(unpacked, job.key, verify=False)
            publish = partial(self._host.publish, job.key, unpacked)
        if job.accepts is not None and not job.accepts(sealed.spec):
            raise _mismatch(job.key, sealed.spec)
        # Another process may have published the entry: its bytes are the same.
        stored = StoredObject(job.key, sealed.spec, sealed.payload, publish())
        seconds = time.monotonic() - started_s
        return stored, Moved("read", Tier.STORE, num_bytes, seconds)


def _used(job: Fetch, load: _Load) -> _Served:
    """Load the object, call `job.use` with it if there is one, and then release it."""
    stored, moved = load()
    if job.use is None:
        return stored, (moved,)
    try:
        job.use(stored)
    finally:
        stored.release()
    return None, (moved,)
