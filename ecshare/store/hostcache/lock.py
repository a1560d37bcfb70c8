# SPDX-License-Identifier: Apache-2.0
"""A lock that the processes of one host share, and that none of them can keep by being stopped.

It is a `flock` on a small file. It goes with its holder, however that ends; but a holder may also
be stopped by a debugger, a frozen container or a dead disk. Whoever has waited too long therefore
puts another file in its place, with the same content: the stopped one holds the lock of a file
that nobody opens any more, and does one step beside the others when it goes on.
"""

import contextlib
import fcntl
import os
import secrets
import time

_PAUSE_S = 0.0005
_MAX_BYTES = 64


class HostLock:
    """The exclusive lock of the file `path`, which is made if need be.

    Safe from several threads and processes. All methods raise OSError: the file cannot be used.
    """

    def __init__(self, path: str, patience_s: float) -> None:
        """`patience_s`: how long a holder may take who does not write to the file, nor touch it."""
        self._path = path
        self._patience_s = patience_s

    def take(self) -> int:
        """Wait for the lock; return the open file, which the caller gives to `unlock_and_close`."""
        patience: Patience | None = None
        while (fd := self.attempt()) is None:
            patience = patience or self.watch()
            if patience.is_over() and (fd := self.take_over()) is not None:
                return fd
            time.sleep(_PAUSE_S)
        return fd

    def attempt(self) -> int | None:
        """As `take`, at once. None: somebody has it."""
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

    def watch(self) -> "Patience":
        """Return what tells how long somebody has waited for this lock, from now on."""
        return Patience(self._path, self._patience_s)

    def take_over(self) -> int | None:
        """Take the lock from whoever does not let go of it. None: it has changed hands meanwhile.

        The file is as `attempt` returns it.
        """
        stuck = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            temporary = f"{os.path.dirname(self._path)}/.{secrets.token_hex(8)}.tmp"
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.write(fd, os.pread(stuck, _MAX_BYTES, 0))
                if _has_name(stuck, self._path):
                    os.rename(temporary, self._path)
                    return fd
                os.unlink(temporary)
            except OSError:
                unlock_and_close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            unlock_and_close(fd)
            return None
        finally:
            os.close(stuck)


class Patience:
    """How long somebody has waited for one holder of a lock: a sign of life begins it anew."""

    def __init__(self, path: str, patience_s: float) -> None:
        """Made by `HostLock.watch`."""
        self._path = path
        self._patience_s = patience_s
        self._seen: tuple[int, int] | None = None
        self._until_s = 0.0

    def is_over(self) -> bool:
        """Whether the file has been the same for too long: none put in its place, none written."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        seen = status.st_ino, status.st_mtime_ns
        if seen != self._seen:
            self._seen, self._until_s = seen, time.monotonic() + self._patience_s
            return False
        return time.monotonic() > self._until_s


def unlock_and_close(fd: int) -> None:
    """Let go of the lock. Not by closing alone: a map holds a duplicate of the descriptor, and so
    may a fork."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _has_name(fd: int, path: str) -> bool:
    """Whether the file open as `fd` is still the one at `path`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False
