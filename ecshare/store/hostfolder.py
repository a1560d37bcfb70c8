# SPDX-License-Identifier: Apache-2.0
"""Where the host cache lies: a folder that is this user's alone."""

import contextlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from ecshare.store.errors import ConfigError

logger = logging.getLogger(__name__)


def default_root() -> Path:
    """Return /dev/shm/ecshare-<uid>, or a temporary folder where there is no /dev/shm."""
    name = f"ecshare-{os.geteuid()}"
    shm = Path("/dev/shm")  # noqa: S108
    if os.access(shm, os.W_OK | os.X_OK):
        return shm / name
    root = Path(tempfile.gettempdir()) / name
    logger.warning("no writable /dev/shm here: the host cache goes to %s", root)
    return root


def make_private(root: Path) -> None:
    """Make `root` for us alone, or check that it is. ConfigError: it is not."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = root.lstat()
    except OSError as exc:
        raise ConfigError(
            f"host_cache_dir: {root} cannot be made ({exc.strerror}); "
            "name a folder this user may write"
        ) from exc
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        raise ConfigError(f"host_cache_dir: {root} is {kind}; name a real folder")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"host_cache_dir: {root} belongs to another user; name a folder of your own"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"host_cache_dir: others may enter {root}, and engines trust what lies there; "
            f"run: chmod 700 {root}"
        )


def fitting(root: Path, limit_bytes: int) -> int:
    """A container's /dev/shm is often 64 MB: better a small cache than one that runs full."""
    disk = os.statvfs(root)
    fits = int(disk.f_blocks * disk.f_frsize * 0.9)
    if not 0 < fits < limit_bytes:
        return limit_bytes
    logger.warning(
        "host_cache_bytes is %d, but %s has room for %d: using that "
        "(in a container, give it a larger --shm-size)",
        limit_bytes,
        root,
        fits,
    )
    return fits
