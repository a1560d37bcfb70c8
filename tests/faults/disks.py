# SPDX-License-Identifier: Apache-2.0
"""Small file systems in memory that can run full and turn read-only."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_FILLER = "filler"


class SmallDisk:
    """A tmpfs of `num_bytes` on `folder`, which is created. Needs the right to mount."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self._num_bytes = num_bytes

    def mount(self) -> None:
        """Raises PermissionError: this process may not."""
        self.folder.mkdir()
        self._run("mount", "-t", "tmpfs", "-o", f"size={self._num_bytes},mode=700", "ecshare")

    def unmount(self) -> None:
        self._run("umount", "--lazy")

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk: no file can grow, and new files stay empty."""
        filler = self.folder / _FILLER
        with filler.open("wb", buffering=0) as file:
            for piece_bytes in (1 << 20, 1 << 12):
                while _took(file.fileno(), bytes(piece_bytes)):
                    pass
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Make the disk read-only for accesses by path; open files stay writable."""
        self._run("mount", "--bind", str(self.folder))
        try:
            self._run("mount", "-o", "remount,bind,ro")
            yield
        finally:
            self.unmount()

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            [*command, str(self.folder)], check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise PermissionError(f"{command[0]} failed: {done.stderr.strip()}")


def _took(fd: int, piece: bytes) -> bool:
    try:
        return os.write(fd, piece) > 0
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        return False
