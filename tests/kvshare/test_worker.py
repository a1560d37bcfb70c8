# SPDX-License-Identifier: Apache-2.0
"""The worker half alone: real tensors, a real store, and what is reported when."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ecshare.store.keys import Kind, object_key
from ecshare.transfer.engine import TransferEngine
from kvshare.config import KVConfig
from kvshare.messages import LoadOrder, Orders, Piece, Report
from kvshare.prefix import ChunkKey
from kvshare.worker import CacheShape, Finished, KVWorker
from tests.kvshare.gated import GatedFileSystem

NAMESPACE = "0" * 32
BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 8, 2, 4, 6, 3
GIVE_UP_S = 20.0
A, B, C = (ChunkKey(bytes([number]) * 32) for number in (1, 2, 3))


class Host:
    """One worker on a host of its own."""

    def __init__(self, host_cache: Path) -> None:
        config = KVConfig(url="gated://bucket", host_cache_dir=str(host_cache))
        self.engine = TransferEngine(config, "options")
        self.worker = KVWorker(config, CacheShape(BLOCKS, TOKENS, HEADS), "t0of1", self.engine)
        self.cache = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
        self.worker.register({f"l.{number}": layer for number, layer in enumerate(self.cache)})

    def save(self, *pieces: Piece) -> None:
        self.worker.save(Orders(NAMESPACE, saves=pieces))
        self.settle()

    def load(self, request_id: str, *pieces: Piece) -> None:
        self.worker.load(Orders(NAMESPACE, loads=(LoadOrder(request_id, pieces),)))

    def settle(self, until: Callable[[Finished], bool] = lambda _: False) -> Finished:
        """Step until all jobs have ended, or `until` is true of all reports so far."""
        total = Finished()
        deadline_s = time.monotonic() + GIVE_UP_S
        while self.engine.in_flight and not until(total):
            finished = self.worker.settle()
            assert not finished.requests & total.requests, "reported twice"
            total.requests.update(finished.requests)
            total.failed.update(finished.failed)
            assert time.monotonic() < deadline_s
        return total

    def counts(self) -> dict[str, float]:
        stats = self.worker.take_stats()
        counts = stats.data if stats else {}
        return {name: count for name, count in counts.items() if name.startswith("blocks/")}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[[], Host]]:
    started: list[Host] = []

    def start() -> Host:
        started.append(Host(tmp_path / f"host-{len(started)}"))
        return started[-1]

    yield start
    GatedFileSystem.open_gates()
    for one in started:
        one.worker.close()
    GatedFileSystem.reset()


def name_of(chunk: ChunkKey) -> str:
    return object_key(Kind.KV, NAMESPACE, bytes(chunk), "t0of1").rpartition("/")[2]


def random_cache() -> Tensor:
    return torch.rand(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)


def test_blocks_travel_to_the_byte(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(Piece(A, TOKENS, 3), Piece(B, 2, 5))
    target.load("r", Piece(A, TOKENS, 1), Piece(B, 2, 0))
    assert target.settle() == Finished({"r"}, set())
    assert torch.equal(target.cache[:, 1], source.cache[:, 3])
    assert torch.equal(target.cache[:, 0], source.cache[:, 5])
    assert target.cache[:, 2:].count_nonzero() == 0
    assert source.counts() == {"blocks/saved": 2}
    assert target.counts() == {"blocks/loaded": 2}
    assert source.worker.report() is None
    assert target.worker.report() is None


def test_a_block_may_be_refilled_once_its_save_was_started(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    before = source.cache[:, 3].clone()
    GatedFileSystem.close_gate("put")
    source.worker.save(Orders(NAMESPACE, saves=(Piece(A, TOKENS, 3),)))
    source.cache.zero_()
    GatedFileSystem.open_gates()
    source.settle()
    target.load("r", Piece(A, TOKENS, 0))
    target.settle()
    assert torch.equal(target.cache[:, 0], before)


def test_what_arrives_after_a_failure_was_reported_is_not_written(
    host: Callable[[], Host],
) -> None:
    """vLLM may have given the blocks to another request by then."""
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(Piece(A, TOKENS, 3))
    GatedFileSystem.close_gate(f"get {name_of(A)}")
    target.load("r", Piece(A, TOKENS, 0), Piece(B, TOKENS, 1))
    reported = target.settle(until=lambda total: bool(total.requests))
    assert reported == Finished({"r"}, {"r"})
    report = target.worker.report()
    assert report is not None
    assert report.lost == {B}
    GatedFileSystem.open_gates()
    assert target.settle() == Finished()
    assert target.cache.count_nonzero() == 0
    assert target.counts() == {"blocks/failed": 1}
    assert target.worker.report() is None


def test_a_second_bad_piece_is_told_as_lost_but_the_request_only_once(
    host: Callable[[], Host],
) -> None:
    target = host()
    GatedFileSystem.close_gate(f"get {name_of(A)}")
    target.load("r", Piece(A, TOKENS, 0), Piece(B, TOKENS, 1))
    assert target.settle(until=lambda total: bool(total.requests)) == Finished({"r"}, {"r"})
    GatedFileSystem.open_gates()
    assert target.settle() == Finished()
    report = target.worker.report()
    assert report is not None
    assert report.lost == {A, B}
    assert target.counts() == {"blocks/failed": 1}


def test_requests_with_one_prefix_share_its_fetches(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(Piece(A, TOKENS, 3), Piece(B, TOKENS, 4))
    target.load("one", Piece(A, TOKENS, 0), Piece(B, TOKENS, 1))
    target.load("two", Piece(A, TOKENS, 2), Piece(C, TOKENS, 5))
    assert target.engine.in_flight == 3
    assert target.settle() == Finished({"one", "two"}, {"two"})
    assert torch.equal(target.cache[:, 0], source.cache[:, 3])
    assert torch.equal(target.cache[:, 1], source.cache[:, 4])


def test_another_number_of_tokens_is_another_thing(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(Piece(A, 2, 3))
    target.load("r", Piece(A, 3, 0))
    assert target.settle() == Finished({"r"}, {"r"})
    assert target.cache.count_nonzero() == 0


def test_a_cache_it_does_not_understand_is_neither_read_nor_written(
    host: Callable[[], Host], caplog: pytest.LogCaptureFixture
) -> None:
    config = KVConfig(url="gated://bucket", host_cache_dir=host().engine.host.root.as_posix())
    engine = TransferEngine(config, "options")
    worker = KVWorker(config, CacheShape(BLOCKS, TOKENS, HEADS), "t0of1", engine)
    worker.register({"l.0": torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT)})
    assert "cannot be read as 8 blocks of 2 heads x 4 tokens" in caplog.text
    report = worker.report()
    assert report is not None
    assert report.is_idle
    loads = (LoadOrder("r", (Piece(A, TOKENS, 0), Piece(B, TOKENS, 1))),)
    orders = Orders(NAMESPACE, loads, saves=(Piece(C, TOKENS, 2),))
    worker.load(orders)
    worker.save(orders)
    assert worker.settle() == Finished({"r"}, {"r"})
    assert engine.in_flight == 0
    worker.close()


def test_reports_of_all_ranks_add_up() -> None:
    one, other = Report(frozenset({A}), is_idle=True), Report(frozenset({B}))
    assert one.aggregate(other) == Report(frozenset({A, B}), is_idle=True)
    assert other.aggregate(one) == Report(frozenset({A, B}), is_idle=True)
