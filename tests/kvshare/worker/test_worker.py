# SPDX-License-Identifier: Apache-2.0
"""The worker half alone, with real tensors and a real store: blocks and reports."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ecshare.plugin.ranks import Rank
from ecshare.store.format import PROLOGUE_BYTES
from ecshare.store.hostcache.cache import HostCache
from ecshare.store.keys import Key, Kind, object_key
from ecshare.transfer.device import staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import Fetch, Handle, Job
from ecshare.transfer.stats import Stats
from kvshare.chunks.layers import AttentionWindow, LayerSet
from kvshare.chunks.prefix import ChunkKey
from kvshare.config import KVConfig
from kvshare.messages import LoadOrder, Orders, Piece, Report
from kvshare.worker import loads
from kvshare.worker.blocks import BlockCaches
from kvshare.worker.layout_check import LayoutCheck
from kvshare.worker.loads import Finished
from kvshare.worker.rank_shards import RankShards
from kvshare.worker.reports import Reports
from kvshare.worker.saves import Saves
from kvshare.worker.worker import CacheShape, KVWorker
from lab.gpu_stand_in import stand_in
from tests.kvshare.gated import GatedFileSystem

NAMESPACE = "0" * 32
BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 8, 2, 4, 6, 3
BLOCK_BYTES = LAYERS * HEADS * TOKENS * CONTENT * 4
GIVE_UP_S = 20.0
_PAUSE_S = 0.001  # polling without a pause keeps Python's lock from the I/O threads
LAYER_SET = LayerSet(
    0, (0,), tuple((f"l.{number}", 0) for number in range(LAYERS)), AttentionWindow(), HEADS, HEADS
)
SHAPE = CacheShape(BLOCKS, TOKENS, (LAYER_SET,), 1)
RANK = Rank(0, 1)
A, B, C = (ChunkKey(bytes([number]) * 32) for number in (1, 2, 3))


class Host:
    """One worker with its own host cache."""

    def __init__(  # noqa: PLR0913
        self,
        host_cache: Path,
        *,
        shape: CacheShape | None = None,
        rank: Rank = RANK,
        saves: bool = True,
        loads: bool = True,
        **options: Any,
    ) -> None:
        both = {"url": "gated://bucket", "host_cache_dir": str(host_cache)} | options
        self.config = KVConfig(**both)
        self.engine = TransferEngine(self.config, "options")
        self.worker = KVWorker(
            self.config, shape or SHAPE, rank, self.engine, saves=saves, loads=loads
        )
        self.cache = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
        self.worker.register({f"l.{number}": layer for number, layer in enumerate(self.cache)})

    def save(self, *pieces: Piece) -> None:
        with torch.inference_mode():  # vLLM makes steps in it
            self.worker.save(Orders(NAMESPACE, saves=pieces))
        self.settle()

    def load(self, request_id: str, *pieces: Piece, is_announced: bool = False) -> None:
        order = LoadOrder(request_id, pieces, is_announced)
        with torch.inference_mode():
            self.worker.load(Orders(NAMESPACE, loads=(order,)))

    def abandon(self, request_id: str) -> None:
        self.worker.load(Orders(NAMESPACE, abandoned=(request_id,)))

    def settle(
        self,
        until: Callable[[Finished], bool] = lambda _: False,
        each: Callable[[], bool] = lambda: True,
    ) -> Finished:
        """Step until all jobs have ended, or `until` is true of all reports so far.

        `each` must be true after each step.
        """
        total = Finished()
        deadline_s = time.monotonic() + GIVE_UP_S
        while self.engine.in_flight and not until(total):
            self.engine.drain(_PAUSE_S)
            finished = self.worker.settle()
            assert each()
            assert not finished.requests & total.requests, "reported twice"
            total.requests.update(finished.requests)
            total.failed.update(finished.failed)
            total.invalid_blocks.update(finished.invalid_blocks)
            assert time.monotonic() < deadline_s
        return total

    def counts(self) -> dict[str, float]:
        stats = self.worker.take_stats()
        counts = stats.data if stats else {}
        return {name: count for name, count in counts.items() if name.startswith("blocks/")}


@pytest.fixture(params=["cpu", "gpu"])
def host(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Host]]:
    started: list[Host] = []
    if request.param == "gpu":
        stand_in(monkeypatch)

    def start(**options: Any) -> Host:
        started.append(Host(tmp_path / f"host-{len(started)}", **options))
        return started[-1]

    yield start
    GatedFileSystem.open_gates()
    for one in started:
        one.worker.unregister()  # or it would wait for announced chunks that never arrive
        one.worker.close()
    GatedFileSystem.reset()


def block(key: ChunkKey, num_tokens: int, block_id: int) -> Piece:
    """Make a piece that is a chunk of one block."""
    return Piece(key, 1, num_tokens, ((block_id,),))


def name_of(chunk: ChunkKey) -> str:
    return object_key(Kind.KV, NAMESPACE, bytes(chunk), "t0of1").rpartition("/")[2]


def random_cache() -> Tensor:
    return torch.rand(LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)


def cannot(blocks: Tensor, first_token: int) -> None:
    raise RuntimeError("another kernel")


def test_tail_that_cannot_be_zeroed_is_not_stored(
    host: Callable[[], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of its block holds KV of an earlier request."""
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "SHAPE", replace(SHAPE, erase=cannot))
        source = host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, 2, 5))
    assert source.counts() == {"blocks/saved": 1, "blocks/dropped": 1}
    report = source.worker.report()
    assert report is not None
    assert report.lost == {B}, "it is not reported as lost"


