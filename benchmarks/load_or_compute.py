# SPDX-License-Identifier: Apache-2.0
"""Simulate the seconds until a stored prompt is ready, if always, never or sometimes loaded.

The choice is that of KVShareConnector (`load`). The store is imaginary, with limited bandwidth, and
so is the engine: it computes so many tokens per second, one prompt after the other, and its KV is
that of an 8B-class model; one table compares it with hybrid models. Time is simulated, so the
figures do not depend on this machine. MB are 10^6 bytes.
"""

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from benchmarks.kv_shapes import DENSE, HYBRID, LARGE_HYBRID, KVShape
from benchmarks.measure import percentile
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.transfer.client.priority import Admission, Priority
from ecshare.transfer.jobs import Tier
from kvshare.chunks.prefix import Chunk, ChunkKey, Grid
from kvshare.chunks.states import objects_of
from kvshare.scheduler.load_or_compute import LoadOrCompute
from lab.counted_time import CountedTime
from lab.throttled_store import Link, ThrottledStore

MODULE = "benchmarks.load_or_compute"
MB = 1e6
TOKEN_BYTES = DENSE.token_bytes
CHUNK_TOKENS = 256
HIT_TOKENS = 30_000
NUM_HITS = 20
NEW_TOKENS = 200
STEP_TOKENS = 8192
STEP_S = 0.005
TIMEOUT_S = 10.0
BUSY = 0.5
LARGE, SMALL, SMALL_PART = (1000, 8000), (100, 500), 0.9
ALWAYS, NEVER, IF_FASTER = "always", "never", "if_faster"
POLICIES = (ALWAYS, NEVER, IF_FASTER)
LINKS = {
    "20 MB/s": Link(20 * MB, 20 * MB, 0.03),
    "200 MB/s": Link(200 * MB, 80 * MB, 0.03),
    "2 GB/s": Link(2000 * MB, 80 * MB, 0.03),
}
SPEEDS = (3_000, 30_000)
HIT_LINKS = {
    f"{speed:g} GB/s": Link(1000 * speed * MB, 125 * speed * MB, 0.03) for speed in (0.2, 2, 10)
}
_HIT_NOTE = (
    f"One prompt of {HIT_TOKENS:,} stored tokens at a time; what follows the last whole chunk is "
    f"computed. The {NUM_HITS}th such prompt, when limits and choice have adapted. Eight "
    "connections fill the store's bandwidth. A hybrid's hit ends with a state. `same tokens/s`: of "
    "the engine that computes what is loaded in as much time. `ready s`: with `if_faster`, by an "
    "engine that computes so many tokens per second."
)
_NOTE = (
    f"Prompts of 1,000 to 8,000 tokens that are stored, and {NEW_TOKENS} that are not, arrive at "
    f"random, so that computing them all would take {BUSY:.0%} of the engine's time. Each "
    "connection to the store has at most 80 MB/s, and answers after 30 ms. `loaded %`: of the "
    "stored tokens."
)
_MIXED_NOTE = (
    f"As above, but of {SMALL_PART:.0%} of the prompts 100 to 500 tokens are stored. `large`: the "
    "others, of which 1,000 to 8,000 are. Small loads take the time of a round trip, which says "
    "little of what large ones take."
)
_CHANGE_NOTE = (
    "The store's bandwidth changes after half of the prompts; {} tokens per second. Seconds until "
    "a prompt is ready: before, and in the {} s after the change; then, until the end."
)


@dataclass
class Engine:
    """Computes prompts in the order of their arrival, in steps, at `speed` tokens per second."""

    speed: int
    choice: LoadOrCompute
    waiting_tokens: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def compute(self, num_tokens: int) -> None:
        """Return when these tokens are computed."""
        self.waiting_tokens += num_tokens
        async with self.turn:
            while num_tokens:
                step = min(num_tokens, STEP_TOKENS)
                self.choice.steps.began(step, 0)
                await asyncio.sleep(STEP_S + step / self.speed)
                self.choice.steps.ended()
                self.waiting_tokens -= step
                num_tokens -= step


@dataclass(frozen=True)
class Served:
    """One prompt."""

    arrived_s: float
    ready_s: float
    """Seconds until it was ready."""
    num_stored: int
    """Tokens."""
    num_loaded: int


