# SPDX-License-Identifier: Apache-2.0
"""Single flight: one process of this host fetches an object for all that wait for it.

A claim is a lock on one byte of a file, at an offset that is a hash of the key. It is an open file
description lock of the kernel: it ends with its process in every case, and nothing must be cleaned
up. If two keys have the same offset (one in 2^62), they only wait for each other.
"""

import errno
import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

_FLOCK = struct.Struct("hhqqi4x")  # of Linux, 64 bits: type, whence, start, length, pid
_TAKEN = {errno.EAGAIN, errno.EACCES}


class Claims:
    """All claims that one host cache hands out.

    They share one opening of the file, so that hundreds of them cost one descriptor. Locks of one
    opening do not exclude each other; a set of places does. The opening ends with the last claim:
    the file may have been removed meanwhile, and others lock the new one. Any thread.
    """

    def __init__(self, path: str) -> None:
        """`path`: of the file with the locks, which is made if necessary."""
        self._path = path
        self._fd = -1
        self._held: set[int] = set()
        # A claim may be let go by the garbage collector, in the middle of `take`.
        self._lock = threading.RLock()

    def take(self, name: str) -> "Claim | None":
        """Claim `name`. None: it is claimed already.

        Raises:
            OSError: the file cannot be used.
        """
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 2
        with self._lock:
            if place in self._held:
                return None
            self._held.add(place)
            try:
                if self._fd < 0:
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                    self._fd = os.open(self._path, flags, 0o600)
                _lock(self._fd, fcntl.F_WRLCK, place)
            except OSError as exc:
                self._forget(place)
                if exc.errno in _TAKEN:
                    return None
                raise
        return Claim(partial(self._release, place))

    def _release(self, place: int) -> None:
        with self._lock:
            # Not by closing alone: a fork holds the same opening.
            _lock(self._fd, fcntl.F_UNLCK, place)
            self._forget(place)

    def _forget(self, place: int) -> None:
        self._held.discard(place)
        if not self._held and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class Claim:
    """The exclusive right to fetch one key, until `release` or the end of the process."""

    def __init__(self, let_go: Callable[[], object] | None = None) -> None:
        """Made by `Claims.take`. Without `let_go`: a claim that excludes nobody."""
        self._let_go = let_go

    def release(self) -> None:
        """Let others fetch it. The second call does nothing."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()

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