def test_only_an_idle_step_waits_for_a_load(
    host: Callable[[], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, waits = host(), host(), Counter[str]()
    source.save(block(A, TOKENS, 3))
    monkeypatch.setattr(target.engine, "wait_idle", lambda *_: waits.update(["now"]))
    idle = Orders(NAMESPACE, is_idle=True)
    target.worker.wait_idle(idle)
    assert not waits, "nothing is loaded"
    target.load("r", block(A, TOKENS, 2))
    target.worker.wait_idle(Orders(NAMESPACE))
    assert not waits, "requests of this step would wait too"
    target.worker.wait_idle(idle)
    assert waits["now"] == 1
    assert target.settle().requests == {"r"}
    target.worker.wait_idle(idle)
    assert waits["now"] == 1


def test_idle_step_waits_for_a_save_too(
    host: Callable[[], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While saves are pending vLLM makes such steps, hundreds a second if they do not wait."""
    source, waits = host(), Counter[str]()
    monkeypatch.setattr(source.engine, "wait_idle", lambda: waits.update(["now"]))
    GatedFileSystem.close_gate("put")
    source.worker.save(Orders(NAMESPACE, saves=(block(A, TOKENS, 3),)))
    source.worker.wait_idle(Orders(NAMESPACE))
    assert not waits, "requests of this step would wait too"
    source.worker.wait_idle(Orders(NAMESPACE, is_idle=True))
    assert waits["now"] == 1
    GatedFileSystem.open_gates()
    source.settle()
    source.worker.wait_idle(Orders(NAMESPACE, is_idle=True))
    assert waits["now"] == 1


def test_loaded_blocks_equal_the_saved_ones(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, 2, 5))
    target.load("r", block(A, TOKENS, 1), block(B, 2, 0))
    assert target.settle() == Finished({"r"})
    assert torch.equal(target.cache[:, 1], source.cache[:, 3])
    assert torch.equal(target.cache[:, 0, :, :2], source.cache[:, 5, :, :2])
    assert target.cache[:, 0, :, 2:].count_nonzero() == 0, (
        "tokens beyond the chunk's end are not written"
    )
    assert target.cache[:, 2:].count_nonzero() == 0
    assert source.counts() == {"blocks/saved": 2}
    assert target.counts() == {"blocks/loaded": 2}
    assert source.worker.report() == Report(frozenset(), ended={A: 1, B: 1})
    assert target.worker.report() is None


def test_chunk_being_saved_is_not_saved_twice(host: Callable[[], Host]) -> None:
    """Another request orders the same save while the store is slow."""
    source = host()
    GatedFileSystem.close_gate("put")
    source.worker.save(Orders(NAMESPACE, saves=(block(A, TOKENS, 3),)))
    source.worker.save(Orders(NAMESPACE, saves=(block(A, TOKENS, 4),)))
    assert source.engine.in_flight == 1
    GatedFileSystem.open_gates()
    source.settle()
    assert source.counts() == {"blocks/saved": 1}


def test_failed_save_leaves_the_host_cache_off_the_hooks_thread(
    host: Callable[[], Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host cache must not keep the object; another thread removes it."""
    source = host()
    discarded = []
    discard = type(source.engine.host).discard

    def noted(cache: HostCache, key: Key) -> None:
        discarded.append(threading.current_thread() is threading.main_thread())
        discard(cache, key)

    monkeypatch.setattr(HostCache, "discard", noted)
    GatedFileSystem.broken.add("put")
    source.worker.save(Orders(NAMESPACE, saves=(block(A, TOKENS, 3),)))
    source.settle()
    assert source.counts() == {"blocks/dropped": 1}
    assert discarded == [False]
    assert source.engine.host.open(object_key(Kind.KV, NAMESPACE, bytes(A), "t0of1")) is None


@pytest.mark.parametrize(("saves", "age_s"), [(True, 60.0), (True, -60.0), (False, 60.0)])
def test_chunk_only_in_the_host_cache_is_stored_by_its_reader(
    tmp_path: Path, saves: bool, age_s: float
) -> None:
    """Its writer was killed before the upload ended. What is new is being stored by its writer."""
    folder, cache = f"file://{tmp_path}/store", tmp_path / "host"
    writer, reader = Host(cache, url=folder), Host(cache, url=folder, saves=saves)
    writer.save(block(A, TOKENS, 3))
    (path,) = (tmp_path / "store").rglob("*.t0of1")
    whole = path.read_bytes()
    path.unlink()
    for entry in cache.rglob("*.t0of1"):
        os.utime(entry, (time.time() - age_s,) * 2)
    reader.load("r", block(A, TOKENS, 1))
    assert reader.settle() == Finished({"r"})
    assert path.exists() is (saves and age_s > 0)
    if path.exists():
        assert path.read_bytes() == whole
        path.unlink()
        reader.load("again", block(A, TOKENS, 1))
        reader.settle()
        assert not path.exists(), "it was stored a moment ago and is not checked again"
    for one in (writer, reader):
        one.worker.close()


@pytest.mark.parametrize(
    ("stored_in", "total_heads"), [(None, HEADS), (None, 1), (1, 2 * HEADS), (2, 8 * HEADS)]
)
def test_one_of_the_ranks_loading_an_object_backfills_it(
    stored_in: int | None, total_heads: int
) -> None:
    """With MLA, few heads or another size several ranks load one object; one of them stores it."""
    ranks = 8
    layer_set = replace(LAYER_SET, total_heads=total_heads, num_heads=max(1, total_heads // ranks))
    asked: Counter[str] = Counter()
    loaded: set[str] = set()
    engine = cast(Any, SimpleNamespace(submit=lambda job: asked.update([job.key])))
    slabs = staging.Staging(torch.device("cpu"), 1)
    for number in range(ranks):
        shards = RankShards([layer_set], Rank(number, ranks))
        saves = Saves(engine, [], slabs, shards, Reports(Stats()))
        piece = Piece(A, 1, TOKENS, ((1,),), tp_size=stored_in)
        for key, part in shards.objects(NAMESPACE, piece):
            loaded.add(key)
            saves.backfill(key, part)
            saves.backfill(key, part)
    assert asked == Counter(loaded)


@pytest.mark.parametrize("stage", range(2))
def test_rank_of_a_stage_reads_the_shards_of_its_stage_in_any_size(stage: int) -> None:
    layer_set = replace(LAYER_SET, total_heads=2 * HEADS)
    shards = RankShards([layer_set], Rank(1, 2, pp_rank=stage, pp_size=2))
    piece = Piece(A, 1, TOKENS, ((1,),))
    parts = [
        [
            key.rpartition(".")[2]
            for key, _ in shards.objects(NAMESPACE, replace(piece, tp_size=size))
        ]
        for size in (None, 1, 2, 4)
    ]
    names = [["t1of2"], ["t0of1"], ["t1of2"], ["t2of4", "t3of4"]]
    assert parts == [[f"{name}-p{stage}of2" for name in of_size] for of_size in names]


def test_chunk_is_one_object_and_can_be_loaded_in_part(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(Piece(A, 3, 3 * TOKENS, ((6, 1, 2),)))
    assert source.counts() == {"blocks/saved": 3}
    target.load("r", Piece(A, 3, 3 * TOKENS, ((5, 4),), first_block=1))
    assert target.engine.in_flight == 1
    assert target.settle() == Finished({"r"})
    assert target.counts() == {"blocks/loaded": 2}
    assert torch.equal(target.cache[:, [5, 4]], source.cache[:, [1, 2]])
    target.cache[:, [5, 4]] = 0
    assert target.cache.count_nonzero() == 0


def test_chunk_with_another_number_of_blocks_is_a_miss(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.save(Piece(A, 2, 2 * TOKENS, ((6, 1),)))
    target.load("r", Piece(A, 3, 3 * TOKENS, ((5, 4, 3),)))
    assert target.settle() == Finished({"r"}, invalid_blocks={5, 4, 3})
    assert target.cache.count_nonzero() == 0


def test_freed_blocks_are_saved_before_they_are_refilled(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    before = source.cache[:, 3].clone()
    orders = Orders(NAMESPACE, leaving=(block(A, TOKENS, 3),))
    source.worker.save_leaving(orders)
    source.cache.zero_()  # by this step's forward pass
    source.worker.save(orders)
    source.settle()
    target.load("r", block(A, TOKENS, 0))
    target.settle()
    assert torch.equal(target.cache[:, 0], before)


def test_loads_stay_within_buffer_bytes(host: Callable[..., Host]) -> None:
    """Loads that exceed the budget are queued."""
    source, target = host(), host(buffer_bytes=2 * (PROLOGUE_BYTES + BLOCK_BYTES))
    source.cache.copy_(random_cache())
    keys = [ChunkKey(bytes([number]) * 32) for number in range(BLOCKS)]
    for number, key in enumerate(keys):
        source.save(block(key, TOKENS, number))
    for number, key in enumerate(keys):
        target.load(f"r{number}", block(key, TOKENS, number))
        assert target.engine.in_flight <= 2
    finished = target.settle(each=lambda: target.engine.in_flight <= 2)
    assert len(finished.requests) == BLOCKS
    assert torch.equal(target.cache, source.cache)


def test_chunk_larger_than_the_budget_is_loaded_alone(host: Callable[..., Host]) -> None:
    source, target = host(), host(buffer_bytes=1)
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, TOKENS, 4))
    target.load("r", block(A, TOKENS, 3), block(B, TOKENS, 4))
    assert target.engine.in_flight == 1
    assert target.settle() == Finished({"r"})
    assert torch.equal(target.cache[:, 3:5], source.cache[:, 3:5])


def test_empty_load_is_reported(host: Callable[[], Host]) -> None:
    target = host()
    target.load("r")
    assert target.worker.settle() == Finished({"r"})


def test_queued_chunks_of_a_failed_load_are_not_fetched(host: Callable[..., Host]) -> None:
    target = host(buffer_bytes=1)
    target.load("r", block(A, TOKENS, 0), block(B, TOKENS, 1), block(C, TOKENS, 2))
    assert target.settle() == Finished({"r"}, invalid_blocks={0, 1, 2})
    report = target.worker.report()
    assert report is not None
    assert report.lost == {A}, "B and C were not asked for"


def test_block_may_be_refilled_once_its_save_started(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    before = source.cache[:, 3].clone()
    GatedFileSystem.close_gate("put")
    source.worker.save(Orders(NAMESPACE, saves=(block(A, TOKENS, 3),)))
    source.cache.zero_()
    GatedFileSystem.open_gates()
    source.settle()
    target.load("r", block(A, TOKENS, 0))
    target.settle()
    assert torch.equal(target.cache[:, 0], before)


def test_chunks_before_a_lost_one_are_loaded_before_the_report(
    host: Callable[[], Host],
) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(C, TOKENS, 4))
    GatedFileSystem.close_gate(f"get {name_of(A)}")
    target.load("r", block(A, TOKENS, 0), block(B, TOKENS, 1), block(C, TOKENS, 2))
    assert target.settle(until=lambda _: target.engine.in_flight == 1) == Finished()
    GatedFileSystem.open_gates()
    assert target.settle() == Finished({"r"}, invalid_blocks={1, 2})
    assert torch.equal(target.cache[:, 0], source.cache[:, 3])
    report = target.worker.report()
    assert report is not None
    assert report.lost == {B}
    assert target.counts()["blocks/failed"] == 1


def test_data_arriving_after_the_report_is_not_written(
    host: Callable[[], Host],
) -> None:
    """vLLM may have given the blocks to another request."""
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3))
    GatedFileSystem.close_gate(f"get {name_of(A)}")
    target.load("r", block(B, TOKENS, 1), block(A, TOKENS, 0))
    reported = target.settle(until=lambda total: bool(total.requests))
    assert reported == Finished({"r"}, invalid_blocks={0, 1})
    report = target.worker.report()
    assert report is not None
    assert report.lost == {B}
    GatedFileSystem.open_gates()
    assert target.settle() == Finished()
    assert target.cache.count_nonzero() == 0
    assert target.counts() == {"blocks/failed": 1}
    assert target.worker.report() is None


def test_second_lost_chunk_is_reported_but_the_request_only_once(
    host: Callable[[], Host],
) -> None:
    target = host()
    GatedFileSystem.close_gate(f"get {name_of(A)}")
    target.load("r", block(B, TOKENS, 1), block(A, TOKENS, 0))
    reported = target.settle(until=lambda total: bool(total.requests))
    assert reported == Finished({"r"}, invalid_blocks={0, 1})
    GatedFileSystem.open_gates()
    assert target.settle() == Finished()
    report = target.worker.report()
    assert report is not None
    assert report.lost == {A, B}
    assert target.counts() == {"blocks/failed": 1}


def test_requests_with_a_common_prefix_share_its_fetches(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, TOKENS, 4))
    target.load("one", block(A, TOKENS, 0), block(B, TOKENS, 1))
    target.load("two", block(A, TOKENS, 2), block(C, TOKENS, 5))
    assert target.engine.in_flight == 3
    assert target.settle() == Finished({"one", "two"}, invalid_blocks={5})
    assert torch.equal(target.cache[:, 0], source.cache[:, 3])
    assert torch.equal(target.cache[:, 1], source.cache[:, 4])


def test_chunk_with_another_number_of_tokens_is_a_miss(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, 2, 3))
    target.load("r", block(A, 3, 0))
    assert target.settle() == Finished({"r"}, invalid_blocks={0})
    assert target.cache.count_nonzero() == 0


def test_cache_of_unknown_layout_is_neither_read_nor_written(
    host: Callable[[], Host], caplog: pytest.LogCaptureFixture
) -> None:
    config = KVConfig(url="gated://bucket", host_cache_dir=host().engine.host.root.as_posix())
    engine = TransferEngine(config, "options")
    worker = KVWorker(config, SHAPE, RANK, engine)
    other = torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT)
    worker.register({f"l.{number}": other for number in range(LAYERS)})
    assert "cannot be read as 8 blocks of 2 heads x 4 tokens" in caplog.text
    report = worker.report()
    assert report is not None
    assert report.is_idle
    loads = (LoadOrder("r", (block(A, TOKENS, 0), block(B, TOKENS, 1))),)
    orders = Orders(NAMESPACE, loads, saves=(block(C, TOKENS, 2),))
    worker.load(orders)
    worker.save(orders)
    assert worker.settle() == Finished({"r"}, {"r"})
    assert engine.in_flight == 0
    worker.close()


def test_engine_whose_layout_check_raises_shares_nothing(
    host: Callable[[], Host], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's operation raises a plain RuntimeError."""

    def update(*_: Any) -> None:
        raise RuntimeError("not before the first step")

    backend = SimpleNamespace(forward_includes_kv_cache_update=False)
    layer = SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=update),
        get_attn_backend=lambda: backend,
        num_kv_heads=HEADS,
        head_size=CONTENT // 2,
        head_size_v=CONTENT // 2,
        kv_cache=None,
    )
    check = LayoutCheck({f"l.{number}": layer for number in range(LAYERS)})
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "SHAPE", replace(SHAPE, check=check))
        refused = host()
    said = [each for each in caplog.messages if "saves and loads nothing" in each]
    assert len(said) == 1
    assert "RuntimeError: not before the first step" in said[0]
    report = refused.worker.report()
    assert report is not None
    assert report.is_idle
    refused.save(block(A, TOKENS, 3))
    refused.load("r", block(A, TOKENS, 3))
    assert refused.worker.settle() == Finished({"r"}, {"r"})
    assert refused.counts() == {"blocks/dropped": 1, "blocks/failed": 1}