class Run:
    """An engine, a store and a policy."""

    def __init__(
        self, link: Link, speed: int, policy: str, small_part: float = 0.0, state_tokens: int = 0
    ) -> None:
        self._clock_s = asyncio.get_running_loop().time
        self.store = ThrottledStore(link)
        self._limits = Admission(TIMEOUT_S, grows=True)
        self._policy = policy
        self._small_part = small_part
        self._choice = LoadOrCompute(self._clock_s, state_tokens)
        self._engine = Engine(speed, self._choice)
        self._chance = random.Random(0)
        self._going: list[tuple[float, int]] = []  # loads: start, and number of tokens
        self.served: list[Served] = []

    async def serve(self, num_prompts: int) -> None:
        """Serve `num_prompts` more prompts, and return when all are ready."""
        sizes = ((self._small_part, SMALL), (1 - self._small_part, LARGE))
        mean_tokens = sum(part * sum(size) / 2 for part, size in sizes)
        mean_s = (mean_tokens + NEW_TOKENS) / self._engine.speed / BUSY
        prompts = []
        for _ in range(num_prompts):
            await asyncio.sleep(self._chance.expovariate(1 / mean_s))
            is_small = self._small_part and self._chance.random() < self._small_part
            num_tokens = self._chance.randrange(*(SMALL if is_small else LARGE))
            chunks = _chunks(num_tokens, CHUNK_TOKENS)
            stored = [chunk.num_tokens * TOKEN_BYTES for chunk in chunks]
            prompts.append(asyncio.create_task(self.serve_one(chunks, stored, NEW_TOKENS)))
        await asyncio.gather(*prompts)

    async def serve_one(
        self, chunks: Sequence[Chunk], sizes: Sequence[int], num_new_tokens: int
    ) -> None:
        """Return when a prompt is ready of which `chunks` are stored, in objects of `sizes`.

        There is one object for each chunk, except that a state may be several.
        """
        begun_s, tiers = self._clock_s(), {chunk.key: Tier.STORE for chunk in chunks}
        loaded = chunks[: self._num_to_load(chunks, tiers)]
        if loaded:
            going = begun_s, loaded[-1].end_tokens
            self._going.append(going)
            moved = sizes if len(loaded) == len(chunks) else sizes[: len(loaded)]
            await asyncio.gather(*map(self._load, moved))
            self._going.remove(going)
            self._choice.loaded(loaded, tiers, 0, self._clock_s() - begun_s)
        num_loaded = loaded[-1].end_tokens if loaded else 0
        num_tokens = chunks[-1].end_tokens
        await self._engine.compute(num_tokens - num_loaded + num_new_tokens)
        ready_s = self._clock_s() - begun_s
        self.served.append(Served(begun_s, ready_s, num_tokens, num_loaded))

    def _num_to_load(self, chunks: Sequence[Chunk], tiers: dict[ChunkKey, Tier]) -> int:
        if self._policy == IF_FASTER:
            now_s, ahead = self._clock_s(), self._engine.waiting_tokens
            under_way = [(num_tokens, now_s - then_s) for then_s, num_tokens in self._going]
            return self._choice.num_worth_loading(chunks, tiers, 0, under_way, lambda: ahead)
        return len(chunks) if self._policy == ALWAYS else 0

    async def _load(self, num_bytes: int) -> None:
        async with self._limits.admitted(Priority.LOAD, num_bytes):
            await self.store.move(num_bytes)


