# SPDX-License-Identifier: Apache-2.0
"""Single flight: one process of this host fetches an object for all that wait for it.

A claim is a lock on one byte of a file, at an offset that is a hash of the key. It is an open file
description lock: the kernel releases it when the process ends, in every case, so nothing must be
cleaned up. If two keys have the same offset (one in 2^62), they only wait for each other.
"""

import errno
import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Callable
from functools import partial

_FLOCK = struct.Struct("hhqqi4x")  # on 64-bit Linux: type, whence, start, length, pid
_TAKEN = {errno.EAGAIN, errno.EACCES}


class Claims:
    """Holds all claims of one host cache.

    They share one open file, so that hundreds of them cost one descriptor. Locks of one open file
    do not exclude each other, so a set of offsets does. The file is closed with the last claim: it
    may have been removed meanwhile, and then other processes lock the new one. Any thread.
    """

    def __init__(self, path: str) -> None:
        """Open nothing yet. `path`: of the file with the locks, which is made if necessary."""
        self._path = path
        self._fd = -1
        self._held: set[int] = set()
        # Reentrant, because the garbage collector may release a claim in the middle of `take`.
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
                self._drop(place)
                if exc.errno in _TAKEN:
                    return None
                raise
        return Claim(partial(self._release, place))

    def _release(self, place: int) -> None:
        with self._lock:
            # Closing would not unlock: a forked process has the same open file.
            _lock(self._fd, fcntl.F_UNLCK, place)
            self._drop(place)

    def _drop(self, place: int) -> None:
        self._held.discard(place)
        if not self._held and self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class Claim:
    """The exclusive right to fetch one key, until `release` or the end of the process."""

    def __init__(self, unlock: Callable[[], object] | None = None) -> None:
        """Hold the lock that `unlock` releases; see `Claims.take`. None: hold no lock."""
        self._unlock = unlock

    def release(self) -> None:
        """Let other processes claim the key. The second call does nothing."""
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()

    def __del__(self) -> None:
        self.release()


def _lock(fd: int, kind: int, place: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
