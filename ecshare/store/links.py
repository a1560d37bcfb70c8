# SPDX-License-Identifier: Apache-2.0
"""A second name for a file that is open: one object, once on disk, in two folders."""

import os
import stat


def link_open_file(fd: int, path: str) -> None:
    """Give the very file that is open as `fd` the name `path`, whatever became of its old name.

    Raises FileExistsError, or OSError: it cannot be, for there is no /proc, it is on another disk,
    or its last name is gone.
    """
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Only with a folder's number does Python make the call that follows the link in /proc.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def open_linkable(path: str, device: int) -> int | None:
    """Open the file at `path` if it may get a second name on `device`, else None.

    Only what nobody can change: a plain file of this user that is read-only. A file that is
    shortened while engines have it mapped kills them with SIGBUS, whoever did it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(fd)
    if (
        stat.S_ISREG(status.st_mode)
        and status.st_dev == device
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o222
    ):
        return fd
    os.close(fd)
    return None
