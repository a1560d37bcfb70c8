# SPDX-License-Identifier: Apache-2.0
"""The scheduler half against a real store, with vLLM's own configuration and requests."""

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

from ecshare.encoder.config import EncoderConfig
from ecshare.encoder.facts import encoder_namespace
from ecshare.encoder.messages import Orders, Report
from ecshare.encoder.scheduler.scheduler import MAX_IDENTIFIER_CHARS, EncoderScheduler
from ecshare.plugin.adapters import adapter_fingerprint
from ecshare.plugin.ledger import open_ledger
from ecshare.store.format import TensorSpec
from ecshare.store.hostcache.cache import open_host_cache
from ecshare.store.keys import Key
from ecshare.transfer.device.staging import Staging
from ecshare.transfer.engine import TransferEngine
from ecshare.transfer.jobs import GiveUp, Handle, Lookup, Outcome, Put
from ecshare.transfer.stats import summed
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
    # What the hooks read of vllm.v1.request.Request, and nothing else.
    return SimpleNamespace(request_id=name, mm_features=list(features), **fields)


@pytest.fixture
def shape(vllm_config: VllmConfig) -> tuple[int, int]:
    return NUM_EMBEDS, vllm_config.model_config.get_hidden_size()


@pytest.fixture
def store(vllm_config: VllmConfig, tmp_path: Path, shape: tuple[int, int]) -> Store:
    """Put a tensor under the key of the default feature, as a producer elsewhere would."""

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
    """The key of an item's object, as docs/format.md has it."""
    return encoder_namespace(vllm_config, "").key(f"{NUM_EMBEDS}::{identifier}")


def until_ready(scheduler: EncoderScheduler, asked: Any) -> bool:
    """Poll as vLLM does, until the request is ready, and no other is lost meanwhile."""

    def is_ready() -> bool:
        if scheduler.ready(asked, 0):
            return True
        assert not scheduler.take_unavailable()
        scheduler.orders({})
        return False

    wait_until(is_ready)
    return True