def test_object_not_matching_its_key_leaves_the_host_cache(host: Callable[[], Host]) -> None:
    """The chunk that is computed and saved instead must be found there."""
    one, key = host(), object_key(Kind.KV, NAMESPACE, bytes(A), "t0of1")
    one.save(block(A, TOKENS, 3))
    assert one.engine.host.has(key)
    one.load("r", Piece(A, 2, 2 * TOKENS, ((1, 2),)))
    assert one.settle().invalid_blocks == {1, 2}
    assert not one.engine.host.has(key)


def test_chunk_with_another_kernel_layout_is_a_miss(
    host: Callable[[], Host], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is valid, and stays in the store for engines that can read it."""
    source, alike = host(), host()
    with monkeypatch.context() as patched:
        check = LayoutCheck(release="another")
        patched.setitem(globals(), "SHAPE", replace(SHAPE, check=check))
        other = host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, TOKENS, 4))
    for number, key in enumerate((A, B)):
        other.load(f"r{number}", block(key, TOKENS, 1))
        assert other.settle().invalid_blocks == {1}
        report = other.worker.report()
        assert report is not None
        assert report.lost == {key}
        assert report.has_misfits
    other.load("missing", block(C, TOKENS, 1))
    other.settle()
    report = other.worker.report()
    assert report is not None
    assert not report.has_misfits
    stats = other.worker.take_stats()
    assert stats is not None
    assert stats.data["misses/layout"] == 2
    assert "misses/corrupt" not in stats.data
    assert not other.cache.any()
    said = [each for each in caplog.messages if "lays out its KV blocks in another way" in each]
    assert len(said) == 1
    assert name_of(A) in said[0]
    assert "`epoch`" in said[0]
    alike.load("r", block(A, TOKENS, 2))
    alike.settle()
    assert torch.equal(alike.cache[:, 2], source.cache[:, 3])


def test_reports_of_all_ranks_add_up() -> None:
    one = Report(frozenset({A}), is_idle=True)
    other = Report(frozenset({B}), not_saved=frozenset({B}))
    both = Report(frozenset({A, B}), is_idle=True, not_saved=frozenset({B}))
    assert one.aggregate(other) == other.aggregate(one) == both


# --- announced chunks ---


class Clock:
    """The clock of loads; the jobs that they submit use real time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loads, "monotonic", clock)
    return clock


