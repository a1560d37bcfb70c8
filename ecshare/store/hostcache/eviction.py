# SPDX-License-Identifier: Apache-2.0
"""Eviction: if the host cache is full, the least recently used entries are removed.

The folder is scanned only if the usage counter says "full". The scan corrects the counter, and
entries are removed down to LOW_WATER of the limit, so that a full cache does not scan for every new
entry. Only files with names of ours are counted or removed.

A scan of very many entries takes seconds. It does not hold the counter's lock, so other processes
add and remove entries meanwhile. The counter's second number limits how wrong the sum of the scan
can be, and the scan corrects the counter no further. Entries are removed a few at a time, each time
under the lock. One process at a time scans and evicts, in a thread of its own: it "has the turn".
"""

import contextlib
import fcntl
import heapq
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

from ecshare.store.errors import ConfigError
from ecshare.store.hostcache.usage import HostLock, Usage, unlock_and_close

LOW_WATER = 0.9
THREAD_NAME = "ecshare-evict"

_TURN_NAME = ".evicting"
# Who has waited so long for the process with the turn evicts a few entries itself: that process may
# be stopped.
ROOM_WAIT_S = 0.25
_ROOM_PAUSE_S = 0.005
STEP_ENTRIES = 16  # removed while the lock is held once: less than a millisecond
RUN_ENTRIES = 10_000  # sorted at once, which blocks other threads; read in 50 ms
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
# Entries of any version of the keys, because only eviction removes the entries of older releases.
# Some of those stored parts of an object, with suffixes to the object's name.
_ENTRY = re.compile(
    r"(?:[0-9a-f]*\+)?(?:ec|kv)\+\d+\+[0-9a-f]{32}\+[0-9a-f]{2}\+[0-9a-f]{64}(?:\.[a-z0-9_-]+)*"
)


class Evictor:
    """Evicts entries to make room in a folder. Safe from several threads and processes."""

    def __init__(self, usage: Usage) -> None:
        """Count the existing entries.

        Raises:
            ConfigError: the folder cannot be used; the message names `host_cache_dir`.
        """
        self.usage = usage
        root = usage.root
        self._turn = HostLock(f"{root}/{_TURN_NAME}", ROOM_WAIT_S)
        try:
            turn = self._turn.attempt()
            if turn is not None:  # otherwise the process that has the turn counts
                scan = _Scan(self, turn)
                scan.run_if_short(partial(scan.recount, _drop))
        except TimeoutError:
            pass  # a stopped process holds the counter: entries are counted when it goes on
        except OSError as exc:
            raise ConfigError(
                f"host_cache_dir: {root} cannot be used ({exc}); name another folder, or empty it"
            ) from exc

    def admit(self, num_bytes: int, free_bytes: int) -> tuple[str, int] | None:
        """Make room, and return the result of `Usage.create`. None: all entries are in use.

        `free_bytes`: evict that many bytes first, even if the counter is below the limit.

        Raises:
            OSError: the folder cannot be used.
        """
        waits_until_s = time.monotonic() + ROOM_WAIT_S
        while True:
            made = None if free_bytes else self.usage.create(num_bytes)
            if made is not None:
                return made
            turn = self._turn.attempt()
            if turn is not None:
                is_room = self._make_room(turn, num_bytes, free_bytes)
                free_bytes = 0
            elif time.monotonic() < waits_until_s or self._is_unknown():
                is_room = True  # soon: another process evicts or counts
                time.sleep(_ROOM_PAUSE_S)
            else:
                is_room = self._evict_inline(num_bytes, list(islice(self.files(), RUN_ENTRIES)))
            if not is_room:
                return None

    def _is_unknown(self) -> bool:
        with self.usage.counter() as counter:
            return counter.read().used is None

    def _make_room(self, turn: int, num_bytes: int, free_bytes: int) -> bool:
        """Remove the least recently used entries until there is room. False: there is none.

        If any must be removed, remove them down to LOW_WATER. Pinned entries stay. With very many
        entries a thread does this, and this call evicts only what it needs itself. `turn`: the
        locked file, which is closed.
        """
        scan = _Scan(self, turn)
        work = partial(self._evict_oldest, scan, num_bytes, free_bytes)
        used = scan.run_if_short(work, is_urgent=bool(free_bytes))
        if used is None:
            return self._evict_inline(num_bytes, scan.first)
        return used + num_bytes <= self.usage.limit_bytes

    def _evict_oldest(self, scan: "_Scan", num_bytes: int, free_bytes: int) -> int:
        runs: list[list[_Found]] = []
        used = scan.recount(runs.append)
        goal = self.usage.limit_bytes - num_bytes
        if free_bytes:
            goal = min(goal, used - free_bytes)
        if used > goal:
            goal = min(goal, int(self.usage.limit_bytes * LOW_WATER))
        return self.evict_in_steps(heapq.merge(*runs), used, goal)

    def _evict_inline(self, num_bytes: int, some: "list[_Found]") -> bool:
        """Evict the least recently used of `some`, at least a tenth of their bytes, to make room.

        They need not be the least recently used of all, because a scan of all takes seconds.
        """
        with self.usage.counter() as counter:
            used = counter.read().used or 0
        share = (1 - LOW_WATER) * sum(each.num_bytes for each in some)
        goal = min(self.usage.limit_bytes - num_bytes, used - int(share))
        used = self.evict_in_steps(sorted(some), used, goal)
        return used + num_bytes <= self.usage.limit_bytes

    def evict_in_steps(self, oldest_first: "Iterable[_Found]", used: int, goal: int) -> int:
        """Unlink these in order until `goal` bytes are in use. Return the bytes in use.

        `used`: the bytes in use before. Pinned entries stay.

        Raises:
            OSError: the counter cannot be used.
        """
        entries = iter(oldest_first)
        while used > goal and (step := list(islice(entries, STEP_ENTRIES))):
            used = self._evict(step, goal)
        return used

    def _evict(self, some: list["_Found"], goal: int) -> int:
        """Unlink the unpinned ones of `some` in order, and return the bytes that are then in use.

        Stop at `goal`. The lock is held once.
        """
        # Files are closed, which frees their memory or disk space, after the lock is released.
        with contextlib.ExitStack() as unlinked, self.usage.counter() as counter:
            used = counter.read().used or 0
            freed = 0
            for each in some:
                if used - freed <= goal:
                    break
                fd = self._unlink_unpinned(each)
                if fd is not None:
                    unlinked.callback(unlock_and_close, fd)
                    freed += each.num_bytes
            counter.add(-freed)
            return max(0, used - freed)

    def _unlink_unpinned(self, found: "_Found") -> int | None:
        """Unlink a file and return its descriptor. None: pinned, used since the scan, or gone."""
        path = f"{self.usage.root}/{found.name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Otherwise it was used since the scan, or replaced by another file of the same name.
            status = os.fstat(fd)
            if status.st_atime_ns == found.used_ns and os.stat(path).st_ino == status.st_ino:
                os.unlink(path)
                return fd
        except OSError:
            pass
        unlock_and_close(fd)
        return None

    def files(self) -> "Iterator[_Found]":
        """Yield all entries and temporary files, each once.

        Raises:
            OSError: the folder cannot be read.
        """
        yielded: set[str] = set()
        with os.scandir(self.usage.root) as entries:
            for entry in entries:
                is_temporary = entry.name.startswith(".")
                if not (_TEMPORARY if is_temporary else _ENTRY).fullmatch(entry.name):
                    continue
                # If an entry is removed during the scan, Linux's tmpfs may list others again.
                if entry.name in yielded:
                    continue
                yielded.add(entry.name)
                try:  # much faster than `suppress`, and there may be a million files
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield _Found(status.st_atime_ns, status.st_size, entry.name, is_temporary)


