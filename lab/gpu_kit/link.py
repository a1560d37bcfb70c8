# SPDX-License-Identifier: Apache-2.0
"""Measure how much of the link between host and device our copies use, for benchmarks.gpu too."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lab.gpu_kit.kit import Bench
from lab.gpu_kit.layouts import Sizes, bits, fill, make_cache
from lab.gpu_kit.workers import MIB, EncoderHost, KVHost, chunks, drawn

TO_HOST, TO_DEVICE = "to the host", "to the device"
PLAIN, KV, EMBEDDINGS = "pinned memcpy", "KV", "embeddings"
PICTURES = 8
CHUNK_BLOCKS = 16
_LINK_BYTES = 256 * MIB
_PICTURE = (1000, 3584)

What = tuple[str, str]
"""The kind of copies, and their direction."""


@dataclass
class Moved:
    """A number of bytes that were copied, and the seconds that this took."""

    num_bytes: int
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record the seconds that the body takes."""
        began_s = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - began_s

    @property
    def rate(self) -> float:
        """Return the bytes per second."""
        return self.num_bytes / self.seconds


def copies(bench: Bench, sizes: Sizes) -> Mapping[What, Moved]:
    """Time copies in both directions, once: plain ones of pinned memory, and ours.

    KV: blocks of a cache of `sizes`, from the order until they are copied; loads read from the
    host cache, and are verified. Embeddings: `PICTURES` in a step, until the device is done.
    """
    return {**_of_pinned_memory(bench), **_of_kv(bench, sizes), **_of_embeddings(bench)}


def _of_pinned_memory(bench: Bench) -> dict[What, Moved]:
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=bench.is_gpu)
    device = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=bench.device)
    found = {}
    for direction, target, source in ((TO_HOST, host, device), (TO_DEVICE, device, host)):
        target.copy_(source)
        bench.finish()
        found[PLAIN, direction] = moved = Moved(_LINK_BYTES)
        with moved.timed():
            target.copy_(source, non_blocking=bench.is_gpu)
            bench.finish()
    return found


def _of_kv(bench: Bench, sizes: Sizes) -> dict[What, Moved]:
    source = make_cache(sizes, "LBHNC", torch.bfloat16, bench.device)
    fill(source, 1)
    target = torch.zeros_like(source)
    pieces = chunks(range(sizes.blocks), CHUNK_BLOCKS, sizes.block_tokens)
    store, host_cache = bench.folder(), bench.folder()
    saved, loaded = Moved(source.nbytes), Moved(source.nbytes)
    room = source.nbytes + MIB
    bench.finish()
    with KVHost(bench, source, store, host_cache=host_cache, buffer_bytes=room) as host:
        with saved.timed():
            host.save(*pieces)
            host.worker.unregister()  # returns when all is copied
        host.worker.restore()
        host.settle()
    with KVHost(bench, target, store, host_cache=host_cache, buffer_bytes=room) as host:
        with loaded.timed():
            host.load("r", *pieces)
            finished = host.settle()
        assert not finished.invalid_blocks
    assert torch.equal(bits(source), bits(target))
    return {(KV, TO_HOST): saved, (KV, TO_DEVICE): loaded}


def _of_embeddings(bench: Bench) -> dict[What, Moved]:
    pictures = [drawn(*_PICTURE, torch.bfloat16, bench.device) for _ in range(PICTURES)]
    num_bytes = sum(each.nbytes for each in pictures)
    saved, loaded = Moved(num_bytes), Moved(num_bytes)
    with EncoderHost(bench, bench.folder(), buffer_bytes=256 * MIB) as host:
        bench.finish()
        with saved.timed():
            for number, picture in enumerate(pictures):
                host.encode(str(number), picture)
            bench.finish()
        host.wait_for("saved", PICTURES)
        host.cache.clear()
        with loaded.timed():
            for number in range(PICTURES):
                host.load(str(number))
            bench.finish()
    return {(EMBEDDINGS, TO_HOST): saved, (EMBEDDINGS, TO_DEVICE): loaded}
