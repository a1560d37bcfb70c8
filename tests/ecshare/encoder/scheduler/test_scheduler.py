# SPDX-License-Identifier: Apache-2.0
"""The scheduler half against a real store, with vLLM's own configuration and requests."""

import asyncio
import fcntl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ECTransferConfig, LoRAConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from ecshare.encoder.config import EncoderConfig
from ecshare.encoder.facts import encoder_namespace
from ecshare.encoder.messages import Orders, Report
from ecshare.encoder.scheduler.scheduler import MAX_IDENTIFIER_CHARS, EncoderScheduler
from ecshare.plugin.adapters import adapter_fingerprint
from ecshare.plugin.ledger import open_ledger
from ecshare.store.epochs import next_epoch
from ecshare.store.format import TensorSpec
from ecshare.store.hostcache.cache import open_host_cache
from ecshare.store.keys import Key
from ecshare.store.open import open_store
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import GiveUp, Handle, Lookup, Outcome, Put
from ecshare.transfer.stats import summed
from ecshare.transfer.upkeep import epochs
from tests.ecshare.upkeep.stores import taken
from tests.expiry import expire, renew_often, wait_until_there
from tests.waiting import Clock, wait_until

NUM_EMBEDS = 16
GRID = torch.tensor([1, 8, 8])

Start = Callable[..., EncoderScheduler]
Store = Callable[..., None]


@pytest.fixture(scope="module")
def vllm_config(vlm: Path) -> VllmConfig:
    return EngineArgs(model=str(vlm), dtype="float32", enforce_eager=True).create_engine_config()


@pytest.fixture
def start(vllm_config: VllmConfig, tmp_path: Path) -> Iterator[Start]:
    started = []

    def start(role: str, **options: Any) -> EncoderScheduler:
        vllm_config.ec_transfer_config = ECTransferConfig(
            ec_connector="ECShareConnector",
            ec_role=role,  # type: ignore[arg-type]
        )
        scheduler = EncoderScheduler.start(vllm_config, config(tmp_path, **options))
        started.append(scheduler)
        return scheduler

    yield start
    for scheduler in started:
        scheduler.close()


def config(tmp_path: Path, **options: Any) -> EncoderConfig:
    return EncoderConfig(
        url=f"file://{tmp_path}/store", host_cache_dir=str(tmp_path / "host"), **options
    )


def feature(
    identifier: str = "picture",
    *,
    pixels: bool = True,
    offset: int = 2,
    num_embeds: int = NUM_EMBEDS,
) -> MultiModalFeatureSpec:
    field = MultiModalSharedField(batch_size=1)
    values = {"image_grid_thw": MultiModalFieldElem(data=GRID, field=field)}
    if pixels:
        values["pixel_values"] = MultiModalFieldElem(data=torch.zeros(64, 8), field=field)
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(values),
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=num_embeds),
    )


def request(*features: MultiModalFeatureSpec, name: str = "request", **fields: Any) -> Any:
    # The fields of vllm.v1.request.Request that the hooks read.
    return SimpleNamespace(request_id=name, mm_features=list(features), **fields)


@pytest.fixture
def shape(vllm_config: VllmConfig) -> tuple[int, int]:
    return NUM_EMBEDS, vllm_config.model_config.get_hidden_size()


@pytest.fixture
def store(vllm_config: VllmConfig, tmp_path: Path, shape: tuple[int, int]) -> Store:
    """Store a tensor under the key of the default feature, as a producer on another host."""

    def store(shape: tuple[int, int] = shape) -> None:
        elsewhere = EncoderConfig(
            url=f"file://{tmp_path}/store", host_cache_dir=str(tmp_path / "elsewhere")
        )
        engine = TransferEngine(elsewhere, "options")
        staging = Staging(torch.device("cpu"), 1 << 24)
        slab = staging.reserve(TensorSpec("F32", shape, {}))
        assert slab is not None
        staging.copy_out(slab, torch.randn(shape))
        engine.submit(Put(key_of(vllm_config), slab))
        engine.drain(10)
        engine.close()

    return store


def key_of(vllm_config: VllmConfig, identifier: str = "picture") -> Key:
    """Return the key of an item's object, as in docs/format.md."""
    return encoder_namespace(vllm_config, "").key(f"{NUM_EMBEDS}::{identifier}")


def until_ready(scheduler: EncoderScheduler, asked: Any) -> bool:
    """Poll as vLLM does until the request is ready; no other request may be lost meanwhile."""

    def is_ready() -> bool:
        if scheduler.ready(asked, 0):
            return True
        assert not scheduler.take_unavailable()
        scheduler.orders({})
        return False

    wait_until(is_ready)
    return True


