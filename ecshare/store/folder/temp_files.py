# SPDX-License-Identifier: Apache-2.0
"""Removes temporary files of killed writers from a folder of objects."""

import contextlib
import logging
import os
import random
import stat
import time
from collections.abc import Iterator

from ecshare.store.folder.store import TEMPORARY, temporary_name

logger = logging.getLogger(__name__)

# No write takes a day: on the slowest disk its writer would have timed out earlier.
_MIN_AGE_S = 86_400.0
# Reading a folder blocks the process's other threads, and loads a file server. After each folder,
# the sweep sleeps this many times as long.
_REST = 9
# A sweep may end before it has read all folders of a store with hundreds of millions of objects. It
# reads them in random order, so that each is read at some time.
LONGEST_S = 1800.0
MARK = ".swept"
"""A file whose age is the time since the last sweep."""


def sweep(root: str) -> int:
    """Remove temporary files below `root` that are older than a day; return how many.

    Do nothing if another process has swept today. Ages are measured by the clock of the disk, which
    may be a server's. Never raises OSError. Call it in a thread of its own: it runs slowly on
    purpose, and may take half an hour.
    """
    num_removed = 0
    with contextlib.suppress(OSError):
        now_s = _disk_time_s(root)
        if not _is_due(root, now_s):
            return 0
        for path, status in _files(root):
            if TEMPORARY.fullmatch(os.path.basename(path)) and _is_old(status, now_s):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    num_removed += 1
    if num_removed:
        logger.info("removed %d temporary files of killed writers from %s", num_removed, root)
    return num_removed


def _is_old(status: os.stat_result, now_s: float) -> bool:
    return stat.S_ISREG(status.st_mode) and now_s - status.st_mtime > _MIN_AGE_S


def _disk_time_s(root: str) -> float:
    """Return the time by the clock of the file system."""
    path = f"{root}/{temporary_name()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        os.unlink(path)


def _is_due(root: str, now_s: float) -> bool:
    """Return whether no process has swept today. If so, record that this process sweeps."""
    fd = os.open(f"{root}/{MARK}", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(fd)
        is_new = status.st_size == 0
        if is_new:
            # Every user who may write to the folder may sweep it.
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, 0o600 | os.stat(root).st_mode & 0o020)
        if not is_new and 0 <= now_s - status.st_mtime < _MIN_AGE_S:
            return False
        os.pwrite(fd, b"ecshare\n", 0)
        return True
    finally:
        os.close(fd)


def _files(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the hidden files below `root`, for LONGEST_S at most. Follow no links."""
    folders = [root]
    end_s = time.perf_counter() + LONGEST_S
    while folders and time.perf_counter() < end_s:
        folder = folders.pop(random.randrange(len(folders)))
        started_s = time.perf_counter()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.startswith("."):
                    yield entry.path, entry.stat(follow_symlinks=False)
        time.sleep(_REST * (time.perf_counter() - started_s))
