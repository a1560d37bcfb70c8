# SPDX-License-Identifier: Apache-2.0
"""Engines of different tensor-parallel sizes: every rank loads its own heads and no others."""

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ecshare.plugin.ranks import Rank
from ecshare.transfer.engine import TransferEngine
from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.chunks.prefix import ChunkKey
from kvshare.config import KVConfig
from kvshare.messages import LoadOrder, Orders, Piece
from kvshare.worker.loads import Finished
from kvshare.worker.worker import CacheShape, KVWorker
from lab.servers.s3 import BUCKET, SeaweedFS

NAMESPACE = "0" * 32
BLOCKS, TOKENS, CONTENT, LAYERS = 6, 4, 6, 3
CHUNK_BLOCKS = 2
KEY = ChunkKey(b"\1" * 32)
GIVE_UP_S = 20.0
HEAD_BYTES = LAYERS * CHUNK_BLOCKS * TOKENS * CONTENT * 4


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return options of a store for this test alone."""
    if request.param == "folder":
        return {"url": f"file://{tmp_path}/store"}
    server: SeaweedFS = request.getfixturevalue("seaweed")
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    return {"url": url, "storage_options": server.storage_options}


class Fleet:
    """The ranks of one engine on one host, and their caches."""

    def __init__(self, place: dict[str, Any], host: Path, tp_size: int, num_heads: int) -> None:
        self.tp_size = tp_size
        own = max(1, num_heads // tp_size)
        layers = tuple((f"l.{number}", 0) for number in range(LAYERS))
        layer_set = LayerSet(0, (0,), layers, AttentionWindow(), own, num_heads)
        shape = CacheShape(BLOCKS, TOKENS, (layer_set,), 1)
        self.engines, self.workers, self.caches = [], [], []
        for rank in range(tp_size):
            config = KVConfig(**place, host_cache_dir=str(host))
            self.engines.append(TransferEngine(config, "options"))
            worker = KVWorker(config, shape, Rank(rank, tp_size), self.engines[-1])
            self.workers.append(worker)
            self.caches.append(torch.zeros(LAYERS, BLOCKS, own, TOKENS, CONTENT))
            worker.register({name: self.caches[-1][n] for n, (name, _) in enumerate(layers)})

    def heads(self, rank: int, num_heads: int) -> slice:
        """Return the heads that vLLM assigns to `rank`."""
        if self.tp_size > num_heads:
            first = rank // (self.tp_size // num_heads)
            return slice(first, first + 1)
        own = num_heads // self.tp_size
        return slice(rank * own, (rank + 1) * own)

    def hold(self, model: Tensor) -> None:
        """Fill each rank's cache from the KV of all heads: [layer, block, head, token, content]."""
        for rank, cache in enumerate(self.caches):
            cache.copy_(model[:, :, self.heads(rank, model.shape[2])])

    def save(self, piece: Piece) -> None:
        for worker in self.workers:
            worker.save(Orders(NAMESPACE, saves=(piece,)))
        assert self.settle() == [Finished()] * self.tp_size

    def load(self, *pieces: Piece) -> list[Finished]:
        for worker in self.workers:
            worker.load(Orders(NAMESPACE, loads=(LoadOrder("r", pieces),)))
        return self.settle()

    def settle(self) -> list[Finished]:
        totals = [Finished() for _ in self.workers]
        deadline_s = time.monotonic() + GIVE_UP_S
        for worker, engine, total in zip(self.workers, self.engines, totals, strict=True):
            while engine.in_flight:
                engine.wait_idle()
                finished = worker.settle()
                assert not finished.requests & total.requests, "reported twice"
                total.requests.update(finished.requests)
                total.failed.update(finished.failed)
                total.invalid_blocks.update(finished.invalid_blocks)
                total.lost.update(finished.lost)
                assert time.monotonic() < deadline_s
        return totals

    def counts(self, rank: int) -> dict[str, float]:
        stats = self.workers[rank].take_stats()
        return stats.data if stats else {}

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


Start = Callable[[int, int], Fleet]


@pytest.fixture
def start(place: dict[str, Any], tmp_path: Path) -> Iterator[Start]:
    started: list[Fleet] = []

    def start(tp_size: int, num_heads: int) -> Fleet:
        started.append(Fleet(place, tmp_path / f"engine-{len(started)}", tp_size, num_heads))
        return started[-1]

    yield start
    for fleet in started:
        fleet.close()


def chunk(*block_ids: int, size: int | None = None, first_block: int = 0) -> Piece:
    num_tokens = CHUNK_BLOCKS * TOKENS
    return Piece(KEY, CHUNK_BLOCKS, num_tokens, (block_ids,), first_block, tp_size=size)


def stored_size(writer: int, num_heads: int) -> int:
    return min(writer, num_heads)


@pytest.mark.parametrize(
    ("writer", "reader", "num_heads"),
    [
        (8, 2, 8),
        (2, 8, 8),
        (1, 8, 8),
        (8, 1, 8),
        (3, 2, 6),
        (2, 3, 6),
        (2, 2, 2),
        (8, 2, 2),
        (1, 4, 2),
    ],
)
def test_every_rank_loads_exactly_its_heads(
    start: Start, writer: int, reader: int, num_heads: int
) -> None:
    model = torch.rand(LAYERS, BLOCKS, num_heads, TOKENS, CONTENT)
    source, target = start(writer, num_heads), start(reader, num_heads)
    source.hold(model)
    source.save(chunk(3, 1))
    finished = target.load(chunk(0, 4, size=stored_size(writer, num_heads)))
    assert finished == [Finished({"r"})] * reader
    expected = torch.zeros_like(model)
    expected[:, [0, 4]] = model[:, [3, 1]]
    for rank, cache in enumerate(target.caches):
        assert torch.equal(cache, expected[:, :, target.heads(rank, num_heads)])
    counts = [target.counts(rank) for rank in range(reader)]
    assert [each["blocks/loaded"] for each in counts] == [CHUNK_BLOCKS] * reader
    read = [each.get("transfer_bytes/read/store", 0) for each in counts]
    assert sum(read) == num_heads * HEAD_BYTES, "a host reads each shard once"


def test_replicated_heads_are_stored_once(start: Start, tmp_path: Path) -> None:
    source = start(8, 2)
    source.hold(torch.rand(LAYERS, BLOCKS, 2, TOKENS, CONTENT))
    source.save(chunk(3, 1))
    counts = [source.counts(rank).get("blocks/saved", 0) for rank in range(8)]
    assert counts == [2, 0, 0, 0, 2, 0, 0, 0]


@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1)])
def test_some_blocks_of_a_chunk_of_another_tp_size_are_loaded(
    start: Start, writer: int, reader: int
) -> None:
    model = torch.rand(LAYERS, BLOCKS, 4, TOKENS, CONTENT)
    source, target = start(writer, 4), start(reader, 4)
    source.hold(model)
    source.save(chunk(3, 1))
    target.load(chunk(5, size=writer, first_block=1))
    for rank, cache in enumerate(target.caches):
        assert torch.equal(cache[:, 5], model[:, 1, target.heads(rank, 4)])
        assert cache[:, :5].count_nonzero() == 0
