# SPDX-License-Identifier: Apache-2.0
"""The cache of verified objects on this host, shared by all processes of one user.

The cache is one flat folder, by default in /dev/shm, with one file per entry, which readers map.
The folder is private to the user. Only our processes write to it, after verification.

Pins. A user of an entry holds a shared `flock` on its file. The kernel releases it when the process
ends, in every case. Eviction needs the exclusive lock. A file is never shortened, and its bytes
stay while it is mapped, even if it is unlinked. So no reader loses bytes.

Writing. A file gets its final size, its disk blocks and a lock under a temporary name. When it is
complete it is linked to its key. Files are read-only and private to the user.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
import time
from pathlib import Path

from ecshare.store.config import StoreConfig
from ecshare.store.errors import ConfigError, ObjectCorrupt
from ecshare.store.format import StreamingChecksum
from ecshare.store.hostcache.eviction import Evictor
from ecshare.store.hostcache.folder import (
    default_roots,
    fitting,
    floor_bytes,
    is_in_memory,
    temporary_root,
)
from ecshare.store.hostcache.single_flight import Claim, Claims
from ecshare.store.hostcache.usage import (
    Usage,
    check_still_private,
    make_private,
    unlock_and_close,
)
from ecshare.store.keys import Key
from ecshare.store.objects import Buffer, Memory

logger = logging.getLogger(__name__)

_CLAIMS_NAME = ".claims"
_TRIES = 4
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Entry:
    """An object in the cache, pinned until `close`. One owner, any thread.

    It is mapped on first use, because mapping costs more than opening and locking.

    Raises:
        OSError: it cannot be mapped (`body`, `copy_on_write`).
    """

    def __init__(self, key: Key, fd: int, num_bytes: int, mapped: mmap.mmap | None = None) -> None:
        self.key = key
        self.num_bytes = num_bytes
        self.is_new = False
        """True if the call that returned it has created it."""
        self._fd = fd
        self._map = mapped
        self._body = memoryview(mapped or b"")

    @property
    def age_s(self) -> float:
        """Return how long ago its bytes were written.

        Raises:
            OSError: the file system does not say.
        """
        return time.time() - os.fstat(self._fd).st_mtime

    @property
    def body(self) -> memoryview:
        """Return the object, read-only. A view that outlives the entry keeps the bytes mapped, but
        not pinned in the cache."""
        if self._map is None:
            self._map = mmap.mmap(self._fd, self.num_bytes, access=mmap.ACCESS_READ)
            self._body = memoryview(self._map)
        return self._body

    def copy_on_write(self) -> memoryview:
        """Return the whole object as private memory, to read and to write.

        Pages are shared with the cache until they are written to. Other processes never see the
        writes. The memory stays valid after `close` and eviction.
        """
        # Not populated in advance: the kernel maps 16 pages per fault, and madvise took longer.
        return memoryview(mmap.mmap(self._fd, self.num_bytes, access=mmap.ACCESS_COPY))

    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out`, uint8, with the bytes from `offset` on. They are read from the file: pages
        that are mapped on use, and unmapped afterwards, make threads wait for each other.

        Raises:
            OSError: they cannot be read.
        """
        while out:
            count = os.preadv(self._fd, [out], offset)
            if not count:
                raise OSError(errno.EIO, "an entry of the host cache has become shorter")
            out, offset = out[count:], offset + count

    def unmap(self) -> None:
        """Unmap, to release the map's descriptor, but keep the pin. No view of `body` may exist."""
        mapped, self._map = self._map, None
        self._body.release()
        self._body = memoryview(b"")
        if mapped is not None:
            with contextlib.suppress(BufferError):
                mapped.close()

    def close(self) -> None:
        """Unpin. Existing views stay readable; the memory is freed with the last of them."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            # Closing would not unlock: a map holds a duplicate of the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        with contextlib.suppress(BufferError):
            self._body.release()
            if self._map is not None:
                self._map.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class Draft:
    """A Sink for an object that goes to the cache. It belongs to one fetch; any thread writes.

    The checksum is computed as the bytes arrive. If the cache has no room, they are kept in private
    memory instead.
    """

    def __init__(self, cache: "HostCache", key: Key, limit_bytes: int) -> None:
        self._cache = cache
        self._key = key
        self._limit_bytes = limit_bytes
        self._target: _DraftFile | Memory | None = None
        self._lock = threading.Lock()  # guards the count, for one subtraction
        self._missing_bytes = 0
        self.checksum = StreamingChecksum()
        """The checksum of the bytes written so far."""
        self._is_over = False

    def begin(self, num_bytes: int) -> None:
        """See Sink.

        Raises:
            BrokenPipeError: after `discard`; the sender may stop.
            ObjectCorrupt: the object is larger than its limit.
        """
        if self._is_over:
            raise BrokenPipeError(errno.EPIPE, "the fetch of this object has ended")
        if not 0 <= num_bytes <= self._limit_bytes:
            raise ObjectCorrupt(f"corrupt object: {num_bytes} bytes, at most {self._limit_bytes}")
        self._target = self._cache.draft(num_bytes)
        if self._target is None:
            self._target = Memory(num_bytes)
            self._target.begin(num_bytes)
        self._missing_bytes = num_bytes

    def write(self, offset: int, piece: Buffer) -> None:
        """See Sink.

        Raises:
            BrokenPipeError: after `discard` or `publish`; the sender may stop.
            ObjectCorrupt: there are more bytes than announced.
            OSError: the bytes cannot be written.
        """
        target = self._target  # keeps its file open until the bytes are in
        if target is None or self._is_over:
            raise BrokenPipeError(errno.EPIPE, "the fetch of this object has ended")
        try:
            target.write(offset, piece)
        except OSError as exc:
            self._cache.warn_of_write(exc)
            raise
        raw = memoryview(piece).cast("B")
        with self._lock:
            self._missing_bytes -= len(raw)
        self.checksum.take(offset, raw)

    @property
    def body(self) -> memoryview:
        """Return all bytes, read-only.

        Raises:
            ObjectCorrupt: some are missing.
        """
        return self._whole().body

    def publish(self) -> Entry | None:
        """Make it an entry and return it, pinned. The caller has verified `body`; it stays valid.

        None: the cache had no room, and the bytes are in private memory.

        Raises:
            ObjectCorrupt: some bytes are missing.
        """
        target = self._whole()
        self._target, self._is_over = None, True
        return self._cache.admit(self._key, target) if isinstance(target, _DraftFile) else None

    def discard(self) -> None:
        """Drop it. Does nothing after `publish`."""
        target, self._target, self._is_over = self._target, None, True
        if isinstance(target, _DraftFile):
            self._cache.drop(target)

    def _whole(self) -> "_DraftFile | Memory":
        if self._target is None or self._missing_bytes:
            raise ObjectCorrupt(f"corrupt object: {self._missing_bytes} bytes are missing")
        return self._target

    def __del__(self) -> None:
        self.discard()


class _DraftFile:
    """A file of the cache without a key, with its lock. The last reference closes it.

    A thread that outlives the fetch may have that reference. If the descriptor were closed earlier,
    its writes would go to the next file with the same number.
    """

    def __init__(self, path: str, fd: int, num_bytes: int) -> None:
        self.path: str | None = path  # None: published or dropped
        self.num_bytes = num_bytes
        self.fd = fd
        self._map: mmap.mmap | None = None

    @property
    def body(self) -> memoryview:
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.num_bytes, access=mmap.ACCESS_READ)
        return memoryview(self._map)

    def write(self, offset: int, piece: Buffer) -> None:
        rest = memoryview(piece).cast("B")
        if offset + len(rest) > self.num_bytes:
            raise ObjectCorrupt(f"corrupt object: more than the {self.num_bytes} bytes announced")
        while rest:
            done = os.pwrite(self.fd, rest, offset)
            rest, offset = rest[done:], offset + done

    def hand_over(self, key: Key) -> Entry:
        """Return an entry that now owns the file, its lock and its pages."""
        fd, self.fd = self.fd, -1
        entry = Entry(key, fd, self.num_bytes, self._map)
        entry.is_new = True
        return entry

    def __del__(self) -> None:
        if self.fd >= 0:
            unlock_and_close(self.fd)


class HostCache:
    """Stores and returns entries; see the module. Safe from several threads and processes. Its only
    state of its own is which warnings were logged."""

    def __init__(self, root: Path, limit_bytes: int, store_id: str = "") -> None:
        """Make `root` if necessary.

        `store_id` ([0-9a-f]*) distinguishes the entries of different stores: an object from one
        store does not mean that another store has it. All stores share the limit.

        Raises:
            ConfigError: `root` cannot be made or used, or is not private; names `host_cache_dir`.
        """
        self.root = root
        self._prefix = f"{store_id}+" if store_id else ""
        self._warned: set[str] = set()
        make_private(root)
        self.is_in_memory = is_in_memory(root)
        """True if its files are in memory: `open` waits for no device or network."""
        self._usage = Usage(root, fitting(root, limit_bytes))
        self.floor_bytes = floor_bytes(root)
        """How many bytes of the folder's file system stay free, for other programs."""
        self._evictor = Evictor(self._usage)
        self._claims = Claims(f"{root}/{_CLAIMS_NAME}")

    @property
    def limit_bytes(self) -> int:
        """Return how many bytes the folder may hold."""
        return self._usage.limit_bytes

    def open(self, key: Key) -> Entry | None:
        """Return the entry, pinned, or None."""
        path = self._path(key)
        try:
            check_still_private(self.root)
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as exc:
            self._warn_once("open", "the host cache cannot be read: %s", exc)
            return None
        try:
            # A holder of the exclusive lock is about to unlink the file.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if status.st_nlink and status.st_size and _is_sound(status):
                # The access time records the use. The other time, of its publication, stays.
                os.utime(fd, ns=(time.time_ns(), status.st_mtime_ns))
                return Entry(key, fd, status.st_size)
        except OSError as exc:
            if exc.errno != errno.EWOULDBLOCK:
                self._warn_once("open", "the host cache cannot be read: %s", exc)
        unlock_and_close(fd)
        return None

    def has(self, key: Key) -> bool:
        """Return whether a file has the name of `key`. Costs a fifth of `open`."""
        return os.access(self._path(key), os.F_OK)

    def changed_ns(self) -> int:
        """Return when an entry was last added or removed, by the file system; 0: unknown."""
        try:
            return os.stat(self.root).st_mtime_ns
        except OSError:
            return 0

    def publish(self, key: Key, body: Buffer) -> Entry | None:
        """Write `body`, whole or not at all, and return the entry, pinned. None: no room.

        If there is an entry under `key`, it is returned, and `body` is not used.
        """
        existing = self.open(key)
        if existing is not None:
            return existing
        draft = self.draft(memoryview(body).nbytes)
        if draft is None:
            return None
        try:
            draft.write(0, body)
        except OSError as exc:
            self.warn_of_write(exc)
            self.drop(draft)
            return None
        return self.admit(key, draft)

    def receive(self, key: Key, limit_bytes: int) -> Draft:
        """Return a sink for the object `key`, of at most `limit_bytes`."""
        return Draft(self, key, limit_bytes)

    def open_or_claim(self, key: Key) -> Entry | Claim | None:
        """Return the entry, pinned, or the right to fetch it. None: another fetch is running."""
        entry = self.open(key)
        if entry is not None:
            return entry
        claim = self.claim(key)
        if claim is None:
            return None
        entry = self.open(key)  # another process may have published it and released its claim
        if entry is None:
            return claim
        claim.release()
        return entry

    def claim(self, key: Key, purpose: str = "") -> Claim | None:
        """Return the exclusive right to fetch `key` to this host. None: it is claimed already.

        If locks fail, every caller gets the claim: two fetches are better than none. `purpose`:
        another activity for one process at a time, e.g. "storing".
        """
        name = os.path.basename(self._path(key))
        try:
            check_still_private(self.root)
            return self._claims.take(f"{name}.{purpose}" if purpose else name)
        except OSError as exc:
            self._warn_once(
                "claim",
                "the host cache cannot lock: each process fetches objects on its own: %s",
                exc,
            )
            return Claim()

    def discard(self, key: Key) -> None:
        """Remove the entry, even if it is pinned. Its users keep its bytes."""
        self._usage.remove(self._path(key))

    # What follows is for Draft.

    def draft(self, num_bytes: int) -> _DraftFile | None:
        """Return a new file of that size, with its disk space reserved. None: no room."""
        if not 0 < num_bytes <= self.limit_bytes:
            self._warn_once(
                "size", "an object of %d bytes does not fit into the host cache", num_bytes
            )
            return None

        failure: OSError | None = None
        evict_bytes = 0
        for _ in range(_TRIES):
            try:
                made = None if evict_bytes else self._usage.create(num_bytes)
                made = made or self._evictor.admit(num_bytes, evict_bytes)
                draft = _DraftFile(*made, num_bytes) if made else None
                if draft is not None:
                    self._reserve(draft)
            except FileNotFoundError as exc:
                failure = exc
                # Session clean-up removes folders from /dev/shm. If another user has taken the name
                # since, the next try fails and reports it.
                with contextlib.suppress(ConfigError):
                    make_private(self.root)
            except OSError as exc:
                failure = exc
                if exc.errno not in _FULL:
                    break
                # The disk is smaller than the limit, or other programs fill it.
                evict_bytes = max(num_bytes, self._shortage(num_bytes))
            else:
                if draft is None:
                    self._warn_once(
                        "room", "host cache %s: it is full, and all entries are in use", self.root
                    )
                return draft
        self.warn_of_write(failure)
        return None

    def admit(self, key: Key, draft: _DraftFile) -> Entry | None:
        """Link the complete `draft` to its key. Return the entry, which may be an older one."""
        path = self._path(key)
        try:
            for _ in range(_TRIES):
                try:
                    self._usage.rename(draft.path or "", path, draft.num_bytes)
                    draft.path = None
                    # The lock that kept the temporary file alive is the entry's pin from now on.
                    return draft.hand_over(key)
                except FileExistsError:
                    existing = self.open(key)
                    if existing is not None:
                        return existing
                    # The file with this name cannot be opened, and no other code would replace it.
                    self._usage.remove(path)
        except OSError as exc:
            self.warn_of_write(exc)
        finally:
            self.drop(draft)
        return None

    def _reserve(self, draft: _DraftFile) -> None:
        """Reserve disk blocks: on a full disk, reading a mapped hole kills the process.

        The floor counts as used: it is left to programs that do not reserve their blocks.
        """
        try:
            self._check_room(draft.num_bytes)
            os.posix_fallocate(draft.fd, 0, draft.num_bytes)
        except OSError:
            self.drop(draft)
            raise

    def _check_room(self, num_bytes: int) -> None:
        if self._shortage(num_bytes):
            raise OSError(
                errno.ENOSPC, f"the rest of the disk of {self.root} is reserved for other programs"
            )

    def _shortage(self, num_bytes: int) -> int:
        """Return how many bytes must be freed so that `num_bytes` more leave the floor free."""
        try:
            disk = os.statvfs(self.root)
        except OSError:
            return 0  # it is unknown
        return max(0, num_bytes + self.floor_bytes - disk.f_bavail * disk.f_frsize)

    def warn_of_write(self, failure: OSError | None) -> None:
        """Log, once, that a file cannot be written."""
        self._warn_once("write", "the host cache cannot be written: %s", failure)

    def drop(self, draft: _DraftFile) -> None:
        """Remove `draft`, unless it has become an entry."""
        path, draft.path = draft.path, None
        if path is not None:
            self._usage.remove(path)

    def _path(self, key: Key) -> str:
        # No key contains a '+', so two keys never get the same name.
        return f"{self.root}/{self._prefix}{key.replace('/', '+')}"

    def _warn_once(self, topic: str, message: str, *args: object) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message, *args)


def open_host_cache(config: StoreConfig) -> HostCache:
    """Return the host cache in `config.host_cache_dir`, or in the best of the default folders.

    Raises:
        ConfigError: the folder `host_cache_dir` cannot be used, or no folder can be made.
    """

    def cache_in(root: Path) -> HostCache:
        return HostCache(root, config.host_cache_bytes, config.store_id())

    if config.host_cache_dir:
        return cache_in(Path(config.host_cache_dir))
    roots = default_roots(config.host_cache_bytes)
    refusal = ""
    for root in roots:
        try:
            cache = cache_in(root)
        except ConfigError as exc:
            refusal = refusal or str(exc)
            continue
        if refusal:
            logger.warning("%s. Until then the host cache is in %s", refusal, root)
        return cache
    root = temporary_root(roots[0].parent)
    logger.warning(
        "%s. Until then each process has its own host cache; this one is in %s", refusal, root
    )
    return cache_in(root)


def _is_sound(status: os.stat_result) -> bool:
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
    )
