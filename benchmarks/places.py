# SPDX-License-Identifier: Apache-2.0
"""The stores that are measured: folders on disk and in memory, and S3 at some distance."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import file_system
from lab.faults.tcp_proxy import ProxyProcess
from lab.servers.s3 import SeaweedFS

SHM = Path("/dev/shm")  # noqa: S108 - where the host cache is by default, too


@dataclass(frozen=True)
class Place:
    """A store to measure: its name, and the connectors' options for it."""

    name: str
    url: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """The folder of the store; None for S3."""
    proxy: ProxyProcess | None = None
    """The proxy in front of the store, if it adds latency."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the part of a connector's `extra_config` that names the store."""
        return {"url": self.url, "storage_options": self.storage_options}


@contextmanager
def folders(disk: Path | None) -> Iterator[list[Place]]:
    """Yield new folders, on disk (below `disk`, or in the temporary folder) and in memory."""
    with ExitStack() as stack:
        places = {}
        for below in (disk, SHM if SHM.is_dir() else None):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=below)))
            name = f"folder, {file_system(folder)}"
            places[name] = Place(name, f"file://{folder}/store", folder=folder)
        yield list(places.values())


@contextmanager
def s3(round_trips_ms: Sequence[float]) -> Iterator[list[Place]]:
    """Yield one real S3 server on loopback at these latencies; 0 is without a proxy."""
    with ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(SeaweedFS(logs))
        places = []
        for round_trip_ms in round_trips_ms:
            proxy, options = None, server.storage_options
            if round_trip_ms:
                proxy = stack.enter_context(
                    ProxyProcess("127.0.0.1", server.port.number, round_trip_ms / 1e3)
                )
                options = {**options, "endpoint_url": proxy.url}
            # A prefix each: otherwise a second place would not store an existing object again.
            name = f"S3, {round_trip_ms:g} ms"
            url = f"{server.url}/{round_trip_ms:g}-ms"
            places.append(Place(name, url, options, proxy=proxy))
        yield places


@contextmanager
def host_folder() -> Iterator[Path]:
    """Yield a new folder for the host cache of one imaginary host, in the usual location."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        yield Path(folder) / "host"
