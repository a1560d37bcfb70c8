# SPDX-License-Identifier: Apache-2.0
"""Single flight: one process of this host fetches an object for all that wait for it.

A claim is a lock on one byte of a file, at an offset that is a hash of the key. It is an open file
description lock of the kernel. So threads exclude each other as processes do, the lock ends with
its holder in every case, and nothing must be cleaned up. If two keys have the same offset (one in
2^62), they only wait for each other.
"""

import errno
import fcntl
import hashlib
import os
import struct
from types import TracebackType
from typing import Self

_FLOCK = struct.Struct("hhqqi4x")  # of Linux, 64 bits: type, whence, start, length, pid
_TAKEN = {errno.EAGAIN, errno.EACCES}


class Claim:
    """The exclusive right to fetch one key, until `release` or the end of the process."""

    def __init__(self, fd: int, place: int) -> None:
        """Made by `take`. `fd` -1: a claim that excludes nobody."""
        self._fd = fd
        self._place = place

    @classmethod
    def take(cls, path: str, name: str) -> "Claim | None":
        """Claim `name` in the file `path`, which is made if necessary. None: it is claimed already.

        Raises:
            OSError: the file cannot be used.
        """
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 2
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _lock(fd, fcntl.F_WRLCK, place)
        except OSError as exc:
            os.close(fd)
            if exc.errno in _TAKEN:
                return None
            raise
        return cls(fd, place)

    def release(self) -> None:
        """Let others fetch it. The second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Not by closing alone: a fork holds the same opening.
            _lock(fd, fcntl.F_UNLCK, self._place)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def _lock(fd: int, kind: int, place: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
