# SPDX-License-Identifier: Apache-2.0
"""The stores of these tests, and their faults; each fault lasts for a `with` block."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bad_s3.faults import always, cut_at, flipped, late, modes, storing, upload_cut_at
from tests.bad_s3.server import BadS3, Fault, refused
from tests.faults.disks import SmallDisk

Failing = Callable[[], contextlib.AbstractContextManager[None]]

# An offset in the middle of a stored object: behind the prologue, before the end.
MIDDLE = 9000
STALLED, STALLED_UPLOAD = cut_at(MIDDLE, "hang"), upload_cut_at(MIDDLE, "hang")
FAULTS: dict[str, Mapping[str, Fault]] = {
    "503": modes("any:503"),
    "403": modes("any:403"),
    "404": {"any": always(refused(404, "NoSuchKey"))},
    "a little slow": {"any": late(0.3)},
    "slow": {"any": late(4.0)},
    "silent": {"any": late(3600.0)},
    "stopped": modes("any:hang"),
    "uploads refused": modes("put:full"),
    "answers cut": {"get": cut_at(MIDDLE, "close")},
    "uploads cut": {"put": upload_cut_at(MIDDLE, "close")},
    "answers reset": {"get": cut_at(MIDDLE, "reset")},
    "uploads reset": {"put": upload_cut_at(MIDDLE, "reset")},
    "answers stalled": {"get": STALLED},
    "uploads stalled": {"put": STALLED_UPLOAD},
    "bits flipped in answers": modes("get:flipped"),
    "bits flipped in uploads": {"put": storing(flipped)},
}
UPLOADS = [name for name, faults in FAULTS.items() if "put" in faults]
READABLE = [*UPLOADS, "a little slow"]
"""The faults during which stored objects can be loaded."""


@dataclass(kw_only=True)
class Bucket:
    """The S3 server of the engines."""

    server: BadS3

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Give the server a fault of FAULTS; fail if no request meets it."""
        self.server.faults = FAULTS[name]
        yield
        assert self.server.num_hits, "no request met the fault"
        self.server.faults = {}

    @contextlib.contextmanager
    def deleted(self) -> Iterator[None]:
        """Delete the bucket with its objects; create an empty one in the end."""
        self.server.objects.clear()
        self.server.faults = modes("any:no-bucket")
        yield
        self.server.faults = {}


@dataclass(kw_only=True)
class Folder:
    """The folders of a store and of two host caches, each on a disk of its own."""

    disks: tuple[SmallDisk, ...]

    @property
    def folder(self) -> Path:
        return self.disks[0].folder / "store"

    @property
    def hosts(self) -> tuple[Path, ...]:
        return tuple(disk.folder / "host" for disk in self.disks[1:])

    @contextlib.contextmanager
    def disk_full(self) -> Iterator[None]:
        with self.disks[0].full():
            yield

    @contextlib.contextmanager
    def disk_read_only(self) -> Iterator[None]:
        with self.disks[0].read_only():
            yield

    @contextlib.contextmanager
    def folder_deleted(self) -> Iterator[None]:
        shutil.rmtree(self.folder)
        yield
        self.folder.mkdir()

    @contextlib.contextmanager
    def host_caches_full(self) -> Iterator[None]:
        """Fill the disks with foreign bytes: entries could be evicted to make room."""
        for host in self.hosts:
            for path in host.glob("*+*"):
                path.unlink()
        with self.disks[1].full(), self.disks[2].full():
            yield

    @contextlib.contextmanager
    def host_caches_read_only(self) -> Iterator[None]:
        with self.disks[1].read_only(), self.disks[2].read_only():
            yield

    @contextlib.contextmanager
    def host_caches_deleted(self) -> Iterator[None]:
        for host in self.hosts:
            shutil.rmtree(host)
        yield

    def date(self, at_s: float) -> None:
        """Set the times of all files, as if the clock had been moved since they were written."""
        for folder in (self.folder, *self.hosts):
            for path in folder.rglob("*"):
                os.utime(path, (at_s, at_s))
