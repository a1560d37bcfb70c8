# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of sharing embeddings: saves, loads, and hooks of the scheduler thread.

ECShareConnector, vLLM's own ECExampleConnector and a plain copy in memory, in turns, on the same
embeddings. Both connectors are driven through their vLLM hooks, without an engine. Medians; MB is
2^20 bytes.
"""

import gc
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from benchmarks import encoder_hooks, places
from benchmarks.encoder_halves import DTYPE, WIDTH, Halves, Role, embedding, vlm_config
from benchmarks.measure import Readings, touch
from benchmarks.places import Place
from benchmarks.raw import RawFiles, RawObstore
from benchmarks.report import Report, Table, arguments, command_line
from ecshare.connector import ECShareConnector

MODULE = "benchmarks.encoder_cache"
MIB = 1 << 20
HOST_CACHE_BYTES = 512 * MIB  # fits all that is loaded again
SIZES_MB = (0.5, 8.0, 32.0)
ROUND_TRIPS_MS = (0.0, 20.0)
MEMCPY, CLONE = "copy into a ready buffer", "clone"
MAPPED = "bare: a file, opened and mapped"
DURABLE, ANNOUNCED = "ECShareConnector, durable", "ECShareConnector, announced"
OURS, EXAMPLE = "ECShareConnector", "ECExampleConnector"
_SAVE_PARTS = ("copy", "wait", "total")
_COLD_PARTS = ("cold ready", "cold load", "cold total")

What = tuple[float, str, str, str]  # MB; place or ""; who; part


@dataclass(frozen=True)
class Site:
    """One place, with all competitors."""

    place: Place
    durable: Halves
    announced: Halves
    consumer: Halves  # on another host: its host cache is another folder
    example: Halves | None  # files only
    raw: RawFiles | RawObstore

    @property
    def raw_name(self) -> str:
        """Return the name of the bare client of this place."""
        return f"bare: {self.raw.name}"

    @property
    def shared_name(self) -> str:
        """Return the name of a bare client that other processes of this host get the bytes from."""
        return f"{self.raw_name}, to a file in memory"


def main(words: Sequence[str]) -> None:
    """Measure, print, write the result files."""
    options = arguments(__doc__ or "", MODULE).parse_args(words)
    rounds = options.rounds or (1 if options.quick else 7)
    sizes = SIZES_MB[:1] if options.quick else SIZES_MB
    num_items = 16 if options.quick else 200
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its messages at the start are no news
    torch.set_num_threads(1)  # a copy is then one memcpy, as in the store's threads
    settings = {"rounds": rounds, "embedding width": WIDTH, "dtype": str(DTYPE), "copy threads": 1}
    report = Report("encoder_cache", command_line(MODULE, options), settings)
    readings: Readings[What] = Readings()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = vlm_config(folder)
        found = [
            *stack.enter_context(places.folders(options.disk)),
            *stack.enter_context(places.s3(ROUND_TRIPS_MS)),
        ]
        sites = [stack.enter_context(_site(place, config)) for place in found]
        # As vLLM's engine core does after its start: the collector skips long-lived objects.
        gc.collect()
        gc.freeze()
        for size_mb in sizes:
            _measure_size(sites, size_mb, rounds, readings)
        report.add(_save_table(sites, sizes, readings))
        report.add(_load_table(sites, sizes, readings))
        report.add(_cold_table(sites, sizes, readings))
        report.add(encoder_hooks.encoder_hooks(config, found, num_items))
    print(f"\nwritten: {report.write(options.results).name}")


@contextmanager
def _site(place: Place, config: VllmConfig) -> Iterator[Site]:
    with ExitStack() as stack:

        def start(role: Role, host: Path, save: str = "durable") -> Halves:
            limits = {"host_cache_dir": str(host), "host_cache_bytes": HOST_CACHE_BYTES}
            extra = {**place.options, **limits, "save": save}
            return stack.enter_context(closing(Halves(ECShareConnector, config, role, extra)))

        here, there = (stack.enter_context(places.host_folder()) for _ in range(2))
        example = None
        if place.folder is not None:
            shared = {"shared_storage_path": str(place.folder / "example")}
            example = Halves(ECExampleConnector, config, "ec_both", shared)
        yield Site(
            place,
            start("ec_producer", here),
            start("ec_producer", here, "announced"),
            start("ec_consumer", there),
            example,
            RawFiles(place, sync=True) if place.folder else RawObstore(place),
        )


# --- measuring ---


def _measure_size(
    sites: Sequence[Site], size_mb: float, rounds: int, readings: Readings[What]
) -> None:
    """Measure all phases for one size, with a new embedding each round. The first one warms up."""
    tensors = [embedding(int(size_mb * MIB), seed) for seed in range(rounds + 1)]
    for phase in (_save, _load_cold, _load_cached):
        for turn, tensor in enumerate(tensors):
            kept = readings if turn else Readings()
            phase(sites, f"{size_mb}-{turn}", tensor, size_mb, kept)
    for site in sites:
        if site.place.folder is not None:
            shutil.rmtree(site.place.folder / "example")


def _copy(
    place: str, tensor: Tensor, ready: Tensor, size_mb: float, readings: Readings[What]
) -> None:
    """Time the copies that saves and loads are compared with; in turns with them."""
    with readings.timed((size_mb, place, MEMCPY, "copy")):
        ready.copy_(tensor)
        touch(ready)
    with readings.timed((size_mb, place, CLONE, "copy")):
        touch(tensor.clone())


def _save(
    sites: Sequence[Site], name: str, tensor: Tensor, size_mb: float, readings: Readings[What]
) -> None:
    ready = torch.zeros_like(tensor)  # then it has been unused as long as the connector's slabs
    for site in sites:
        place = site.place.name
        _put_raw(site, name, tensor, size_mb, readings)
        _copy(place, tensor, ready, size_mb, readings)
        for who, halves in (
            (DURABLE, site.durable),
            (ANNOUNCED, site.announced),
            (EXAMPLE, site.example),
        ):
            if halves is None:
                continue
            copied_s, settled_s = halves.save(f"{who}-{name}", tensor)
            if who == ANNOUNCED:
                halves.settle(1)  # or it would upload while the next save is timed
            readings.add((size_mb, place, who, "copy"), copied_s)
            readings.add((size_mb, place, who, "wait"), settled_s)
            readings.add((size_mb, place, who, "total"), copied_s + settled_s)


def _put_raw(
    site: Site, name: str, tensor: Tensor, size_mb: float, readings: Readings[What]
) -> None:
    body = tensor.view(torch.uint8).view(-1).numpy().data
    with readings.timed((size_mb, site.place.name, site.raw_name, "total")):
        site.raw.put([name], body, 1)


def _load_cold(
    sites: Sequence[Site], name: str, tensor: Tensor, size_mb: float, readings: Readings[What]
) -> None:
    """Load what another host saved, with none of it in this host's cache."""
    for site in sites:
        place = site.place.name
        with readings.timed((size_mb, place, site.raw_name, "cold")):
            site.raw.get([name], 1)
        with (
            places.host_folder() as path,
            open(path, "w+b", buffering=0) as file,
            readings.timed((size_mb, place, site.shared_name, "cold")),
        ):
            for piece in site.raw.pieces(name):
                file.write(piece)
            touch(_mapped(file.fileno()))
        for who, key, halves in (
            (OURS, DURABLE, site.consumer),
            (EXAMPLE, EXAMPLE, site.example),
        ):
            if halves is None:
                continue
            ready_s, loaded_s, loaded = halves.load(f"{key}-{name}", len(tensor))
            _check(loaded, tensor)
            readings.add((size_mb, place, who, "cold ready"), ready_s)
            readings.add((size_mb, place, who, "cold load"), loaded_s)
            readings.add((size_mb, place, who, "cold total"), ready_s + loaded_s)


