# SPDX-License-Identifier: Apache-2.0
"""Where the host cache lies: a folder that is this user's alone."""

import atexit
import contextlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from ecshare.store.errors import ConfigError

logger = logging.getLogger(__name__)


SHM = Path("/dev/shm")  # noqa: S108
# A container's own is 64 MB: one large picture and a few small ones. Below this, disk is better.
_ENOUGH_BYTES = 1 << 30
_SHARE = 0.9  # of a disk that a cache may take
_OTHER_NAMES = 8


def default_root(wanted_bytes: int) -> Path:
    """Return the first of `default_roots` that is this user's alone, or not there yet.

    The first of all, where none is. Makes nothing.
    """
    roots = default_roots(wanted_bytes)
    return next((root for root in roots if _is_free(root)), roots[0])


def default_roots(wanted_bytes: int) -> list[Path]:
    """Return the folders for a cache of `wanted_bytes`, the best one first.

    That is `ecshare-<uid>` in /dev/shm. Where /dev/shm is missing, or holds neither `wanted_bytes`
    nor 1 GiB: in the folder for temporary files, or the user's cache folder; else in the largest of
    the three. All processes of a user get the same answer: it rests on what disks are there, not on
    what they hold. The others are for when somebody else has made something under that name: the
    same with a number, and a folder in the user's cache folder, where nobody else can.
    """
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = f"ecshare-{os.geteuid()}"
    best = _best_place(wanted_bytes, user_cache) / name
    others = [best.with_name(f"{name}-{n}") for n in range(2, 2 + _OTHER_NAMES)]
    return [best, *others, user_cache / name]


def temporary_root(place: Path) -> Path:
    """Make a folder for this process alone, which is removed when it ends of itself.

    In `place` if possible. ConfigError: it cannot be made anywhere.
    """
    for parent in (place, None):
        with contextlib.suppress(OSError):
            root = tempfile.mkdtemp(prefix=f"ecshare-{os.geteuid()}-", dir=parent)
            atexit.register(shutil.rmtree, root, ignore_errors=True)
            return Path(root)
    raise ConfigError(
        f"host_cache_dir: no folder can be made in {place} or the folder for temporary files; "
        "name a folder this user may write"
    )


def _best_place(wanted_bytes: int, user_cache: Path) -> Path:
    places = [SHM, Path(tempfile.gettempdir()), user_cache]
    sizes = {place: _size(place) for place in places}
    enough = min(wanted_bytes, _ENOUGH_BYTES)
    chosen = next((place for place in places if sizes[place] >= enough), None)
    if chosen is None:
        chosen = max(places, key=lambda place: sizes[place])
    if chosen != SHM:
        logger.warning(
            "/dev/shm has room for %d MB only: the host cache goes to %s, which is slower "
            "(in a container, give it a larger --shm-size; or name a folder with host_cache_dir)",
            sizes[SHM] // 1_000_000,
            chosen / f"ecshare-{os.geteuid()}",
        )
    return chosen


def _is_free(root: Path) -> bool:
    """Whether `root` is for us alone, or could be made so."""
    try:
        check_private(root)
    except FileNotFoundError:
        return True
    except (ConfigError, OSError):
        return False
    return True


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
