# SPDX-License-Identifier: Apache-2.0
"""Moves objects between this host and the store, on one thread of its own.

Jobs go in, outcomes come out. Below this file there are exceptions, above it there are values: a
vLLM hook submits and polls, and never waits or sees an I/O error.

A Put seals its slab, publishes the object to the host cache, then writes it to the store. A Fetch
asks the host cache, then the store; what comes from the store is verified and published, so that
every process of this host reads the same verified bytes. A Backfill stores what the host cache has
and the store has lost. A Lookup asks the host cache for each key and the store for the rest, in one
batch; a MultiLookup does so in several rounds. A Run is work of another kind that a hook must not
do.
"""

import asyncio
import logging
import queue
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import Struct

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, ObjectCorrupt, ObjectMissing, StoreBusy, StoreError
from ecshare.store.format import seal
from ecshare.store.hostcache.cache import Entry, open_host_cache
from ecshare.store.hostcache.single_flight import Claim
from ecshare.store.integrity import open_integrity
from ecshare.store.keys import Key, Kind
from ecshare.store.objects import Buffer, ObjectStore, probe
from ecshare.store.open import open_store
from ecshare.store.secrets import masked_url
from ecshare.store.temp_files import sweep
from ecshare.transfer.affinity import start_unbound
from ecshare.transfer.fetch import Fetcher
from ecshare.transfer.jobs import (
    Backfill,
    Done,
    Fetch,
    Handle,
    Job,
    Lookup,
    Moved,
    MultiLookup,
    Outcome,
    Put,
    Run,
    StoredObject,
    Tier,
)
from ecshare.transfer.namespaces import NamespaceWatch
from ecshare.transfer.priority import Priority
from ecshare.transfer.renewal import Record, renew, write_record
from ecshare.transfer.stats import Stats
from ecshare.transfer.store_client import StoreClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Sealing, checking and publishing are copies at memory speed; two threads keep the loop free. Loads
# have two of their own: none waits for saves.
_COPY_THREADS = 2
# How often a store that cannot serve is asked again at start-up.
_FIRST_PAUSE_S = 0.1
_PAUSE_GROWTH = 2.0
_LONGEST_PAUSE_S = 2.0


class _Message(Struct, frozen=True):
    """From the thread that submits to the I/O thread."""

    begun: tuple[Handle[Any], ...] = ()
    cancelled: tuple[Handle[Any], ...] = ()


