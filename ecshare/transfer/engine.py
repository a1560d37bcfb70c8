# SPDX-License-Identifier: Apache-2.0
"""Moves objects between this host and the store, on one thread of its own.

Jobs go in, outcomes come out. Below this file there are exceptions, above it there are values: a
vLLM hook submits and polls, and never waits or sees an I/O error.

A Put seals its slab, publishes the object to the host cache, then writes it to the store. A Fetch
asks the host cache, then the store; what comes from the store is verified and published, so that
every process of this host reads the same verified bytes. A Lookup asks the host cache for each key
and the store for the rest, in one batch.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ecshare.store.config import StoreConfig, masked_url
from ecshare.store.errors import (
    ConfigError,
    ObjectCorrupt,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
)
from ecshare.store.format import TensorFacts, seal, unseal
from ecshare.store.hostcache import Entry, HostCache, Incoming, default_root
from ecshare.store.integrity import open_integrity
from ecshare.store.keys import Kind
from ecshare.store.manifest import write_manifest
from ecshare.store.objects import ObjectStore, open_store, probe
from ecshare.transfer.health import StoreHealth
from ecshare.transfer.staging import Slab

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Bandwidth x round trip: 8 objects of 8 MB in flight fill a fast link (docs/layout.md has figures).
_FETCHES_IN_FLIGHT = 8
_LOOKUPS_IN_FLIGHT = 4
_PUTS_IN_FLIGHT = 8
# Sealing, checking and publishing are copies at memory speed; two threads keep the loop free.
_COPY_THREADS = 2
# No object of any model comes near it.
_LARGEST_BYTES = 4 << 30


class Outcome(Enum):
    """How a job ended. Everything but OK is a miss, and is counted under its name."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    UNAVAILABLE = "unavailable"
    REJECTED = "rejected"  # never tried, or no room on this host


@dataclass(frozen=True, slots=True)
class Put:
    """Store the object in `slab` under `key`. The engine owns `slab` from now on."""

    key: str
    slab: Slab


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the object under `key` to this host, verified and pinned, within `timeout_s`."""

    key: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask which of `keys` exist, within `timeout_s`.

    In the host cache or the store; `store_only` asks what other hosts can read as well.
    """

    keys: tuple[str, ...]
    timeout_s: float
    store_only: bool = False


