# SPDX-License-Identifier: Apache-2.0
"""The folder of the host cache in use: it is private, and its processes share a count and a lock.

Nobody but its user may enter it. Who takes a lock in it checks that first.

The file `.used` contains the number of bytes in the folder. It is read and written under its own
lock. A scan of the folder may miss files that are added, renamed or removed meanwhile. So a second
number in the file is the sum of the bytes of all these changes.

A HostLock is a `flock` on a small file. The kernel releases it when its holder ends, in every case.
But a holder may also be stopped, by a debugger, a frozen container or a dead disk. Then each other
process waits once, and adds and removes no entries until the holder goes on. Holders that go on
change the file: many of them may keep a busy host waiting for longer, and none is stopped.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ecshare.store.errors import ConfigError

_COUNTER = struct.Struct("<qq")
_COUNTER_NAME = ".used"
# The counter is held for a few milliseconds. A process that holds it longer than this was stopped.
COUNTER_WAIT_S = 1.0
_MAX_TURNOVER = 1 << 62
_LOCK_PAUSE_S = 0.0005


class Usage:
    """The files of the folder `root`, and the bytes they take.

    Safe from several threads and processes.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        """Make nothing yet. `limit_bytes`: how many the folder may hold."""
        self.root = root
        self.limit_bytes = limit_bytes
        self._lock = HostLock(f"{root}/{_COUNTER_NAME}", COUNTER_WAIT_S)

    @contextlib.contextmanager
    def counter(self) -> "Iterator[UsageCounter]":
        """Hold the lock of the counter.

        Raises:
            OSError: the file cannot be used.
        """
        with self._lock.held() as fd:
            yield UsageCounter(fd)

    def create(self, num_bytes: int) -> tuple[str, int] | None:
        """Make a temporary file of `num_bytes`, count it, and lock it (shared).

        Return its path and descriptor; None if there is no room, or the counter is not known. The
        file is locked before the counter is released, so no scan takes it for a dead writer's.

        Raises:
            OSError: the counter cannot be used, or the file not made.
        """
        with self.counter() as counter:
            used = counter.read().used
            if used is None or used + num_bytes > self.limit_bytes:
                return None
            path = f"{self.root}/.{secrets.token_hex(8)}.tmp"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o400)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                os.ftruncate(fd, num_bytes)
            except OSError:
                os.close(fd)
                os.unlink(path)
                raise
            counter.add(num_bytes)
            return path, fd

    def rename(self, temporary: str, path: str, num_bytes: int) -> None:
        """Give a finished temporary file, of that size, its final name.

        Raises:
            FileExistsError: there is a file of that name.
            OSError: the file cannot be renamed, or the counter not used.
        """
        with self.counter() as counter:
            os.link(temporary, path)
            os.unlink(temporary)
            # A scan at this moment may see two files, or none.
            counter.add(0, turnover=num_bytes)

    def remove(self, path: str) -> None:
        """Unlink the file and subtract its size. Do nothing if it does not exist, or on errors."""
        with contextlib.suppress(OSError), self.counter() as counter:
            status = os.stat(path, follow_symlinks=False)
            os.unlink(path)
            counter.add(-status.st_size if stat.S_ISREG(status.st_mode) else 0)


class Count(NamedTuple):
    """The content of `.used`."""

    used: int | None
    """The bytes in the folder. None: not known, a scan is needed."""
    turnover: int
    """The bytes of all files ever added, renamed or removed."""


