# SPDX-License-Identifier: Apache-2.0
"""Simulate a day of traffic at a store whose budget is a tenth of it: which chunks are hits?

The planner and the record of uses are the real ones, and the rest is simulated: time, the store and
the engines. The cleaner runs every 20 minutes, and engines note their uses every 5. It is compared
with stores that keep exactly to the budget and remove one chunk at a time: the one that was stored
first (what expiry rules do), and the one that was used longest ago. Two traces are drawn, always
the same ones:

- documents: the popularity of prompts follows a Zipf law, and every hour new ones become popular
- conversations: each turn's prompt continues the one before it, after a pause of minutes to hours;
  all begin with one of a few system prompts

    python -m benchmarks.evictions
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from benchmarks.report import Report, Table, arguments, command_line
from ecshare.upkeep.plan import FOREVER, Candidates, Limit, Rules, removals
from ecshare.upkeep.record import UseRecord

MODULE = "benchmarks.evictions"
SEED = 36
DAY_S = 86_400
CLEAN_S = 1200
NOTE_S = 300
SHARE = 10
"""How many times the budget all chunks of the trace are."""

Chunks = Sequence[bytes]


@dataclass(frozen=True)
class Request:
    """A prompt, as the names of its chunks, and when it is asked."""

    at_s: float
    chunks: Chunks


def documents(num_requests: int, dice: random.Random) -> list[Request]:
    """Return requests for documents of 1 to 32 chunks."""
    num = num_requests // 2
    weights = [1 / (rank + 1) ** 0.9 for rank in range(num)]
    sizes = [min(32, 1 + int(dice.expovariate(1 / 6))) for _ in range(2 * num)]
    requests = []
    ranks = dice.choices(range(num), weights, k=num_requests)
    for number, rank in enumerate(ranks):
        at_s = number * DAY_S / num_requests
        # The head drifts: each hour one in 24 of the ranks has another document.
        hour = int(at_s // 3600)
        turn = (hour + rank * 7) // 24
        document = rank + turn * num
        size = sizes[document % len(sizes)]
        requests.append(Request(at_s, [b"%d/%d" % (document, n) for n in range(size)]))
    return requests


def conversations(num_requests: int, dice: random.Random) -> list[Request]:
    """Return the turns of conversations, each with 1 to 4 more chunks than the last."""
    requests: list[Request] = []
    number = 0
    while len(requests) < num_requests:
        number += 1
        at_s = dice.uniform(0, DAY_S)
        system = dice.choices(range(8), [1 / (n + 1) for n in range(8)])[0]
        chunks = [b"system %d/%d" % (system, n) for n in range(4)]
        for turn in range(1 + int(dice.expovariate(1 / 5))):
            chunks = [
                *chunks,
                *(b"%d/%d/%d" % (number, turn, n) for n in range(dice.randint(1, 4))),
            ]
            requests.append(Request(at_s, chunks))
            at_s += dice.lognormvariate(5.5, 1.5)
    return sorted(requests[:num_requests], key=lambda request: request.at_s)


class Store:
    """A store of chunks of one size; counts hits."""

    def __init__(self, most_chunks: int) -> None:
        self.most_chunks = most_chunks
        self.num_asked = self.num_hits = self.largest = 0
        self.stored: OrderedDict[bytes, float] = OrderedDict()

    def ask(self, request: Request) -> None:
        """Load the leading chunks that are stored, and store the others."""
        num_hits = next(
            (n for n, chunk in enumerate(request.chunks) if chunk not in self.stored),
            len(request.chunks),
        )
        self.num_asked += len(request.chunks)
        self.num_hits += num_hits
        for chunk in request.chunks[num_hits:]:
            if chunk not in self.stored:
                self.stored[chunk] = request.at_s
        self.used(request)
        self.largest = max(self.largest, len(self.stored))

    def used(self, request: Request) -> None:
        """Record the use, and keep within the budget."""
        raise NotImplementedError

    @property
    def hit_rate(self) -> float:
        """Return the share of all chunks that were hits."""
        return self.num_hits / self.num_asked


class Fifo(Store):
    """Removes the chunk that was stored first."""

    def used(self, request: Request) -> None:
        """See Store."""
        while len(self.stored) > self.most_chunks:
            self.stored.popitem(last=False)


class Lru(Store):
    """Removes the chunk that was used longest ago, of a prompt the last one first."""

    def used(self, request: Request) -> None:
        """See Store."""
        for chunk in reversed(request.chunks):
            self.stored.move_to_end(chunk)
        while len(self.stored) > self.most_chunks:
            self.stored.popitem(last=False)


class Cleaned(Store):
    """Is cleaned from time to time, by what engines have noted until then."""

    def __init__(self, most_chunks: int) -> None:
        super().__init__(most_chunks)
        self._now_s = 0.0
        self._record = UseRecord(1 << 40, clock_s=lambda: self._now_s)
        self._noted: dict[bytes, tuple[int, int]] = {}
        self._note_s, self._clean_s = float(NOTE_S), float(CLEAN_S)

    def used(self, request: Request) -> None:
        """See Store."""
        self._now_s = request.at_s
        if request.at_s >= self._note_s:
            self._note_s += NOTE_S
            minute = int(request.at_s // 60)
            for name, age, position in chain.from_iterable(self._record.take()):
                self._noted[bytes(name)] = minute - age, position  # type: ignore[arg-type]
        self._record.add_chain(request.chunks, 1)
        if request.at_s >= self._clean_s:
            self._clean_s += CLEAN_S
            self._clean(int(request.at_s // 60))

    def _clean(self, now: int) -> None:
        names = list(self.stored)
        noted = [self._noted.get(name, (0, 0)) for name in names]
        stored = [int(at_s // 60) for at_s in self.stored.values()]
        since = now - CLEAN_S // 60
        growth = sum(at >= since for at in stored)
        last = [max(use, at) for (use, _), at in zip(noted, stored, strict=True)]
        zeros = np.zeros(len(names), np.uint32)
        objects = Candidates(
            zeros,
            np.ones(len(names), np.uint64),
            np.arange(len(names), dtype=np.uint32),
            np.uint32(now) - np.array(last, np.uint32),
            np.array([position for _, position in noted], np.uint32),
        )
        rules = Rules([Limit(frozenset({0}), self.most_chunks, growth)], [FOREVER], [0])
        for number in removals(objects, rules):
            del self.stored[names[number]]
        self._noted = {name: use for name, use in self._noted.items() if name in self.stored}


def simulate(num_requests: int) -> Iterator[tuple[str, list[Store], int]]:
    """Yield for each trace its name, the stores after it, and its number of different chunks."""
    for trace in (documents, conversations):
        requests = trace(num_requests, random.Random(SEED))
        num = len({chunk for request in requests for chunk in request.chunks})
        stores: list[Store] = [kind(num // SHARE) for kind in (Cleaned, Lru, Fifo)]
        for request in requests:
            for store in stores:
                store.ask(request)
        yield trace.__name__, stores, num


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print and keep the table."""
    options = arguments(__doc__ or "", MODULE).parse_args(argv)
    num_requests = 3_000 if options.quick else 60_000
    table = Table(
        "Hit rates of a day",
        ("trace", "chunks", "ours", "LRU", "FIFO", "most chunks of ours, in budgets"),
        "Shares of all chunks of all prompts. The budget is a tenth of the trace's chunks. Each "
        "run of the cleaner makes room for what may come before the next one.",
    )
    for name, (ours, lru, fifo), num in simulate(num_requests):
        largest = ours.largest / ours.most_chunks
        table.add(name, num, ours.hit_rate, lru.hit_rate, fifo.hit_rate, largest)
    settings = {"requests": num_requests, "seed": SEED}
    report = Report("evictions", command_line(MODULE, options), settings)
    report.add(table)
    report.write(options.results)


if __name__ == "__main__":
    main()