def many(number: int) -> list[Piece]:
    """Make `number` chunks, which use the cache's blocks in turn."""
    return [block(ChunkKey(bytes([each]) * 32), TOKENS, each % BLOCKS) for each in range(number)]


def test_announced_chunks_may_arrive_as_long_as_others_do(
    host: Callable[..., Host], clock: Clock
) -> None:
    """`wait_s` limits the gap between arrivals, not the whole load."""
    source, target = host(), host(wait_s=0.05)
    source.cache.copy_(random_cache())
    pieces = many(5)
    target.load("r", *pieces, is_announced=True)
    counts: Counter[str] = Counter()

    def is_loaded(number: int) -> bool:
        counts.update(target.counts())
        return counts["blocks/loaded"] > number

    for number, piece in enumerate(pieces[:-1]):
        clock.now_s += 0.04
        source.save(piece)
        assert target.settle(until=lambda _, number=number: is_loaded(number)) == Finished()  # type: ignore[misc]
    clock.now_s += 0.06
    assert target.settle() == Finished({"r"}, invalid_blocks={4})
    assert torch.equal(target.cache[:, :4], source.cache[:, :4])
    counts.update(target.counts())
    assert counts == {"blocks/loaded": 4, "blocks/failed": 1}
    report = target.worker.report()
    assert report is not None
    assert report.lost == {pieces[4].key}


