# SPDX-License-Identifier: Apache-2.0
"""Measure continuous saves with fixed limits in flight, and with limits that follow throughput.

`fixed`: at most 8 objects and 65 MiB are in flight. An imaginary store has a limited bandwidth, per
connection and in total; it transfers nothing, and its time is simulated. The S3 server is real. MB
are 10^6 bytes.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks import places
from benchmarks.measure import Readings, in_turn, noise
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.store.config import StoreConfig
from ecshare.store.keys import Kind, object_key
from ecshare.store.open import open_store
from ecshare.transfer.client.priority import Admission, Priority
from lab.counted_time import CountedTime
from lab.throttled_store import Link, ThrottledStore

MODULE = "benchmarks.in_flight"
MIB, MB = 1 << 20, 1e6
TIMEOUT_S = 10.0
WAITING = 96  # more than are admitted
SIZES = {
    "1 MiB": MIB,
    "4 MiB": 4 * MIB,
    "14 MiB": 14 * MIB,
    "32 MiB": 32 * MIB + 4096,
    "64 MiB": 64 * MIB,
}
LINKS = {
    "2 GB/s, 80 MB/s each, 30 ms": Link(2000 * MB, 80 * MB, 0.03),
    "200 MB/s, 80 MB/s each, 30 ms": Link(200 * MB, 80 * MB, 0.03),
    "2 GB/s, 30 ms": Link(2000 * MB, 2000 * MB, 0.03),
    "1 GB/s, 1 ms": Link(1000 * MB, 1000 * MB, 0.001),
}
SPANS_S = (10.0, 30.0)
S3_SIZES = ("1 MiB", "32 MiB")
S3_SPANS_S = (2.0, 3.0)
FIXED, OURS = "fixed", "ours"
_NOTE = (
    "`begin`: MB/s of the first {} s, in which our limits adapt. `MB/s` and `in flight` (the most "
    "objects at once): of the next {} s."
)

Save = Callable[[int], Awaitable[object]]


@dataclass(frozen=True)
class What:
    """The key of one figure; `of`: its subject."""

    store: str
    size: str
    limits: str
    of: str


class Saving:
    """Continuous saves within the limits of `limits`."""

    def __init__(self, save: Save, size: int, limits: str) -> None:
        self.most = 0
        self._saved_bytes = self._in_flight = 0
        self._save = save
        self._size = size
        self._admission = Admission(TIMEOUT_S, grows=limits == OURS)

    async def forever(self) -> None:
        """Save again and again, each time with a new turn."""
        while True:
            async with self._admission.admitted(Priority.SAVE, self._size):
                self._in_flight += 1
                self.most = max(self.most, self._in_flight)
                await self._save(self._size)
                self._in_flight -= 1
                self._saved_bytes += self._size

    async def rate(self, seconds: float) -> float:
        """Return the MB/s of the next `seconds`."""
        clock_s = asyncio.get_running_loop().time
        begun_s, before, self.most = clock_s(), self._saved_bytes, self._in_flight
        await asyncio.sleep(seconds)
        return (self._saved_bytes - before) / MB / (clock_s() - begun_s)


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (1 if options.quick else 3)
    report = Report("in_flight", command_line(MODULE, options), {"rounds with S3": rounds})
    sizes = [size for size in SIZES if not options.quick or size == "4 MiB"]
    report.add(_imaginary(sizes))
    report.add(_real(S3_SIZES[:1] if options.quick else S3_SIZES, rounds))
    print(f"\nwritten: {report.write(options.results).name}")


def _imaginary(sizes: Sequence[str]) -> Table:
    readings: Readings[What] = Readings()
    for name, link in LINKS.items():
        for size in sizes:
            for limits in (FIXED, OURS):
                what = What(name, size, limits, "")
                with asyncio.Runner(loop_factory=CountedTime) as runner:
                    runner.run(_read(what, ThrottledStore(link).move, SPANS_S, readings))
    return _table("Imaginary stores", LINKS, sizes, SPANS_S, readings)


def _real(sizes: Sequence[str], rounds: int) -> Table:
    readings: Readings[What] = Readings()
    with places.s3([0.0]) as (place,):
        for turn in range(rounds):
            for size in sizes:
                for limits in in_turn((FIXED, OURS), turn):
                    asyncio.run(_read_s3(place, What(place.name, size, limits, ""), readings))
    title = "An S3 server on the same cores"
    return _table(title, [place.name], sizes, S3_SPANS_S, readings)


async def _read_s3(place: places.Place, what: What, readings: Readings[What]) -> None:
    config = StoreConfig(url=place.url, storage_options=place.storage_options)
    store = open_store(config, "options")
    body = memoryview(noise(SIZES[what.size]))
    # Saves write the same few objects again and again.
    keys = [object_key(Kind.EC, "0" * 32, f"object {number}") for number in range(WAITING)]
    number = count()

    async def save(_: int) -> None:
        await store.put(keys[next(number) % len(keys)], body, replace=True)

    await _read(what, save, S3_SPANS_S, readings)
    await store.close()


async def _read(
    what: What, save: Save, spans_s: tuple[float, float], readings: Readings[What]
) -> None:
    saving = Saving(save, SIZES[what.size], what.limits)
    tasks = [asyncio.create_task(saving.forever()) for _ in range(WAITING)]
    begin, rate = await saving.rate(spans_s[0]), await saving.rate(spans_s[1])
    for of, value in (("begin", begin), ("rate", rate), ("in flight", saving.most)):
        readings.add(What(what.store, what.size, what.limits, of), value)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _table(
    title: str,
    stores: Sequence[str] | dict[str, Link],
    sizes: Sequence[str],
    spans_s: tuple[float, float],
    readings: Readings[What],
) -> Table:
    columns = ["store", "object"]
    for limits in (FIXED, OURS):
        columns += [f"{limits}: {of}" for of in ("begin", "MB/s", "in flight")]
    table = Table(title, [*columns, "of fixed"], _NOTE.format(*map(int, spans_s)))
    for store in stores:
        for size in sizes:
            cells: list[float] = []
            for limits in (FIXED, OURS):
                what = [What(store, size, limits, of) for of in ("begin", "rate", "in flight")]
                begin, rate, most = map(readings.median, what)
                cells += [begin, rate, int(most)]
            table.add(store, size, *cells, cells[4] / cells[1])
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