def _load_cached(
    sites: Sequence[Site], name: str, tensor: Tensor, size_mb: float, readings: Readings[What]
) -> None:
    """Load what is in this host's memory: the host cache, or the page cache of a folder."""
    _copy("", tensor, torch.zeros_like(tensor), size_mb, readings)
    with places.host_folder() as path:
        path.write_bytes(tensor.view(torch.uint8).numpy().data)
        with readings.timed((size_mb, "", MAPPED, "copy")):
            fd = os.open(path, os.O_RDONLY)
            touch(_mapped(fd))
            os.close(fd)
    for site in sites:
        place = site.place.name
        for who, key, halves in (
            (OURS, DURABLE, site.consumer),
            (EXAMPLE, EXAMPLE, site.example),
        ):
            if halves is None:
                continue
            _, loaded_s, loaded = halves.load(f"{key}-{name}", len(tensor))
            _check(loaded, tensor)
            readings.add((size_mb, place, who, "load"), loaded_s)


def _mapped(fd: int) -> Tensor:
    """Return the bytes of a file in a private mapping, as our worker half loads them on a CPU."""
    return torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _check(loaded: Tensor, saved: Tensor) -> None:
    if not torch.equal(loaded.view(torch.int16), saved.view(torch.int16)):
        raise AssertionError("what was loaded is not what was saved")


