# SPDX-License-Identifier: Apache-2.0
"""A request whose items are all on this host is ready when vLLM first asks."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from ecshare.encoder.config import EncoderConfig
from ecshare.encoder.scheduler.scheduler import EncoderScheduler
from ecshare.store.format import TensorSpec
from ecshare.store.hostcache.folder import SHM, is_in_memory
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.inline_reads import OPENS_PER_STEP
from ecshare.transfer.jobs import Done, Fetch, Handle, Put, StoredObject
from ecshare.transfer.stats import summed
from tests.ecshare.encoder.scheduler.test_scheduler import (
    NUM_EMBEDS,
    counted,
    feature,
    is_pinned,
    key_of,
    num_descriptors,
    request,
    until_ready,
)
from tests.waiting import Clock

Start = Callable[..., EncoderScheduler]


@pytest.fixture(scope="module")
def vllm_config(vlm: Path) -> VllmConfig:
    return EngineArgs(model=str(vlm), dtype="float32", enforce_eager=True).create_engine_config()


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a folder in /dev/shm for the host cache in `host` and the store in `store`."""
    with tempfile.TemporaryDirectory(dir=SHM, prefix="ecshare-test-") as folder:
        yield Path(folder)


def config(place: Path) -> EncoderConfig:
    return EncoderConfig(url=f"file://{place}/store", host_cache_dir=f"{place}/host")


@pytest.fixture
def start(vllm_config: VllmConfig, place: Path) -> Iterator[Start]:
    started = []

    def start(role: str) -> EncoderScheduler:
        vllm_config.ec_transfer_config = ECTransferConfig(
            ec_connector="ECShareConnector",
            ec_role=role,  # type: ignore[arg-type]
        )
        scheduler = EncoderScheduler.start(vllm_config, config(place))
        started.append(scheduler)
        return scheduler

    yield start
    for scheduler in started:
        scheduler.close()


def put_in_host_cache(
    vllm_config: VllmConfig, place: Path, *identifiers: str, num_columns: int = 0
) -> None:
    """Store images as another engine of this host does."""
    width = num_columns or vllm_config.model_config.get_hidden_size()
    engine = TransferEngine(config(place), "options")
    staging = Staging(torch.device("cpu"), 1 << 24)
    for identifier in identifiers:
        slab = staging.reserve(TensorSpec("F32", (NUM_EMBEDS, width), {}))
        assert slab is not None
        staging.copy_out(slab, torch.randn(NUM_EMBEDS, width))
        engine.submit(Put(key_of(vllm_config, identifier), slab))
        engine.drain(10)
    engine.close()


def entry(place: Path) -> Path:
    (path,) = (each for each in (place / "host").iterdir() if "+" in each.name)
    return path


@pytest.mark.parametrize("pixels", [True, False])
def test_items_in_the_host_cache_are_ready_at_once(
    start: Start, vllm_config: VllmConfig, place: Path, pixels: bool
) -> None:
    put_in_host_cache(vllm_config, place, "one", "two")
    scheduler = start("ec_consumer")
    asked = request(feature("one", pixels=pixels), feature("two", pixels=pixels, offset=20))
    assert scheduler.ready(asked, 0)
    for index, identifier in enumerate(("one", "two")):
        assert scheduler.has(identifier)
        scheduler.allocated(asked, index)
    loads = scheduler.orders({"request": 40}).loads
    assert [load.identifier for load in loads] == ["one", "two"]
    stats = scheduler.take_stats()
    assert stats is not None
    counts = summed(stats.data)
    assert counts["items/loaded"] == counts["wait_seconds_count"] == 2
    assert counts["transfer_seconds/read/host_count"] == 2


def test_item_stays_pinned_for_60_s_after_its_request(
    clock: Clock, start: Start, vllm_config: VllmConfig, place: Path
) -> None:
    put_in_host_cache(vllm_config, place, "picture")
    scheduler = start("ec_consumer")
    asked = request(feature())
    before = num_descriptors(place)
    assert scheduler.ready(asked, 0)
    assert num_descriptors(place) == before + 1
    scheduler.allocated(asked, 0)
    scheduler.orders({"request": 20})
    scheduler.finished(asked)
    clock.forward(59)
    scheduler.orders({})
    assert is_pinned(place / "host", key_of(vllm_config))
    clock.forward(1)
    scheduler.orders({})
    assert not is_pinned(place / "host", key_of(vllm_config))


def test_host_cache_checks_per_step_are_bounded(
    start: Start, vllm_config: VllmConfig, place: Path
) -> None:
    names = [f"p{number}" for number in range(OPENS_PER_STEP + 2)]
    put_in_host_cache(vllm_config, place, *names)
    scheduler = start("ec_consumer")
    many = request(*(feature(name) for name in names), name="many")
    assert not scheduler.ready(many, 0)
    assert [scheduler.has(name) for name in names] == OPENS_PER_STEP * [True] + 2 * [False]
    put_in_host_cache(vllm_config, place, "later")
    later = request(feature("later"), name="later")
    assert not scheduler.ready(later, 0), "the step's checks are used up"
    scheduler.finished(later)
    scheduler.orders({})
    assert scheduler.ready(later, 0)
    assert until_ready(scheduler, many)
    assert all(scheduler.has(name) for name in names)