def main(words: Sequence[str]) -> None:
    """Simulate, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    num_prompts = 40 if options.quick else 400
    report = Report("load_or_compute", command_line(MODULE, options), {"prompts": num_prompts})
    report.add(_steady(num_prompts))
    report.add(_mixed(10 * num_prompts))
    report.add(_changing(num_prompts))
    report.add(_hits())
    print(f"\nwritten: {report.write(options.results).name}")


def _hits() -> Table:
    columns = ["store", "model", "MB", "objects", "load s", "same tokens/s"]
    columns += [f"ready s, {speed:,}/s" for speed in SPEEDS]
    table = Table("A hit of 30,000 tokens", columns, _HIT_NOTE)
    for (name, link), shape in product(HIT_LINKS.items(), (DENSE, HYBRID, LARGE_HYBRID)):
        hit = _Hit.of(shape)
        with asyncio.Runner(loop_factory=CountedTime) as runner:
            load_s = runner.run(_time_of_hits(link, hit, SPEEDS[0], ALWAYS)) - hit.rest_s(SPEEDS[0])
        row: list[str | int | float] = [name, shape.name, sum(hit.sizes) / MB, len(hit.sizes)]
        row += [load_s, round(hit.num_tokens / load_s)]
        for speed in SPEEDS:
            with asyncio.Runner(loop_factory=CountedTime) as runner:
                row.append(runner.run(_time_of_hits(link, hit, speed, IF_FASTER)))
        table.add(*row)
    return table


@dataclass(frozen=True)
class _Hit:
    """What is stored of a prompt, and how much of it is not."""

    chunks: Sequence[Chunk]
    sizes: Sequence[int]
    """The bytes of each object."""
    state_tokens: int

    @classmethod
    def of(cls, shape: KVShape) -> "_Hit":
        """Return what engines with a model of `shape` store of HIT_TOKENS tokens."""
        chunk_tokens = max(CHUNK_TOKENS, shape.block_tokens)
        grid = Grid(shape.block_tokens, chunk_tokens // shape.block_tokens)
        chunks = _chunks(HIT_TOKENS // chunk_tokens * chunk_tokens, chunk_tokens)
        sizes = [chunk.num_tokens * shape.token_bytes for chunk in chunks]
        if shape.state is None:
            return cls(chunks, sizes, 0)
        layers = range(shape.layers * shape.num_recurrent_groups)
        parts = objects_of(layers, shape.layer_state_bytes)
        sizes += [len(part) * shape.layer_state_bytes for part in parts]
        state_tokens = -(-shape.state_bytes // shape.token_bytes)
        return cls([*chunks, grid.state_of(chunks[-1])], sizes, state_tokens)

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1].end_tokens

    def rest_s(self, speed: int) -> float:
        """Return the seconds in which an engine computes what is not stored."""
        return STEP_S + (HIT_TOKENS - self.num_tokens) / speed


async def _time_of_hits(link: Link, hit: _Hit, speed: int, policy: str) -> float:
    """Return the seconds until the last of several prompts is ready, one after the other."""
    here = Run(link, speed, policy, state_tokens=hit.state_tokens)
    for _ in range(NUM_HITS):
        await here.serve_one(hit.chunks, hit.sizes, HIT_TOKENS - hit.num_tokens)
    return here.served[-1].ready_s


def _steady(num_prompts: int) -> Table:
    columns = ["store", "tokens/s", "load", "mean s", "p50 s", "p95 s", "max s", "loaded %"]
    table = Table("A store that stays as it is", columns, _NOTE)
    for (link, speed, policy), served in _each(num_prompts, 0.0):
        waits = [each.ready_s for each in served]
        figures = [_mean(served), *(percentile(waits, of) for of in (50, 95, 100))]
        table.add(link, speed, policy, *figures, _loaded_percent(served))
    return table


def _mixed(num_prompts: int) -> Table:
    columns = ["store", "tokens/s", "load", "mean s", "large mean s", "max s", "large loaded %"]
    table = Table("Many small hits", columns, _MIXED_NOTE)
    for (link, speed, policy), served in _each(num_prompts, SMALL_PART):
        large = [each for each in served if each.num_stored >= LARGE[0]]
        longest = max(each.ready_s for each in served)
        figures = _mean(served), _mean(large), longest
        table.add(link, speed, policy, *figures, _loaded_percent(large))
    return table


def _each(
    num_prompts: int, small_part: float
) -> Iterator[tuple[tuple[str, int, str], list[Served]]]:
    """Yield the results of each policy with each store and engine."""

    async def run(link: Link, speed: int, policy: str) -> list[Served]:
        here = Run(link, speed, policy, small_part)
        await here.serve(num_prompts)
        return here.served

    for name, speed, policy in product(LINKS, SPEEDS, POLICIES):
        with asyncio.Runner(loop_factory=CountedTime) as runner:
            yield (name, speed, policy), runner.run(run(LINKS[name], speed, policy))


def _changing(num_prompts: int) -> Table:
    speed, soon_s = SPEEDS[0], 60.0
    columns = ["store", "load", "before", "soon after", "then", "then loaded %"]
    table = Table("A store that changes", columns, _CHANGE_NOTE.format(f"{speed:,}", int(soon_s)))

    async def run(links: tuple[str, str], policy: str) -> list[list[Served]]:
        here = Run(LINKS[links[0]], speed, policy)
        await here.serve(num_prompts // 2)
        changed_s = asyncio.get_running_loop().time()
        here.store.become(LINKS[links[1]])
        await here.serve(num_prompts // 2)
        ends_s = (0.0, changed_s, changed_s + soon_s, float("inf"))
        return [
            [each for each in here.served if begin_s <= each.arrived_s < end_s]
            for begin_s, end_s in pairwise(ends_s)
        ]

    for links in (("2 GB/s", "20 MB/s"), ("20 MB/s", "2 GB/s")):
        for policy in POLICIES:
            with asyncio.Runner(loop_factory=CountedTime) as runner:
                spans = runner.run(run(links, policy))
            table.add(" -> ".join(links), policy, *map(_mean, spans), _loaded_percent(spans[-1]))
    return table


def _chunks(num_tokens: int, size: int) -> list[Chunk]:
    return [
        Chunk(ChunkKey(start.to_bytes(8)), start // size, 1, start, min(size, num_tokens - start))
        for start in range(0, num_tokens, size)
    ]


def _mean(served: Sequence[Served]) -> float:
    return sum(each.ready_s for each in served) / len(served)


def _loaded_percent(served: Sequence[Served]) -> int:
    num_stored = sum(each.num_stored for each in served)
    return round(100 * sum(each.num_loaded for each in served) / num_stored)


if __name__ == "__main__":
    main(sys.argv[1:])
