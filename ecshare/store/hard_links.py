# SPDX-License-Identifier: Apache-2.0
"""A second name for a file that is open: one object, once on disk, in two folders."""

import os
import stat


def link_open_file(fd: int, name: str, folder: int) -> None:
    """Give the very file that is open as `fd` the name `name` in the open `folder`, too.

    Whatever became of its old name. Raises FileExistsError, or OSError: it cannot be, for there is
    no /proc, it is on another disk, or its last name is gone.
    """
    # Only with a folder's number does Python make the call that follows the link in /proc.
    os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)


def open_linkable(path: str, device: int) -> int | None:
    """Open the file at `path` if it may get a second name on `device`, else None.

    Only what nobody can change: a plain file of this user that is read-only. A file that is
    shortened while engines have it mapped kills them with SIGBUS, whoever did it. And only what
    nobody else may open: a lock of theirs on the file would be one on both its names.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(fd)
    if is_private(status) and status.st_dev == device:
        return fd
    os.close(fd)
    return None


def is_private(status: os.stat_result) -> bool:
    """Whether it is a plain file of this user that nobody may write and nobody else may open."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o277
    )
