# SPDX-License-Identifier: Apache-2.0
"""The worker half with real tensors and a real folder; no engine."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ecshare.encoder.config import EncoderConfig
from ecshare.encoder.messages import LoadOrder, Orders, Report, SaveOrder
from ecshare.encoder.worker import EncoderWorker
from ecshare.plugin.ledger import Ledger
from ecshare.plugin.ranks import Rank
from ecshare.store.format import unseal
from ecshare.store.hostcache.cache import open_host_cache
from ecshare.store.keys import Kind, gap_key, object_key
from ecshare.transfer.device import staging
from ecshare.transfer.device.staging import Staging
from lab.gpu_stand_in import stand_in
from tests.waiting import Clock

KEY = object_key(Kind.EC, "0" * 32, "picture")
SAVE = SaveOrder("picture", KEY, {"num_embeds": 16, "metadata": {"image_grid_thw": [1, 8, 8]}})
LOAD = LoadOrder("picture", KEY)
EMBEDDING = torch.randn(16, 64)

Start = Callable[..., EncoderWorker]


@pytest.fixture(params=["cpu", "gpu"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    started = []
    if request.param == "gpu":
        stand_in(monkeypatch)

    def start(
        role: str, host: str = "host", tp_rank: int = 0, device: str = "cpu", **options: Any
    ) -> EncoderWorker:
        # What the worker half reads of a VllmConfig.
        vllm_config: Any = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(
                is_ec_producer=role in ("producer", "both"),
                is_ec_consumer=role in ("consumer", "both"),
                engine_id="engine",
            ),
            device_config=SimpleNamespace(device=device),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )
        config = EncoderConfig(
            url=f"file://{tmp_path}/store", host_cache_dir=str(tmp_path / host), **options
        )
        worker = EncoderWorker.start(vllm_config, config, Rank(tp_rank, 2))
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.close()


def counted(worker: EncoderWorker) -> dict[str, float]:
    """Return the worker's counts of items since its start."""
    report = worker.report()
    totals = report.totals if report else {}
    return {
        name: count
        for sums in totals.values()
        for name, count in sums.items()
        if name.startswith("items/")
    }


def stored(tmp_path: Path) -> Path:
    return tmp_path / "store" / KEY


def encode(worker: EncoderWorker, tensor: torch.Tensor = EMBEDDING) -> None:
    """Simulate one V1 step of a producer that encodes the image."""
    cache: dict[str, torch.Tensor] = {}
    worker.begin_saves(Orders(saves=(SAVE,)), cache)
    cache["picture"] = tensor
    worker.save("picture", cache)
    worker.settle()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_embedding_equals_the_saved_one(start: Start, dtype: torch.dtype) -> None:
    tensor = torch.randn(16, 64).to(dtype)
    encode(start("producer"), tensor)
    cache: dict[str, torch.Tensor] = {}
    reader = start("consumer", host="another-host")
    reader.load(Orders(loads=(LOAD,)), cache)
    assert cache["picture"].dtype is dtype
    assert torch.equal(cache["picture"], tensor)
    report = reader.report()
    assert report is not None
    assert report.loaded == {KEY}
    cache["picture"].zero_()
    again: dict[str, torch.Tensor] = {}
    reader.load(Orders(loads=(LOAD,)), again)
    assert torch.equal(again["picture"], tensor)


@pytest.mark.parametrize("role", ["producer", "both"])
def test_durable_save_is_stored_when_the_step_ends(start: Start, tmp_path: Path, role: str) -> None:
    encode(start(role, save="durable"))
    facts = unseal(memoryview(stored(tmp_path).read_bytes()), KEY).spec
    assert facts.shape == (16, 64)
    assert facts.attributes == SAVE.attributes