# --- reporting ---


def _save_table(sites: Sequence[Site], sizes: Sequence[float], readings: Readings[What]) -> Table:
    table = Table(
        "Saving one embedding: how long its step is held up",
        ("MB", "store", "who", "copy ms", "durable wait ms", "held up ms", "x copy"),
        "`copy`: the hooks after the encoder; `durable wait`: the hook at the end of the step. A "
        "durable save's step ends when the embedding is stored and published to its own host; an "
        "announced one is stored behind later steps. ECExampleConnector writes to the page cache "
        "and does not sync; a reader may see half a file.",
    )
    for size in sizes:
        for site in sites:
            place = site.place.name
            base_s = readings.median((size, place, MEMCPY, "copy"))
            for who in (MEMCPY, CLONE):
                copied_s = readings.median((size, place, who, "copy"))
                table.add(size, place, who, *_timed(copied_s, None, copied_s, base_s=base_s))
            raw_s = readings.median((size, place, site.raw_name, "total"))
            table.add(size, place, site.raw_name, *_timed(None, raw_s, raw_s, base_s=base_s))
            for who in (DURABLE, ANNOUNCED, EXAMPLE):
                if (size, place, who, "total") not in readings:
                    table.add(size, place, f"{who}: cannot use S3", None, None, None, None)
                    continue
                parts = [readings.median((size, place, who, part)) for part in _SAVE_PARTS]
                table.add(size, place, who, *_timed(*parts, base_s=base_s))
    return table


def _load_table(sites: Sequence[Site], sizes: Sequence[float], readings: Readings[What]) -> Table:
    table = Table(
        "Loading one embedding that is on this host, to the last page touched",
        ("MB", "from", "who", "ms", "x copy"),
        "Into vLLM's encoder cache, on a CPU. ECExampleConnector maps its file instead of copying "
        "it, so its pages arrive as they are touched; on a GPU it would copy too.",
    )
    for size in sizes:
        base_s = readings.median((size, "", MEMCPY, "copy"))
        for who in (MEMCPY, CLONE, MAPPED):
            table.add(
                size, "", who, *_timed(readings.median((size, "", who, "copy")), base_s=base_s)
            )
        loaded_s = readings.median((size, sites[0].place.name, OURS, "load"))
        table.add(size, "host cache", OURS, *_timed(loaded_s, base_s=base_s))
        for site in sites:
            what = (size, site.place.name, EXAMPLE, "load")
            if what in readings:
                loaded_s = readings.median(what)
                table.add(size, site.place.name, EXAMPLE, *_timed(loaded_s, base_s=base_s))
    return table


def _cold_table(sites: Sequence[Site], sizes: Sequence[float], readings: Readings[What]) -> Table:
    table = Table(
        "Loading one embedding that another host has stored",
        ("MB", "store", "who", "until ready ms", "load ms", "total ms", "x bare"),
        "`until ready`: from the first ensure_cache_available, asked again every millisecond, to "
        "True; `load`: the worker half. `bare`: the bytes alone, in no tensor and unchecked; `to a "
        "file in memory`: where another process, like vLLM's worker, can map them, until it has "
        "read a byte of each page. "
        "ECExampleConnector has no store but a folder, which is this host's own here.",
    )
    for size in sizes:
        for site in sites:
            place = site.place.name
            raw_s = readings.median((size, place, site.raw_name, "cold"))
            table.add(size, place, site.raw_name, *_timed(None, None, raw_s, base_s=raw_s))
            shared_s = readings.median((size, place, site.shared_name, "cold"))
            table.add(size, place, site.shared_name, *_timed(None, None, shared_s, base_s=raw_s))
            for who in (OURS, EXAMPLE):
                if (size, place, who, "cold total") not in readings:
                    table.add(size, place, f"{who}: cannot use S3", None, None, None, None)
                    continue
                parts = [readings.median((size, place, who, part)) for part in _COLD_PARTS]
                table.add(size, place, who, *_timed(*parts, base_s=raw_s))
    return table


def _timed(*seconds: float | None, base_s: float) -> list[float | None]:
    """Return cells of milliseconds, then the ratio of the last one to `base_s`."""
    assert seconds[-1] is not None
    return [*(None if each is None else 1e3 * each for each in seconds), seconds[-1] / base_s]


if __name__ == "__main__":
    main(sys.argv[1:])
