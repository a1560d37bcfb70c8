# SPDX-License-Identifier: Apache-2.0
"""Objects in a folder: local disk, tmpfs, NFS.

A write goes to a temporary file beside its goal, is flushed to the disk, and is then linked to its
name. `link` is atomic and refuses a name that is taken, also on NFS, so that a reader sees a whole
file or none and the first writer wins. Names that begin with a dot are ours and are no objects.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterator, Sequence

from ecshare.store.buffers import fresh_buffer
from ecshare.store.errors import ConfigError, ObjectMissing, StoreDenied, StoreUnavailable
from ecshare.store.keys import check_key, is_safe_key
from ecshare.store.objects import Buffer, ObjectInfo
from ecshare.store.threads import Threads

logger = logging.getLogger(__name__)

_Level = tuple[list[str], list[ObjectInfo]]  # folders and objects

# One big file is read faster by two threads than by one; below this it does not pay.
_SPLIT_BYTES = 4 << 20
# Filesystems without hard links (vfat, some SMB, some FUSE) say so in one of these ways.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class Directory:
    """An ObjectStore below one folder. Any number of processes and hosts may share it."""

    def __init__(self, root: str, io_timeout_s: float) -> None:
        self._root = root
        self._threads = Threads("files", 8, io_timeout_s)
        self._links = True  # until the filesystem says otherwise; only ever set to False

    @classmethod
    def open(cls, folder: str, io_timeout_s: float, option: str) -> "Directory":
        """Make `folder` if need be. ConfigError, naming `option`, when that is impossible."""
        root = os.path.normpath(folder)
        try:
            os.makedirs(root, exist_ok=True)
        except FileExistsError as exc:
            raise ConfigError(f"{option}: {root} is a file, a folder is needed") from exc
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or str(exc)
            raise ConfigError(
                f"{option}: the folder {root} cannot be made ({reason}); "
                "make it first, or choose one this user may write"
            ) from exc
        return cls(root, io_timeout_s)

    async def get(self, key: str) -> memoryview:
        """See ObjectStore. The bytes are a copy: nobody can change or shorten them later."""
        file = await self._threads.run(self._open, key)
        if file.size == 0:
            return memoryview(b"")
        body = fresh_buffer(file.size)
        half = file.size // 2 if file.size >= _SPLIT_BYTES else file.size
        spans = [(0, half), (half, file.size)] if half < file.size else [(0, half)]
        sizes = await self._threads.each(
            lambda span: file.read_into(body[span[0] : span[1]], span[0], key), spans
        )
        # Somebody may have shortened the file meanwhile: hand over what there was.
        return body[: sum(sizes)].toreadonly()

    async def put(self, key: str, body: Buffer) -> bool:
        """See ObjectStore."""
        return await self._threads.run(self._put, key, body)

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """See ObjectStore."""
        return await self._threads.each(self._exists, keys)

    async def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""
        await self._threads.each(self._delete, keys)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore."""
        levels = [check_key(prefix.removesuffix("/")) + "/" if prefix else ""]
        while levels:
            folders, found = await self._threads.run(self._scan, levels.pop())
            levels += folders
            for each in found:
                yield each

    async def close(self) -> None:
        """See ObjectStore."""
        self._threads.close()

    # What follows runs in the store's threads.

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _open(self, key: str) -> "_File":
        with mapped_errors(key):
            file = _File(self._path(key))
            if not stat.S_ISREG(file.status.st_mode):
                raise StoreUnavailable(f"{key} is not a file in {self._root}")
            return file

    def _exists(self, key: str) -> bool:
        try:
            with mapped_errors(key):
                return stat.S_ISREG(os.stat(self._path(key)).st_mode)
        except ObjectMissing:
            return False

    def _delete(self, key: str) -> None:
        with contextlib.suppress(ObjectMissing), mapped_errors(key):
            os.unlink(self._path(key))

    def _put(self, key: str, body: Buffer) -> bool:
        path = self._path(key)
        if self._exists(key):  # saves writing the body; `link` decides races
            return False
        folder = os.path.dirname(path)
        # Unique on every host that shares the folder; a crash leaves it, a sweep removes it.
        temporary = f"{folder}/.{secrets.token_hex(8)}.{os.getpid()}.tmp"
        with mapped_errors(key):
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileNotFoundError:
                self._make_folders(key)
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                _write(fd, body)
                return self._publish(temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):  # renamed, not linked
                    os.unlink(temporary)

    def _make_folders(self, key: str) -> None:
        """Make the levels of `key` below the root, and never the root itself.

        A root that is gone is a file system that is no longer mounted: writing in its place would
        fill the wrong disk.
        """
        folder = self._root
        if not os.path.isdir(folder):
            raise StoreUnavailable(f"the folder {folder} is gone")
        for level in key.split("/")[:-1]:
            folder = f"{folder}/{level}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)

    def _publish(self, temporary: str, path: str) -> bool:
        if self._links:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as exc:
                if exc.errno not in _NO_LINKS:
                    raise
                self._links = False
                logger.warning(
                    "%s takes no hard links (%s): objects are renamed into place, which may write "
                    "one twice when two engines store it at the same moment",
                    self._root,
                    exc.strerror,
                )
        if not self._links:
            # Replaces what came meanwhile by the same bytes, atomically.
            os.rename(temporary, path)
        _sync_folder(os.path.dirname(path))
        return True

    def _scan(self, level: str) -> _Level:
        """Return the folders and the objects of one level ("" or "ec/1/")."""
        folders, found = [], []
        try:
            with mapped_errors(level), os.scandir(f"{self._root}/{level}") as entries:
                for entry in entries:
                    key = level + entry.name
                    if not is_safe_key(key):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{key}/")
                        continue
                    with contextlib.suppress(FileNotFoundError):  # removed since
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append(ObjectInfo(key, status.st_size, status.st_mtime))
        except ObjectMissing as exc:
            if not os.path.isdir(self._root):
                raise StoreUnavailable(f"the folder {self._root} is gone") from exc
        return folders, found


@contextlib.contextmanager
def mapped_errors(key: str) -> Iterator[None]:
    """Turn what the operating system says into the errors of ecshare."""
    try:
        yield
    except FileNotFoundError as exc:
        raise ObjectMissing(f"no object {key}") from exc
    except StoreUnavailable:
        raise
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreDenied(f"{exc.strerror}: {exc.filename or key}") from exc
        raise StoreUnavailable(f"{exc.strerror or exc}: {exc.filename or key}") from exc


class _File:
    """A file open for reading. The last thread that holds it closes it.

    That thread may outlive the call that asked for it and timed out: closing the number earlier
    would let it read from whatever file gets the number next.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self.status = os.fstat(self._fd)
        self.size = self.status.st_size

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read_into(self, target: memoryview, offset: int, key: str) -> int:
        """Fill `target` from byte `offset`; return how much there was."""
        done = 0
        with mapped_errors(key):
            while done < len(target):
                n = os.preadv(self._fd, [target[done:]], offset + done)
                if n == 0:
                    break
                done += n
        return done


def _write(fd: int, body: Buffer) -> None:
    """Write all of `body`, to the disk, and close `fd`."""
    try:
        rest = memoryview(body).cast("B")
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder: str) -> None:
    """Make a new name survive a power cut. Some network file systems refuse; their server cares."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