def test_out_of_memory_in_a_save_drops_the_save(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU must copy a view before it can be stored."""

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker = start("producer")
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "copy_out", full)
        encode(worker)
    report = worker.report()
    assert report is not None
    (totals,) = report.totals.values()
    assert totals["items/dropped"] == 1
    assert not totals.get("now/save_queue_bytes"), "its memory is released"
    worker.close()
    assert (tmp_path / "store" / gap_key(KEY)).is_file(), "nobody is told"


def test_out_of_memory_in_a_load_fails_that_item_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(start("producer", save="durable"))

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker = start("consumer", host="elsewhere")
    other = LoadOrder("other", KEY)
    encoder_cache: dict[str, torch.Tensor] = {}
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "copy_in", full)
        worker.load(Orders(loads=(LOAD,)), encoder_cache)
    worker.load(Orders(loads=(other,)), encoder_cache)
    assert counted(worker) == {"items/failed": 1}
    assert torch.equal(encoder_cache["other"], EMBEDDING)


def test_view_is_stored_with_its_own_shape(start: Start, tmp_path: Path) -> None:
    encode(start("producer", save="durable"), torch.randn(64, 32).T[:16, ::1])
    assert unseal(memoryview(stored(tmp_path).read_bytes()), KEY).spec.shape == (16, 64)


def test_embedding_already_in_the_encoder_cache_is_stored(start: Start, tmp_path: Path) -> None:
    worker = start("producer", save="durable")
    worker.begin_saves(Orders(saves=(SAVE,)), {"picture": EMBEDDING})
    worker.settle()
    assert stored(tmp_path).is_file()


def test_save_order_is_fulfilled_once_by_a_later_step(start: Start, tmp_path: Path) -> None:
    worker = start("producer", save="durable")
    worker.begin_saves(Orders(saves=(SAVE,)), {})
    worker.settle()
    worker.begin_saves(Orders(), {})
    worker.save("picture", {"picture": EMBEDDING})
    worker.settle()
    assert counted(worker) == {"items/saved": 1}
    stored(tmp_path).unlink()
    worker.save("picture", {"picture": EMBEDDING})
    worker.settle()
    assert not stored(tmp_path).exists()


def test_save_order_is_void_once_sharing_has_stopped(start: Start, tmp_path: Path) -> None:
    worker = start("producer", save="durable")
    worker.begin_saves(Orders(saves=(SAVE,)), {})
    worker.begin_saves(Orders(num_stops=1), {})
    worker.save("picture", {"picture": EMBEDDING})
    worker.settle()
    assert not stored(tmp_path).exists()
    worker.begin_saves(Orders(saves=(SAVE,), num_stops=1), {})
    worker.save("picture", {"picture": EMBEDDING})
    worker.settle()
    assert stored(tmp_path).exists()


def test_embedding_without_a_save_order_is_not_stored(start: Start, tmp_path: Path) -> None:
    worker = start("producer", save="durable")
    worker.save("picture", {"picture": EMBEDDING})
    worker.settle()
    assert counted(worker) == {}
    assert not stored(tmp_path).exists()


@pytest.mark.parametrize(("role", "tp_rank"), [("consumer", 0), ("producer", 1), ("both", 1)])
def test_only_the_first_rank_of_a_producer_writes(
    start: Start, tmp_path: Path, role: str, tp_rank: int
) -> None:
    worker = start(role, tp_rank=tp_rank)
    encode(worker)
    worker.close()
    assert not stored(tmp_path).exists()


@pytest.mark.parametrize("role", ["producer", "both"])
def test_announced_save_runs_in_the_background(start: Start, tmp_path: Path, role: str) -> None:
    worker = start(role)
    with hung_host_cache():
        encode(worker)
        assert not stored(tmp_path).exists()
    worker.close()
    assert stored(tmp_path).is_file()


def test_decoding_engine_drops_a_save_instead_of_waiting_for_memory(start: Start) -> None:
    worker = start("both", buffer_bytes=1)
    other = SaveOrder("other", object_key(Kind.EC, "0" * 32, "other"), {})
    with hung_host_cache():
        cache = {"picture": EMBEDDING, "other": EMBEDDING + 1}
        worker.begin_saves(Orders(saves=(SAVE, other)), cache)
        worker.settle()
        assert counted(worker) == {"items/dropped": 1}


def test_ledger_keeps_counts_that_no_report_delivered(
    clock: Clock, start: Start, tmp_path: Path
) -> None:
    worker = start("producer", save="durable")
    encode(worker)
    clock.forward(1)  # it writes at intervals
    worker.settle()
    worker.close()
    host = open_host_cache(EncoderConfig(url="file:///none", host_cache_dir=str(tmp_path / "host")))
    ledger = Ledger(host.root, "engine.0")
    assert ledger.read()[0]["items/saved"] == 1


@contextmanager
def hung_host_cache() -> Iterator[None]:
    """Block all allocations in the host cache, and so all saves."""
    may_go_on, reserve = threading.Event(), os.posix_fallocate

    def held(*of_what: int) -> None:
        may_go_on.wait()
        reserve(*of_what)

    with patch("os.posix_fallocate", held):
        try:
            yield
        finally:
            may_go_on.set()


def test_failed_load_is_counted(start: Start) -> None:
    worker = start("consumer", wait_s=0.2, io_timeout_s=0.1)
    cache: dict[str, torch.Tensor] = {}
    worker.load(Orders(loads=(LOAD,)), cache)
    assert cache == {}
    assert counted(worker) == {"items/failed": 1}


def test_durable_save_waits_for_memory_of_the_former(start: Start, tmp_path: Path) -> None:
    worker = start("producer", buffer_bytes=1, save="durable")
    other = SaveOrder("other", object_key(Kind.EC, "0" * 32, "other"), {})
    cache = {"picture": EMBEDDING, "other": EMBEDDING + 1}
    worker.begin_saves(Orders(saves=(SAVE, other)), cache)
    worker.settle()
    assert counted(worker) == {"items/saved": 2}


def test_save_of_an_unsupported_dtype_is_dropped_and_counted(start: Start, tmp_path: Path) -> None:
    worker = start("producer", save="durable")
    encode(worker, torch.zeros(16, 64, dtype=torch.complex64))
    assert counted(worker) == {"items/dropped": 1}
    worker.close()
    assert (tmp_path / "store" / gap_key(KEY)).is_file(), "nobody is told"


def test_reports_of_ranks_are_merged() -> None:
    first = Report({0: {"items/saved": 1}}, frozenset("a"))
    total = first.aggregate(Report({1: {"items/failed": 1}}, frozenset("b")))
    assert total == Report({0: {"items/saved": 1}, 1: {"items/failed": 1}}, frozenset("ab"))


@pytest.mark.parametrize("start", ["gpu"], indirect=True)
@pytest.mark.parametrize(("device", "number"), [("cuda", 3), ("cuda:1", 1)])
def test_worker_threads_select_the_workers_device(
    start: Start, monkeypatch: pytest.MonkeyPatch, device: str, number: int
) -> None:
    """vLLM names the kind of device, and has selected the rank's own in its thread."""
    selected: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda chosen: selected.append((threading.current_thread().name, chosen)),
    )
    start("both", device=device)
    assert ("ecshare-io", number) in selected


