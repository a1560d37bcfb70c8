# SPDX-License-Identifier: Apache-2.0
"""Compare throughput and CPU time of our stores with the bare client on the same server.

MB/s and the client's CPU seconds (user and system, of this process; the server is another one) per
GB, for whole objects of several sizes, one and eight at a time. MB and GB are 10^6 and 10^9 bytes.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks import places
from benchmarks.measure import Readings, cpu_s, noise
from benchmarks.raw import (
    FilesInThreads,
    RawClient,
    RawFiles,
    RawObstore,
    RawS3fs,
    in_lanes_on,
)
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.store.config import StoreConfig
from ecshare.store.fsspec.store import open_fsspec
from ecshare.store.keys import Key, Kind, object_key
from ecshare.store.objects import Memory, ObjectStore
from ecshare.store.open import open_store

MODULE = "benchmarks.store"
KB, MB = 1000, 1000 * 1000
SIZES = {"64 KB": 64 * KB, "1 MB": MB, "8 MB": 8 * MB, "32 MB": 32 * MB}
LANES = (1, 8)
VERBS = ("put", "get")
NAMESPACE = "0" * 32
# The bytes of a reading, about: fewer are noisy, more take long.
FEWEST, MOST = 2, 256
MEMCPY = "memcpy"
FILES, OBSTORE, S3FS = "ecshare", "ecshare by obstore", "ecshare by s3fs"
SYNCED, IN_THREADS = "os, fsync", "os, in threads"
BARE = {IN_THREADS: SYNCED, FILES: SYNCED, OBSTORE: "obstore", S3FS: "s3fs"}
_NOTE = (
    "`of bare`: MB/s as a share of the bare client's to its left, which in a folder is `os, fsync`,"
    " in the same turns; above 1 ours is faster. `os, in threads`: the calls of `os, fsync`, each "
    "in a thread, as an event loop needs it that must not wait for a disk."
)


class OurStore(RawClient):
    """One of our stores with the same methods, on an event loop as in the transfer engine."""

    def __init__(self, name: str, store: ObjectStore) -> None:
        self.name = name
        self._store = store
        self._loop = asyncio.new_event_loop()

    def put(self, names: Sequence[str], body: memoryview, lanes: int) -> None:
        """See RawClient."""
        self._each(names, lanes, lambda key: self._store.put(key, body))

    def get(self, names: Sequence[str], lanes: int) -> None:
        """See RawClient."""
        self._each(names, lanes, lambda key: self._store.get(key, Memory(1 << 30)))

    def delete(self, names: Sequence[str]) -> None:
        """See RawClient."""
        if self.name == FILES:
            keys = [self._key(name) for name in names]
            self._loop.run_until_complete(self._store.delete(keys))

    def close(self) -> None:
        """See RawClient."""
        self._loop.run_until_complete(self._store.close())
        self._loop.close()

    def _key(self, name: str) -> Key:
        # Both clients share a bucket, and a put of an existing object would cost nothing.
        return object_key(Kind.EC, NAMESPACE, f"{self.name}/{name}")

    def _each(
        self, names: Sequence[str], lanes: int, call: Callable[[Key], Awaitable[object]]
    ) -> None:
        in_lanes_on(self._loop, names, lanes, lambda name: call(self._key(name)))


class Memcpy(RawClient):
    """A copy in memory, which no store can beat."""

    name = MEMCPY

    def __init__(self, num_bytes: int) -> None:
        self._source, self._target = noise(num_bytes, seed=1), bytearray(num_bytes)

    def put(self, names: Sequence[str], body: memoryview, lanes: int) -> None:
        """See RawClient."""
        for _ in names:
            self._target[:] = body

    def get(self, names: Sequence[str], lanes: int) -> None:
        """See RawClient."""
        for _ in names:
            self._target[:] = memoryview(self._source)


@dataclass(frozen=True)
class What:
    """One row of the table, before its figures."""

    place: str
    client: str
    verb: str
    size: str
    lanes: int


Turns = tuple[Readings[What], Readings[What]]  # MB/s; CPU seconds a GB


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    parser = arguments(__doc__ or "", MODULE)
    parser.add_argument(
        "--round-trip-ms", type=float, default=0.0, help="latency added before the S3 server"
    )
    options = parser.parse_args(words)
    sizes = [name for name in SIZES if not options.quick or SIZES[name] <= MB]
    rounds = options.rounds or (1 if options.quick else 3)
    reading_bytes = (1 if options.quick else 32) * MB
    settings = {"rounds": rounds, "MB a reading, about": reading_bytes // MB}
    report = Report("store", command_line(MODULE, options), settings)
    with ExitStack() as stack:
        folders = stack.enter_context(places.folders(options.disk))
        buckets = stack.enter_context(places.s3([options.round_trip_ms]))
        for place in (*folders, *buckets):
            readings: Turns = Readings(), Readings()
            for size in sizes:
                _measure(place, size, rounds, reading_bytes, readings)
            report.add(_table(place, sizes, readings))
    print(f"\nwritten: {report.write(options.results).name}")


def clients(place: places.Place, num_bytes: int) -> list[RawClient]:
    """Return all competitors at `place`."""
    config = StoreConfig(url=place.url, storage_options=place.storage_options, io_timeout_s=60)
    if place.folder is not None:
        return [
            Memcpy(num_bytes),
            RawFiles(place, sync=False),
            RawFiles(place, sync=True),
            FilesInThreads(place),
            OurStore(FILES, open_store(config, "options")),
        ]
    return [
        RawObstore(place),
        OurStore(OBSTORE, open_store(config, "options")),
        RawS3fs(place),
        OurStore(S3FS, open_fsspec(config, "options")),
    ]


def _measure(
    place: places.Place, size: str, rounds: int, reading_bytes: int, readings: Turns
) -> None:
    """Take one reading of each verb and width of each client a round, turn by turn."""
    body = memoryview(noise(SIZES[size]))
    count = min(MOST, max(FEWEST, reading_bytes // SIZES[size]))
    competing = clients(place, SIZES[size])
    for client in competing:  # connections, code paths, pages
        client.put([f"warm-{size}"], body, 1)
        client.get([f"warm-{size}"], 1)
        client.delete([f"warm-{size}"])
    for turn in range(rounds):
        for lanes in LANES:
            # At least one object a lane.
            names = [f"{size}-{lanes}-{turn}-{number}" for number in range(max(count, lanes))]
            for verb in VERBS:
                for client in competing:
                    if client.name == MEMCPY and lanes > 1:
                        continue
                    what = What(place.name, client.name, verb, size, lanes)
                    _read(what, client, names, body, readings)
            for client in competing:
                client.delete(names)
    for client in competing:
        client.close()


def _read(
    what: What, client: RawClient, names: Sequence[str], body: memoryview, readings: Turns
) -> None:
    gc.collect()
    used_s, start_s = cpu_s(), time.perf_counter()
    if what.verb == "put":
        client.put(names, body, what.lanes)
    else:
        client.get(names, what.lanes)
    took_s, used_s = time.perf_counter() - start_s, cpu_s() - used_s
    num_bytes = len(names) * len(body)
    rates, costs = readings
    rates.add(what, num_bytes / MB / took_s)
    costs.add(what, used_s / (num_bytes / 1e9))


def _table(place: places.Place, sizes: Sequence[str], readings: Turns) -> Table:
    names = (
        (MEMCPY, "os", SYNCED, IN_THREADS, FILES)
        if place.folder
        else ("obstore", OBSTORE, "s3fs", S3FS)
    )
    columns = ["verb", "size", "at once"]
    for name in names:
        columns += [f"{name}: MB/s", "s/GB", *(["of bare"] if name in BARE else [])]
    table = Table(f"{place.name}: MB/s, and CPU seconds of the client per GB", columns, _NOTE)
    rates, costs = readings
    for verb in VERBS:
        for size in sizes:
            for lanes in LANES:
                cells: list[float | None] = []
                for name in names:
                    what = What(place.name, name, verb, size, lanes)
                    is_there = what in rates
                    cells += [rates.median(what), costs.median(what)] if is_there else [None, None]
                    if name in BARE:
                        bare = rates.median(replace(what, client=BARE[name]))
                        cells.append(rates.median(what) / bare)
                table.add(verb, size, lanes, *cells)
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