def test_only_an_idle_step_waits_for_an_item(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store()
    scheduler, waits = start("ec_consumer"), list[str]()
    monkeypatch.setattr(TransferEngine, "wait_idle", lambda _: waits.append("now"))
    scheduler.orders({})
    assert not waits, "no request waits for an item"
    asked = request(feature())
    assert not scheduler.ready(asked, 0)
    scheduler.orders({"other": 1})
    assert not waits, "it would delay the other request"
    scheduler.orders({})
    assert waits
    assert until_ready(scheduler, asked)


def until_lost(scheduler: EncoderScheduler, *asked: Any) -> set[str]:
    """Poll as vLLM does until a request is lost; return the lost ones. None may become ready."""
    lost: set[str] = set()

    def is_any_lost() -> bool:
        assert not any([scheduler.ready(each, 0) for each in asked])
        scheduler.orders({})
        lost.update(scheduler.take_unavailable())
        return bool(lost)

    wait_until(is_any_lost)
    return lost


def until_answered(scheduler: EncoderScheduler, *asked: Any) -> None:
    """Poll requests that stay unready until the store has answered three later lookups."""
    for n in range(3):
        later = request(feature(f"later {n}"), name="later")
        assert not scheduler.ready(later, 0)
        assert until_ready(scheduler, later)
        scheduler.finished(later)
        assert not any([scheduler.ready(each, 0) for each in asked])


def counted(scheduler: EncoderScheduler) -> dict[str, float]:
    """Return the counts since the last call, without times and transfers."""
    stats = scheduler.take_stats()
    counts = {} if stats is None else stats.data
    return {
        name: count
        for name, count in summed(counts).items()
        if name != "wait_seconds_sum" and not name.startswith("transfer")
    }


def test_consumer_waits_until_the_item_is_in_the_host_cache(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature(pixels=False))
    assert not scheduler.has("picture")
    assert not scheduler.ready(asked, 0)
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")
    scheduler.allocated(asked, 0)
    (load,) = scheduler.orders({"request": 20}).loads
    assert load.identifier == "picture"
    assert [name for name, _, _ in taken(scheduler.engine.uses)] == [load.key]
    assert scheduler.orders({"request": 1}).loads == ()
    assert scheduler.finished(asked) is None
    assert not scheduler.has("picture")


def test_missing_item_with_pixels_is_encoded(start: Start) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature())
    assert until_ready(scheduler, asked)
    assert not scheduler.has("picture")
    scheduler.allocated(asked, 0)
    assert scheduler.orders({"request": 20}) == scheduler.orders({})
    assert counted(scheduler) == {
        "items/missed": 1,
        "misses/missing": 1,
        "wait_seconds_count": 1,
        "items/encoded": 1,
    }


def test_missing_item_without_pixels_fails_its_request_once(start: Start) -> None:
    scheduler = start("ec_consumer", wait_s=0.1)
    asked = request(feature(pixels=False))
    assert until_lost(scheduler, asked) == {"request"}
    assert scheduler.take_unavailable() == set()
    scheduler.finished(asked)
    assert scheduler.ready(request(name="other"), 0)


def test_earlier_miss_of_a_request_with_pixels_fails_no_other(start: Start, store: Store) -> None:
    """The first request looked it up before it was stored, and waits to be encoded."""
    scheduler = start("ec_consumer")
    first = request(feature(), name="first")
    assert until_ready(scheduler, first)
    assert not scheduler.has("picture")
    second = request(feature(pixels=False), name="second")
    assert not scheduler.ready(second, 0)
    assert scheduler.take_unavailable() == set()
    store()
    assert until_ready(scheduler, second)
    assert scheduler.has("picture")
    for each in (first, second):
        scheduler.finished(each)


def test_request_fails_after_its_own_wait_s_and_may_be_retried(
    clock: Clock, start: Start, store: Store
) -> None:
    scheduler = start("ec_consumer", wait_s=60, io_timeout_s=600)
    first = request(feature(), name="first")
    assert until_ready(scheduler, first)
    clock.forward(30)
    second = request(feature(pixels=False), name="second")
    until_answered(scheduler, second)
    clock.forward(50)
    until_answered(scheduler, second)
    clock.forward(10)
    assert until_lost(scheduler, second) == {"second"}
    scheduler.finished(second)
    store()
    assert until_ready(scheduler, second)


def test_request_fails_early_if_the_stored_object_is_damaged(
    start: Start, vllm_config: VllmConfig, tmp_path: Path
) -> None:
    scheduler = start("ec_consumer", wait_s=60)
    assert until_ready(scheduler, request(feature(), name="first"))
    path = tmp_path / "store" / key_of(vllm_config)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"of no use")
    second = request(feature(pixels=False), name="second")
    assert until_lost(scheduler, second) == {"second"}


def test_request_joining_a_fetch_late_has_its_own_wait_s(
    clock: Clock, start: Start, store: Store
) -> None:
    scheduler = start("ec_consumer", wait_s=60, io_timeout_s=600)
    first = request(feature(pixels=False), name="first")
    assert not scheduler.ready(first, 0)
    scheduler.orders({})
    clock.forward(30)
    second = request(feature(pixels=False), name="second")
    assert not scheduler.ready(second, 0)
    clock.forward(30)
    assert until_lost(scheduler, first, second) == {"first"}
    scheduler.finished(first)
    store()
    assert until_ready(scheduler, second)


def test_missing_item_without_data_in_vllm_fails_its_request(start: Start) -> None:
    scheduler = start("ec_consumer", wait_s=0.1)
    asked = request(feature())
    asked.mm_features[0].data = None
    assert until_lost(scheduler, asked) == {"request"}


@pytest.mark.parametrize("wrong", [(NUM_EMBEDS, 7), (NUM_EMBEDS - 1, 64)])
def test_stored_tensor_of_another_shape_is_a_miss(
    start: Start, store: Store, wrong: tuple[int, int]
) -> None:
    scheduler = start("ec_consumer")
    store(wrong)
    assert until_ready(scheduler, request(feature()))
    assert not scheduler.has("picture")


