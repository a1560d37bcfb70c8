# SPDX-License-Identifier: Apache-2.0
"""Reads and writes tar files that hold objects under their keys.

Only regular files of the ustar format are written and read: our keys fit into its names, and our
objects into its sizes. So every header has the same size, and a hostile tar cannot choose it. This
module checks only where members are; the caller bounds and verifies their bytes.

A tar is written as FILE.part, and renamed when it is complete. An interrupted part is continued
after its last complete member.
"""

import contextlib
import fcntl
import os
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ecshare.store.errors import ConfigError, ObjectCorrupt
from ecshare.store.objects import Buffer

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_LATEST_S = 8**11 - 1  # the largest time that a ustar header can hold
# Headers that describe the next member. We write none, and skip them with their contents.
_EXTENSIONS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME)


class Member(NamedTuple):
    """A member of a tar. All that is checked is that the tar has all of its bytes."""

    name: str
    num_bytes: int
    offset: int
    is_file: bool
    """False: a folder, a link, a device or the like."""


class Truncated(ObjectCorrupt):
    """The tar is truncated."""


def members(fd: int) -> Iterator[Member]:
    """Yield the members of the tar that is open as `fd`.

    Raises:
        Truncated: the tar is truncated; the members so far are complete.
        ObjectCorrupt: the file is not a tar, or not from this byte on.
    """
    total, at = os.fstat(fd).st_size, 0
    while True:
        header = os.pread(fd, _BLOCK, at)
        if len(header) < _BLOCK:
            raise Truncated(f"the tar is cut off at byte {total:,}")
        if header == bytes(_BLOCK):
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            raise ObjectCorrupt(f"no tar header at byte {at:,}: {exc}") from exc
        has_bytes = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
        num_bytes = info.size if has_bytes or info.type in _EXTENSIONS else 0
        at += _BLOCK
        if num_bytes < 0:
            raise ObjectCorrupt(f"no tar header at byte {at - _BLOCK:,}: a negative size")
        end = at + num_bytes + -num_bytes % _BLOCK
        if end > total:
            raise Truncated(f"the tar is cut off at byte {total:,}")
        if info.type not in _EXTENSIONS:
            yield Member(info.name, num_bytes, at, info.isreg())
        at = end


def open_tar(path: str) -> int:
    """Return a descriptor of the tar, which the caller closes.

    Raises:
        ConfigError: `path` cannot be read, or is not a file.
    """
    try:
        # O_NONBLOCK: a pipe must not hang.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {getattr(exc, 'strerror', exc)}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path}: it is not a file")
    return fd


class TarWriter:
    """Appends members to a tar. Any thread; `close` waits for the calls of other threads."""

    def __init__(self, path: str) -> None:
        """Start the tar that `finish` puts at `path`, or continue its part.

        Raises:
            ConfigError: `path` exists, its part cannot be created, or another process writes it.
        """
        self._path = path
        self.part = f"{path}.part"
        """The path of the file until `finish`."""
        if os.path.lexists(path):
            raise ConfigError(f"{path}: it exists; remove it, or name another file")
        try:
            # Only this user may read it: prompts can be recovered from KV.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self.part, flags, 0o600)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{self.part}: {getattr(exc, 'strerror', exc)}") from exc
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._fd)
            raise ConfigError(f"{self.part}: another process writes it") from exc
        self._end = 0
        self._is_checked = False
        """Whether the part is empty or the beginning of a tar."""
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all complete members."""
        return self._end

    def members(self) -> Iterator[Member]:
        """Yield the complete members of the part; further ones follow the last of them.

        Call this first, and exhaust it.

        Raises:
            ConfigError: the part is not the beginning of a tar.
        """
        try:
            for member in members(self._fd):
                yield member
                self._end = member.offset + member.num_bytes + -member.num_bytes % _BLOCK
        except Truncated:
            pass
        except ObjectCorrupt as exc:
            raise ConfigError(f"{self.part}: {exc}; remove it to begin anew") from exc
        os.ftruncate(self._fd, self._end)
        self._is_checked = True

    def add(self, name: str, body: Buffer, modified_s: float) -> None:
        """Append a file.

        Raises:
            OSError: the file cannot be written, e.g. because the disk is full.
        """
        view = memoryview(body)
        info = tarfile.TarInfo(name)
        info.size = len(view)
        with contextlib.suppress(ValueError, OverflowError):  # NaN or infinite
            info.mtime = min(max(0, int(modified_s)), _LATEST_S)
        with self._lock:
            at = self._end
            for piece in (info.tobuf(tarfile.USTAR_FORMAT), view, bytes(-len(view) % _BLOCK)):
                at = self._write(piece, at)
            self._end = at

    def finish(self) -> None:
        """Complete the tar, and rename its part to its path.

        Raises:
            OSError: the file cannot be written.
        """
        self._write(_END, self._end)
        os.fsync(self._fd)
        os.rename(self.part, self._path)

    def close(self) -> None:
        """Close the file, and remove an empty part."""
        with self._lock:
            if self._is_checked and not self._end:
                Path(self.part).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _write(self, piece: Buffer, at: int) -> int:
        view = memoryview(piece)
        while view:
            num = os.pwrite(self._fd, view, at)
            view, at = view[num:], at + num
        return at
