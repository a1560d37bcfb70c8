# SPDX-License-Identifier: Apache-2.0
"""Chooses the folder of the host cache: on which file system, under which name, how large."""

import atexit
import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from ecshare.store.errors import ConfigError
from ecshare.store.hostcache.usage import check_private

logger = logging.getLogger(__name__)


SHM = Path("/dev/shm")  # noqa: S108
# By default, /dev/shm of a container has 64 MB, enough for one large picture and a few small ones.
# If it has less than this, a disk is better.
ENOUGH_BYTES = 1 << 30
# The part of a file system that a cache may take. Others need it too: vLLM's queues and NCCL's
# buffers in /dev/shm are made without reserving their memory. If none is left when a process writes
# to them, it dies of SIGBUS.
SHARE = 0.5
# The bytes that stay free for them, in addition to what they take already. In a small file system
# it is _FLOOR_SHARE of it.
FLOOR_BYTES = 1 << 30
_FLOOR_SHARE = 0.25
_OTHER_NAMES = 8
_IN_MEMORY = {"tmpfs", "ramfs"}


def default_root(wanted_bytes: int) -> Path:
    """Return the first of `default_roots` that is private to this user, or does not exist yet.

    If there is none, return the first one. Makes no folder.
    """
    roots = default_roots(wanted_bytes)
    return next((root for root in roots if _is_free(root)), roots[0])


def default_roots(wanted_bytes: int) -> list[Path]:
    """Return the folders for a cache of `wanted_bytes`, the best one first.

    The best one is `ecshare-<uid>` in /dev/shm. If /dev/shm is missing, or smaller than both
    `wanted_bytes` and 1 GiB, it is in the folder for temporary files, or in the user's cache
    folder; if these are too small as well, in the largest of the three. All processes of a user get
    the same result, because it depends on the disks' sizes and not on their content. The other
    folders are used if another user has taken the name: they are the same name with a number, and
    a folder in the user's cache folder, where other users cannot write.
    """
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = f"ecshare-{os.geteuid()}"
    best = _best_place(wanted_bytes, user_cache) / name
    others = [best.with_name(f"{name}-{n}") for n in range(2, 2 + _OTHER_NAMES)]
    return [best, *others, user_cache / name]


def temporary_root(place: Path) -> Path:
    """Make a folder for this process only, in `place` if possible. A normal exit removes it.

    Raises:
        ConfigError: it cannot be made anywhere.
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
    enough = min(wanted_bytes, ENOUGH_BYTES)
    chosen = next((place for place in places if sizes[place] >= enough), None)
    if chosen is None:
        chosen = max(places, key=lambda place: sizes[place])
    if chosen != SHM:
        logger.warning(
            "/dev/shm has room for only %d MB: the host cache is in %s, which is slower "
            "(in a container, give it a larger --shm-size; or name a folder with host_cache_dir)",
            sizes[SHM] // 1_000_000,
            chosen / f"ecshare-{os.geteuid()}",
        )
    return chosen


def _is_free(root: Path) -> bool:
    """Return whether `root` is private to this user, or does not exist."""
    try:
        check_private(root)
    except FileNotFoundError:
        return True
    except (ConfigError, OSError):
        return False
    return True


def fitting(root: Path, limit_bytes: int) -> int:
    """Return `limit_bytes`, or half of the file system of `root` if that is less."""
    fits = _size(root)
    if not 0 < fits < limit_bytes:
        return limit_bytes
    logger.warning(
        "host_cache_bytes is %d, but half of the file system of %s is %d: using that "
        "(in a container, give it a larger --shm-size)",
        limit_bytes,
        root,
        fits,
    )
    return fits


def floor_bytes(root: Path) -> int:
    """Return how much of the file system of `root` a cache leaves free. 0: it is unknown."""
    return int(min(FLOOR_BYTES, _FLOOR_SHARE * _disk_bytes(root)))


def is_in_memory(root: Path) -> bool:
    """Return whether the files of `root` are in memory, so that access waits for no device."""
    try:
        device = root.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    mounted = (line.split() for line in mounts.splitlines())
    kinds = (fields[fields.index("-") + 1] for fields in mounted if fields[2] == number)
    return next(kinds, "") in _IN_MEMORY


def _size(folder: Path) -> int:
    """Return how many bytes a cache may use of the disk of `folder`; 0 if none, or unknown."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return 0
    return int(_disk_bytes(folder) * SHARE)


def _disk_bytes(folder: Path) -> int:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_blocks * disk.f_frsize
