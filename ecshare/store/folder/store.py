# SPDX-License-Identifier: Apache-2.0
"""Objects in a folder: local disk, tmpfs, NFS.

A write goes to a temporary file in the same folder, is flushed to the disk, and is then linked to
its name. `link` is atomic and refuses an existing name, also on NFS, so a reader sees a whole file
or none, and the first writer wins. A power cut may undo the newest names, which costs hits; it
leaves no name with half a file. Names that begin with a dot are temporary files, not objects.

Files and folders are made for this user alone, or for the group of the root folder, independently
of the umask. If other users can write to the folder too, they may put links into it. So writes and
removals open folder after folder by descriptor, and follow no link below the root.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ecshare.store.errors import (
    ConfigError,
    ObjectMissing,
    ObjectUnreadable,
    StoreBusy,
    StoreDenied,
    StoreUnavailable,
)
from ecshare.store.folder.access import check_access, make_root, open_to_group
from ecshare.store.keys import Key, is_safe_key
from ecshare.store.objects import (
    MOST_HASHED_BYTES,
    Buffer,
    ByteRange,
    ObjectInfo,
    ObjectStat,
    Sink,
    cut,
)
from ecshare.store.threads import Threads

logger = logging.getLogger(__name__)

TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.[0-9]+\.tmp")
"""The names that `temporary_name` returns."""

# Two threads read a big file faster than one, but not a file smaller than this.
_SPLIT_BYTES = 4 << 20
# The time that another thread costs. On a local disk, a look-up of a name takes a hundredth of it.
_SWITCH_S = 3e-4
_READ_BYTES = 1 << 18  # small enough to stay in a core's cache between the read and the write
# A full disk, or a file server that is slow or down for a while.
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT, errno.ESTALE}
# Errors of file systems without hard links: vfat, some SMB, some FUSE.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class TemporaryFile(NamedTuple):
    """A file that a writer is writing, or has left."""

    path: str
    """Below the root."""
    modified_s: float
    """Seconds since the epoch, by the clock of the file system."""


TemporaryFiles = list[TemporaryFile]


class _Level(NamedTuple):
    folders: list[str]
    objects: list[ObjectInfo]
    temporary: list[TemporaryFile]
    scan_s: float
    """The CPU time that the scan took."""


class DirectoryStore:
    """An ObjectStore below one folder. Any number of processes and hosts may share it."""

    def __init__(self, root: str, *, is_shared: bool = False) -> None:
        self._root = root
        self._is_shared = is_shared
        self.listing_s = 0.0
        """The CPU time of listings so far, in threads of the store."""
        self._threads = Threads("files", 8)
        # Saves wait until the disk has their bytes. Their own threads keep loads from waiting too.
        self._saving = Threads("files-save", 8)
        self._num_together = 0  # see _measured; 0: not measured yet
        self._links = True  # until the file system refuses a link; only ever set to False

    @classmethod
    def open(cls, folder: str, option: str, *, is_shared: bool = False) -> "DirectoryStore":
        """Make `folder` if necessary, and return a store in it.

        `is_shared`: the users of its group share it. An existing folder keeps its mode; a warning
        is logged if the mode admits other users, or excludes the group.

        Raises:
            ConfigError: the folder cannot be made or used; names `option`.
        """
        root = os.path.normpath(folder)
        try:
            make_root(root, is_shared)
            check_access(root, option, is_shared)
        except FileExistsError as exc:
            raise ConfigError(f"{option}: {root} is a file, a folder is needed") from exc
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or str(exc)
            raise ConfigError(
                f"{option}: the folder {root} cannot be made ({reason}); "
                "make it first, or choose one this user may write"
            ) from exc
        return cls(root, is_shared=is_shared)

    @property
    def creates_once(self) -> bool:
        """See ObjectStore. False without hard links, because a rename replaces an existing file."""
        return self._links

    @property
    def serves_many(self) -> bool:
        """See ObjectStore."""
        return False

    async def get(self, key: Key, sink: Sink) -> None:
        """See ObjectStore. One call opens and reads: switching threads costs more than the read."""
        await self._threads.run(self._get, key, sink)

    async def put(self, key: Key, body: Buffer, *, replace: bool = False) -> bool:
        """See ObjectStore."""
        if replace:
            return await self._saving.run(self._replace, key, body)
        return await self._saving.run(self._put, key, body)

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See ObjectStore."""
        if not self._num_together:
            self._num_together = await self._threads.run(self._measured)
        return await self._threads.each(self._exists, keys, self._num_together)

    async def stat(self, key: Key) -> ObjectStat:
        """See ObjectStore. The file is read once more, from the disk if the system allows that."""
        return await self._threads.run(self._stat, key)

    async def delete(self, keys: Sequence[Key]) -> None:
        """See ObjectStore."""
        await self._saving.each(self._delete, keys)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore."""
        async for each in self.list_into(prefix, []):
            yield each

    async def list_into(self, prefix: str, temporary: TemporaryFiles) -> AsyncIterator[ObjectInfo]:
        """Do `list`, and append the temporary files that it passes to `temporary`."""
        levels = [Key(prefix.removesuffix("/")) + "/" if prefix else ""]
        while levels:
            level = await self._threads.run(self._scan, levels.pop())
            self.listing_s += level.scan_s
            levels += level.folders
            temporary += level.temporary
            for each in level.objects:
                yield each

    async def remove_temporary(self, files: Sequence[TemporaryFile]) -> None:
        """Remove temporary files, as `delete` removes objects."""
        await self._saving.each(self._delete, [file.path for file in files])

    async def close(self) -> None:
        """See ObjectStore."""
        self._threads.close()
        self._saving.close()

    # What follows runs in the store's threads.

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _get(self, key: Key, sink: Sink) -> None:
        path = self._path(key)
        with self._own_errors(key):
            try:
                file = _File(path)
            except PermissionError as exc:
                if _may_read(os.path.dirname(path)):
                    raise ObjectUnreadable(f"{key} cannot be read: {exc.strerror}") from exc
                raise
            _check_kind(file.status, key)
        sink.begin(file.size)
        whole = ByteRange(0, file.size)
        if file.size < _SPLIT_BYTES:
            file.copy(sink, whole, key)
        else:
            halves = cut(whole, -(-file.size // 2))
            self._threads.both(*(partial(file.copy, sink, half, key) for half in halves))

    def _measured(self) -> int:
        """Return for how many keys `exists` takes less time in one thread than in two.

        The names are new, since a client of a network file system remembers others. The shortest
        time counts: Python's lock, which vLLM's threads hold, makes the others longer.
        """
        shortest_s = _SWITCH_S
        for _ in range(3):
            begun_s = time.perf_counter()
            os.path.lexists(self._path(temporary_name()))
            shortest_s = min(shortest_s, time.perf_counter() - begun_s)
        return max(1, int(_SWITCH_S / max(shortest_s, 1e-6)))

    def _exists(self, key: Key) -> bool:
        try:
            return self._has_file(key)
        except ObjectUnreadable:
            return False

    def _has_file(self, key: Key) -> bool:
        """Return whether there is a file under `key`.

        Raises:
            ObjectUnreadable: there is something else under `key`.
        """
        try:
            with self._own_errors(key):
                _check_kind(os.stat(self._path(key)), key)
        except ObjectMissing:
            return False
        return True

    def _stat(self, key: Key) -> ObjectStat:
        with self._own_errors(key):
            file = _File(self._path(key))
            _check_kind(file.status, key)
            return ObjectStat(file.size, file.md5() if file.size <= MOST_HASHED_BYTES else "")

    def _is_stored(self, key: Key) -> bool:
        """Return whether a put finds a file under `key`.

        Raises:
            ObjectUnreadable: there is something else, or a file that this user may not read.
        """
        if not self._has_file(key):
            return False
        path = self._path(key)
        if not os.access(path, os.R_OK) and _may_read(os.path.dirname(path)):
            raise ObjectUnreadable(f"{key} exists already, but cannot be read")
        return True

    @contextlib.contextmanager
    def _own_errors(self, key: str) -> Iterator[None]:
        """Map errors as `mapped_errors` does, and two more to ObjectUnreadable.

        They are: the object's path is a folder, or the path of its folder is a file. A file in the
        place of a folder higher up affects too many objects, and stays StoreUnavailable.
        """
        folder = os.path.dirname(self._path(key))
        with mapped_errors(key):
            try:
                yield
            except IsADirectoryError as exc:
                raise ObjectUnreadable(f"{key} is not a file") from exc
            except NotADirectoryError as exc:
                if folder != self._root and (os.path.isfile(folder) or os.path.islink(folder)):
                    raise ObjectUnreadable(f"{key} cannot exist: {folder} is no folder") from exc
                raise

    def _delete(self, key: str) -> None:
        with (
            contextlib.suppress(ObjectMissing),
            self._own_errors(key),
            self._folder_of(key) as folder,
        ):
            os.unlink(os.path.basename(key), dir_fd=folder)

    def _put(self, key: Key, body: Buffer) -> bool:
        if self._is_stored(key):  # avoids writing the body; `link` decides races
            return False
        with self._own_errors(key), self._folder_of(key, make=True) as folder:
            return self._put_copy(body, os.path.basename(key), folder, self._publish)

    def _replace(self, key: Key, body: Buffer) -> bool:
        with self._own_errors(key), self._folder_of(key, make=True) as folder:
            return self._put_copy(body, os.path.basename(key), folder, _rename)

    def _put_copy(
        self, body: Buffer, name: str, folder: int, publish: Callable[[str, str, int], bool]
    ) -> bool:
        # Left by a crash; a cleaner of the store removes it (see ecshare/upkeep).
        temporary = temporary_name()
        # Read-only, because objects never change, and readers may have mapped the file.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400, dir_fd=folder)
        try:
            _write(fd, body, 0o440 if self._is_shared else None)
            return publish(temporary, name, folder)
        finally:
            with contextlib.suppress(FileNotFoundError):  # if it was renamed, not linked
                os.unlink(temporary, dir_fd=folder)

    @contextlib.contextmanager
    def _folder_of(self, key: str, *, make: bool = False) -> Iterator[int]:
        """Open the folder of `key`. `make`: make its levels, but never the root itself.

        If the root is missing, its file system is no longer mounted, and writing under its path
        would fill the wrong disk.
        """
        path = self._root
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as exc:
            raise StoreUnavailable(f"the folder {path} is gone") from exc
        try:
            for level in key.split("/")[:-1]:
                path = f"{path}/{level}"
                inner = self._enter(level, fd, path, make=make)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _enter(self, level: str, folder: int, path: str, *, make: bool) -> int:
        """Open the folder `level` inside the open `folder`. `path`: its path, for errors."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            try:
                return os.open(level, flags, dir_fd=folder)
            except FileNotFoundError:
                if not make:
                    raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(level, 0o700, dir_fd=folder)
                if self._is_shared:
                    return open_to_group(os.open(level, flags, dir_fd=folder))
            return os.open(level, flags, dir_fd=folder)
        except OSError as exc:
            exc.filename = path
            if os.path.islink(path):
                exc.strerror = "Folders of a store may be no symbolic links"
            raise

    def _publish(self, temporary: str, name: str, folder: int) -> bool:
        if self._links:
            try:
                os.link(
                    temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
                )
            except FileExistsError:
                return False
            except OSError as exc:
                if exc.errno not in _NO_LINKS:
                    raise
                self._links = False
                logger.warning(
                    "%s does not support hard links (%s): objects are renamed into place, so "
                    "one may be written twice if two engines store it at the same time",
                    self._root,
                    exc.strerror,
                )
            else:
                return True
        return _rename(temporary, name, folder)

    def _scan(self, level: str) -> _Level:
        """Return what is in one level ("" or "ec/2/")."""
        begun_s = time.thread_time()
        scanned = _Level([], [], [], 0.0)
        try:
            with mapped_errors(level), os.scandir(f"{self._root}/{level}") as entries:
                for entry in entries:
                    key = level + entry.name
                    is_temporary = TEMPORARY.fullmatch(entry.name) is not None
                    if not is_temporary and not is_safe_key(key):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        scanned.folders.extend([] if is_temporary else [f"{key}/"])
                        continue
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISREG(status.st_mode):
                            continue
                        if is_temporary:
                            scanned.temporary.append(TemporaryFile(key, status.st_mtime))
                        else:
                            size = status.st_size
                            scanned.objects.append(ObjectInfo(Key(key), size, status.st_mtime))
        except ObjectMissing as exc:
            if not os.path.isdir(self._root):
                raise StoreUnavailable(f"the folder {self._root} is gone") from exc
        return scanned._replace(scan_s=time.thread_time() - begun_s)