@pytest.mark.parametrize(("more", "is_taken"), [(0, True), (4, True), (5, True), (1, False)])
def test_embedding_of_a_pruned_video_may_have_position_columns(
    start: Start,
    vllm_config: VllmConfig,
    store: Store,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    more: int,
    is_taken: bool,
) -> None:
    monkeypatch.setattr(vllm_config.model_config.multimodal_config, "video_pruning_rate", 0.5)
    scheduler = start("ec_consumer")
    store((shape[0], shape[1] + more))
    assert until_ready(scheduler, request(feature()))
    assert scheduler.has("picture") is is_taken


@pytest.mark.parametrize(
    ("role", "cache_gb", "warns"),
    [("ec_consumer", 4, True), ("ec_consumer", 0, False), ("ec_both", 4, False)],
)
def test_consumer_with_a_processor_cache_logs_a_warning(
    start: Start,
    vllm_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: str,
    cache_gb: float,
    warns: bool,
) -> None:
    media = vllm_config.model_config.multimodal_config
    monkeypatch.setattr(media, "mm_processor_cache_gb", cache_gb)
    start(role)
    assert ("--mm-processor-cache-gb" in caplog.text) is warns


@pytest.mark.parametrize(("has_a_cache", "is_shared"), [(True, True), (False, False)])
def test_item_with_a_counter_as_identifier_is_not_shared(
    start: Start,
    vllm_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    has_a_cache: bool,
    is_shared: bool,
) -> None:
    """Without caches vLLM numbers images from 1 in every engine."""
    media = vllm_config.model_config.multimodal_config
    monkeypatch.setattr(media, "mm_processor_cache_gb", 0)
    monkeypatch.setattr(vllm_config.cache_config, "enable_prefix_caching", has_a_cache)
    scheduler = start("ec_both")
    name = numbered()
    numbered_one, named_one = request(feature(name)), request(feature("a" * 64), name="other")
    for asked in (numbered_one, named_one):
        assert until_ready(scheduler, asked)
        scheduler.allocated(asked, 0)
    orders = scheduler.orders({"request": 1, "other": 1})
    saved = {order.identifier for order in orders.saves}
    assert saved == ({name, "a" * 64} if is_shared else {"a" * 64})
    announced = scheduler.finished(numbered_one)
    assert announced is not None
    assert set(announced) == ({name} if is_shared else set())
    assert set(scheduler.finished(named_one) or ()) == {"a" * 64}
    lost = request(feature(name, pixels=False), name="lost")
    if not is_shared:
        assert not scheduler.ready(lost, 0)
        assert scheduler.take_unavailable() == {"lost"}


def numbered() -> str:
    """Return the identifier that this vLLM gives the first image when it has no caches."""
    base = pytest.importorskip("vllm.renderers.base")
    off = SimpleNamespace(mm_processor_cache_gb=0)
    renderer = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=off),
        config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
        _validate_mm_uuids=lambda *_: None,
    )
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    names = base.BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "renderer0-mm-1")
    (name,) = names["image"]
    assert isinstance(name, str)
    return name


def test_store_slower_than_wait_s_is_a_miss(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer", wait_s=1e-9)
    store()
    assert scheduler.ready(request(feature()), 0)


def test_items_covered_by_kv_are_not_looked_up(start: Start) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature("a", offset=0), feature("b", offset=100))
    assert scheduler.ready(asked, 116)
    assert not scheduler.ready(asked, 115)
    scheduler.orders({})
    wait_until(lambda: scheduler.ready(asked, 115))
    assert counted(scheduler)["misses/missing"] == 1


def test_item_is_unpinned_when_the_prefill_has_passed_it(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature(offset=2), feature("later", offset=50))
    assert until_ready(scheduler, asked)
    assert scheduler.ready(asked, 17)
    assert scheduler.has("picture")
    assert scheduler.ready(asked, 18)
    assert not scheduler.has("picture")
    # Preempted: it starts again, and looks up the items that it had unpinned.
    assert not scheduler.ready(asked, 0)
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")
    assert counted(scheduler)["misses/missing"] == 1, "it asked twice for the later one"


class Counted(list[MultiModalFeatureSpec]):
    """Counts how often it is iterated over."""

    times = 0

    def __iter__(self) -> Iterator[MultiModalFeatureSpec]:
        self.times += 1
        return super().__iter__()


def test_decode_step_does_not_iterate_over_passed_items(
    start: Start,
) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature(offset=2), feature("later", offset=50))
    asked.mm_features = features = Counted(asked.mm_features)
    assert scheduler.ready(asked, 66)
    features.times = 0
    for num_computed_tokens in range(66, 166):
        assert scheduler.ready(asked, num_computed_tokens)
    assert not features.times


def test_preempted_request_keeps_items_pinned(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature(offset=2))
    assert scheduler.ready(asked, 18)
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")
    assert scheduler.ready(asked, 18)
    assert not scheduler.has("picture")


def test_new_item_of_a_resumed_session_is_looked_up(start: Start) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature(offset=2))
    assert scheduler.ready(asked, 18)
    asked.mm_features.append(feature("next", offset=10))
    assert not scheduler.ready(asked, 18)


