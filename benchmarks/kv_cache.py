# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of sharing KV blocks: saves, loads, and hooks of the scheduler thread.

KVShareConnector, vLLM's own ExampleConnector and plain copies in memory, in turns, for one prompt
on synthetic cache tensors of an 8B-class model. Then the same for a hybrid model, which has states
of recurrent layers too, and which ExampleConnector cannot serve. Both connectors are driven through
their vLLM hooks, without an engine. Medians.
"""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.request import Request

from benchmarks import kv_hooks, kv_lookups, kv_steps, places
from benchmarks.kv_halves import KVHalves, LoadTimes, fill, prompt_of, text_config
from benchmarks.kv_shapes import DENSE, HYBRID, KVShape
from benchmarks.measure import Readings
from benchmarks.places import Place
from benchmarks.raw import RawFiles, RawObstore
from benchmarks.report import Cell, Report, Table, arguments, command_line
from kvshare.config import CHUNK_TOKENS
from kvshare.connector import KVShareConnector

MODULE = "benchmarks.kv_cache"
ROUND_TRIPS_MS = (0.0, 20.0)
MEMCPY, GATHER, SCATTER = "copy of as many bytes", "gather of the blocks", "scatter of the blocks"
GATHER_PUT = "gather, each chunk put by threads meanwhile"
EXAMPLE = "ExampleConnector"
HOST_CACHE_BYTES = 1 << 30  # of two hosts for each size of chunks, in memory
RAW_LANES = 8

What = tuple[str, str, str]  # place; who; part


def ours_name(chunk_tokens: int) -> str:
    """Return the name of our connector in the tables."""
    return f"KVShareConnector, chunks of {chunk_tokens}"


@dataclass(frozen=True)
class Turns:
    """The model, and the sizes and rounds to measure at each place."""

    config: VllmConfig
    shape: KVShape
    num_tokens: int
    rounds: int
    chunk_tokens: Sequence[int]

    @property
    def block_ids(self) -> list[int]:
        """Return the blocks of the prompt: those of its KV, then those of its states."""
        shape = self.shape
        num_blocks = max(1, self.num_tokens // shape.block_tokens) + shape.num_recurrent_groups
        return list(range(1, num_blocks + 1))  # vLLM never hands out block 0

    def prompt(self, num_more: int, seed: int, *, name: str = "") -> Request:
        """Return a request with `num_more` tokens more than the blocks hold."""
        shape = self.shape
        num_blocks = len(self.block_ids) - shape.num_recurrent_groups
        num_tokens = num_blocks * shape.block_tokens + num_more
        return prompt_of(num_tokens, seed, name=name, block_tokens=shape.block_tokens)


@dataclass(frozen=True)
class Ours:
    """Two engines with our connector."""

    first: KVHalves
    second: KVHalves  # on another host: its host cache is another folder


@dataclass(frozen=True)
class Site:
    """One place, with all competitors."""

    place: Place
    turns: Turns
    caches: Tensor  # the source of saves
    target: Tensor  # the target of loads
    ours: dict[int, Ours]  # by tokens a chunk
    example: KVHalves | None  # files only, and no hybrids
    example_reader: KVHalves | None
    raw: RawFiles | RawObstore

    @property
    def raw_name(self) -> str:
        """Return the name of the bare client of this place."""
        return f"bare: {self.raw.name}"


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    parser = arguments(__doc__ or "", MODULE)
    parser.add_argument("--tokens", type=int, help="length of the prompt")
    parser.add_argument("--chunk-tokens", help="some, as in 16,256; default: the connector's own")
    options = parser.parse_args(words)
    sizes = [int(size) for size in (options.chunk_tokens or str(CHUNK_TOKENS)).split(",")]
    rounds = options.rounds or (1 if options.quick else 5)
    num_tokens = options.tokens or (64 if options.quick else 1024)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its messages at the start are no news
    torch.set_num_threads(1)  # a copy is then one memcpy, as in the store's threads
    settings: dict[str, Cell] = {
        "rounds": rounds,
        "copy threads": 1,
    }
    report = Report("kv_cache", command_line(MODULE, options), settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = text_config(folder)
        found = [
            *stack.enter_context(places.folders(options.disk)),
            *stack.enter_context(places.s3(ROUND_TRIPS_MS)),
        ]
        gc.collect()
        gc.freeze()  # as vLLM's engine core does once it has started
        # A chunk of the hybrid is a block, which is larger than the chunks of the other model.
        for shape, chunk_tokens in ((DENSE, sizes), (HYBRID, [HYBRID.block_tokens])):
            turns = Turns(config, shape, num_tokens, rounds, chunk_tokens)
            readings: Readings[What] = Readings()
            names = [_measure_place(place, turns, readings) for place in found]
            report.add(_save_table(names, turns, readings))
            report.add(_load_table(names, turns, readings))
        report.add(kv_lookups.kv_lookups(found, sizes, rounds))
        report.add(kv_hooks.kv_hooks(config, found, sizes, 16 if options.quick else 100))
        report.add(kv_steps.kv_steps(config, 32 if options.quick else 1024, 10 * rounds))
        report.add(kv_steps.stored_bytes(config))
    print(f"\nwritten: {report.write(options.results).name}")


# --- measuring ---


def _measure_place(place: Place, turns: Turns, readings: Readings[What]) -> tuple[str, str]:
    """Save and load a prompt of its own each round; the first one warms up.

    Returns the name of the place and of its bare client.
    """
    block_ids = turns.block_ids
    with _site(place, turns) as site:
        for turn in range(turns.rounds + 1):
            kept = readings if turn else Readings()
            fill(site.caches, turn)
            _raw(site, turn, kept)
            _gather_put(site, turn, block_ids, kept)
            _copy(site, block_ids, kept)
            for size in turns.chunk_tokens:
                _ours(site, size, turn, block_ids, kept)
            _example(site, turn, block_ids, kept)
        return place.name, site.raw_name


@contextmanager
def _site(place: Place, turns: Turns) -> Iterator[Site]:
    config, shape = turns.config, turns.shape
    caches, target = (shape.empty_caches(turns.block_ids[-1] + 1) for _ in range(2))
    with ExitStack() as stack:

        def ours(over: Tensor, chunk_tokens: int) -> KVHalves:
            host = stack.enter_context(places.host_folder())
            limits = {
                "host_cache_dir": str(host),
                "host_cache_bytes": HOST_CACHE_BYTES,
                "chunk_tokens": chunk_tokens,
                "load": "always",  # the simulated engine computes nothing
            }
            halves = KVHalves(KVShareConnector, config, {**place.options, **limits}, over, shape)
            return stack.enter_context(closing(halves))

        def example(over: Tensor) -> KVHalves | None:
            if place.folder is None or shape.state is not None:
                return None
            shared = {"shared_storage_path": str(place.folder / "example")}
            return KVHalves(ExampleConnector, config, shared, over)

        yield Site(
            place,
            turns,
            caches,
            target,
            {size: Ours(ours(caches, size), ours(target, size)) for size in turns.chunk_tokens},
            example(caches),
            example(target),
            RawFiles(place, sync=True) if place.folder else RawObstore(place),
        )


def _copy(site: Site, block_ids: Sequence[int], readings: Readings[What]) -> None:
    place = site.place.name
    index = torch.tensor(block_ids)
    blocks = site.caches.index_select(1, index)
    ready = torch.zeros_like(blocks)
    with readings.timed((place, MEMCPY, "total")):
        ready.copy_(blocks)
    with readings.timed((place, GATHER, "total")):
        torch.index_select(site.caches, 1, index, out=ready)
    with readings.timed((place, SCATTER, "total")):
        site.target.index_copy_(1, index, ready)


def _raw(site: Site, turn: int, readings: Readings[What]) -> None:
    names = [f"{turn}-{number}" for number in range(len(site.turns.block_ids))]
    block_bytes = site.turns.shape.block_bytes
    body = site.caches.view(torch.uint8).view(-1)[:block_bytes].numpy().data
    with readings.timed((site.place.name, site.raw_name, "put")):
        site.raw.put(names, body, RAW_LANES)
    with readings.timed((site.place.name, site.raw_name, "get")):
        site.raw.get(names, RAW_LANES)
    site.raw.delete(names)


def _gather_put(site: Site, turn: int, block_ids: Sequence[int], readings: Readings[What]) -> None:
    """Gather chunk after chunk while threads put those before, as any connector does that neither
    holds up the step for the store nor waits with the store for the step."""
    blocks_each = site.turns.chunk_tokens[0] // site.turns.shape.block_tokens
    starts = range(0, len(block_ids), blocks_each)
    indices = [torch.tensor(block_ids[start : start + blocks_each]) for start in starts]
    ready = [torch.zeros_like(site.caches.index_select(1, index)) for index in indices]
    names = [f"{turn}-gathered-{number}" for number in range(len(indices))]
    with (
        ThreadPoolExecutor(RAW_LANES) as threads,
        readings.timed((site.place.name, GATHER_PUT, "total")),
    ):
        puts = []
        for name, index, chunk in zip(names, indices, ready, strict=True):
            torch.index_select(site.caches, 1, index, out=chunk)
            body = chunk.view(torch.uint8).view(-1).numpy().data
            puts.append(threads.submit(site.raw.put, [name], body, 1))
    for put in puts:
        put.result()
    site.raw.delete(names)


def _ours(
    site: Site, size: int, turn: int, block_ids: Sequence[int], readings: Readings[What]
) -> None:
    place, turns = site.place.name, site.turns
    halves, who = site.ours[size], ours_name(size)
    start_s = perf_counter()
    held_up_s = halves.first.save(turns.prompt(1, turn), block_ids)
    readings.add((place, who, "save held up"), held_up_s)
    halves.first.settle(turns.shape.num_saved(block_ids))
    readings.add((place, who, "save"), perf_counter() - start_s)
    for source in ("store", "host"):
        site.target.zero_()
        request = turns.prompt(2, turn, name=source)
        _record(readings, place, f"{who}, from {source}", halves.second.load(request, block_ids))
        _check(site, block_ids)
    if site.place.folder is not None:
        _empty(site.place.folder / "store")


def _empty(folder: Path) -> None:
    """Remove all objects: memory cannot hold every round of every size."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


