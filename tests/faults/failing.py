# SPDX-License-Identifier: Apache-2.0
"""The stores of these tests, and their faults; each fault lasts for a `with` block."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import s3fs

from lab.faults.http_proxy import FaultProxy, Method
from lab.faults.kinds import Fault
from lab.servers.s3 import BUCKET, SeaweedFS
from tests.faults.disks import SmallDisk
from tests.waiting import wait_until

Failing = Callable[[], contextlib.AbstractContextManager[None]]

# An offset in the middle of a stored object: behind the prologue, before the end.
MIDDLE = 9000
FAULTS: dict[str, tuple[Fault, Method]] = {
    "503": (Fault.answer(503), "any"),
    "403": (Fault.answer(403), "any"),
    "404": (Fault.answer(404), "any"),
    "a little slow": (Fault.slow(0.3), "any"),
    "slow": (Fault.slow(4.0), "any"),
    "silent": (Fault.slow(3600.0), "any"),
    "uploads refused": (Fault.answer(507, "QuotaExceeded"), "PUT"),
    "answers cut": (Fault.cut(MIDDLE), "GET"),
    "uploads cut": (Fault.cut(MIDDLE, "upload"), "PUT"),
    "answers reset": (Fault.reset(MIDDLE), "GET"),
    "uploads reset": (Fault.reset(MIDDLE, "upload"), "PUT"),
    "answers stalled": (Fault.stall(MIDDLE), "GET"),
    "uploads stalled": (Fault.stall(MIDDLE, "upload"), "PUT"),
    "bits flipped in answers": (Fault.flip(MIDDLE), "GET"),
    "bits flipped in uploads": (Fault.flip(MIDDLE, "upload"), "PUT"),
}
UPLOADS = [name for name, (_, on) in FAULTS.items() if on == "PUT"]
READABLE = [*UPLOADS, "a little slow"]
"""The faults during which stored objects can be loaded."""
_TRIES = 3
_STARTS_WITHIN_S = 12.0  # ordinarily one or two


@dataclass(kw_only=True)
class Bucket:
    """An S3 server that engines reach through a proxy."""

    server: SeaweedFS
    proxy: FaultProxy

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Give the proxy a fault of FAULTS; fail if no request meets it."""
        fault, on = FAULTS[name]
        before = self.proxy.num_hits
        self.proxy.fail(fault, on=on)
        yield
        self.proxy.heal()
        assert self.proxy.num_hits > before, "no request met the fault"

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse all connections."""
        self.proxy.fail(Fault.refuse())
        yield
        self.proxy.heal()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the server's process (SIGSTOP)."""
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()

    @contextlib.contextmanager
    def deleted(self) -> Iterator[None]:
        """Delete the bucket with its objects; create an empty one in the end."""
        s3 = self.client()
        s3.rm(BUCKET, recursive=True)
        with contextlib.suppress(FileNotFoundError):
            s3.rmdir(BUCKET)
        assert not s3.exists(BUCKET)
        yield
        with contextlib.suppress(FileExistsError):  # an upload makes SeaweedFS create it
            s3.mkdir(BUCKET)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Kill the server, and cut the connections in the proxy; then start it again."""
        self.server.kill()
        self.proxy.disconnect()
        self.proxy.heal()
        yield
        self.start_again()

    def start_again(self) -> None:
        """Start a killed server. It was seen to hang in that start: then kill it and retry."""
        for _ in range(_TRIES):
            self.server.start()
            with contextlib.suppress(AssertionError):
                wait_until(self.server.is_ready, _STARTS_WITHIN_S, pause_s=0.1)
                return
            self.server.kill()
        raise self.server.failure("does not start again")

    def client(self) -> s3fs.S3FileSystem:
        """A client that bypasses the proxy."""
        return s3fs.S3FileSystem(**self.server.storage_options, use_listings_cache=False)


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