def temporary_name() -> str:
    """Return a name that no other writer uses, on any host that shares the folder."""
    return f".{secrets.token_hex(8)}.{os.getpid()}.tmp"


@contextlib.contextmanager
def mapped_errors(key: str) -> Iterator[None]:
    """Turn the operating system's errors in the body into those of ecshare.

    Raises:
        ObjectMissing: there is no such file.
        StoreDenied: permissions, or a read-only file system, forbid it.
        StoreBusy: the fault may pass, e.g. a full disk.
        StoreUnavailable: any other error.
    """
    try:
        yield
    except FileNotFoundError as exc:
        raise ObjectMissing(f"no object {key}") from exc
    except StoreUnavailable:
        raise
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = " (users share a folder by folder_access)" if exc.errno == errno.EACCES else ""
            raise StoreDenied(f"{exc.strerror}: {exc.filename or key}{hint}") from exc
        kind = StoreBusy if exc.errno in _PASSING else StoreUnavailable
        raise kind(f"{exc.strerror or exc}: {exc.filename or key}") from exc


def _check_kind(status: os.stat_result, key: Key) -> None:
    """Check that it is a regular file.

    Raises:
        ObjectUnreadable: it is a folder, a pipe or the like.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ObjectUnreadable(f"{key} is not a file")


def _may_read(folder: str) -> bool:
    """Return whether this user may read `folder`. If not, all objects in it are refused."""
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return False
    return True


class _File:
    """A file open for reading. The last reference closes it.

    A thread may outlive a cancelled call and hold that reference. If the descriptor were closed
    earlier, the thread would read from the next file with the same number.
    """

    def __init__(self, path: str) -> None:
        # O_NONBLOCK: opening must not hang if another user has put a pipe in the folder.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.status = os.fstat(self._fd)
        self.size = self.status.st_size

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def copy(self, sink: Sink, byte_range: ByteRange, key: Key) -> None:
        """Write the bytes of `byte_range` to `sink`."""
        start, stop = byte_range.start, byte_range.stop
        buffer = _own_buffer()
        while start < stop:
            with mapped_errors(key):
                n = os.preadv(self._fd, [buffer[: stop - start]], start)
            if n == 0:
                raise StoreUnavailable(f"{key} became shorter while it was read")
            sink.write(start, buffer[:n])
            start += n

    def md5(self) -> str:
        """Return the MD5 of its content, read from the disk and not the page cache if possible."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.md5(usedforsecurity=False)
        at = 0
        while piece := os.pread(self._fd, _READ_BYTES, at):
            digest.update(piece)
            at += len(piece)
        return digest.hexdigest()


_buffers = threading.local()


def _own_buffer() -> memoryview:
    """Return this thread's read buffer. It is reused, because new pages cost more than the read."""
    buffer: memoryview | None = getattr(_buffers, "read", None)
    if buffer is None:
        buffer = _buffers.read = memoryview(bytearray(_READ_BYTES))
    return buffer


def _write(fd: int, body: Buffer, mode: int | None) -> None:
    """Write all of `body`, flush it to the disk, and close `fd`. `mode`: if not None, set it."""
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        rest = memoryview(body).cast("B")
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(temporary: str, name: str, folder: int) -> bool:
    """Rename atomically. A file that exists under `name` is replaced by the same bytes."""
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    return True