def test_repeated_item_stays_pinned_until_its_last_position(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature(offset=2), feature(offset=50))
    assert until_ready(scheduler, asked)
    assert scheduler.ready(asked, 30)
    assert scheduler.has("picture")


@pytest.mark.parametrize(("is_reported", "pinned_s"), [(False, 60), (True, 5)])
def test_pin_outlives_the_request_until_its_load_ended(
    clock: Clock,
    start: Start,
    store: Store,
    tmp_path: Path,
    is_reported: bool,
    pinned_s: float,
) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature())
    assert until_ready(scheduler, asked)
    scheduler.allocated(asked, 0)
    (load,) = scheduler.orders({"request": 20}).loads
    if is_reported:
        scheduler.reported(Report(loaded=frozenset({load.key})))
    scheduler.finished(asked)
    clock.forward(pinned_s - 1)
    scheduler.orders({})
    assert is_pinned(tmp_path / "host", load.key)
    clock.forward(1)
    scheduler.orders({})
    assert not is_pinned(tmp_path / "host", load.key)


def is_pinned(host: Path, key: Key) -> bool:
    """Return whether a process holds the lock that keeps a cached object from eviction."""
    (path,) = (each for each in host.rglob("*") if each.name.endswith(key.rpartition("/")[2]))
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def num_descriptors(tmp_path: Path) -> int:
    """Return how many of this process's descriptors are host cache entries."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(link.readlink()).startswith(f"{tmp_path}/host/")
    return found


def test_pinned_item_holds_one_file_descriptor(start: Start, store: Store, tmp_path: Path) -> None:
    scheduler = start("ec_consumer")
    store()
    before = num_descriptors(tmp_path)
    assert until_ready(scheduler, request(feature()))
    assert scheduler.has("picture")
    assert num_descriptors(tmp_path) == before + 1


def few_descriptors(kind: int) -> tuple[int, int]:
    return 256, 256


def test_number_of_lingering_pins_is_bounded(
    start: Start, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", few_descriptors)
    scheduler = start("ec_consumer")
    store()
    for number in range(80):
        asked = request(feature(), name=f"r{number}")
        assert until_ready(scheduler, asked)
        scheduler.finished(asked)
    scheduler.orders({})
    assert 60 < num_descriptors(tmp_path) < 80


def test_requests_beyond_the_descriptor_limit_wait_without_timing_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", few_descriptors)
    scheduler = start("ec_consumer")
    requests = [request(feature(f"p{number}"), name=f"r{number}") for number in range(65)]
    for asked in requests[:64]:
        assert until_ready(scheduler, asked)
    counted(scheduler)
    late = requests[64]
    for _ in range(3):
        assert not scheduler.ready(late, 0)
        scheduler.orders({})
        scheduler.engine.drain(10)
    assert counted(scheduler) == {}
    assert scheduler.ready(requests[0], 0), "a request with open items is not delayed"
    scheduler.finished(requests[0])
    assert until_ready(scheduler, late)
    assert counted(scheduler) == {"wait_seconds_count": 1, "items/missed": 1, "misses/missing": 1}


def test_identifier_with_a_second_length_fails_that_request(start: Start) -> None:
    scheduler = start("ec_consumer")
    assert until_ready(scheduler, request(feature(), name="first"))
    second = request(feature(num_embeds=NUM_EMBEDS + 1), name="second")
    assert not scheduler.ready(second, 0)
    assert scheduler.take_unavailable() == {"second"}


def test_shared_item_stays_pinned_until_the_last_request_ends(start: Start, store: Store) -> None:
    scheduler = start("ec_both")
    store()
    first, second = (request(feature(), name=name) for name in ("first", "second"))
    assert until_ready(scheduler, first)
    assert scheduler.ready(second, 0)
    scheduler.finished(first)
    assert scheduler.has("picture")
    scheduler.finished(second)
    assert not scheduler.has("picture")


def test_producer_orders_one_save_of_a_missing_item(start: Start) -> None:
    scheduler = start("ec_producer")
    asked = request(feature())
    assert until_ready(scheduler, asked)
    assert scheduler.orders({"another": 1}).saves == ()
    (save,) = scheduler.orders({"request": 20}).saves
    assert save.identifier == "picture"
    assert save.attributes == {"num_embeds": NUM_EMBEDS, "metadata": {"image_grid_thw": [1, 8, 8]}}
    assert scheduler.orders({"request": 1}).saves == ()
    announced = scheduler.finished(asked)  # vLLM 0.31 and later add the item's position
    assert announced is not None
    assert announced["picture"]["metadata"] == {"image_grid_thw": [1, 8, 8]}


def test_overlong_metadata_is_announced_but_not_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the times of a long video: an object's header is small."""
    monkeypatch.setattr("ecshare.encoder.scheduler.saves.MAX_NOTED_CHARS", 20)
    scheduler = start("ec_producer")
    asked = request(feature())
    assert until_ready(scheduler, asked)
    (save,) = scheduler.orders({"request": 20}).saves
    assert save.attributes == {"num_embeds": NUM_EMBEDS, "metadata": {}}
    announced = scheduler.finished(asked)
    assert announced is not None
    assert announced["picture"]["metadata"] == {"image_grid_thw": [1, 8, 8]}