def test_unsuccessful_host_cache_checks_count_too(
    start: Start, vllm_config: VllmConfig, place: Path
) -> None:
    put_in_host_cache(vllm_config, place, "picture")
    scheduler = start("ec_consumer")
    strange = request(*(feature(f"s{number}") for number in range(OPENS_PER_STEP)), name="strange")
    assert not scheduler.ready(strange, 0)
    assert not scheduler.ready(request(feature()), 0)


@pytest.mark.parametrize("damage", ["header", "length", "shape"])
def test_damaged_entry_is_a_miss_and_is_closed_and_removed(
    start: Start, vllm_config: VllmConfig, place: Path, damage: str
) -> None:
    put_in_host_cache(vllm_config, place, "picture", num_columns=7 if damage == "shape" else 0)
    spoiled = entry(place)
    spoiled.chmod(0o600)
    if damage == "header":
        spoiled.write_bytes(b"no object".ljust(spoiled.stat().st_size))
    elif damage == "length":
        spoiled.write_bytes(spoiled.read_bytes()[:-1])
    (place / "store" / key_of(vllm_config)).unlink()
    scheduler = start("ec_consumer")
    asked = request(feature())
    before = num_descriptors(place)
    assert not scheduler.ready(asked, 0)
    assert num_descriptors(place) == before
    assert until_ready(scheduler, asked)
    assert not scheduler.has("picture")
    assert not spoiled.exists()
    assert counted(scheduler)["misses/missing"] == 1


def test_announcing_engine_stores_a_lost_item_from_its_host_cache(
    start: Start, vllm_config: VllmConfig, place: Path
) -> None:
    put_in_host_cache(vllm_config, place, "picture")
    (place / "store" / key_of(vllm_config)).unlink()
    scheduler = start("ec_both")
    assert scheduler.ready(request(feature()), 0)
    scheduler.orders({})
    scheduler.engine.drain(10)
    assert (place / "store" / key_of(vllm_config)).exists()
    assert counted(scheduler)["items/saved"] == 1


def test_host_cache_on_disk_is_read_by_the_io_thread(
    start: Start, vllm_config: VllmConfig, place: Path
) -> None:
    put_in_host_cache(vllm_config, place, "picture")
    scheduler = start("ec_consumer")
    scheduler.engine.host.is_in_memory = False  # as on a disk
    assert not scheduler.ready(request(feature()), 0)
    assert until_ready(scheduler, request(feature()))
    assert scheduler.has("picture")


def test_fetch_that_must_be_in_the_store_does_not_end_at_once(
    start: Start, vllm_config: VllmConfig, place: Path
) -> None:
    put_in_host_cache(vllm_config, place, "picture")
    engine = TransferEngine(config(place), "options")
    key = key_of(vllm_config)
    assert not engine.fetch_inline(Handle(Fetch(key, 5, in_store=True)))
    ended: list[Done[StoredObject]] = []
    assert engine.fetch_inline(Handle(Fetch(key, 5), ended.append))
    (done,) = ended
    assert done.value is not None
    done.value.release()
    assert engine.in_flight == 0
    engine.close()


def test_is_in_memory_is_true_only_for_shm() -> None:
    assert is_in_memory(SHM)
    assert not is_in_memory(Path("/proc"))
    assert not is_in_memory(SHM / "no such folder")


# --- vLLM's own encoder cache ---


def after_encoding(scheduler: EncoderScheduler, *identifiers: str) -> None:
    """Have vLLM encode images that are not stored, and end their requests."""
    for identifier in identifiers:
        asked = request(feature(identifier), name=f"first {identifier}")
        assert until_ready(scheduler, asked)
        scheduler.allocated(asked, 0)
        scheduler.orders({asked.request_id: 20})
        scheduler.finished(asked)


def test_items_in_vllms_encoder_cache_are_ready_at_once(start: Start) -> None:
    scheduler = start("ec_consumer")
    after_encoding(scheduler, "one", "two")
    assert scheduler.ready(request(feature("one"), feature("two", offset=20)), 0)
    assert not scheduler.has("one"), "if vLLM evicts it meanwhile, it is encoded"


def test_items_evicted_by_vllm_are_looked_up_again(start: Start) -> None:
    scheduler = start("ec_consumer")
    after_encoding(scheduler, "one", "two")
    scheduler.orders({}, ["one"])
    assert not scheduler.ready(request(feature("one"), name="a"), 0)
    assert scheduler.ready(request(feature("two"), name="b"), 0)


def test_request_without_pixels_does_not_rely_on_vllms_cache(start: Start) -> None:
    """vLLM evicts items while it schedules, and reports it when the request is admitted."""
    scheduler = start("ec_consumer")
    after_encoding(scheduler, "one")
    assert not scheduler.ready(request(feature("one", pixels=False)), 0)


def test_announcing_engine_checks_the_store_for_cached_items(start: Start) -> None:
    scheduler = start("ec_both")
    after_encoding(scheduler, "one")
    assert not scheduler.ready(request(feature("one")), 0)


def test_items_in_vllms_encoder_cache_cause_no_lookup(start: Start) -> None:
    scheduler = start("ec_consumer")
    after_encoding(scheduler, "picture")
    scheduler.engine.drain(10)
    assert scheduler.ready(request(feature(), name="second"), 0)
    scheduler.orders({"second": 20})
    assert scheduler.engine.in_flight == 0


def test_item_of_another_length_is_not_taken_from_vllms_cache(start: Start) -> None:
    scheduler = start("ec_consumer")
    after_encoding(scheduler, "picture")
    assert not scheduler.ready(request(feature(num_embeds=NUM_EMBEDS + 1)), 0)