class UsageCounter:
    """The common count of bytes in the folder. Valid while its lock is held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read: Count | None = None

    def read(self) -> Count:
        """Return the content of `.used`."""
        if self._read is None:
            self._read = self._parsed(os.pread(self._fd, _COUNTER.size, 0))
        return self._read

    def _parsed(self, raw: bytes) -> Count:
        used = int.from_bytes(raw[:8], "little", signed=True) if len(raw) >= 8 else -1
        # An older release writes only the first number.
        turnover = int.from_bytes(raw[8:], "little") if len(raw) == _COUNTER.size else 0
        return Count(used if used >= 0 else None, turnover)

    def add(self, num_bytes: int, *, turnover: int | None = None) -> None:
        """Add `num_bytes`, which may be negative. `turnover`: bytes changed, if not the same."""
        used, before = self.read()
        moved = abs(num_bytes) if turnover is None else turnover
        self._write(-1 if used is None else max(0, used + num_bytes), before + moved)

    def correct(self, counted: int, before: int) -> int:
        """Correct the count by the bytes that a scan has `counted`, and return it.

        `before`: the turnover when the scan began. The scan may have missed any change since then.
        """
        used, turnover = self.read()
        doubt = max(0, turnover - before)
        most = counted + doubt
        used = most if used is None else min(max(used, counted - doubt), most)
        self._write(used, turnover)
        return used

    def _write(self, used: int, turnover: int) -> None:
        os.pwrite(self._fd, _COUNTER.pack(used, turnover % _MAX_TURNOVER), 0)
        self._read = None


class HostLock:
    """The exclusive lock of the file `path`, which is made if necessary.

    Safe from several threads and processes. The threads of a process take turns, so that one of
    them looks at the file's lock, again and again, and not all.

    Raises:
        OSError: the file cannot be used (every method).
    """

    def __init__(self, path: str, patience_s: float) -> None:
        """Take no lock yet. `patience_s`: if nothing changes for so long, a holder was stopped."""
        self._path = path
        self._patience_s = patience_s
        self._is_stuck = False
        self._turn = threading.Lock()
        self._num_turns = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Wait for the lock, and hold it in the block, which gets the open file.

        Raises:
            TimeoutError: its holder was stopped. The next call does not wait again for that one.
        """
        self._await_turn()
        try:
            self._num_turns += 1
            fd = self.attempt()
            if fd is None:
                fd = self._awaited()
            self._is_stuck = False
            try:
                yield fd
            finally:
                unlock_and_close(fd)
        finally:
            self._turn.release()

    def _await_turn(self) -> None:
        num_turns = self._num_turns
        while not self._turn.acquire(timeout=self._wait_s()):
            if self._num_turns == num_turns:
                raise self._stopped()
            num_turns = self._num_turns

    def _awaited(self) -> int:
        changed_ns, until_s = self._changed_ns(), time.monotonic() + self._wait_s()
        while (fd := self.attempt()) is None:
            if time.monotonic() > until_s:
                before_ns, changed_ns = changed_ns, self._changed_ns()
                if changed_ns == before_ns:
                    raise self._stopped()
                until_s = time.monotonic() + self._wait_s()
            time.sleep(_LOCK_PAUSE_S)
        return fd

    def _wait_s(self) -> float:
        return 0.0 if self._is_stuck else self._patience_s

    def _stopped(self) -> TimeoutError:
        self._is_stuck = True
        return TimeoutError(errno.ETIMEDOUT, "a stopped process holds it", self._path)

    def _changed_ns(self) -> int:
        return os.stat(self._path, follow_symlinks=False).st_mtime_ns

    def attempt(self) -> int | None:
        """Take the lock without waiting, and return the open file. None: it is locked already."""
        # Checked here, because every change of the folder begins with a lock in it.
        check_still_private(os.path.dirname(self._path))
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _has_name(fd, self._path):
                return fd
        except BlockingIOError:
            pass
        except OSError:
            os.close(fd)
            raise
        unlock_and_close(fd)
        return None


def unlock_and_close(fd: int) -> None:
    """Release the lock and close the file. Closing alone does not release the lock while a mapping
    or a forked process has a duplicate of the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _has_name(fd: int, path: str) -> bool:
    """Return whether the file open as `fd` is still the one at `path`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False


def make_private(root: Path) -> None:
    """Make `root` private to this user, or check that it is.

    Raises:
        ConfigError: it cannot be made, or is not private.
    """
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        check_private(root)
    except OSError as exc:
        raise ConfigError(
            f"host_cache_dir: {root} cannot be made ({exc.strerror}); "
            "name a folder this user may write"
        ) from exc


def check_still_private(root: str | Path) -> None:
    """Repeat `check_private` before a use of the running cache.

    A clean-up may remove the folder, and another user may then put a link under its name. While the
    folder exists, no other user can replace it: its parent is sticky, or belongs to this user.

    Raises:
        OSError: it is not private any more, or is gone.
    """
    try:
        check_private(root)
    except ConfigError as exc:
        raise PermissionError(errno.EPERM, str(exc)) from None


def check_private(root: str | Path) -> None:
    """Check that the existing folder `root` is private to this user.

    Raises:
        ConfigError: it is not a folder, or others own it or may enter it.
        OSError: it cannot be examined, e.g. because it does not exist.
    """
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        raise ConfigError(f"host_cache_dir: {root} is {kind}; name a real folder")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"host_cache_dir: {root} belongs to another user; name a folder of your own"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"host_cache_dir: other users may enter {root}, and engines trust its content; "
            f"run: chmod 700 {root}"
        )
