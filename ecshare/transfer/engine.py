# SPDX-License-Identifier: Apache-2.0
"""Moves objects between this host and the store, on one thread of its own.

Code below this file raises exceptions, code above it gets outcomes: a vLLM hook submits jobs and
polls. It never sees an I/O error, and never waits for I/O while an engine has something to compute.
TransferEngine is the side of the thread that submits, JobService the side of the I/O thread; they
share two queues.

A Put seals its slab, publishes the object to the host cache, then writes it to the store; a
Backfill stores what the host cache has and the store has lost (save.py). A GiveUp leaves a note for
waiting readers that an object will not be stored (absence_notes.py). A Fetch asks the host cache,
then the store; an object from the store is verified and published, so that every process of this
host reads the same verified bytes (fetch.py). A Lookup asks the host cache for each key, and the
store for the rest in one batch; a MultiLookup does so in several rounds (lookup.py). A Run is other
work that a hook must not do.
"""

import asyncio
import atexit
import logging
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt, ObjectGivenUp, ObjectMissing, StoreError
from ecshare.store.hostcache.cache import HostCache, open_host_cache
from ecshare.store.integrity import Integrity, open_integrity
from ecshare.store.keys import Key
from ecshare.store.loops import new_loop
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.store.threads import end_all
from ecshare.transfer.announced.absence_notes import AbsenceNotes
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.closing import ClosingTime
from ecshare.transfer.fetch import Fetcher
from ecshare.transfer.inline_reads import InlineReads
from ecshare.transfer.jobs import (
    Backfill,
    Done,
    Fetch,
    GiveUp,
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
from ecshare.transfer.lookup import Locator
from ecshare.transfer.loop_thread import LoopThread
from ecshare.transfer.packing import Packing
from ecshare.transfer.pools import Pools
from ecshare.transfer.save import Saver
from ecshare.transfer.stats import Stats
from ecshare.transfer.upkeep.epochs import Epochs
from ecshare.transfer.upkeep.renewal import Record
from ecshare.transfer.upkeep.start_up import StartUp
from ecshare.upkeep.record import UseRecord

logger = logging.getLogger(__name__)

# vLLM ends a worker that has not closed after 5 s.
_CLOSE_S = 4.0
# Of it, for a note of what was used last.
_NOTE_S = 2.0
_closing = ClosingTime()
# The longest that a new request waits behind an engine that has nothing to compute.
_IDLE_WAIT_S = 0.003
# A process that exits without `close` waits at most this long for each I/O thread to end.
_EXIT_S = 1.0


class _Message(Struct, frozen=True):
    """Jobs to begin and to cancel, from the thread that submits to the I/O thread."""

    begun: tuple[Handle[Any], ...] = ()
    cancelled: tuple[Handle[Any], ...] = ()


class TransferEngine:
    """Takes jobs, and returns how they ended.

    Ownership: one thread submits, polls, drains and closes. All fields belong to it; `stats` has
    the counts of transfers and that thread's own counts.
    """

    def __init__(
        self,
        config: StoreConfig,
        path: str,
        *,
        store: ObjectStore | None = None,
        packing: Packing | None = None,
        on_thread_start: Callable[[], object] | None = None,
    ) -> None:
        """Open the store of `config`, unless `store` is given, and start the thread.

        `path`: where the user wrote the options, for messages. The engine closes the store.
        `packing`: how objects are packed in the store; None: not at all.
        `on_thread_start`: called first in each thread that copies slabs, runs a job's `use` or
        releases a slab; see `device_selector`.

        Raises:
            ConfigError: an option is wrong; the message names it and the fix.
        """
        store = store or open_store(config, path)
        self.host = open_host_cache(config)
        integrity = open_integrity(config, path)
        self.integrity = integrity.name if integrity else ""
        """The name of the key that authenticates objects; "" without a key."""
        self.in_flight = 0
        self.stats = Stats()
        self.uses = UseRecord()
        """The objects that were used. The store hears of them by and by, after `start_up`."""
        self._is_closed = False
        self._inline = InlineReads(self.host)
        self._pools = Pools(on_thread_start)
        # No request waits longer than `wait_s` for an answer: a slower store counts as down.
        answer_timeout_s = min(config.wait_s, config.io_timeout_s)
        client = StoreClient(store, config.io_timeout_s, answer_timeout_s)
        loop = new_loop()
        self._start = StartUp(config, path, store, client, loop, integrity)
        self._service = JobService(self.host, client, self._start, self._pools, integrity, packing)
        self._done = self._service.done
        # The I/O thread starts those of the pools and of the store, which inherit its cores.
        self._io = LoopThread[_Message](
            loop, self._pools.begin_thread, self._service.take, self._service.end
        )
        # A thread that runs while Python ends may crash it.
        atexit.register(self.stop)

    def probe(self, *, write: bool) -> bool:
        """Block until the store has answered, at start-up. `write`: it must also accept an object.

        A store that cannot serve now is retried for `io_timeout_s`. After that, return False and
        log a warning: an engine must be able to start without its cache.

        Raises:
            ConfigError: the store cannot be used with these options; names the option and the
                cause.
        """
        return self._start.probe(write=write)

    def start_up(self, record: Record, *, write: bool, live: bool = False) -> None:
        """Do what `probe` does, and log how the facts of `record` differ from those of others.

        A writer also stores the record, and writes it again every few hours. `live`: follow the
        epochs of the model from now on, see `epochs`.

        Raises:
            ConfigError: as `probe`.
        """
        self._start.begin(record, write=write, live=live)
        self._start.note(self.uses, record.kind, record.namespace)
        self._start.fill(self.host, record, lambda: self.in_flight > 0)

    @property
    def epochs(self) -> Epochs:
        """Return what says whether this engine may share now. It belongs to the submitting
        thread."""
        return self._start.epochs

    def move(self, record: Record, *, write: bool) -> None:
        """Use the namespace of `record` in the store from now on. Never blocks, never raises.

        A writer stores the record and renews it, instead of the one before. Jobs name keys, so
        those under way end as they were begun.
        """
        if not self._is_closed:
            self._start.move(self.uses, record, write=write)

    @property
    def open_breakers(self) -> frozenset[str]:
        """Return the directions, "read" and "write", whose breaker is open. Any thread."""
        return self._service.open_breakers

    def take_counts(self, half: str) -> dict[str, float]:
        """Return the counts of `stats` since the last call, with the state of the breakers.

        `half`: the half to which this engine belongs, "scheduler" or "worker".
        """
        opened = self.open_breakers
        for direction in ("read", "write"):
            self.stats.set(f"now/breaker_open/{half}/{direction}", float(direction in opened))
        return self.stats.take()

    def submit(self, *jobs: Handle[Any] | Job[Any]) -> None:
        """Queue jobs. Never blocks, never raises. `poll` and `drain` call the continuations.

        One call costs one wake-up of the I/O thread for any number of jobs.
        """
        handles = tuple(job if isinstance(job, Handle) else Handle(job) for job in jobs)
        self.in_flight += len(handles)
        for handle in handles:
            handle.started_s = time.monotonic()
        if not self._is_closed:
            self._io.inbox.put(_Message(handles))
            return
        for handle in handles:  # the engine process is shutting down
            self._done.put(_end_of(handle, Outcome.REJECTED))

    def fetch_inline(self, handle: Handle[StoredObject]) -> bool:
        """Do a Fetch on this thread if the host cache is in memory and has its object.

        Return whether it did: the continuation was called. If not, nothing has changed: submit it.
        Neither waits nor wakes a thread. InlineReads limits the number until `begin_step`.
        """
        job = handle.job
        if not isinstance(job, Fetch) or job.use is not None or job.in_store:
            return False
        handle.started_s = time.monotonic()
        stored = self._inline.open(job)
        if stored is None:
            return False
        seconds = time.monotonic() - handle.started_s
        moved = Moved("read", Tier.HOST, len(stored.payload), seconds)
        self._deliver(handle, Done(job, Outcome.OK, seconds, stored, (moved,)))
        return True

    def has_in_memory(self, keys: Iterable[Key]) -> bool:
        """Return whether this host has all these objects in memory; False if that is not known.

        Neither waits nor wakes a thread. InlineReads limits the number until `begin_step`.
        """
        return self._inline.has_all(keys)

    def begin_step(self) -> None:
        """Allow the inline reads and checks of another step."""
        self._inline.begin_step()

    def cancel(self, *handles: Handle[Any]) -> None:
        """Cancel jobs that were submitted. Never blocks, never raises.

        Each job still gets one Done: CANCELLED, unless it has ended already.
        """
        if not self._is_closed:
            self._io.inbox.put(_Message(cancelled=handles))

    def poll(self) -> list[Done[Any]]:
        """Call the continuations of jobs that have ended, and return their Dones. Never blocks.

        The value of a Done belongs to the continuation, or to the caller if there is none.
        """
        ended: list[Done[Any]] = []
        while not self._done.empty():
            ended.append(self._end(*self._done.get()))
        return ended

    def wait_idle(self, is_enough: Callable[[], bool] = lambda: True) -> None:
        """Block until a job ends, for at most 3 ms, and call its continuation.

        Go on with the next job, within these 3 ms, unless `is_enough` after the continuation.

        For a step in which the engine computes nothing, because its requests wait for jobs or for
        their next attempt. vLLM starts the next such step at once. Hundreds of them a second would
        keep a core busy in each of its processes, and would not see a job's end any sooner.
        """
        deadline_s = time.monotonic() + _IDLE_WAIT_S
        with suppress(queue.Empty):
            self._end(*self._done.get(timeout=_IDLE_WAIT_S))
            while not is_enough():
                self._end(*self._done.get(timeout=max(0.0, deadline_s - time.monotonic())))

    def drain(self, timeout_s: float, *, until: Handle[Any] | None = None) -> list[Done[Any]]:
        """Poll, but block until all jobs or `until` have ended, for at most `timeout_s`."""
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
        self._deliver(handle, done)
        return done

    def _deliver(self, handle: Handle[Any], done: Done[Any]) -> None:
        for moved in done.moved:
            where = f"{moved.direction}/{moved.tier.value}"
            self.stats.add(f"transfer_bytes/{where}", moved.num_bytes)
            self.stats.observe(f"transfer_seconds/{where}", moved.seconds)
        handle.ended(done)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Give jobs in flight `timeout_s` to end, then stop. A second call does nothing.

        Engines of this process that are closed one right after the other share that time. Jobs that
        have not ended are dropped. An object in the store is always whole.
        """
        if self._is_closed or not self._io.is_ours:
            return
        with _closing.until(timeout_s) as deadline_s:
            self._wait_for_jobs(deadline_s)
            if not self.open_breakers:  # else it would wait in vain
                self._start.note_last(min(_NOTE_S, deadline_s - time.monotonic()))
            self._stop(timeout_s)

    def stop(self) -> None:
        """Drop all jobs and stop the I/O thread. A second call does nothing."""
        self._stop(_EXIT_S)

    def _stop(self, timeout_s: float) -> None:
        if self._is_closed or not self._io.is_ours:
            return
        self._is_closed = True
        self._io.stop(timeout_s)
        self._start.close()
        self._pools.close()
        atexit.unregister(self.stop)

    def _wait_for_jobs(self, deadline_s: float) -> None:
        """Wait for the jobs in flight, without calling their continuations."""
        with suppress(queue.Empty):
            while self.in_flight:
                handle, done = self._done.get(timeout=max(0.0, deadline_s - time.monotonic()))
                handle.then = None
                self._end(handle, done)
                if isinstance(done.value, StoredObject):
                    done.value.release()


class JobService:
    """Does jobs, and puts how each ended into `done`.

    Ownership: the I/O thread, from the first `take` to `end`. Any thread may read `open_breakers`.
    """

    def __init__(  # noqa: PLR0913 — the parts of the engine that it uses
        self,
        host: HostCache,
        client: StoreClient,
        start: StartUp,
        pools: Pools,
        integrity: Integrity | None,
        packing: Packing | None,
    ) -> None:
        """Use what the engine owns, and close `client` in `end`."""
        self.done: queue.SimpleQueue[tuple[Handle[Any], Done[Any]]] = queue.SimpleQueue()
        """Read by the thread that submits."""
        self._client = client
        self._start = start
        self._copies = pools.copies
        self._notes = AbsenceNotes(host, client, integrity)
        self._saver = Saver(host, client, pools.copies, integrity, packing)
        self._fetcher = Fetcher(host, client, pools.loads, integrity, self._notes, packing)
        self._locator = Locator(host, client)
        self._serving: set[Handle[Any]] = set()

    @property
    def open_breakers(self) -> frozenset[str]:
        """See TransferEngine."""
        damaged = {"read"} if self._fetcher.is_open else set()
        return self._client.open_breakers | damaged

    def take(self, message: _Message) -> None:
        """Begin and cancel jobs."""
        loop = asyncio.get_running_loop()
        for handle in message.begun:
            handle.task = loop.create_task(self._run_job(handle))
            self._serving.add(handle)
        for handle in message.cancelled:
            if handle in self._serving and handle.task is not None:
                # Deferred: a task that is cancelled before it begins would end without its Done.
                loop.call_soon(handle.task.cancel)

    async def end(self) -> None:
        """Cancel the jobs that have not ended, and close the store."""
        jobs = [handle.task for handle in self._serving if handle.task]
        await end_all([*jobs, *self._start.tasks])
        with suppress(StoreError):
            await self._client.close()

    async def _run_job(self, handle: Handle[Any]) -> None:
        """Do a job and put exactly one Done, whatever happens."""
        job, outcome, value = handle.job, Outcome.UNAVAILABLE, None
        moved: tuple[Moved, ...] = ()
        try:
            value, moved = await self._do(job, handle.started_s)
            outcome = Outcome.OK
        except ObjectGivenUp:
            outcome = Outcome.GIVEN_UP
        except ObjectMissing:
            outcome = Outcome.MISSING
        except ObjectCorrupt as exc:
            outcome = Outcome.CORRUPT
            logger.warning("store: a damaged object counts as missing: %s", exc)
        except (StoreError, OSError) as exc:  # OSError: too late, or no room on this host
            logger.debug("store: %s failed: %s", type(job).__name__, exc)
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
        except Exception:  # noqa: BLE001 — a bug here must cost one job, not the thread that serves all
            logger.exception("store: %s failed unexpectedly", type(job).__name__)
        finally:
            # Also after a cancellation that arrived when the work had ended.
            self._serving.discard(handle)
        self.done.put(_end_of(handle, outcome, value, moved))
        if self._start.is_watching and outcome in (Outcome.OK, Outcome.MISSING):
            is_hit = job.is_hit(outcome, value)
            if is_hit is not None:
                self._start.compare_again(is_hit=is_hit)
        if isinstance(job, Put) and outcome is Outcome.UNAVAILABLE:
            await self._give_up(handle, job)

    async def _give_up(self, handle: Handle[Any], job: Put) -> None:
        """Leave a note that the object of a failed save will not be stored."""
        self._serving.add(handle)
        try:
            with suppress(StoreError, TimeoutError):
                await self._notes.write(job.key)
        finally:
            self._serving.discard(handle)

    async def _do(self, job: Job[Any], started_s: float) -> tuple[Any, tuple[Moved, ...]]:
        match job:
            case Put():
                return None, await self._saver.put(job)
            case Fetch():
                return await self._fetcher.serve(job, started_s + job.timeout_s)
            case Backfill():
                return await self._saver.backfill(job)
            case GiveUp():
                await self._notes.write(job.key)
                return None, ()
            case Lookup():
                return await self._locator.look_up(job, started_s + job.timeout_s), ()
            case MultiLookup():
                return await self._locator.look_up_in_rounds(job, started_s + job.timeout_s), ()
            case Run():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._copies, job.work), ()
        raise TypeError(f"no such job: {type(job).__name__}")


def _end_of(
    handle: Handle[Any], outcome: Outcome, value: Any = None, moved: tuple[Moved, ...] = ()
) -> tuple[Handle[Any], Done[Any]]:
    """Return how a job ended, and release the slab of a Put."""
    job = handle.job
    if isinstance(job, Put):
        # A store call that timed out may still read the slab: it must not be filled again.
        job.slab.release(reuse=outcome is Outcome.OK)
    seconds = time.monotonic() - handle.started_s
    return handle, Done(job, outcome, seconds, value, moved)
