# SPDX-License-Identifier: Apache-2.0
"""Declares the limit of a process for one folder of the host cache, and reads those of others.

Each process evicts down to its own limit, so the smallest counts for all. So that others can warn
of that, a process holds a shared `flock` on `.limits/<bytes>` while it uses the folder. The kernel
releases it when the process ends, in every case.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from ecshare.store.hostcache.usage import unlock_and_close

_NAME = ".limits"


def declare_limit(root: Path, limit_bytes: int) -> int | None:
    """Return a descriptor of a file that declares this limit while it is open.

    None: the file cannot be made or locked.
    """
    with contextlib.suppress(OSError):
        folder = root / _NAME
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / str(limit_bytes), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd
    return None


def declared_limits(root: Path) -> set[int]:
    """Return the limits, in bytes, of all processes that use the folder now.

    Files of processes that have ended are removed.
    """
    found = set()
    with contextlib.suppress(OSError):
        for path in (root / _NAME).iterdir():
            if path.name.isdecimal() and _is_held(path):
                found.add(int(path.name))
    return found


def _is_held(path: Path) -> bool:
    """Return whether a process has locked the file. If none has, remove the file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        unlock_and_close(fd)
    return False