def test_only_a_step_that_computes_nothing_waits_for_an_item(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store()
    scheduler, waits = start("ec_consumer"), list[str]()
    monkeypatch.setattr(TransferEngine, "wait_idle", lambda _: waits.append("now"))
    scheduler.orders({})
    assert not waits, "nobody wants anything"
    asked = request(feature())
    assert not scheduler.ready(asked, 0)
    scheduler.orders({"other": 1})
    assert not waits, "others would wait too"
    scheduler.orders({})
    assert waits
    assert until_ready(scheduler, asked)


def until_lost(scheduler: EncoderScheduler, *asked: Any) -> set[str]:
    """Poll as vLLM does, until a request is lost; return all that are. None becomes ready."""
    lost: set[str] = set()

    def is_any_lost() -> bool:
        assert not any([scheduler.ready(each, 0) for each in asked])
        scheduler.orders({})
        lost.update(scheduler.take_unavailable())
        return bool(lost)

    wait_until(is_any_lost)
    return lost


def until_answered(scheduler: EncoderScheduler, *asked: Any) -> None:
    """Poll requests that stay unready, until the store has answered what was asked after them."""
    for n in range(3):
        later = request(feature(f"later {n}"), name="later")
        assert not scheduler.ready(later, 0)
        assert until_ready(scheduler, later)
        scheduler.finished(later)
        assert not any([scheduler.ready(each, 0) for each in asked])


def counted(scheduler: EncoderScheduler) -> dict[str, float]:
    """What was counted since the last call, but for times and what was moved."""
    stats = scheduler.take_stats()
    counts = {} if stats is None else stats.data
    return {
        name: count
        for name, count in summed(counts).items()
        if name != "wait_seconds_sum" and not name.startswith("transfer")
    }


def test_a_consumer_waits_until_the_item_is_on_this_host(start: Start, store: Store) -> None:
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
    assert scheduler.orders({"request": 1}).loads == ()
    assert scheduler.finished(asked) is None
    assert not scheduler.has("picture")


def test_an_absent_item_with_pixels_is_encoded(start: Start) -> None:
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


def test_an_absent_item_without_pixels_fails_its_request_once(start: Start) -> None:
    scheduler = start("ec_consumer", wait_s=0.1)
    asked = request(feature(pixels=False))
    assert until_lost(scheduler, asked) == {"request"}
    assert scheduler.take_unavailable() == set()
    scheduler.finished(asked)
    assert scheduler.ready(request(name="other"), 0)


def test_who_comes_without_pixels_is_not_failed_for_others_who_have_them(
    start: Start, store: Store
) -> None:
    """They had asked before it was stored, and hold it as absent while they wait to be encoded."""
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


def test_it_fails_after_its_own_time_and_may_come_again(
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


def test_who_has_time_left_asks_but_once_for_what_is_of_no_use(
    start: Start, vllm_config: VllmConfig, tmp_path: Path
) -> None:
    scheduler = start("ec_consumer", wait_s=60)
    assert until_ready(scheduler, request(feature(), name="first"))
    path = tmp_path / "store" / key_of(vllm_config)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"of no use")
    second = request(feature(pixels=False), name="second")
    assert until_lost(scheduler, second) == {"second"}


def test_who_joins_late_has_time_of_its_own(clock: Clock, start: Start, store: Store) -> None:
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


def test_an_absent_item_that_vllm_holds_no_data_of_fails_its_request(start: Start) -> None:
    scheduler = start("ec_consumer", wait_s=0.1)
    asked = request(feature())
    asked.mm_features[0].data = None
    assert until_lost(scheduler, asked) == {"request"}


@pytest.mark.parametrize("wrong", [(NUM_EMBEDS, 7), (NUM_EMBEDS - 1, 64)])
def test_a_stored_tensor_of_another_shape_is_a_miss(
    start: Start, store: Store, wrong: tuple[int, int]
) -> None:
    scheduler = start("ec_consumer")
    store(wrong)
    assert until_ready(scheduler, request(feature()))
    assert not scheduler.has("picture")


@pytest.mark.parametrize(("more", "is_taken"), [(0, True), (4, True), (5, True), (1, False)])
def test_pruned_videos_may_have_positions_beside_the_embedding(
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
def test_a_cache_of_inputs_that_may_confuse_them_is_warned_of(
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
def test_a_number_that_vllm_gave_a_picture_is_not_its_name(
    start: Start,
    vllm_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    has_a_cache: bool,
    is_shared: bool,
) -> None:
    """Without caches vLLM counts pictures from 1, in every engine."""
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
    """What this vLLM calls the first picture, where it has no cache that needs a hash."""
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


def test_a_late_store_is_a_miss(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer", wait_s=1e-9)
    store()
    assert scheduler.ready(request(feature()), 0)


def test_items_covered_by_kv_are_not_asked_for(start: Start) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature("a", offset=0), feature("b", offset=100))
    assert scheduler.ready(asked, 116)
    assert not scheduler.ready(asked, 115)
    scheduler.orders({})
    wait_until(lambda: scheduler.ready(asked, 115))
    assert counted(scheduler)["misses/missing"] == 1


def test_an_item_is_let_go_when_the_prefill_has_passed_it(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature(offset=2), feature("later", offset=50))
    assert until_ready(scheduler, asked)
    assert scheduler.ready(asked, 17)
    assert scheduler.has("picture")
    assert scheduler.ready(asked, 18)
    assert not scheduler.has("picture")
    # Preempted: it begins again, and asks again for what it let go.
    assert not scheduler.ready(asked, 0)
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")
    assert counted(scheduler)["misses/missing"] == 1, "it asked twice for the later one"


class Counted(list[MultiModalFeatureSpec]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[MultiModalFeatureSpec]:
        self.times += 1
        return super().__iter__()


def test_items_of_a_request_that_is_past_them_are_not_gone_through_in_each_step(
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


def test_who_is_past_its_items_and_begins_anew_holds_them_until_it_is_past_them_again(
    start: Start, store: Store
) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature(offset=2))
    assert scheduler.ready(asked, 18)
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")
    assert scheduler.ready(asked, 18)
    assert not scheduler.has("picture")


def test_a_session_that_goes_on_with_another_picture_asks_for_it(start: Start) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature(offset=2))
    assert scheduler.ready(asked, 18)
    asked.mm_features.append(feature("next", offset=10))
    assert not scheduler.ready(asked, 18)


def test_the_same_picture_further_on_keeps_the_item(start: Start, store: Store) -> None:
    scheduler = start("ec_consumer")
    store()
    asked = request(feature(offset=2), feature(offset=50))
    assert until_ready(scheduler, asked)
    assert scheduler.ready(asked, 30)
    assert scheduler.has("picture")


@pytest.mark.parametrize(("is_reported", "pinned_s"), [(False, 60), (True, 5)])
def test_a_pin_outlives_the_request_until_the_load_cannot_be_on_its_way(
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
    """Whether somebody holds the lock on a cached object that keeps it from being evicted."""
    (path,) = (each for each in host.rglob("*") if each.name.endswith(key.rpartition("/")[2]))
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def num_descriptors(tmp_path: Path) -> int:
    """How many of this process's lead to entries of the host cache."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(link.readlink()).startswith(f"{tmp_path}/host/")
    return found


def test_an_item_that_is_here_holds_one_descriptor(
    start: Start, store: Store, tmp_path: Path
) -> None:
    scheduler = start("ec_consumer")
    store()
    before = num_descriptors(tmp_path)
    assert until_ready(scheduler, request(feature()))
    assert scheduler.has("picture")
    assert num_descriptors(tmp_path) == before + 1


def few_descriptors(kind: int) -> tuple[int, int]:
    return 256, 256


def test_items_that_were_let_go_do_not_pile_up(
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


def test_requests_beyond_what_may_be_open_wait_for_their_turn_and_lose_no_time(
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
    assert scheduler.ready(requests[0], 0), "who has asked is not put off"
    scheduler.finished(requests[0])
    assert until_ready(scheduler, late)
    assert counted(scheduler) == {"wait_seconds_count": 1, "items/missed": 1, "misses/missing": 1}


def test_one_identifier_with_two_lengths_fails_the_second_request(start: Start) -> None:
    scheduler = start("ec_consumer")
    assert until_ready(scheduler, request(feature(), name="first"))
    second = request(feature(num_embeds=NUM_EMBEDS + 1), name="second")
    assert not scheduler.ready(second, 0)
    assert scheduler.take_unavailable() == {"second"}


def test_requests_share_an_item_until_the_last_one_ends(start: Start, store: Store) -> None:
    scheduler = start("ec_both")
    store()
    first, second = (request(feature(), name=name) for name in ("first", "second"))
    assert until_ready(scheduler, first)
    assert scheduler.ready(second, 0)
    scheduler.finished(first)
    assert scheduler.has("picture")
    scheduler.finished(second)
    assert not scheduler.has("picture")


def test_a_producer_orders_each_absent_item_to_be_stored_once(start: Start) -> None:
    scheduler = start("ec_producer")
    asked = request(feature())
    assert until_ready(scheduler, asked)
    assert scheduler.orders({"another": 1}).saves == ()
    (save,) = scheduler.orders({"request": 20}).saves
    assert save.identifier == "picture"
    assert save.attributes == {"num_embeds": NUM_EMBEDS, "metadata": {"image_grid_thw": [1, 8, 8]}}
    assert scheduler.orders({"request": 1}).saves == ()
    announced = scheduler.finished(asked)  # vLLM 0.31 and later also say where the item stands
    assert announced is not None
    assert announced["picture"]["metadata"] == {"image_grid_thw": [1, 8, 8]}


def test_metadata_without_an_end_is_not_noted_with_the_object(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long video's times; the header of an object has little room."""
    monkeypatch.setattr("ecshare.encoder.scheduler.saves.MAX_NOTED_CHARS", 20)
    scheduler = start("ec_producer")
    asked = request(feature())
    assert until_ready(scheduler, asked)
    (save,) = scheduler.orders({"request": 20}).saves
    assert save.attributes == {"num_embeds": NUM_EMBEDS, "metadata": {}}
    announced = scheduler.finished(asked)
    assert announced is not None
    assert announced["picture"]["metadata"] == {"image_grid_thw": [1, 8, 8]}


def test_how_things_are_is_not_added_up(start: Start) -> None:
    """A worker's report and the ledger may tell the same in one step."""
    scheduler = start("ec_producer")
    for _ in range(2):
        scheduler.reported(Report({0: {"now/breaker_open": 1.0, "items/saved": 3}}, frozenset()))
    counts = counted(scheduler)
    assert (counts["now/breaker_open"], counts["items/saved"]) == (1.0, 3)


def test_embeddings_that_a_client_sends_are_no_media(start: Start, tmp_path: Path) -> None:
    """No encoder makes them. A stored one could also be of a dtype that media never have."""
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


def test_encoder_decoder_models_are_left_alone(
    vllm_config: VllmConfig, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for their items too; its runners would load none of them."""
    monkeypatch.setitem(vars(vllm_config.model_config), "is_encoder_decoder", True)
    assert_idle(start("ec_both"))


def test_ranks_that_schedule_for_themselves_share_nothing(
    vllm_config: VllmConfig,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each would answer by its own clock: they would run different steps, and hang."""
    parallel = vars(vllm_config.parallel_config)
    monkeypatch.setitem(parallel, "distributed_executor_backend", "external_launcher")
    monkeypatch.setitem(parallel, "world_size", 2)
    assert_idle(start("ec_both"))
    (warning,) = [each for each in caplog.messages if "saves and loads nothing" in each]
    assert "external_launcher" in warning
    assert not any("this engine saves" in each for each in caplog.messages)


def test_devices_whose_copies_are_not_waited_for_share_nothing(
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


def test_a_producer_does_not_encode_what_is_stored(start: Start, store: Store) -> None:
    scheduler = start("ec_producer")
    store()
    asked = request(feature())
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")
    scheduler.allocated(asked, 0)
    orders = scheduler.orders({"request": 20})
    assert (orders.loads, orders.saves) == ((), ())


def test_a_producer_does_not_announce_what_it_neither_has_nor_will_encode(
    start: Start, store: Store, tmp_path: Path
) -> None:
    """vLLM counts what was in the store as cached here, and does not encode it once it is lost."""
    scheduler = start("ec_producer")

    def announced(name: str, *, allocates: bool) -> bool:
        asked = request(feature(), name=name)
        assert until_ready(scheduler, asked)
        if allocates:  # vLLM asks no more for what it counts as cached
            scheduler.allocated(asked, 0)
        scheduler.orders({name: 20})
        assert scheduler.ready(asked, 2 + NUM_EMBEDS)  # lets go of the item before the end
        return "picture" in (scheduler.finished(asked) or {})

    store()
    assert announced("stored", allocates=True)
    assert announced("still stored", allocates=False)
    (stored,) = (path for path in (tmp_path / "store").rglob("ec/2/*/*/*") if path.is_file())
    stored.unlink()
    assert not announced("lost", allocates=False)
    # vLLM has forgotten the entry, so the item is encoded and stored.
    assert announced("encoded", allocates=True)
    assert announced("cached", allocates=False)


def test_a_producer_encodes_again_what_only_its_own_host_still_has(
    start: Start, store: Store, tmp_path: Path
) -> None:
    consumer = start("ec_consumer")
    store()
    assert until_ready(consumer, request(feature()))
    assert consumer.has("picture")  # so it is in the host cache now
    (path,) = (path for path in (tmp_path / "store" / "ec").rglob("*") if len(path.name) == 64)
    path.unlink()
    producer = start("ec_producer")
    assert until_ready(producer, request(feature()))
    assert not producer.has("picture")


def test_what_one_host_has_and_the_store_has_lost_is_stored_again_by_who_announces_it(
    start: Start, vllm_config: VllmConfig, store: Store, tmp_path: Path
) -> None:
    store()
    stored = tmp_path / "store" / key_of(vllm_config)
    for role in ("ec_both", "ec_both", "ec_consumer"):
        scheduler = start(role)
        assert until_ready(scheduler, request(feature()))
        scheduler.orders({"request": 1})
        scheduler.close()  # lets what it has begun end
        assert stored.exists() is (role == "ec_both")
        stored.unlink(missing_ok=True)


def test_the_announcement_survives_vllm_dropping_the_pixels(start: Start) -> None:
    scheduler = start("ec_producer")
    first = request(feature(), name="first")
    assert until_ready(scheduler, first)
    announced = scheduler.finished(first)
    again = request(feature(), name="again")
    again.mm_features[0].data = None
    scheduler.ready(again, 0)
    assert scheduler.finished(again) == announced


def test_reports_of_workers_count_once_however_they_come(
    clock: Clock, start: Start, vllm_config: VllmConfig, tmp_path: Path
) -> None:
    scheduler = start("ec_producer")
    scheduler.reported(Report({0: {"items/saved": 2}}))
    scheduler.reported(None)
    assert counted(scheduler) == {"items/saved": 2}
    ledger = open_ledger(vllm_config, open_host_cache(config(tmp_path)))
    ledger.write(0, {"items/saved": 5.0})
    clock.forward(2)  # it looks now and then
    counts: list[dict[str, float]] = []

    def is_counted() -> bool:
        counts.append(counted(scheduler))
        return bool(counts[-1])

    wait_until(is_counted)
    assert counts[-1] == {"items/saved": 3}
    scheduler.reported(Report({0: {"items/saved": 5.0}}))
    assert counted(scheduler) == {}


@pytest.mark.parametrize("is_told", [True, False])
def test_an_announced_item_is_waited_for(start: Start, store: Store, is_told: bool) -> None:
    """An encoder's answer announces it, and so does that somebody has no pixels."""
    scheduler = start("ec_consumer")
    params = {"picture": {"metadata": dict[str, Any]()}} if is_told else None
    asked = request(feature(pixels=is_told), ec_transfer_params=params)
    assert not scheduler.ready(asked, 0)
    until_answered(scheduler, asked)
    store()
    assert until_ready(scheduler, asked)
    assert scheduler.has("picture")


def test_an_announced_item_that_never_comes_is_encoded_in_the_end(
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


def test_an_announced_item_that_its_encoder_gave_up_is_encoded_at_once(
    clock: Clock, start: Start, vllm_config: VllmConfig, tmp_path: Path
) -> None:
    """The clock stands still: nobody has waited for long."""
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


def test_who_was_told_makes_those_wait_who_were_not(start: Start, store: Store) -> None:
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
def test_odd_transfer_params_announce_nothing(start: Start, params: Any) -> None:
    scheduler = start("ec_consumer", wait_s=60)
    assert until_ready(scheduler, request(feature(), ec_transfer_params=params))


def test_nobody_waits_any_more_so_the_fetch_ends(start: Start) -> None:
    scheduler = start("ec_consumer", wait_s=60)
    asked = request(feature(pixels=False))
    assert not scheduler.ready(asked, 0)
    scheduler.orders({})
    scheduler.finished(asked)
    scheduler.orders({})
    (done,) = scheduler.engine.drain(10)  # nobody is told how it ended
    assert done.outcome is Outcome.CANCELLED


def test_an_item_asked_for_again_is_found_though_its_first_fetch_was_cancelled(
    start: Start, store: Store
) -> None:
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


def test_a_step_costs_one_look_up_and_one_wake_up(
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


def test_who_asks_again_without_a_step_in_between_has_an_answer_too(start: Start) -> None:
    scheduler = start("ec_consumer")
    asked = request(feature())
    wait_until(lambda: scheduler.ready(asked, 0))
    assert counted(scheduler)["misses/missing"] == 1


def test_an_identifier_of_megabytes_is_encoded_and_never_stored(start: Start) -> None:
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
def test_an_adapter_counts_by_its_content_not_its_name(start: Start, tmp_path: Path) -> None:
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
def test_what_a_changed_adapter_makes_is_not_shared(start: Start, tmp_path: Path) -> None:
    """vLLM's own cache tells embeddings by its name: they may be those of the former one."""
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
def test_what_an_unknown_adapter_makes_is_not_shared(start: Start, tmp_path: Path) -> None:
    scheduler = start("ec_both")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "none"))
    assert until_ready(scheduler, request(feature(), lora_request=lora))
    assert counted(scheduler)["misses/unidentified"] == 1
    assert scheduler.orders({"request": 20}).saves == ()


@pytest.mark.parametrize(
    "identifier", ["../../evil/x", "", "\x00", "ü" * 4096, "/etc/passwd", "\ud800"]
)
def test_a_hostile_identifier_stays_inside_the_store(
    start: Start, vllm_config: VllmConfig, identifier: str
) -> None:
    scheduler = start("ec_producer")
    asked = request(feature(identifier))
    assert until_ready(scheduler, asked)
    (save,) = scheduler.orders({"request": 20}).saves
    assert save.key.startswith(f"ec/2/{encoder_namespace(vllm_config, '').digest}/")
    assert ".." not in save.key
    assert len(save.key) < 200


def test_its_manifest_outlives_a_rule_on_age(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_often(monkeypatch)
    start("ec_producer")
    wait_until_there(expire(tmp_path / "store"))