class _Scan:
    """One scan of a folder, by the process that has the turn. One thread at a time."""

    def __init__(self, room: Evictor, turn: int) -> None:
        """Read the first entries. `turn`: the file of the turn, open and locked; owned."""
        self._room = room
        self._turn = turn
        try:
            with room.usage.counter() as counter:
                self._count_before = counter.read()
            self._files = room.files()
            self.first = list(islice(self._files, RUN_ENTRIES))
        except OSError:
            unlock_and_close(turn)
            raise

    def run_if_short(self, work: Callable[[], int], *, is_urgent: bool = False) -> int | None:
        """Do `work`, release the turn and return the result. None: a thread does the work.

        A thread does it if there are very many entries, unless the work is urgent, or the number
        of bytes in use is not known.
        """
        is_known = self._count_before.used is not None
        if len(self.first) == RUN_ENTRIES and is_known and not is_urgent:
            threading.Thread(
                target=self._run_in_background, args=(work,), name=THREAD_NAME, daemon=True
            ).start()
            return None
        return self._run(work)

    def recount(self, keep: Callable[[list["_Found"]], object]) -> int:
        """Remove files of dead writers, correct the counter and return the bytes in use.

        `keep` gets the entries, sorted, some thousands at a time.

        Raises:
            OSError: the folder or the counter cannot be used.
        """
        total, temporary, run = 0, [], self.first
        while run:
            total += sum(each.num_bytes for each in run)
            temporary += [each for each in run if each.is_temporary]
            keep(sorted(each for each in run if not each.is_temporary))
            run = list(islice(self._files, RUN_ENTRIES))
        with self._room.usage.counter() as counter:
            used = counter.correct(total, self._count_before.turnover)
        return self._room.evict_in_steps(temporary, used, 0)

    def _run(self, work: Callable[[], int]) -> int:
        try:
            return work()
        finally:
            unlock_and_close(self._turn)

    def _run_in_background(self, work: Callable[[], int]) -> None:
        # The folder may be gone. A caller that needs room then gets the same error.
        with contextlib.suppress(OSError):
            self._run(work)


def _drop(run: "list[_Found]") -> None:
    del run


class _Found(NamedTuple):
    """A file of the cache, as a scan saw it. Sorts by last use.

    The last use is the file's access time, which is set whenever an entry is opened.
    """

    used_ns: int
    num_bytes: int
    name: str
    is_temporary: bool
    """True if it is still being written, unless its writer is dead. A living writer holds a lock on
    it, taken before the counter's lock was released."""
