# SPDX-License-Identifier: Apache-2.0
"""Moves objects between this host and the store, on one thread of its own.

Jobs go in, outcomes come out. Code below this file raises exceptions, code above it gets values: a
vLLM hook submits and polls. It never sees an I/O error, and never waits for I/O while an engine
has something to compute.

A Put seals its slab, publishes the object to the host cache, then writes it to the store; a
Backfill stores what the host cache has and the store has lost (save.py). A GiveUp tells those who
wait for an object that it will not be stored (gaps.py). A Fetch asks the host
cache, then the store; what comes from the store is verified and published, so that every process of
this host reads the same verified bytes (fetch.py). A Lookup asks the host cache for each key and
the store for the rest, in one batch; a MultiLookup does so in several rounds (lookup.py). A Run is
work of another kind that a hook must not do.
"""

import asyncio
import atexit
import logging
import os
import queue
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ObjectCorrupt, ObjectGivenUp, ObjectMissing, StoreError
from ecshare.store.hostcache.cache import open_host_cache
from ecshare.store.integrity import open_integrity
from ecshare.store.keys import Key, Kind
from ecshare.store.objects import ObjectStore
from ecshare.store.open import open_store
from ecshare.store.threads import Workers
from ecshare.transfer.announced.gaps import Gaps
from ecshare.transfer.client.store_client import StoreClient
from ecshare.transfer.closing import ClosingTime
from ecshare.transfer.device.affinity import start_unbound
from ecshare.transfer.fetch import Fetcher, look
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
from ecshare.transfer.packing import Packing
from ecshare.transfer.save import Saver
from ecshare.transfer.stats import Stats
from ecshare.transfer.upkeep.start_up import StartUp

logger = logging.getLogger(__name__)

# Sealing, checking and publishing are copies at memory speed; two threads keep the loop free. Loads
# have two of their own: none waits for saves.
_COPY_THREADS = 2
# vLLM ends a worker that has not closed after 5 s.
_CLOSE_S = 4.0
_closing = ClosingTime()
# So many look-ups on the caller's thread are less than a millisecond, whatever they find.
LOOKS_A_STEP = 16
# So many questions for a name are half a millisecond.
NAMES_A_STEP = 64
# A new request may have to wait for so long behind an engine that has nothing to compute.
_IDLE_WAIT_S = 0.003
# A process that exits without `close` waits no longer for the end of each I/O thread.
_EXIT_S = 1.0
_running: "weakref.WeakSet[TransferEngine]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop what was not closed: a thread that still runs while Python ends may crash it."""
    for engine in tuple(_running):
        engine.stop()


class _Message(Struct, frozen=True):
    """From the thread that submits to the I/O thread."""

    begun: tuple[Handle[Any], ...] = ()
    cancelled: tuple[Handle[Any], ...] = ()