def watch_submits(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> list[Fetch]:
    """Return a list of the fetches that `engine` gets from now on."""
    fetches: list[Fetch] = []
    submit = engine.submit

    def watched(*jobs: Handle[Any] | Job[Any]) -> None:
        for each in jobs:
            job = each.job if isinstance(each, Handle) else each
            fetches.extend([job] if isinstance(job, Fetch) else [])
        submit(*jobs)

    monkeypatch.setattr(engine, "submit", watched)
    return fetches


def test_only_the_next_missing_announced_chunk_is_polled(
    host: Callable[..., Host], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = host(), host()
    submitted = watch_submits(target.engine, monkeypatch)
    pieces = many(120)
    GatedFileSystem.close_gate("exists")  # which a read begins with
    target.load("r", *pieces, is_announced=True)
    assert target.engine.in_flight == 1 + 8
    GatedFileSystem.open_gates()
    assert target.settle(until=lambda _: target.engine.in_flight == 1) == Finished()
    (first,) = (job.key for job in submitted if job.is_announced)
    assert [job.key for job in submitted].count(first) == 1, (
        "it waits for the announced chunk without polling"
    )
    source.save(pieces[0])
    most = 0

    def watched() -> bool:
        nonlocal most
        most = max(most, target.engine.in_flight)
        return True

    target.settle(until=lambda _: target.engine.in_flight == 1, each=watched)
    assert most <= 2
    source.save(*pieces[2:])
    source.save(pieces[1])
    assert target.settle(each=watched) == Finished({"r"})
    assert 8 < most <= 1 + 32


def test_false_announcement_takes_no_memory_from_other_loads(host: Callable[..., Host]) -> None:
    source, target = host(), host(buffer_bytes=1, wait_s=60.0)
    source.save(block(B, TOKENS, 1))
    target.load("false", block(A, TOKENS, 0), block(C, TOKENS, 2), is_announced=True)
    target.load("true", block(B, TOKENS, 1))
    target.load("also false", block(A, TOKENS, 3), is_announced=True)
    finished = target.settle(until=lambda total: bool(total.requests))
    assert finished == Finished({"true"})
    target.load("looked up, and lost since", block(A, TOKENS, 4))
    finished = target.settle(until=lambda total: bool(total.requests))
    assert finished == Finished({"looked up, and lost since"}, invalid_blocks={4})
    # After a moment both announced loads share one fetch.
    target.settle(until=lambda _: target.engine.in_flight == 1)
    assert target.engine.in_flight == 1


def test_announced_loads_take_no_memory_from_found_ones(host: Callable[..., Host]) -> None:
    """This holds also while the store is slow to report that they are missing."""
    source, target = host(), host(buffer_bytes=1, wait_s=60.0)
    source.save(block(B, TOKENS, 1))
    false = [piece for piece in many(6) if piece.key not in (A, B)]
    GatedFileSystem.close_gate(*(f"exists {name_of(piece.key)}" for piece in false))
    target.load("false", *false, is_announced=True)
    target.load("true", block(B, TOKENS, 1))
    finished = target.settle(until=lambda total: bool(total.requests))
    assert finished == Finished({"true"})


def test_damaged_announced_chunk_is_not_waited_for(host: Callable[..., Host]) -> None:
    source, target = host(), host(wait_s=60.0)
    source.save(Piece(A, 2, 2 * TOKENS, ((6, 1),)))
    target.load("r", block(A, TOKENS, 0), is_announced=True)
    assert target.settle() == Finished({"r"}, invalid_blocks={0})
    assert target.counts()["blocks/failed"] == 1


def test_abandoned_load_stops_its_fetches(host: Callable[..., Host]) -> None:
    target = host(wait_s=60.0)
    target.load("r", block(A, TOKENS, 0), is_announced=True)
    target.load("other", block(A, TOKENS, 1), is_announced=True)
    target.abandon("r")
    target.abandon("r")
    target.abandon("nobody")
    assert target.worker.settle() == Finished({"r"})
    assert target.engine.in_flight == 1
    target.abandon("other")
    assert target.settle() == Finished({"other"})
    assert target.worker.report() is None, "nothing was lost"
    assert target.counts() == {}


class Copying:
    """Blocks copies into the KV cache after they began, until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        write = BlockCaches.write

        def held(*args: Any) -> None:
            self.begun.release()
            assert self.go_on.wait(GIVE_UP_S)
            write(*args)

        monkeypatch.setattr(BlockCaches, "write", held)

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=GIVE_UP_S)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    held = Copying(monkeypatch)
    yield held
    held.go_on.set()


def test_abandoned_load_is_reported_after_its_copies_end(
    host: Callable[[], Host], copying: Copying
) -> None:
    source, target = host(), host()
    source.save(block(A, TOKENS, 3))
    target.load("r", block(A, TOKENS, 0))
    copying.wait_begun()
    target.abandon("r")
    assert target.worker.settle() == Finished(), "vLLM would give the block to another request"
    copying.go_on.set()
    assert target.settle() == Finished({"r"})
    assert target.counts() == {}


def test_load_with_a_lost_chunk_is_reported_after_its_copies_end(
    host: Callable[[], Host], copying: Copying
) -> None:
    source, target = host(), host()
    source.save(block(A, TOKENS, 3))
    GatedFileSystem.close_gate(f"get {name_of(B)}")
    target.load("r", block(B, TOKENS, 1), block(A, TOKENS, 0))
    copying.wait_begun()
    GatedFileSystem.open_gates()
    until_s = time.monotonic() + GIVE_UP_S
    while not target.worker.report():  # that B is missing
        assert target.worker.settle().requests == set()
        assert time.monotonic() < until_s
    copying.go_on.set()
    assert target.settle() == Finished({"r"}, invalid_blocks={0, 1})


def test_second_load_of_a_chunk_being_copied_gets_it_too(
    host: Callable[[], Host], copying: Copying
) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3))
    target.load("first", block(A, TOKENS, 0))
    copying.wait_begun()
    target.load("second", block(A, TOKENS, 1))
    copying.go_on.set()
    assert target.settle() == Finished({"first", "second"})
    assert torch.equal(target.cache[:, [0, 1]], source.cache[:, [3, 3]])
    assert target.counts() == {"blocks/loaded": 2}


def test_announced_chunk_that_arrives_while_requested_is_written(
    host: Callable[[], Host], copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = host(), host()
    source.save(block(A, TOKENS, 3))
    submit = target.engine.submit

    def submit_and_wait(*jobs: Handle[Any] | Job[Any]) -> None:
        submit(*jobs)
        copying.wait_begun()

    copying.go_on.set()
    monkeypatch.setattr(target.engine, "submit", submit_and_wait)
    target.load("r", block(A, TOKENS, 0), is_announced=True)
    assert target.settle() == Finished({"r"})
    assert target.counts() == {"blocks/loaded": 1}


def test_data_for_an_abandoned_load_is_not_written(
    host: Callable[[], Host],
) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3))
    GatedFileSystem.close_gate(f"get {name_of(A)}")
    target.load("r", block(A, TOKENS, 0))
    target.abandon("r")
    assert target.worker.settle() == Finished({"r"})
    GatedFileSystem.open_gates()
    assert target.settle() == Finished()
    assert target.cache.count_nonzero() == 0


# --- vLLM sleeps ---


@pytest.mark.parametrize("saves", [True, False])
def test_running_load_writes_nothing_after_unregister(
    host: Callable[..., Host], copying: Copying, *, saves: bool
) -> None:
    """The cache's memory may belong to another process by then."""
    source, target = host(), host(saves=saves)
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3), block(B, TOKENS, 4))
    GatedFileSystem.close_gate(f"get {name_of(B)}")
    target.load("r", block(A, TOKENS, 0), block(B, TOKENS, 1))
    copying.wait_begun()
    sleeping = threading.Thread(target=target.worker.unregister)
    sleeping.start()
    sleeping.join(0.05)  # sound code waits however long this takes
    assert sleeping.is_alive(), "a block is being written"
    copying.go_on.set()
    sleeping.join(GIVE_UP_S)
    assert not sleeping.is_alive(), "unregister waits for the store"
    target.cache.zero_()
    GatedFileSystem.open_gates()
    assert target.settle() == Finished({"r"}, invalid_blocks={0, 1}), "vLLM waits for a report"
    assert target.cache.count_nonzero() == 0


