# SPDX-License-Identifier: Apache-2.0
"""Eviction: if the host cache is full, the least recently used entries are removed.

The folder is scanned only when the usage counter says "full". The scan corrects the counter, and
entries are removed down to LOW_WATER of the limit, so that a full cache does not scan for every new
entry. Only files with names of ours are counted or removed.

A scan does not hold the counter's lock, so other processes add and remove entries meanwhile, and
may scan too. The counter's second number limits how wrong the sum of the scan can be, and the scan
corrects the counter no further. Entries are removed a few at a time, each time under the lock.
"""

import contextlib
import fcntl
import heapq
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ecshare.store.errors import ConfigError
from ecshare.store.hostcache.usage import Usage, unlock_and_close

LOW_WATER = 0.9
STEP_ENTRIES = 16  # removed under one lock: less than a millisecond
RUN_ENTRIES = 10_000  # sorted at once, which lets no other thread run; read in 50 ms
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
# Of any version of the keys: nobody else would ever remove what an older release left. Some kept
# parts of an object, under names below the object's.
_ENTRY = re.compile(
    r"(?:[0-9a-f]*\+)?(?:ec|kv)\+\d+\+[0-9a-f]{32}\+[0-9a-f]{2}\+[0-9a-f]{64}(?:\.[a-z0-9_-]+)*"
)


class Evictor:
    """Makes room in a folder. Safe from several threads and processes."""

    def __init__(self, usage: Usage) -> None:
        """Count the existing entries.

        Raises:
            ConfigError: the folder cannot be used; the message names `host_cache_dir`.
        """
        self.usage = usage
        self._makes_room = threading.Lock()
        """One thread of this process scans; the others find the room that it has made."""
        try:
            self._recount()
        except OSError as exc:
            raise ConfigError(
                f"host_cache_dir: {usage.root} cannot be used ({exc}); name another folder, or "
                "empty it"
            ) from exc

    def admit(self, num_bytes: int, free_bytes: int) -> tuple[str, int] | None:
        """As `Usage.create`, after making room. None: all entries are in use.

        `free_bytes`: evict that many bytes first, whatever the counter says.

        Raises:
            OSError: the folder cannot be used.
        """
        if not free_bytes and (made := self.usage.create(num_bytes)) is not None:
            return made
        with self._makes_room:
            while True:
                made = None if free_bytes else self.usage.create(num_bytes)
                if made is not None:
                    return made
                if not self._make_room(num_bytes, free_bytes):
                    return None
                free_bytes = 0  # other processes may have taken the room: try again

    def _make_room(self, num_bytes: int, free_bytes: int) -> bool:
        """Remove the least recently used entries until there is room. False: there is none.

        If any must be removed, remove them down to LOW_WATER. Pinned entries stay.
        """
        used, runs = self._recount()
        goal = self.usage.limit_bytes - num_bytes
        if free_bytes:
            goal = min(goal, used - free_bytes)
        if used > goal:
            goal = min(goal, int(self.usage.limit_bytes * LOW_WATER))
        used = self._evict_in_steps(heapq.merge(*runs), used, goal)
        return used + num_bytes <= self.usage.limit_bytes

    def _recount(self) -> "tuple[int, list[list[_Found]]]":
        """Remove files of dead writers and correct the counter.

        Return the bytes in use, and the entries in lists of RUN_ENTRIES, each of them sorted.

        Raises:
            OSError: the folder or the counter cannot be used.
        """
        with self.usage.counter() as counter:
            before = counter.read().turnover
        files, total = self.files(), 0
        temporary: list[_Found] = []
        runs: list[list[_Found]] = []
        while run := list(islice(files, RUN_ENTRIES)):
            total += sum(each.num_bytes for each in run)
            temporary += [each for each in run if each.is_temporary]
            runs.append(sorted(each for each in run if not each.is_temporary))
        with self.usage.counter() as counter:
            used = counter.correct(total, before)
        return self._evict_in_steps(temporary, used, 0), runs

    def _evict_in_steps(self, oldest_first: "Iterable[_Found]", used: int, goal: int) -> int:
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
        """Unlink the unpinned ones of these in order, and return the bytes that are then in use.

        Stops at `goal`. Holds the lock once.
        """
        # Their memory or disk space is given back when they are closed: after the lock.
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
        """Unlink it and return its descriptor. None: it is pinned, was used since, or is gone."""
        path = f"{self.usage.root}/{found.name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Used since the scan, or replaced by another file of the same name: not the oldest.
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
                # If an entry is removed meanwhile, Linux's tmpfs may list others again.
                if entry.name in yielded:
                    continue
                yielded.add(entry.name)
                is_temporary = entry.name.startswith(".")
                if not (_TEMPORARY if is_temporary else _ENTRY).fullmatch(entry.name):
                    continue
                try:  # many times faster than `suppress`, and there may be a million
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield _Found(status.st_atime_ns, status.st_size, entry.name, is_temporary)


class _Found(NamedTuple):
    """A file of the cache, as a scan saw it. Sorts by last use.

    That is its time of access, which is set whenever an entry is opened.
    """

    used_ns: int
    num_bytes: int
    name: str
    is_temporary: bool
    """Still being written, unless its writer is dead. A living writer has a lock on it, from before
    it released the counter's lock."""