class TransferEngine:
    """One I/O thread with one event loop; jobs in, outcomes out.

    Ownership: one thread submits, polls, drains and closes. It owns `in_flight` and `stats`, which
    has the counts of transfers and that thread's own counts. The store, its breakers and all tasks
    belong to the I/O thread. The two threads share the queues `_inbox` and `_done`. A third thread
    passes jobs from the first one to the loop.
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
        `packing`: how objects are packed in the store; see Packing.
        `on_thread_start`: called first in each thread that copies slabs, runs a job's `use` or
        releases a slab; see `device_selector`.

        Raises:
            ConfigError: an option is wrong; the message names it and the fix.
        """
        self._store = store or open_store(config, path)
        self.host = open_host_cache(config)
        self.in_flight = 0
        self._is_closed = False
        self.begin_step()
        self.stats = Stats()
        self._integrity = open_integrity(config.integrity_key, path)
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Handle[Any], Done[Any]]] = queue.SimpleQueue()
        self._on_thread_start = on_thread_start
        self._copies = self._threads("ecshare-copy")
        self._loads = self._threads("ecshare-load")
        # No request waits longer than `wait_s` for an answer: a store that needs longer is down.
        answer_timeout_s = min(config.wait_s, config.io_timeout_s)
        self._client = StoreClient(self._store, config.io_timeout_s, answer_timeout_s)
        self._gaps = Gaps(self.host, self._client, self._integrity)
        self._saver = Saver(self.host, self._client, self._copies, self._integrity, packing)
        self._fetcher = Fetcher(
            self.host, self._client, self._loads, self._integrity, self._gaps, packing
        )
        self._locator = Locator(self.host, self._client)
        self._loop = asyncio.new_event_loop()
        self._serving: set[Handle[Any]] = set()
        self._start = StartUp(config, path, self._store, self._client, self._loop)
        # Those for copies, loads and blocking calls are started by this one.
        self._thread = start_unbound("ecshare-io", self._run)
        self._carrier = start_unbound("ecshare-inbox", self._carry)
        self._process = os.getpid()
        _running.add(self)

    def probe(self, *, write: bool) -> bool:
        """Block until the store has answered, at start-up. `write`: it must also accept an object.

        A store that cannot serve now is asked again for `io_timeout_s`. After that, return False
        and log a warning: an engine must be able to start without its cache.

        Raises:
            ConfigError: the store cannot be used with these options; names the option and the
                cause.
        """
        return self._start.probe(write=write)

    def start_up(
        self,
        kind: Kind,
        namespace: str,
        facts: Mapping[str, Any],
        *,
        write: bool,
        mark: Key | None = None,
    ) -> None:
        """Do what `probe` does, and log how `facts` differ from those of other engines.

        A writer also stores them as the manifest of its namespace, and an object under the key
        `mark`, if given, of which only the existence matters. It writes both again every few hours.

        Raises:
            ConfigError: as `probe`.
        """
        self._start.begin(kind, namespace, facts, write=write, mark=mark)

    @property
    def integrity(self) -> str:
        """The fingerprint of the key that authenticates objects; "" without a key."""
        return self._integrity.fingerprint if self._integrity else ""

    @property
    def open_breakers(self) -> frozenset[str]:
        """Which of "read" and "write" have an open breaker. Any thread."""
        damaged = {"read"} if self._fetcher.is_open else set()
        return self._client.open_breakers | damaged

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
            self._inbox.put(_Message(handles))
            return
        for handle in handles:  # the engine process is on its way out
            self._finish(handle, Outcome.REJECTED)

    def end_at_once(self, handle: Handle[StoredObject]) -> bool:
        """Do a Fetch here and now if this host has its object in memory; return whether it ended.

        If so, its continuation was called. If not, nothing has happened: submit it. It takes some
        40 us, and neither waits nor wakes a thread. There are LOOKS_A_STEP such looks, until
        `begin_step`.
        """
        job = handle.job
        if not isinstance(job, Fetch) or job.use is not None or job.in_store:
            return False
        if not self.host.is_in_memory or not self._looks_left:
            return False
        self._looks_left -= 1
        handle.started_s = time.monotonic()
        stored = look(self.host, job)
        if stored is None:
            return False
        seconds = time.monotonic() - handle.started_s
        moved = Moved("read", Tier.HOST, len(stored.payload), seconds)
        self._tell(handle, Done(job, Outcome.OK, seconds, stored, (moved,)))
        return True

    def has_at_once(self, keys: Iterable[Key]) -> bool:
        """Return whether this host has all these objects in memory; False if that is not known.

        It takes some 5 us a key, up to the first that is missing, and neither waits nor wakes a
        thread. There are NAMES_A_STEP such questions, until `begin_step`.
        """
        if not self.host.is_in_memory:
            return False
        for key in keys:
            if not self._names_left:
                return False
            self._names_left -= 1
            if not self.host.has(key):
                return False
        return True

    def begin_step(self) -> None:
        """Allow as many looks and questions at once as a step may take."""
        self._looks_left, self._names_left = LOOKS_A_STEP, NAMES_A_STEP

    def cancel(self, *handles: Handle[Any]) -> None:
        """Cancel jobs that were submitted. Never blocks, never raises.

        Each job still gets one Done: CANCELLED, unless it had ended before.
        """
        if not self._is_closed:
            self._inbox.put(_Message(cancelled=handles))

    def poll(self) -> list[Done[Any]]:
        """Call the continuations of jobs that have ended, and return their Dones. Never blocks.

        The value of a Done belongs to the continuation, or to the caller if there is none.
        """
        ended: list[Done[Any]] = []
        while not self._done.empty():
            ended.append(self._end(*self._done.get()))
        return ended

    def wait_idle(self) -> None:
        """Block until a job ends, for at most 3 ms, and call its continuation.

        For a step in which the engine computes nothing because its requests wait, for jobs or for
        the time of the next one. vLLM makes the next such step at once. Hundreds of them a second
        would keep a core busy in each of its processes, and would learn of a job's end no sooner.
        """
        with suppress(queue.Empty):
            self._end(*self._done.get(timeout=_IDLE_WAIT_S))

    def drain(self, timeout_s: float, *, until: Handle[Any] | None = None) -> list[Done[Any]]:
        """As `poll`, but block until all jobs or `until` have ended, for at most `timeout_s`."""
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
        self._tell(handle, done)
        return done

    def _tell(self, handle: Handle[Any], done: Done[Any]) -> None:
        for moved in done.moved:
            where = f"{moved.direction}/{moved.tier.value}"
            self.stats.add(f"transfer_bytes/{where}", moved.num_bytes)
            self.stats.observe(f"transfer_seconds/{where}", moved.seconds)
        handle.ended(done)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Give jobs in flight `timeout_s` to end, then stop. A second call does nothing.

        Engines of this process that are closed one right after the other share that time. Jobs that
        have not ended are dropped. An object is whole in the store, or not there.
        """
        if self._is_closed:
            return
        with _closing.until(timeout_s) as deadline_s:
            self._let_end(deadline_s)
            self._stop(timeout_s)

    def stop(self) -> None:
        """Drop all jobs and stop the I/O thread. A second call does nothing."""
        self._stop(_EXIT_S)

    def _stop(self, timeout_s: float) -> None:
        if self._is_closed or self._process != os.getpid():
            return
        self._is_closed = True
        self._inbox.put(None)
        self._carrier.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        for threads in (self._copies, self._loads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _let_end(self, deadline_s: float) -> None:
        """Wait for the jobs in flight, without calling their continuations."""
        with suppress(queue.Empty):
            while self.in_flight:
                handle, done = self._done.get(timeout=max(0.0, deadline_s - time.monotonic()))
                handle.then = None
                self._end(handle, done)
                if isinstance(done.value, StoredObject):
                    done.value.release()

    def _threads(self, name: str) -> Workers:
        return Workers(_COPY_THREADS, thread_name_prefix=name, initializer=self._begin_thread)

    # --- I/O, copy and load threads ---

    def _begin_thread(self) -> None:
        """Do what the owner wants done first. A thread that cannot serves all the same."""
        if self._on_thread_start is None:
            return
        try:
            self._on_thread_start()
        except Exception:  # noqa: BLE001 — without the I/O thread nothing would ever end
            logger.exception("a thread could not be set up")

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
        self._begin_thread()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        jobs = [handle.task for handle in self._serving if handle.task]
        tasks = [*jobs, *self._start.tasks, *self._client.operations]
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
        except ObjectGivenUp:
            outcome = Outcome.GIVEN_UP
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
        if self._start.is_watching and outcome in (Outcome.OK, Outcome.MISSING):
            is_hit = job.is_hit(outcome, value)
            if is_hit is not None:
                self._start.compare_again(is_hit=is_hit)
        if isinstance(job, Put) and outcome is Outcome.UNAVAILABLE:
            await self._give_up(handle, job)

    async def _give_up(self, handle: Handle[Any], job: Put) -> None:
        """Tell those who wait for the object of a save that has failed."""
        self._serving.add(handle)
        try:
            with suppress(StoreError, TimeoutError):
                await self._gaps.note(job.key)
        finally:
            self._serving.discard(handle)

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
                return None, await self._saver.put(job)
            case Fetch():
                return await self._fetcher.serve(job, started_s + job.timeout_s)
            case Backfill():
                return await self._saver.backfill(job)
            case GiveUp():
                await self._gaps.note(job.key)
                return None, ()
            case Lookup():
                return await self._locator.look_up(job, started_s + job.timeout_s), ()
            case MultiLookup():
                return await self._locator.look_up_in_rounds(job, started_s + job.timeout_s), ()
            case Run():
                return await self._loop.run_in_executor(self._copies, job.work), ()
        raise TypeError(f"no such job: {type(job).__name__}")
