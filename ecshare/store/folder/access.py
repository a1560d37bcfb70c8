# SPDX-License-Identifier: Apache-2.0
"""Makes and checks the folder of a store, for one user or for the folder's group."""

import logging
import os
import stat

logger = logging.getLogger(__name__)


def make_root(path: str, is_shared: bool) -> None:
    """Make the folder `path`, and its missing parents.

    Raises:
        OSError: it cannot be made.
        ValueError: the path contains a null character.
    """
    if os.path.isdir(path):
        return
    if not os.path.lexists(parent := os.path.dirname(path)):
        make_root(parent, is_shared)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if os.path.isdir(path):  # another process has made it meanwhile
            return
        raise
    if is_shared:
        os.close(open_to_group(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)))


def open_to_group(fd: int) -> int:
    """Let the group use the open folder, and own all that is made in it. Return `fd`."""
    try:
        os.fchmod(fd, 0o2770)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_access(root: str, option: str, is_shared: bool) -> None:
    """Warn if the mode of `root` differs from the options. It may be so on purpose."""
    mode = os.stat(root).st_mode
    is_open = mode & (0o007 if is_shared else 0o077)
    if is_open:
        logger.warning(
            "%s: other users may %s %s (mode %o), where prompts are stored; run: chmod -R %s %s%s",
            option,
            "write to" if is_open & 0o022 else "read",
            root,
            stat.S_IMODE(mode),
            "o=" if is_shared else "go=",
            root,
            "" if is_shared else "; or set folder_access to 'group' if you share it",
        )
    if is_shared and mode & 0o2070 != 0o2070:
        logger.warning(
            "%s: folder_access is 'group', but the group cannot use all of %s (mode %o); "
            "run: chgrp GROUP %s && chmod 2770 %s",
            option,
            root,
            stat.S_IMODE(mode),
            root,
            root,
        )