class TransferEngine:
    """One I/O thread with one event loop; jobs in, outcomes out.

    Ownership: the thread that submits also polls, drains and closes; it owns `in_flight` and
    `stats`, which counts what was moved. The store, its breakers and all tasks belong to the I/O
    thread. They meet in two queues, `_inbox` and `_done`; a thread that does nothing else carries
    jobs from the first one to the loop.
    """

    def __init__(self, config: StoreConfig, path: str, *, store: ObjectStore | None = None) -> None:
        """Open the store of `config`, unless `store` is given, and start the thread.

        `path`: where the user wrote the options, for messages. The engine closes the store.

        Raises:
            ConfigError: an option is wrong; the message names it and the fix.
        """
        self._config = config
        self._path = path
        self._store = store or open_store(config, path)
        self.host = open_host_cache(config)
        self.in_flight = 0
        self._is_closed = False
        self.stats = Stats()
        self._integrity = open_integrity(config.integrity_key, path)
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Handle[Any], Done[Any]]] = queue.SimpleQueue()
        self._copies = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="ecshare-copy")
        self._loads = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="ecshare-load")
        self._client = StoreClient(self._store, config.io_timeout_s)
        self._fetcher = Fetcher(self.host, self._client, self._loads, self._integrity)
        self._loop = asyncio.new_event_loop()
        self._serving: set[Handle[Any]] = set()
        self._watch: NamespaceWatch | None = None  # of an engine that only reads
        self._comparing: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        # Those for copies, loads and blocking calls are started by this one.
        self._thread = start_unbound("ecshare-io", self._run)
        self._carrier = start_unbound("ecshare-inbox", self._carry)

    def probe(self, *, write: bool) -> bool:
        """Block until the store has answered, at start-up; `write`: it must take an object too.

        A store that cannot serve just now is asked again, and after `io_timeout_s` left to itself:
        False, and a warning. An engine must not depend on a cache that costs it hits only.

        Raises:
            ConfigError: it can never be used like this; names the option and the cause.
        """
        option = f"{self._path}.url: {masked_url(self._config.url)!r}"
        try:
            reason = self._block_on(self._asked_until_it_serves(write=write))
        except StoreError as exc:
            # Without its causes: a client's own words may quote a signed url.
            raise ConfigError(
                f"{option} cannot be used: {exc}. "
                f"Check the url, {self._path}.storage_options and that the store is up."
            ) from None
        if reason:
            logger.warning(
                "%s does not serve now: %s. This engine starts without it, and uses it as soon as "
                "it does; until then nothing is shared.",
                option,
                reason,
            )
        return not reason

    def start_up(
        self,
        kind: Kind,
        namespace: str,
        facts: Mapping[str, Any],
        *,
        write: bool,
        mark: Key | None = None,
    ) -> None:
        """Do what `probe` does, and tell the user how `facts` differ from those of other engines.

        A writer also leaves them as the manifest of its namespace, and an object under the key
        `mark`, if there is one: that it is there says all. It writes both anew every few hours.

        Raises:
            ConfigError: as `probe`.
        """
        for warning in self._config.warnings(self._path):
            logger.warning("%s", warning)
        serves = self.probe(write=write)
        watch = NamespaceWatch(self._client, kind, namespace, facts)
        if serves:
            # Not within a time-out of ours: it has its own, and says nothing where it fails.
            self._block_on(watch.compare())
        if not write:
            self._watch = watch
            return
        self._block_on(self._keep(Record(kind, namespace, facts, mark), at_once=serves))
        if self._config.folder:
            # It may take long and nobody waits for it; what is left to do when the process ends
            # is done another day.
            start_unbound("ecshare-sweep", sweep, self._config.folder)

    async def _keep(self, record: Record, *, at_once: bool) -> None:
        """Write `record`, `at_once` or in some minutes, and anew from time to time."""
        timeout_s = self._config.io_timeout_s
        is_written = at_once and await write_record(self._store, record, timeout_s)
        renewing = renew(self._store, record, timeout_s, is_written=is_written)
        self._renewing = self._loop.create_task(renewing)

    async def _asked_until_it_serves(self, *, write: bool) -> str:
        """Return why it did not within `io_timeout_s`; "": it did. Raises StoreError: it cannot."""
        reason = f"no answer within {self._config.io_timeout_s:g} s"
        pause_s = _FIRST_PAUSE_S
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.io_timeout_s):
                while True:
                    try:
                        await probe(self._store, write=write)
                    except StoreBusy as exc:
                        reason = str(exc)
                    else:
                        return ""
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1))
                    pause_s = min(_PAUSE_GROWTH * pause_s, _LONGEST_PAUSE_S)
        return reason

    def _block_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the I/O thread and wait for it; only while the engine starts."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def integrity(self) -> str:
        """The fingerprint of the key that objects are authenticated with; "" without a key."""
        return self._integrity.fingerprint if self._integrity else ""

    @property
    def open_breakers(self) -> frozenset[str]:
        """Which of "read" and "write" failed repeatedly and is left alone. Any thread."""
        damaged = {"read"} if self._fetcher.is_open else set()
        return self._client.open_breakers | damaged

    def note_breakers(self, half: str) -> None:
        """Say in `stats` which breakers are open, for the `half` that this engine belongs to."""
        opened = self.open_breakers
        for direction in ("read", "write"):
            self.stats.set(f"now/breaker_open/{half}/{direction}", float(direction in opened))

    def submit(self, *jobs: Handle[Any] | Job[Any]) -> None:
        """Queue jobs; never blocks, never raises. What follows them is called by `poll`, `drain`.

        One call costs one wake-up of the I/O thread, however many jobs it brings.
        """
        handles = tuple(job if isinstance(job, Handle) else Handle(job) for job in jobs)
        self.in_flight += len(handles)
        for handle in handles:
            handle.started_s = time.monotonic()
        if not self._is_closed:
            self._inbox.put(_Message(handles))
            return
        for handle in handles:  # the engine process is on its way out
            self._finish(handle, Outcome.REJECTED)

    def cancel(self, *handles: Handle[Any]) -> None:
        """Let go of what was submitted; never blocks, never raises.

        Each job still has its one Done: CANCELLED, unless it had ended already.
        """
        if not self._is_closed:
            self._inbox.put(_Message(cancelled=handles))

    def poll(self) -> list[Done[Any]]:
        """Go on with what follows each job that has ended, and return these; never blocks.

        The value of a Done belongs to what follows the job; to the caller if nothing does.
        """
        ended: list[Done[Any]] = []
        while not self._done.empty():
            ended.append(self._end(*self._done.get()))
        return ended

    def drain(self, timeout_s: float, *, until: Handle[Any] | None = None) -> list[Done[Any]]:
        """As `poll`, but block until every job has ended, or `until`, or `timeout_s` are over."""
        deadline_s = time.monotonic() + timeout_s
        ended: list[Done[Any]] = []
        while self.in_flight:
            try:
                handle, done = self._done.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                break
            ended.append(self._end(handle, done))
            if handle is until:
                break
        return ended

    def _end(self, handle: Handle[Any], done: Done[Any]) -> Done[Any]:
        self.in_flight -= 1
        for moved in done.moved:
            where = f"{moved.direction}/{moved.tier.value}"
            self.stats.add(f"transfers/{where}")
            self.stats.add(f"transfer_bytes/{where}", moved.num_bytes)
            self.stats.add(f"transfer_seconds/{where}", moved.seconds)
        handle.ended(done)
        return done

    def close(self, timeout_s: float = 5.0) -> None:
        """Give what is in flight `timeout_s` to end, then stop the thread; once.

        What has not ended by then is dropped; an object is whole in the store or not there.
        """
        if self._is_closed:
            return
        self._let_end(timeout_s)
        self._is_closed = True
        self._inbox.put(None)
        self._carrier.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        for threads in (self._copies, self._loads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _let_end(self, timeout_s: float) -> None:
        """Wait for what is in flight. Nothing follows it any more."""
        deadline_s = time.monotonic() + timeout_s
        with suppress(queue.Empty):
            while self.in_flight:
                handle, done = self._done.get(timeout=max(0.0, deadline_s - time.monotonic()))
                handle.then = None
                self._end(handle, done)
                if isinstance(done.value, StoredObject):
                    done.value.release()

    # --- carrier thread ---

    def _carry(self) -> None:
        """Wake the loop for each message, until `close`.

        Waking it is a system call, for which Python lets go of the interpreter's lock; on return
        it waits for whoever took the lock meanwhile, up to milliseconds. `Queue.put` does not let
        go, so the thread that submits goes on at once (p99 of a submit: 50 us instead of 500).
        """
        while (message := self._inbox.get()) is not None:
            self._loop.call_soon_threadsafe(self._take, message)

    # --- I/O thread ---

    def _run(self) -> None:
        """Serve jobs until `close` stops the loop; then cancel what is left and close the store."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        background = (self._comparing, self._renewing)
        serving = [handle.task for handle in self._serving]
        tasks = [task for task in (*serving, *background) if task]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        with suppress(StoreError):
            self._loop.run_until_complete(self._store.close())
        self._loop.close()

    def _take(self, message: "_Message") -> None:
        for handle in message.begun:
            handle.task = self._loop.create_task(self._attend(handle))
            self._serving.add(handle)
        for handle in message.cancelled:
            if handle in self._serving and handle.task is not None:
                # Not at once: a task that has not begun would end without its Done.
                self._loop.call_soon(handle.task.cancel)

    async def _attend(self, handle: Handle[Any]) -> None:
        """Do a job; whatever happens, exactly one Done comes of it."""
        job, outcome, value = handle.job, Outcome.UNAVAILABLE, None
        moved: tuple[Moved, ...] = ()
        try:
            value, moved = await self._do(job, handle.started_s)
            outcome = Outcome.OK
        except ObjectMissing:
            outcome = Outcome.MISSING
        except ObjectCorrupt as exc:
            outcome = Outcome.CORRUPT
            logger.warning("store: a damaged object counts as missing: %s", exc)
        except (StoreError, TimeoutError) as exc:
            logger.debug("store: %s failed: %s", type(job).__name__, exc)
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
        except Exception:  # noqa: BLE001 — a bug here must cost one job, not the thread that serves all
            logger.exception("store: %s failed unexpectedly", type(job).__name__)
        finally:
            # After a cancellation that came too late to be noticed, too.
            self._serving.discard(handle)
        self._finish(handle, outcome, value, moved)
        if outcome in (Outcome.OK, Outcome.MISSING):
            self._note(job, outcome, value)

    def _note(self, job: Job[Any], outcome: Outcome, value: Any) -> None:
        """Compare namespaces once more where an engine that only reads finds nothing."""
        is_hit = outcome is Outcome.OK
        if not isinstance(job, Fetch):
            is_hit = any(value) if isinstance(value, tuple) else bool(value)
        # What only the store is asked for is of no use to this engine itself.
        is_read = isinstance(job, Fetch | MultiLookup) or (
            isinstance(job, Lookup) and not job.store_only
        )
        if is_read and self._watch and self._watch.is_due(is_hit=is_hit):
            self._comparing = self._loop.create_task(self._watch.compare())

    def _finish(
        self,
        handle: Handle[Any],
        outcome: Outcome,
        value: Any = None,
        moved: tuple[Moved, ...] = (),
    ) -> None:
        job = handle.job
        if isinstance(job, Put):
            # A store call that timed out may still read the slab: it must not be filled again.
            job.slab.release(reuse=outcome is Outcome.OK)
        seconds = time.monotonic() - handle.started_s
        self._done.put((handle, Done(job, outcome, seconds, value, moved)))

    async def _do(self, job: Job[Any], started_s: float) -> tuple[Any, tuple[Moved, ...]]:
        match job:
            case Put():
                return None, await self._put(job)
            case Fetch():
                return await self._fetcher.serve(job, started_s + job.timeout_s)
            case Backfill():
                return await self._backfill(job)
            case Lookup():
                deadline_s = started_s + job.timeout_s
                where = await self._look_up(job.keys, deadline_s, store_only=job.store_only)
                return tuple(tier is not None for tier in where), ()
            case MultiLookup():
                return await self._inquire(job, started_s + job.timeout_s), ()
            case Run():
                return await self._loop.run_in_executor(self._copies, job.work), ()
        raise TypeError(f"no such job: {type(job).__name__}")

    async def _put(self, job: Put) -> tuple[Moved, ...]:
        # No deadline: a queue of saves must not expire unsent.
        body = job.slab.body
        entry, published = await self._loop.run_in_executor(self._copies, self._prepare, job, body)
        claim = self._claim_storing(job.key)
        try:
            stored = await self._write(job.key, body)
        except Exception:
            # What was there before may well be in the store.
            if entry is not None and entry.is_new and not job.keeps_unstored:
                await self._loop.run_in_executor(self._copies, self.host.discard, job.key)
            raise
        finally:
            if claim is not None:
                claim.release()
            if entry is not None:
                entry.close()
        return published, stored

    def _claim_storing(self, key: Key) -> Claim | None:
        """Tell the processes of this host that the object is on its way to the store."""
        return self.host.claim(Key(f"{key}.storing"))

    async def _write(self, key: Key, body: Buffer) -> Moved:
        started_s = time.monotonic()
        replace = self._fetcher.must_replace(key)
        await self._client.ask(
            lambda store: store.put(key, body, replace=replace),
            Priority.SAVE,
            len(body),
        )
        self._fetcher.is_well(key)
        return Moved("write", Tier.STORE, len(body), time.monotonic() - started_s)

    async def _backfill(self, job: Backfill) -> tuple[bool, tuple[Moved, ...]]:
        entry = self.host.open(job.key)
        if entry is None:
            raise ObjectMissing(job.key)
        with entry:
            claim = self._claim_storing(job.key)
            if claim is None:
                return False, ()  # somebody here is storing it already
            with claim:
                return await self._store_again(job.key, entry)

    async def _store_again(self, key: Key, entry: Entry) -> tuple[bool, tuple[Moved, ...]]:
        started_s, num_bytes = time.monotonic(), entry.num_bytes
        replace = self._fetcher.must_replace(key)

        async def put_if_lost(store: ObjectStore) -> bool:
            (is_stored,) = await store.exists([key])
            if is_stored and not replace:
                return False
            await store.put(key, entry.body, replace=replace)
            return True

        # One operation: that the store answers the question does not mean that saves work.
        if not await self._client.ask(put_if_lost, Priority.SAVE, num_bytes):
            return False, ()
        self._fetcher.is_well(key)
        return True, (Moved("write", Tier.STORE, num_bytes, time.monotonic() - started_s),)

    def _prepare(self, job: Put, body: memoryview) -> tuple[Entry | None, Moved]:
        """Seal the slab, whose memory is `body`, and publish it to this host. Copy thread."""
        job.slab.wait()
        started_s = time.monotonic()
        seal(body, job.slab.facts, job.key, self._integrity)
        entry = self.host.publish(job.key, body)
        seconds = time.monotonic() - started_s
        num_bytes = len(body) if entry else 0
        return entry, Moved("write", Tier.HOST, num_bytes, seconds)

    async def _inquire(self, job: MultiLookup[Any], deadline_s: float) -> Any:
        questions = job.questions()
        answers: Any = None  # to send None is to begin
        while True:
            try:
                keys = questions.send(answers)
            except StopIteration as end:
                return end.value
            answers = await self._look_up(keys, deadline_s)

    async def _look_up(
        self, wanted: Sequence[Key], deadline_s: float, *, store_only: bool = False
    ) -> tuple[Tier | None, ...]:
        found: dict[Key, Tier | None] = dict.fromkeys(wanted)
        if not store_only:
            for key in found:
                entry = self.host.open(key)
                if entry is not None:
                    found[key] = Tier.HOST
                    entry.close()
        keys = [key for key, tier in found.items() if tier is None]
        if keys:
            there = await self._client.ask(
                lambda store: store.exists(keys), Priority.LOOK_UP, deadline_s=deadline_s
            )
            for key, is_there in zip(keys, there, strict=True):
                is_sound = is_there and not self._fetcher.is_known_bad(key)
                found[key] = Tier.STORE if is_sound else None
        return tuple(found[key] for key in wanted)