@pytest.mark.parametrize("start", ["gpu"], indirect=True)
@pytest.mark.parametrize(
    ("role", "tp_rank", "expected"),
    [
        ("producer", 0, 1 << 30),
        ("producer", 1, mmap.PAGESIZE),
        ("consumer", 0, 256 << 20),
        ("both", 0, 1 << 30),
        ("both", 1, 256 << 20),
    ],
)
def test_rank_pins_only_the_buffers_it_uses(
    start: Start, monkeypatch: pytest.MonkeyPatch, role: str, tp_rank: int, expected: int
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(staging, "_is_pinned", lambda memory, device: pinned.append(memory.nbytes))
    start(role, tp_rank=tp_rank)
    assert pinned == [expected]


def test_model_may_write_to_a_loaded_embedding(start: Start) -> None:
    """The host cache, which other engines share, is not changed by it."""
    encode(start("producer"))
    reader = start("consumer")
    loaded: list[torch.Tensor] = []
    for _ in range(2):
        cache: dict[str, torch.Tensor] = {}
        reader.load(Orders(loads=(LOAD,)), cache)
        loaded.append(cache["picture"])
        assert torch.equal(loaded[-1], EMBEDDING)
        assert "w" in rights_at(loaded[-1].data_ptr()), "a write would kill the process"
        loaded[-1].zero_()


def rights_at(address: int) -> str:
    """Return this process's rights to the memory at `address`, such as rw-p."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_ = line.split()
        first, end = (int(each, 16) for each in place.split("-"))
        if first <= address < end:
            return rights
    raise AssertionError("no memory is there")