def _example(site: Site, turn: int, block_ids: Sequence[int], readings: Readings[What]) -> None:
    if site.example is None or site.example_reader is None:
        return
    place = site.place.name
    held_up_s = site.example.save(site.turns.prompt(1, turn), block_ids)
    readings.add((place, EXAMPLE, "save held up"), held_up_s)
    site.target.zero_()
    # Its folder's name omits the last token, so it finds what a prompt with one token less saved.
    times = site.example_reader.load(site.turns.prompt(2, turn, name="example"), block_ids)
    _record(readings, place, EXAMPLE, times)
    _check(site, block_ids)
    assert site.place.folder is not None
    shutil.rmtree(site.place.folder / "example")


def _record(readings: Readings[What], place: str, who: str, times: LoadTimes) -> None:
    readings.add((place, who, "look-up"), times.look_up_s)
    readings.add((place, who, "load held up"), times.held_up_s)
    readings.add((place, who, "load"), times.total_s)


def _check(site: Site, block_ids: Sequence[int]) -> None:
    if not site.turns.shape.has_equal(site.caches, site.target, block_ids):
        raise AssertionError("what was loaded is not what was saved")


# --- reporting ---


def _save_table(names: Sequence[tuple[str, str]], turns: Turns, readings: Readings[What]) -> Table:
    table = Table(
        f"Saving one prompt: {turns.shape.name}",
        ("store", "who", "step held up ms", "x gather", "until stored ms", "x bare"),
        f"{_size(turns)} `step held up`: from the end of the forward pass to where the next step "
        f"may begin. `x gather`: the median of each round's ratio. `until stored`: all objects are "
        f"durable. `bare`: as many bytes, {RAW_LANES} blocks at once. "
        "ExampleConnector writes to the page cache within the step and does not sync.",
    )
    for place, raw in names:
        raw_s = readings.median((place, raw, "put"))
        gather = place, GATHER, "total"
        for who in (MEMCPY, GATHER, GATHER_PUT):
            what = place, who, "total"
            cells = (1e3 * readings.median(what), readings.ratio(what, gather))
            table.add(place, who, *cells, None, None)
        table.add(place, raw, None, None, 1e3 * raw_s, 1.0)
        for who in map(ours_name, turns.chunk_tokens):
            held_up, stored_s = (place, who, "save held up"), readings.median((place, who, "save"))
            cells = (1e3 * readings.median(held_up), readings.ratio(held_up, gather))
            table.add(place, who, *cells, 1e3 * stored_s, stored_s / raw_s)
        held_up = place, EXAMPLE, "save held up"
        if held_up in readings:
            cells = (1e3 * readings.median(held_up), readings.ratio(held_up, gather))
            table.add(place, EXAMPLE, *cells, None, None)
        else:
            table.add(place, f"{EXAMPLE}: {_why_not(turns)}", None, None, None, None)
    return table