Job = Put | Fetch | Lookup


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A verified object on this host, valid until `release`.

    `payload` is read-only. It lies in the host cache, pinned by `entry`; or, where the cache had no
    room, in this process alone, and `entry` is None.
    """

    key: str
    facts: TensorFacts
    payload: memoryview
    entry: Entry | None

    def release(self) -> None:
        """Unpin; `payload` must not be used any more. The second call does nothing."""
        self.payload.release()
        if self.entry is not None:
            self.entry.close()


@dataclass(frozen=True, slots=True)
class Done:
    """What became of `job`.

    `value`: a StoredObject for a Fetch that is OK (the receiver owns it), a tuple of bools in the
    order of the keys for a Lookup that is OK, else None. `seconds`: from submit to the end.
    """

    job: Job
    outcome: Outcome
    seconds: float
    value: StoredObject | tuple[bool, ...] | None = None


def open_object(host: HostCache, key: str) -> StoredObject | None:
    """Open the object under `key` in the host cache, pinned; None if it is not there.

    It was verified when it was published, so the checksum is not computed again. Any thread; reads
    memory only.
    """
    entry = host.open(key)
    if entry is None:
        return None
    try:
        sealed = unseal(entry.body, key, verify=False)
    except ObjectCorrupt as exc:
        logger.warning("host cache: dropping a damaged entry: %s", exc)
        entry.close()
        host.discard(key)
        return None
    return StoredObject(key, sealed.facts, sealed.payload, entry)


class TransferEngine:
    """One I/O thread with one event loop; jobs in, outcomes out.

    Ownership: the thread that submits also polls, drains and closes; it owns `in_flight`. The
    store, its health and all tasks belong to the I/O thread. They meet in two queues, `_inbox` and
    `_done`; a thread that does nothing else carries jobs from the first one to the loop.
    """

    def __init__(self, config: StoreConfig, path: str, *, store: ObjectStore | None = None) -> None:
        """Open the store of `config`, unless `store` is given, and start the thread.

        `path`: where the user wrote the options, for messages. The engine closes the store.

        Raises:
            ConfigError: an option is wrong; the message names it and the fix.
        """
        self._config = config
        self._path = path
        self._integrity = open_integrity(config.integrity_key, path)
        self._store = store or open_store(config, path)
        root = Path(config.host_cache_dir) if config.host_cache_dir else default_root()
        self.host = HostCache(root, config.host_cache_bytes, config.store_id())
        self.in_flight = 0
        self._is_closed = False
        self._inbox: queue.SimpleQueue[tuple[Job, float] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._health = StoreHealth()
        self._copies = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="ecshare-copy")
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._limits = {
            Fetch: asyncio.Semaphore(_FETCHES_IN_FLIGHT),
            Lookup: asyncio.Semaphore(_LOOKUPS_IN_FLIGHT),
            Put: asyncio.Semaphore(_PUTS_IN_FLIGHT),
        }
        self._thread = threading.Thread(target=self._run, name="ecshare-io", daemon=True)
        self._thread.start()
        self._carrier = threading.Thread(target=self._carry, name="ecshare-inbox", daemon=True)
        self._carrier.start()

    def probe(self, *, write: bool) -> None:
        """Block until the store has answered, at start-up; `write`: it must take an object too.

        Raises:
            ConfigError: it did not, within `io_timeout_s`; names the option and the cause.
        """
        self._block_on(probe(self._store, write=write))

    def start_up(
        self, kind: Kind, namespace: str, facts: Mapping[str, Any], *, write: bool
    ) -> None:
        """Do what `probe` does; a writer also leaves `facts` as the manifest of its namespace.

        Raises:
            ConfigError: as `probe`.
        """
        self.probe(write=write)
        if write:
            self._block_on(write_manifest(self._store, kind, namespace, facts))

    def _block_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the I/O thread and wait for it; only while the engine starts."""

        async def bounded() -> None:
            async with asyncio.timeout(self._config.io_timeout_s):
                await work

        try:
            asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()
        except TimeoutError:
            reason = f"no answer within {self._config.io_timeout_s:g} s"
        except StoreError as exc:
            reason = str(exc)
        else:
            return
        raise ConfigError(
            f"{self._path}.url: {masked_url(self._config.url)!r} cannot be used: {reason}. "
            f"Check the url, {self._path}.storage_options and that the store is up."
        )

    def submit(self, job: Job) -> None:
        """Queue `job`; never blocks, never raises. Its Done comes out of `poll` or `drain`."""
        self.in_flight += 1
        started_s = time.monotonic()
        if self._is_closed:  # the engine process is on its way out
            self._finish(job, Outcome.REJECTED, started_s)
        else:
            self._inbox.put((job, started_s))

    def poll(self) -> list[Done]:
        """Return what has ended since the last call; never blocks."""
        ended: list[Done] = []
        while not self._done.empty():
            ended.append(self._done.get())
        self.in_flight -= len(ended)
        return ended

    def drain(self, timeout_s: float) -> list[Done]:
        """Block until every job has ended, or `timeout_s` is over; return the ended ones."""
        deadline_s = time.monotonic() + timeout_s
        ended = self.poll()
        while self.in_flight:
            try:
                done = self._done.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            self.in_flight -= 1
            ended.append(done)
        return ended

    def close(self, timeout_s: float = 5.0) -> None:
        """Give what is in flight `timeout_s` to end, then stop the thread; once.

        What has not ended by then is dropped; an object is whole in the store or not there.
        """
        if self._is_closed:
            return
        for done in self.drain(timeout_s):
            if isinstance(done.value, StoredObject):
                done.value.release()
        self._is_closed = True
        self._inbox.put(None)
        self._carrier.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        self._copies.shutdown(wait=False, cancel_futures=True)

    # --- carrier thread ---

    def _carry(self) -> None:
        """Wake the loop for each job, until `close`.

        Waking it is a system call, for which Python lets go of the interpreter's lock; on return
        it waits for whoever took the lock meanwhile, up to milliseconds. `Queue.put` does not let
        go, so the thread that submits goes on at once (p99 of a submit: 50 us instead of 500).
        """
        while (entry := self._inbox.get()) is not None:
            self._loop.call_soon_threadsafe(self._start, *entry)

    # --- I/O thread ---

    def _run(self) -> None:
        """Serve jobs until `close` stops the loop; then cancel what is left and close the store."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        with suppress(StoreError):
            self._loop.run_until_complete(self._store.close())
        self._loop.close()

    def _start(self, job: Job, started_s: float) -> None:
        task = self._loop.create_task(self._attend(job, started_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, job: Job, started_s: float) -> None:
        """Do `job`; whatever happens, exactly one Done comes of it."""
        outcome, value = Outcome.UNAVAILABLE, None
        try:
            async with self._limits[type(job)]:
                value = await self._do(job, started_s)
                outcome = Outcome.OK
        except ObjectMissing:
            outcome = Outcome.MISSING
        except ObjectCorrupt as exc:
            outcome = Outcome.CORRUPT
            logger.warning("store: a damaged object was removed and counts as missing: %s", exc)
        except (StoreError, TimeoutError) as exc:
            logger.debug("store: %s failed: %s", type(job).__name__, exc)
        except asyncio.CancelledError:
            outcome = Outcome.REJECTED
        except Exception:  # noqa: BLE001 — a bug here must cost one job, not the thread that serves all
            logger.exception("store: %s failed unexpectedly", type(job).__name__)
        self._finish(job, outcome, started_s, value)

    def _finish(
        self,
        job: Job,
        outcome: Outcome,
        started_s: float,
        value: StoredObject | tuple[bool, ...] | None = None,
    ) -> None:
        if isinstance(job, Put):
            # A store call that timed out may still read the slab: it must not be filled again.
            job.slab.release(reuse=outcome is Outcome.OK)
        self._done.put(Done(job, outcome, time.monotonic() - started_s, value))

    async def _do(self, job: Job, started_s: float) -> StoredObject | tuple[bool, ...] | None:
        match job:
            case Put():
                await self._put(job)
                return None
            case Fetch():
                return await self._fetch(job, started_s + job.timeout_s)
            case Lookup():
                return await self._look_up(job, started_s + job.timeout_s)

    async def _put(self, job: Put) -> None:
        # The time-out starts here, not at submit: a queue of saves must not expire unsent.
        deadline_s = time.monotonic() + self._config.io_timeout_s
        entry = await self._loop.run_in_executor(self._copies, self._prepare, job)
        with entry or nullcontext():
            file = entry.path if entry else None
            await self._ask(deadline_s, lambda: self._store.put(job.key, job.slab.body, file))

    def _prepare(self, job: Put) -> Entry | None:
        """Seal the slab and publish it to this host. Copy thread."""
        job.slab.wait()
        seal(job.slab.body, job.slab.facts, job.key, self._integrity)
        return self.host.publish(job.key, job.slab.body)

    async def _fetch(self, job: Fetch, deadline_s: float) -> StoredObject:
        here = open_object(self.host, job.key)
        if here is not None:
            return here
        incoming = self.host.receive(job.key, _LARGEST_BYTES)
        try:
            await self._ask(deadline_s, lambda: self._store.get(job.key, incoming))
            return await self._loop.run_in_executor(self._copies, self._admit, job.key, incoming)
        except ObjectCorrupt:
            # Puts are create-only: only removal lets the next save replace it. A failure to remove
            # (read-only credentials, say) leaves a miss, which it is already.
            with suppress(StoreError, TimeoutError):
                await self._ask(deadline_s, lambda: self._store.delete([job.key]))
            raise
        finally:
            incoming.discard()

    def _admit(self, key: str, incoming: Incoming) -> StoredObject:
        """Verify what came and publish it to this host. Copy thread."""
        sealed = unseal(incoming.body, key, integrity=self._integrity)
        entry = incoming.publish()
        if entry is None:
            return StoredObject(key, sealed.facts, sealed.payload, None)
        payload = unseal(entry.body, key, verify=False).payload
        return StoredObject(key, sealed.facts, payload, entry)

    async def _look_up(self, job: Lookup, deadline_s: float) -> tuple[bool, ...]:
        found = dict.fromkeys(job.keys, False)
        if not job.store_only:
            for key in found:
                entry = self.host.open(key)
                if entry is not None:
                    found[key] = True
                    entry.close()
        ask = [key for key, is_here in found.items() if not is_here]
        if ask:
            there = await self._ask(deadline_s, lambda: self._store.exists(ask))
            found.update(zip(ask, there, strict=True))
        return tuple(found[key] for key in job.keys)

    async def _ask(self, deadline_s: float, call: Callable[[], Awaitable[T]]) -> T:
        """Await one store operation by `deadline_s`, unless the store counts as gone.

        Raises:
            StoreError, TimeoutError: as the store does; the store's health has heard of it.
        """
        if time.monotonic() >= deadline_s:
            raise TimeoutError("the time was over before the store could be asked")
        if not self._health.allows():
            raise StoreUnavailable("the store failed repeatedly and is left alone for a while")
        try:
            async with asyncio.timeout_at(deadline_s):
                answer = await call()
        except (ObjectMissing, ObjectCorrupt):
            self._health.succeeded()
            raise
        except (StoreError, TimeoutError):
            self._health.failed()
            raise
        self._health.succeeded()
        return answer
