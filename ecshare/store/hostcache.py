# SPDX-License-Identifier: Apache-2.0
"""Verified objects on this host, shared by all processes of one user.

One flat folder (in /dev/shm unless told otherwise), one file an entry, `mmap` to read. The folder
is private to the user: what lies in it was put there by our own processes, after verification.

Pins. Who uses an entry holds a shared `flock` on its file: the lock is the kernel's, and dies with
the process, however that ends. Who evicts must get the exclusive lock first. A file is never
shortened, and an unlinked one lives on while it is mapped: no reader loses bytes under its hands.

Budget. `.used` holds the bytes in the folder, as all processes together believe; it is read and
written under its own lock, for microseconds. Only when it says "full" is the folder scanned, which
corrects it, and emptied to LOW_WATER of the limit: a full cache does not scan for every entry.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ecshare.store.errors import ConfigError
from ecshare.store.keys import check_key
from ecshare.store.objects import Buffer

logger = logging.getLogger(__name__)

LOW_WATER = 0.9

_TALLY = struct.Struct("<q")
_TALLY_NAME = ".used"
_TALLY_WAIT_S = (
    1.0  # somebody who holds it longer was stopped by a debugger, or is dead in the kernel
)
_TRIES = 4
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NEVER_EVICT = 1 << 62  # later than any time of last use
_STALE_S = 60.0  # an unlocked temporary file of that age belongs to nobody


def default_root() -> Path:
    """Return /dev/shm/ecshare-<uid>, or a temporary folder where there is no /dev/shm."""
    name = f"ecshare-{os.geteuid()}"
    shm = Path("/dev/shm")  # noqa: S108
    if os.access(shm, os.W_OK | os.X_OK):
        return shm / name
    root = Path(tempfile.gettempdir()) / name
    logger.warning("no writable /dev/shm here: the host cache goes to %s", root)
    return root


class Entry:
    """An object in the cache, pinned and mapped until `close`. One owner, any thread."""

    def __init__(self, key: str, fd: int, num_bytes: int) -> None:
        self.key = key
        self._fd = fd
        self._map = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ)
        self.body = memoryview(self._map)
        """Read only. Take no view of it that outlives the entry, unless the bytes may go any time
        after the view does."""

    def close(self) -> None:
        """Unpin. Views that still exist stay readable; the memory goes with the last of them."""
        if self._fd < 0:
            return
        # Not by closing alone: the map holds a duplicate of the descriptor, and so may a fork.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):
            self.body.release()
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class HostCache:
    """See the module. Safe from several threads and processes; holds no state between calls but
    what has been logged."""

    def __init__(self, root: Path, limit_bytes: int, store_id: str = "") -> None:
        """Make `root` if need be. ConfigError names `host_cache_dir`: it is not ours alone.

        `store_id` ([0-9a-f]*) keeps apart what came from different stores: an object that is here
        must not pass for one that the other store holds as well. They share the limit.
        """
        self.root = root
        self._prefix = f"{store_id}+" if store_id else ""
        self.limit_bytes = limit_bytes
        self._said: set[str] = set()
        _make_private(root)
        self._fit_to_disk()
        with self._tally() as tally:
            tally.write(sum(found.num_bytes for found in self._scan()))

    def open(self, key: str) -> Entry | None:
        """Return the entry, pinned, or None."""
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as exc:
            self._say_once("open", "the host cache cannot be read: %s", exc)
            return None
        try:
            # Who holds it exclusively is about to unlink it.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if status.st_nlink and status.st_size:
                os.utime(fd)  # now the most recently used
                return Entry(key, fd, status.st_size)
        except OSError as exc:
            if exc.errno != errno.EWOULDBLOCK:
                self._say_once("open", "the host cache cannot be read: %s", exc)
        os.close(fd)
        return None

    def publish(self, key: str, body: Buffer) -> Entry | None:
        """Write `body`, whole or not at all, and return it pinned. None: no room.

        Where the key is there already, that entry is returned and `body` is not looked at.
        """
        view = memoryview(body).cast("B")
        if not 0 < len(view) <= self.limit_bytes:
            self._say_once("size", "an object of %d bytes does not go into the cache", len(view))
            return None
        failure: OSError | None = None
        free_bytes = 0
        for _ in range(_TRIES):
            there = self.open(key)
            if there is not None:
                return there
            try:
                return self._publish(key, view, free_bytes)
            except FileExistsError:
                continue  # another process was first; its entry will do, if it is not gone already
            except FileNotFoundError as exc:
                failure = exc
                with contextlib.suppress(ConfigError):
                    _make_private(self.root)  # session clean-up takes folders out of /dev/shm
            except OSError as exc:
                failure = exc
                if exc.errno not in _FULL:
                    break
                free_bytes = len(view)  # a disk smaller than the limit
        if failure is not None:
            self._say_once("write", "the host cache cannot be written: %s", failure)
        return None

    def discard(self, key: str) -> None:
        """Remove the entry, pinned or not. Who has it open keeps its bytes."""
        path = self._path(key)
        with contextlib.suppress(OSError), self._tally() as tally:
            size = os.stat(path).st_size
            os.unlink(path)
            tally.add(-size)

    def _publish(self, key: str, view: memoryview, free_bytes: int) -> Entry | None:
        """Raises FileExistsError: the key is there. OSError: the disk is full, or worse."""
        temporary = f"{self.root}/.{secrets.token_hex(8)}.tmp"
        fd = self._admit(temporary, len(view), free_bytes)
        if fd is None:
            return None
        entry = None
        try:
            done = 0
            while done < len(view):
                done += os.write(fd, view[done:])
            os.link(temporary, self._path(key))
            # The shared lock that kept the temporary file alive is now the entry's pin.
            entry = Entry(key, fd, len(view))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            if entry is None:
                os.close(fd)
                with contextlib.suppress(OSError), self._tally() as tally:
                    tally.add(-len(view))
        return entry

    def _admit(self, temporary: str, num_bytes: int, free_bytes: int) -> int | None:
        """Account for a file of `num_bytes` and make it, empty, with its final size and our lock.

        All under the tally's lock: a scan by another process sees the file or not its bytes.
        `free_bytes` asks for that much to be evicted first, whatever the tally says.
        """
        with self._tally() as tally:
            used = tally.read()
            if used is None or free_bytes or used + num_bytes > self.limit_bytes:
                used = self._evict(num_bytes, free_bytes)
                tally.write(used)
                if used + num_bytes > self.limit_bytes:
                    self._say_once("room", "host cache %s: everything in it is in use", self.root)
                    return None
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                os.ftruncate(fd, num_bytes)
                tally.add(num_bytes)
            except OSError:
                os.close(fd)
                raise
            return fd

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
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Used since the scan, or replaced by another file of the same name: not the oldest.
            status = os.fstat(fd)
            if status.st_mtime_ns != found.used_ns or os.stat(path).st_ino != status.st_ino:
                return False
            os.unlink(path)
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def _scan(self) -> "list[_Found]":
        """Everything in the folder that takes room. Removes what dead writers left behind."""
        found = []
        with os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name == _TALLY_NAME:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    each = _Found(status.st_mtime_ns, status.st_size, entry.name)
                    stale = time.time() - status.st_mtime > _STALE_S
                    if entry.name.startswith(".") and not (stale and self._unlink_unpinned(each)):
                        # Being written: it takes room, and its writer's lock protects it.
                        each = each._replace(used_ns=_NEVER_EVICT)
                    elif entry.name.startswith("."):
                        continue
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
            os.close(fd)

    def _path(self, key: str) -> str:
        # No key holds a '+', so that two keys never meet in one name.
        return f"{self.root}/{self._prefix}{check_key(key).replace('/', '+')}"

    def _fit_to_disk(self) -> None:
        """A container's /dev/shm is often 64 MB: better a small cache than one that runs full."""
        disk = os.statvfs(self.root)
        fits = int(disk.f_blocks * disk.f_frsize * 0.9)
        if 0 < fits < self.limit_bytes:
            logger.warning(
                "host_cache_bytes is %d, but %s has room for %d: using that "
                "(in a container, give it a larger --shm-size)",
                self.limit_bytes,
                self.root,
                fits,
            )
            self.limit_bytes = fits

    def _say_once(self, topic: str, message: str, *args: object) -> None:
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(message, *args)


class _Found(NamedTuple):
    """A file of the cache, as a scan saw it. Sorts by last use."""

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
        return _TALLY.unpack(raw)[0] if len(raw) == _TALLY.size else None

    def write(self, used_bytes: int) -> None:
        """Replace what is believed by what was counted."""
        os.pwrite(self._fd, _TALLY.pack(used_bytes), 0)

    def add(self, num_bytes: int) -> None:
        """Account for a change, if a number is there to be changed."""
        used = self.read()
        if used is not None:
            self.write(max(0, used + num_bytes))


def _make_private(root: Path) -> None:
    """Make `root` for us alone, or check that it is. ConfigError: it is not."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = root.lstat()
    except OSError as exc:
        raise ConfigError(
            f"host_cache_dir: {root} cannot be made ({exc.strerror}); "
            "name a folder this user may write"
        ) from exc
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        raise ConfigError(f"host_cache_dir: {root} is {kind}; name a real folder")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"host_cache_dir: {root} belongs to another user; name a folder of your own"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"host_cache_dir: others may enter {root}, and engines trust what lies there; "
            f"run: chmod 700 {root}"
        )