def _load_table(names: Sequence[tuple[str, str]], turns: Turns, readings: Readings[What]) -> Table:
    table = Table(
        f"Loading one prompt: {turns.shape.name}",
        ("store", "who", "look-up ms", "in hooks ms", "total ms", "x scatter", "x bare"),
        "`total`: from the first question how much is stored to the last byte in the cache; `in "
        "hooks`: the part of it that other requests wait for. `from store`: another host saved it; "
        "`from host`: it is in this host's cache. ExampleConnector reads this host's page cache.",
    )
    for place, raw in names:
        base_s, raw_s = (readings.median((place, *of)) for of in ((SCATTER, "total"), (raw, "get")))
        table.add(place, SCATTER, None, None, 1e3 * base_s, 1.0, None)
        table.add(place, raw, None, None, 1e3 * raw_s, raw_s / base_s, 1.0)
        ours = [ours_name(size) for size in turns.chunk_tokens]
        sources = [f"{name}, from {of}" for of in ("store", "host") for name in ours]
        for who in (*sources, EXAMPLE):
            if (place, who, "load") not in readings:
                table.add(place, f"{who}: {_why_not(turns)}", None, None, None, None, None)
                continue
            look_up_s, held_s, total_s = (
                readings.median((place, who, of)) for of in ("look-up", "load held up", "load")
            )
            cells = (1e3 * look_up_s, 1e3 * held_s, 1e3 * total_s)
            table.add(place, who, *cells, total_s / base_s, total_s / raw_s)
    return table


def _size(turns: Turns) -> str:
    shape, num_blocks = turns.shape, len(turns.block_ids) - turns.shape.num_recurrent_groups
    num_bytes = num_blocks * shape.block_bytes + shape.state_bytes
    return (
        f"{num_blocks * shape.block_tokens} tokens in blocks of {shape.block_tokens}; "
        f"{num_bytes / 1e6:.0f} MB, of which a state is {shape.state_bytes / 1e6:.0f}."
    )


def _why_not(turns: Turns) -> str:
    """Return why there are no figures of ExampleConnector."""
    return "cannot use S3" if turns.shape.state is None else "cannot serve hybrids"


if __name__ == "__main__":
    main(sys.argv[1:])