@pytest.mark.parametrize("saves", [True, False])
def test_sleeping_worker_reads_and_writes_nothing(
    host: Callable[..., Host], *, saves: bool
) -> None:
    source, target = host(), host(saves=saves)
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3))
    target.worker.unregister()
    target.worker.unregister()
    target.load("r", block(A, TOKENS, 0))
    target.load("announced", block(B, TOKENS, 1), is_announced=True)
    target.load("nothing")
    ended = {"r", "announced", "nothing"}
    assert target.worker.settle() == Finished(ended, invalid_blocks={0, 1}, lost={A, B})
    target.save(block(C, TOKENS, 2))
    assert target.settle() == Finished()
    assert target.cache.count_nonzero() == 0
    assert target.counts() == {"blocks/failed": 2, "blocks/dropped": 1}
    report = target.worker.report()
    assert report is not None
    assert report.lost == {A, B, C}, "the scheduler would take them for stored"


def test_woken_worker_saves_and_loads_again(host: Callable[[], Host]) -> None:
    source, target = host(), host()
    source.cache.copy_(random_cache())
    source.save(block(A, TOKENS, 3))
    for _ in range(2):  # sleep and wake-up may both be called twice
        target.worker.unregister()
        target.worker.restore()
        target.worker.restore()
    target.load("r", block(A, TOKENS, 0))
    assert target.settle() == Finished({"r"})
    assert torch.equal(target.cache[:, 0], source.cache[:, 3])
    target.save(block(B, TOKENS, 0))
    assert target.counts() == {"blocks/loaded": 1, "blocks/saved": 1}