def test_gauges_of_reports_are_not_summed(start: Start) -> None:
    """A worker's report and the ledger may carry the same values in one step."""
    scheduler = start("ec_producer")
    for _ in range(2):
        scheduler.reported(Report({0: {"now/breaker_open": 1.0, "items/saved": 3}}, frozenset()))
    counts = counted(scheduler)
    assert (counts["now/breaker_open"], counts["items/saved"]) == (1.0, 3)


def test_prompt_embeddings_are_not_shared_as_media(start: Start, tmp_path: Path) -> None:
    """No encoder computes them, and their dtype may be one that media embeddings never have."""
    scheduler = start("ec_both")
    sent = feature("sent")
    sent.modality = "prompt_embeds"
    asked = request(sent, feature(offset=40))
    assert until_ready(scheduler, asked)
    assert not scheduler.has("sent")
    scheduler.allocated(asked, 0)
    scheduler.allocated(asked, 1)
    orders = scheduler.orders({"request": 60})
    assert [order.identifier for order in orders.saves] == ["picture"]
    announced = scheduler.finished(asked)
    assert announced is not None
    assert announced.keys() == {"picture"}
    assert counted(scheduler)["items/encoded"] == 1


def test_encoder_decoder_models_share_nothing(
    vllm_config: VllmConfig, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks the scheduler half for their items, but its runners would not load them."""
    monkeypatch.setitem(vars(vllm_config.model_config), "is_encoder_decoder", True)
    assert_idle(start("ec_both"))


def test_external_launcher_with_several_ranks_shares_nothing(
    vllm_config: VllmConfig,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each rank would decide by its own clock, so ranks would run different steps and hang."""
    parallel = vars(vllm_config.parallel_config)
    monkeypatch.setitem(parallel, "distributed_executor_backend", "external_launcher")
    monkeypatch.setitem(parallel, "world_size", 2)
    assert_idle(start("ec_both"))
    (warning,) = [each for each in caplog.messages if "saves and loads nothing" in each]
    assert "external_launcher" in warning
    assert not any("this engine saves" in each for each in caplog.messages)


def test_unsupported_device_type_shares_nothing(
    vllm_config: VllmConfig,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(vars(vllm_config.device_config), "device_type", "xpu")
    assert_idle(start("ec_both"))
    assert "ecshare saves and loads nothing: devices of the kind xpu" in caplog.text


def assert_idle(scheduler: EncoderScheduler) -> None:
    asked = request(feature())
    assert scheduler.ready(asked, 0)
    assert not scheduler.has("picture")
    assert scheduler.orders({"request": 20}) == Orders((), ())
    assert scheduler.finished(asked) is None


def test_producer_does_not_encode_stored_items(start: Start, store: Store) -> None:
    scheduler = start("ec_producer")
    store()
    asked = request(feature())
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")
    scheduler.allocated(asked, 0)
    orders = scheduler.orders({"request": 20})
    assert (orders.loads, orders.saves) == ((), ())
    assert (scheduler.finished(asked) or {})["picture"]["stored"] is True
    new = request(feature("new"), name="new")
    assert until_ready(scheduler, new)
    assert (scheduler.finished(new) or {})["new"]["stored"] is False


def test_announcement_says_nothing_of_an_item_whose_look_up_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The item may be stored, and so may KV of what follows it."""
    scheduler = start("ec_producer", wait_s=0.01)
    monkeypatch.setattr(TransferEngine, "submit", lambda *_: None)  # the store never answers
    asked = request(feature())
    assert until_ready(scheduler, asked)
    assert "stored" not in (scheduler.finished(asked) or {})["picture"]


def test_producer_does_not_announce_a_lost_item_it_will_not_encode(
    start: Start, store: Store, tmp_path: Path
) -> None:
    """vLLM counts a stored item as cached, and does not encode it when the store loses it."""
    scheduler = start("ec_producer")

    def announced(name: str, *, allocates: bool) -> bool:
        asked = request(feature(), name=name)
        assert until_ready(scheduler, asked)
        if allocates:  # vLLM does not allocate an item that it counts as cached
            scheduler.allocated(asked, 0)
        scheduler.orders({name: 20})
        assert scheduler.ready(asked, 2 + NUM_EMBEDS)  # unpins the item before the request ends
        return "picture" in (scheduler.finished(asked) or {})

    store()
    assert announced("stored", allocates=True)
    assert announced("still stored", allocates=False)
    (stored,) = (path for path in (tmp_path / "store").rglob("ec/2/*/*/*") if path.is_file())
    stored.unlink()
    assert not announced("lost", allocates=False)
    # vLLM has evicted the entry, so the item is encoded and stored.
    assert announced("encoded", allocates=True)
    assert announced("cached", allocates=False)


def test_producer_encodes_an_item_only_in_its_host_cache(
    start: Start, store: Store, tmp_path: Path
) -> None:
    consumer = start("ec_consumer")
    store()
    assert until_ready(consumer, request(feature()))
    assert consumer.has("picture")  # it is in the host cache now
    (path,) = (path for path in (tmp_path / "store" / "ec").rglob("*") if len(path.name) == 64)
    path.unlink()
    producer = start("ec_producer")
    assert until_ready(producer, request(feature()))
    assert not producer.has("picture")


def test_announcing_engine_restores_an_item_the_store_lost(
    start: Start, vllm_config: VllmConfig, store: Store, tmp_path: Path
) -> None:
    store()
    stored = tmp_path / "store" / key_of(vllm_config)
    for role in ("ec_both", "ec_both", "ec_consumer"):
        scheduler = start(role)
        assert until_ready(scheduler, request(feature()))
        scheduler.orders({"request": 1})
        scheduler.close()  # waits for its running jobs
        assert stored.exists() is (role == "ec_both")
        stored.unlink(missing_ok=True)


def test_announcement_keeps_metadata_after_vllm_drops_the_pixels(start: Start) -> None:
    scheduler = start("ec_producer")
    first = request(feature(), name="first")
    assert until_ready(scheduler, first)
    announced = scheduler.finished(first) or {}
    again = request(feature(), name="again")
    again.mm_features[0].data = None
    scheduler.ready(again, 0)
    said = scheduler.finished(again) or {}
    # The second request ends before its look-up.
    assert {name: entry | {"stored": False} for name, entry in said.items()} == announced


def test_counts_in_both_report_and_ledger_count_once(
    clock: Clock, start: Start, vllm_config: VllmConfig, tmp_path: Path
) -> None:
    scheduler = start("ec_producer")
    scheduler.reported(Report({0: {"items/saved": 2}}))
    scheduler.reported(None)
    assert counted(scheduler) == {"items/saved": 2}
    ledger = open_ledger(vllm_config, open_host_cache(config(tmp_path)))
    ledger.write(0, {"items/saved": 5.0})
    clock.forward(2)  # it reads the ledger at intervals
    counts: list[dict[str, float]] = []

    def is_counted() -> bool:
        counts.append(counted(scheduler))
        return bool(counts[-1])

    wait_until(is_counted)
    assert counts[-1] == {"items/saved": 3}
    scheduler.reported(Report({0: {"items/saved": 5.0}}))
    assert counted(scheduler) == {}


@pytest.mark.parametrize("is_told", [True, False])
def test_announced_item_is_waited_for(start: Start, store: Store, is_told: bool) -> None:
    """An encoder's answer announces the item, and so does a request without pixels."""
    scheduler = start("ec_consumer")
    params = {"picture": {"metadata": dict[str, Any]()}} if is_told else None
    asked = request(feature(pixels=is_told), ec_transfer_params=params)
    assert not scheduler.ready(asked, 0)
    until_answered(scheduler, asked)
    store()
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")


def test_item_that_was_stored_long_ago_is_not_waited_for(
    clock: Clock, start: Start, store: Store
) -> None:
    """A router remembers it, and says that its params name all items that are on their way. The
    simulated clock stands still, so no time-out can have passed."""
    scheduler = start("ec_consumer", wait_s=60, io_timeout_s=600)
    said = {"ecshare": {"names_all": True}}
    lost = request(feature(pixels=False), name="lost", ec_transfer_params=said)
    assert until_lost(scheduler, lost) == {"lost"}
    scheduler.finished(lost)

    with_pixels = request(feature(), name="with pixels")
    assert until_ready(scheduler, with_pixels)
    joins = request(feature(pixels=False), name="joins", ec_transfer_params=said)
    assert until_lost(scheduler, joins) == {"joins"}
    for each in (with_pixels, joins):
        scheduler.finished(each)

    named = request(feature(pixels=False), name="named", ec_transfer_params=said | {"picture": {}})
    assert not scheduler.ready(named, 0)
    until_answered(scheduler, named)
    store()
    assert until_ready(scheduler, named)
    scheduler.finished(named)

    found = request(feature(pixels=False), name="found", ec_transfer_params=said)
    assert until_ready(scheduler, found)
    assert scheduler.has("picture")


@pytest.mark.parametrize("said", [{}, True, {"names_all": 1.5}, {"names_all": True, "more": 0}])
def test_other_values_of_ecshare_in_transfer_params_mean_nothing(
    start: Start, store: Store, said: Any
) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature(pixels=False), ec_transfer_params={"ecshare": said})
    assert not scheduler.ready(asked, 0)
    until_answered(scheduler, asked)
    store()
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")


def test_announced_item_that_never_arrives_is_encoded_after_wait_s(
    clock: Clock, start: Start
) -> None:
    scheduler = start("ec_consumer", wait_s=60, io_timeout_s=600)
    asked = request(feature(), ec_transfer_params={"picture": {}})
    assert not scheduler.ready(asked, 0)
    scheduler.orders({})
    clock.forward(59)
    until_answered(scheduler, asked)
    clock.forward(1)
    assert until_ready(scheduler, asked)
    assert not scheduler.has("picture")


def test_announced_item_given_up_by_its_encoder_is_encoded_at_once(
    clock: Clock, start: Start, vllm_config: VllmConfig, tmp_path: Path
) -> None:
    """The simulated clock stands still, so no time-out can have passed."""
    scheduler = start("ec_consumer", wait_s=60, io_timeout_s=600)
    asked = request(feature(), ec_transfer_params={"picture": {}})
    assert not scheduler.ready(asked, 0)
    scheduler.orders({})
    elsewhere = TransferEngine(config(tmp_path), "options")
    elsewhere.submit(GiveUp(key_of(vllm_config)))
    elsewhere.drain(10)
    elsewhere.close()
    assert until_ready(scheduler, asked)
    assert not scheduler.has("picture")
    assert counted(scheduler)["misses/given_up"] == 1


def test_announcement_makes_other_requests_of_the_item_wait(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    first = request(feature(), name="first")
    told = request(feature(), name="told", ec_transfer_params={"picture": {}})
    assert not scheduler.ready(first, 0)
    assert not scheduler.ready(told, 0)
    until_answered(scheduler, told)
    store()
    assert until_ready(scheduler, first)
    assert scheduler.has("picture")


@pytest.mark.parametrize(
    "params", [None, [], "picture", 7, {"": 1}, {"other": {}}, {1: 2}, [["picture"]]]
)
def test_malformed_transfer_params_announce_nothing(start: Start, params: Any) -> None:
    scheduler = start("ec_consumer", wait_s=60)
    assert until_ready(scheduler, request(feature(), ec_transfer_params=params))


def test_fetch_is_cancelled_when_its_last_request_ends(start: Start) -> None:
    scheduler = start("ec_consumer", wait_s=60)
    asked = request(feature(pixels=False))
    assert not scheduler.ready(asked, 0)
    scheduler.orders({})
    scheduler.finished(asked)
    scheduler.orders({})
    (done,) = scheduler.engine.drain(10)  # its outcome is not reported
    assert done.outcome is Outcome.CANCELLED


def test_item_is_found_after_earlier_fetches_were_cancelled(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature(pixels=False))
    for _ in range(20):
        assert not scheduler.ready(asked, 0)
        scheduler.orders({})
        scheduler.finished(asked)
    assert not scheduler.ready(asked, 0)
    store()
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")


def test_step_submits_one_lookup_for_all_items(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = start("ec_producer")
    submitted: list[tuple[Handle[Any], ...]] = []
    monkeypatch.setattr(TransferEngine, "submit", lambda _, *each: submitted.append(each))
    asked = request(*(feature(name, offset=20 * n) for n, name in enumerate("abc")))
    assert not scheduler.ready(asked, 0)
    assert submitted == []
    scheduler.orders({})
    scheduler.orders({})
    ((handle,),) = submitted
    assert isinstance(handle.job, Lookup)
    assert len(set(handle.job.keys)) == 3


def test_request_becomes_ready_without_further_steps(start: Start) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature())
    wait_until(lambda: scheduler.ready(asked, 0))
    assert counted(scheduler)["misses/missing"] == 1


def test_item_with_an_overlong_identifier_is_encoded_and_not_stored(start: Start) -> None:
    scheduler = start("ec_both")
    identifier = "x" * (MAX_IDENTIFIER_CHARS + 1)
    asked = request(feature(identifier))
    assert scheduler.ready(asked, 0)
    assert not scheduler.has(identifier)
    scheduler.allocated(asked, 0)
    assert scheduler.orders({"request": 20}).saves == ()
    pixelless = request(feature(identifier, pixels=False), name="pixelless")
    assert not scheduler.ready(pixelless, 0)
    assert scheduler.take_unavailable() == {"pixelless"}


@pytest.fixture
def tower_adapters(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM apply LoRA adapters to the encoder too."""
    monkeypatch.setattr(vllm_config, "lora_config", LoRAConfig(enable_tower_connector_lora=True))


def adapter(tmp_path: Path, rank: int) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    (folder / "adapter_model.bin").write_bytes(bytes(rank))
    return folder


@pytest.mark.usefixtures("tower_adapters")
def test_key_depends_on_the_adapters_content_not_its_name(start: Start, tmp_path: Path) -> None:
    scheduler = start("ec_producer")
    keys = []
    for name, rank in (("a", 8), ("b", 16), ("c", 8)):
        lora = SimpleNamespace(lora_name=name, lora_path=str(adapter(tmp_path, rank)))
        asked = request(feature(), lora_request=lora)
        assert until_ready(scheduler, asked)
        (save,) = scheduler.orders({"request": 20}).saves
        keys.append(save.key)
        scheduler.finished(asked)
    assert keys[0] == keys[2] != keys[1]
    pretender = f"{adapter_fingerprint(tmp_path / 'adapter')}:picture"
    for identifier in ("picture", pretender, f":{pretender}"):
        plain = request(feature(identifier), lora_request=None)
        assert until_ready(scheduler, plain)
        (save,) = scheduler.orders({"request": 20}).saves
        assert save.key not in keys
        scheduler.finished(plain)


@pytest.mark.usefixtures("tower_adapters")
def test_items_of_a_changed_adapter_are_not_shared(start: Start, tmp_path: Path) -> None:
    """vLLM's own cache keys embeddings by the adapter's name, so they may be the old ones."""
    scheduler = start("ec_producer")
    num_saved = []
    for rank in (8, 16, 8):
        lora = SimpleNamespace(lora_name="a", lora_path=str(adapter(tmp_path, rank)))
        asked = request(feature(), lora_request=lora)
        assert until_ready(scheduler, asked)
        num_saved.append(len(scheduler.orders({"request": 20}).saves))
        scheduler.finished(asked)
    assert num_saved == [1, 0, 0]
    assert counted(scheduler)["misses/unidentified"] == 2


@pytest.mark.usefixtures("tower_adapters")
def test_items_of_an_unreadable_adapter_are_not_shared(start: Start, tmp_path: Path) -> None:
    scheduler = start("ec_both")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "none"))
    assert until_ready(scheduler, request(feature(), lora_request=lora))
    assert counted(scheduler)["misses/unidentified"] == 1
    assert scheduler.orders({"request": 20}).saves == ()


@pytest.mark.parametrize(
    "identifier", ["../../evil/x", "", "\x00", "ü" * 4096, "/etc/passwd", "\ud800"]
)
def test_hostile_identifier_gives_a_safe_key(
    start: Start, vllm_config: VllmConfig, identifier: str
) -> None:
    scheduler = start("ec_producer")
    asked = request(feature(identifier))
    assert until_ready(scheduler, asked)
    (save,) = scheduler.orders({"request": 20}).saves
    assert save.key.startswith(f"ec/2/{encoder_namespace(vllm_config, '').digest}/")
    assert ".." not in save.key
    assert len(save.key) < 200


def test_manifest_is_renewed_before_expiry(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_often(monkeypatch)
    start("ec_producer")
    wait_until_there(expire(tmp_path / "store"))


# --- epochs: weights are updated in place ---


@pytest.fixture
def begin_epoch(
    vllm_config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[EncoderScheduler], int]:
    """Begin an epoch, and wait until an engine has read it."""
    monkeypatch.setattr(epochs, "READ_EVERY_S", 0.05)

    async def begin() -> int:
        store = open_store(config(tmp_path), "options")
        return await next_epoch(store, str(vllm_config.model_config.model), None)

    def begin_epoch(scheduler: EncoderScheduler) -> int:
        number = asyncio.run(begin())
        reader = scheduler.engine.epochs._reader
        assert reader is not None
        wait_until(lambda: reader.number == number)
        return number

    return begin_epoch


def test_nothing_is_shared_from_an_epoch_until_the_encoder_cache_is_reset(
    start: Start, store: Store, begin_epoch: Callable[[EncoderScheduler], int]
) -> None:
    store()
    scheduler = start("ec_both")
    old = request(feature(), name="old")
    assert until_ready(scheduler, old)
    assert scheduler.has("picture")
    scheduler.allocated(old, 0)
    scheduler.orders({"old": 1})
    begin_epoch(scheduler)
    assert scheduler.ready(old, 0), "what it was promised is of the weights that it began with"
    scheduler.finished(old)
    scheduler.orders({})
    new = request(feature(), name="new")
    assert scheduler.ready(new, 0)
    assert not scheduler.has("picture")
    scheduler.allocated(new, 0)
    assert not scheduler.orders({"new": 1}).saves
    assert scheduler.finished(new) is None, "nothing is announced"
    bare = request(feature(pixels=False), name="bare")
    assert not scheduler.ready(bare, 0)
    assert scheduler.take_unavailable() == {"bare"}
    scheduler.finished(bare)


def test_running_requests_save_nothing_from_an_epoch_on(
    start: Start, begin_epoch: Callable[[EncoderScheduler], int]
) -> None:
    """No request begins meanwhile: only steps tell. They may have save orders of earlier steps."""
    scheduler = start("ec_both")
    running = request(feature(), name="running")
    assert until_ready(scheduler, running)
    scheduler.allocated(running, 0)
    before = scheduler.orders({})
    begin_epoch(scheduler)
    orders = scheduler.orders({"running": 1})
    assert (orders.num_stops, orders.saves) == (before.num_stops + 1, ())
    EncoderCacheManager(cache_size=64).reset()
    assert scheduler.orders({"running": 1}).num_stops == before.num_stops + 2
    wait_until(lambda: scheduler.orders({"running": 1}) and scheduler.engine.epochs.may_share)
    assert not scheduler.orders({"running": 1}).saves, "it has run with the old weights"


def test_new_epoch_has_items_of_its_own(
    start: Start, store: Store, begin_epoch: Callable[[EncoderScheduler], int]
) -> None:
    store()
    scheduler = start("ec_both")
    running = request(feature(), name="running")
    assert until_ready(scheduler, running)
    scheduler.orders({})
    number = begin_epoch(scheduler)
    EncoderCacheManager(cache_size=64).reset()
    assert until_ready(scheduler, running)
    assert not scheduler.has("picture"), "the embedding is of the old weights"
    scheduler.allocated(running, 0)
    orders = scheduler.orders({"running": 1})
    (save,) = orders.saves
    assert orders.num_stops == 1
    assert save.key.split("/")[2] != scheduler_namespace(scheduler, 0)
    assert save.key.split("/")[2] == scheduler_namespace(scheduler, number)


def scheduler_namespace(scheduler: EncoderScheduler, number: int) -> str:
    record = scheduler.engine.epochs._record
    assert record is not None
    return record.in_epoch(number).namespace


def test_reset_alone_changes_nothing_that_is_shared(start: Start, store: Store) -> None:
    store()
    scheduler = start("ec_consumer")
    assert until_ready(scheduler, request(feature(), name="before"))
    scheduler.orders({})
    EncoderCacheManager(cache_size=64).reset()
    assert until_ready(scheduler, request(feature(), name="after"))
    assert scheduler.has("picture")
