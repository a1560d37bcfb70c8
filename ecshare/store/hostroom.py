# SPDX-License-Identifier: Apache-2.0
"""The byte budget of the host cache, kept by all its processes together.

`.used` holds the bytes in the folder, as all believe; it is read and written under its own lock,
for microseconds. Only when it says "full" is the folder scanned, which corrects it, and emptied to
LOW_WATER of the limit: a full cache does not scan for every entry. Only files of our own names are
counted or removed.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from ecshare.store.errors import ConfigError

LOW_WATER = 0.9

T = TypeVar("T")

_TALLY = struct.Struct("<q")
_TALLY_NAME = ".used"
_TALLY_WAIT_S = (
    1.0  # somebody who holds it longer was stopped by a debugger, or is dead in the kernel
)
_NEVER_EVICT = 1 << 62  # later than any time of last use
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
# Of any version of the keys: nobody else would ever remove what an older release left. A part of an
# object may have a name below the object's (`Fetch.local_key`).
_ENTRY = re.compile(
    r"(?:[0-9a-f]*\+)?(?:ec|kv)\+\d+\+[0-9a-f]{32}\+[0-9a-f]{2}\+[0-9a-f]{64}(?:\.[a-z0-9_-]+)*"
)


class Room:
    """Who may write how much into the folder `root`. Safe from several threads and processes."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        """Count what is there. ConfigError names `host_cache_dir`: it cannot be used."""
        self.root = root
        self.limit_bytes = limit_bytes
        try:
            with self._tally() as tally:
                tally.write(sum(found.num_bytes for found in self._scan()))
        except TimeoutError:
            return  # whoever holds it has counted
        except OSError as exc:
            raise ConfigError(
                f"host_cache_dir: {root} cannot be used ({exc}); name another folder, or empty it"
            ) from exc

    def admit(self, num_bytes: int, free_bytes: int, make: Callable[[str], T]) -> T | None:
        """Account for a file of `num_bytes` and `make` it, at the temporary path it is given.

        All under the tally's lock: a scan by another process sees the file or not its bytes. So
        `make` gives it its size, and a lock. `free_bytes` asks for that much to be evicted first,
        whatever the tally says. None: everything here is in use. Raises OSError, also that of
        `make`.
        """
        with self._tally() as tally:
            used = tally.read()
            if used is None or free_bytes or used + num_bytes > self.limit_bytes:
                used = self._evict(num_bytes, free_bytes)
                tally.write(used)
                if used + num_bytes > self.limit_bytes:
                    return None
            made = make(f"{self.root}/.{secrets.token_hex(8)}.tmp")
            tally.add(num_bytes)
            return made

    def rename(self, temporary: str, path: str) -> None:
        """Give a finished file its name. FileExistsError: it is taken; OSError: it cannot be.

        Under the tally's lock too: a scan in between could see two files, or none.
        """
        with self._tally():
            os.link(temporary, path)
            os.unlink(temporary)

    def remove(self, path: str) -> None:
        """Unlink the file and take it off the account. Nothing happens if it is not there."""
        with contextlib.suppress(OSError), self._tally() as tally:
            size = os.stat(path, follow_symlinks=False).st_size
            os.unlink(path)
            tally.add(-size)

    def _evict(self, num_bytes: int, free_bytes: int) -> int:
        """Scan; unlink the least recently used until there is room; return what is left, in bytes.

        Down to LOW_WATER if anything has to go. Pinned entries stay.
        """
        entries = self._scan()
        used = sum(entry.num_bytes for entry in entries)
        goal = self.limit_bytes - num_bytes
        if free_bytes:
            goal = min(goal, used - free_bytes)
        if used <= goal:
            return used
        goal = min(goal, int(self.limit_bytes * LOW_WATER))
        for entry in sorted(entries):
            if used <= goal:
                break
            if self._unlink_unpinned(entry):
                used -= entry.num_bytes
        return used

    def _unlink_unpinned(self, found: "_Found") -> bool:
        path = f"{self.root}/{found.name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Used since the scan, or replaced by another file of the same name: not the oldest.
            status = os.fstat(fd)
            if status.st_atime_ns != found.used_ns or os.stat(path).st_ino != status.st_ino:
                return False
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        finally:
            unlock_and_close(fd)
        return True

    def _scan(self) -> "list[_Found]":
        """All files of ours that take room. Removes what dead writers left behind."""
        found = []
        with os.scandir(self.root) as entries:
            for entry in entries:
                is_temporary = _TEMPORARY.fullmatch(entry.name) is not None
                if not is_temporary and not _ENTRY.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    each = _Found(status.st_atime_ns, status.st_size, entry.name)
                    if is_temporary:
                        # It got its lock under ours: without one, its writer is dead.
                        if self._unlink_unpinned(each):
                            continue
                        each = each._replace(used_ns=_NEVER_EVICT)
                    found.append(each)
        return found

    @contextlib.contextmanager
    def _tally(self) -> "Iterator[_Tally]":
        """Hold the tally's lock. OSError (ETIMEDOUT): somebody does not let go of it."""
        fd = os.open(f"{self.root}/{_TALLY_NAME}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            deadline_s = time.monotonic() + _TALLY_WAIT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError(errno.ETIMEDOUT, "the cache's tally is locked") from None
                    time.sleep(0.0005)
            yield _Tally(fd)
        finally:
            unlock_and_close(fd)


def unlock_and_close(fd: int) -> None:
    """Let go of the lock. Not by closing alone: a map holds a duplicate of the descriptor, and so
    may a fork."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class _Found(NamedTuple):
    """A file of the cache, as a scan saw it. Sorts by last use.

    That is its time of access, which is set whenever an entry is opened. The time of modification
    may be a store's, whose file this is as well.
    """

    used_ns: int
    num_bytes: int
    name: str


class _Tally:
    """The bytes in the folder, as all processes together believe. Valid while its lock is held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self) -> int | None:
        """None: nobody knows; scan."""
        raw = os.pread(self._fd, _TALLY.size, 0)
        used = _TALLY.unpack(raw)[0] if len(raw) == _TALLY.size else -1
        return used if used >= 0 else None

    def write(self, used_bytes: int) -> None:
        """Replace what is believed by what was counted."""
        os.pwrite(self._fd, _TALLY.pack(used_bytes), 0)

    def add(self, num_bytes: int) -> None:
        """Account for a change, if a number is there to be changed."""
        used = self.read()
        if used is not None:
            self.write(max(0, used + num_bytes))
