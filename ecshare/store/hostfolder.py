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


SHM = Path("/dev/shm")  # noqa: S108
# A container's own is 64 MB: one large picture and a few small ones. Below this, disk is better.
_ENOUGH_BYTES = 1 << 30
_SHARE = 0.9  # of a disk that a cache may take


def default_root(wanted_bytes: int) -> Path:
    """Return the folder for a cache of `wanted_bytes`: `ecshare-<uid>` in /dev/shm.

    Where that is missing, or holds neither `wanted_bytes` nor 1 GiB: in the folder for temporary
    files, or the user's cache folder; else in the largest of the three. All processes of a user
    get the same answer: it rests on what disks are there, not on what they hold.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [SHM, Path(tempfile.gettempdir()), Path(user_cache)]
    sizes = {place: _size(place) for place in places}
    enough = min(wanted_bytes, _ENOUGH_BYTES)
    chosen = next((place for place in places if sizes[place] >= enough), None)
    if chosen is None:
        chosen = max(places, key=lambda place: sizes[place])
    root = chosen / f"ecshare-{os.geteuid()}"
    if chosen != SHM:
        logger.warning(
            "/dev/shm has room for %d MB only: the host cache goes to %s, which is slower "
            "(in a container, give it a larger --shm-size; or name a folder with host_cache_dir)",
            sizes[SHM] // 1_000_000,
            root,
        )
    return root


def fitting(root: Path, limit_bytes: int) -> int:
    """Return `limit_bytes`, or less: better a small cache than one that runs full."""
    fits = _size(root)
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


def _size(folder: Path) -> int:
    """How much a cache may take of the disk below `folder`, full or not. 0: none, or unknown."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return 0
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return int(disk.f_blocks * disk.f_frsize * _SHARE)


def make_private(root: Path) -> None:
    """Make `root` for us alone, or check that it is. ConfigError: it is not."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        check_private(root)
    except OSError as exc:
        raise ConfigError(
            f"host_cache_dir: {root} cannot be made ({exc.strerror}); "
            "name a folder this user may write"
        ) from exc


def check_private(root: Path) -> None:
    """Check that `root`, which is there, is for us alone. ConfigError: it is not."""
    status = root.lstat()
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