def test_worker_that_shares_nothing_can_sleep(host: Callable[[], Host]) -> None:
    idle = host()
    idle.worker.register({})
    other = KVWorker(idle.config, None, RANK, idle.engine)
    other.unregister()
    other.restore()
    other.load(Orders(NAMESPACE, loads=(LoadOrder("r", (block(A, TOKENS, 0),)),)))
    assert other.settle().failed == {"r"}


SAVE_BYTES, LOAD_BYTES = 1 << 30, 128 << 20
REPLICATED = replace(SHAPE, layer_sets=(replace(LAYER_SET, total_heads=1),))


@pytest.mark.parametrize("host", ["gpu"], indirect=True)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [SAVE_BYTES, LOAD_BYTES]),
        ({"loads": False}, [SAVE_BYTES]),
        ({"saves": False}, [LOAD_BYTES]),
        ({"shape": REPLICATED, "rank": Rank(0, 8, 0, 1)}, [SAVE_BYTES, LOAD_BYTES]),
        ({"shape": REPLICATED, "rank": Rank(1, 8, 0, 1)}, [LOAD_BYTES]),
    ],
)
def test_rank_pins_only_the_buffers_it_uses(
    host: Callable[..., Host],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    expected: list[int],
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(staging, "_is_pinned", lambda memory, device: pinned.append(memory.nbytes))
    host(**options)
    assert pinned == expected


@pytest.mark.parametrize(
    "options", [{"loads": False}, {"shape": REPLICATED, "rank": Rank(1, 8, 0, 1)}]
)
def test_rank_without_loads_or_saves_can_still_save_and_sleep(
    host: Callable[..., Host], options: dict[str, Any]
) -> None:
    one = host(**options)
    one.cache.copy_(random_cache())
    one.save(block(A, TOKENS, 3))
    one.worker.unregister()
    one.save(block(B, TOKENS, 3))
    is_writer = "rank" not in options
    assert one.counts() == ({"blocks/saved": 1, "blocks/dropped": 1} if is_writer else {})
