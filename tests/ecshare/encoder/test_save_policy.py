# SPDX-License-Identifier: Apache-2.0
"""Which media items an engine stores; it announces no others."""

from collections import Counter
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from ecshare.encoder.scheduler.scheduler import EncoderScheduler
from ecshare.plugin.sightings import Sightings
from tests.ecshare.encoder.scheduler.test_scheduler import (
    NUM_EMBEDS,
    Start,
    Store,
    feature,
    request,
    shape,
    start,
    store,
    until_ready,
    vllm_config,
)

__all__ = ["shape", "start", "store", "vllm_config"]


def asking(name: str, *, max_tokens: int = 20, params: Any = None) -> Any:
    return request(
        feature(),
        name=name,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        ec_transfer_params=params,
    )


def serve(scheduler: EncoderScheduler, asked: Any) -> tuple[int, bool]:
    """Serve a request; return how many saves it orders, and if the item is announced."""
    assert until_ready(scheduler, asked)
    if not scheduler.has("picture"):
        scheduler.allocated(asked, 0)
    saves = scheduler.orders({asked.request_id: 20}).saves
    assert scheduler.ready(asked, 2 + NUM_EMBEDS)
    return len(saves), "picture" in (scheduler.finished(asked) or {})


def num_declined(scheduler: EncoderScheduler) -> float:
    stats = scheduler.take_stats()
    return stats.data.get("items/declined", 0) if stats else 0


def test_by_default_items_are_stored_at_once(start: Start) -> None:
    assert serve(start("ec_both"), asking("first")) == (1, True)


def test_item_is_stored_once_seen_save_after_times(
    start: Start,
) -> None:
    scheduler = start("ec_both", save_after=3)
    assert serve(scheduler, asking("first")) == (0, False)
    assert serve(scheduler, asking("second")) == (0, False)
    assert num_declined(scheduler) == 2
    assert serve(scheduler, asking("third")) == (1, True)
    assert num_declined(scheduler) == 0


def test_concurrent_requests_count_separately(start: Start) -> None:
    scheduler = start("ec_both", save_after=2)
    first, second = asking("first"), asking("second")
    assert until_ready(scheduler, first)
    assert scheduler.orders({"first": 20}).saves == ()
    assert until_ready(scheduler, second)
    assert len(scheduler.orders({"second": 20}).saves) == 1
    assert scheduler.orders({"first": 1, "second": 1}).saves == ()
    assert "picture" in (scheduler.finished(first) or {})
    assert "picture" in (scheduler.finished(second) or {})


def test_unstored_item_covered_by_kv_is_not_announced(start: Start) -> None:
    scheduler = start("ec_both", save_after=3)
    assert serve(scheduler, asking("first")) == (0, False)
    covered = asking("second")
    assert scheduler.ready(covered, 2 + NUM_EMBEDS)
    assert "picture" not in (scheduler.finished(covered) or {})


def test_item_stored_by_another_engine_is_announced(start: Start, store: Store) -> None:
    scheduler = start("ec_both", save_after=3)
    assert serve(scheduler, asking("first")) == (0, False)
    store()
    assert serve(scheduler, asking("second")) == (0, True)


def test_encoder_engine_stores_at_once_despite_save_after(start: Start) -> None:
    assert serve(start("ec_producer", save_after=3), asking("first")) == (1, True)


def test_max_tokens_of_one_is_not_taken_for_a_prefill(start: Start) -> None:
    assert serve(start("ec_both", save_after=3), asking("score", max_tokens=1)) == (0, False)


@pytest.mark.parametrize("role", ["ec_producer", "ec_both"])
def test_request_with_ecshare_save_false_is_not_stored(start: Start, role: str) -> None:
    scheduler = start(role)
    private = {"ecshare_save": False}
    assert serve(scheduler, asking("private", params=private)) == (0, False)
    assert num_declined(scheduler) == 1
    assert serve(scheduler, asking("public")) == (1, True)


def test_request_with_ecshare_save_true_is_stored(start: Start) -> None:
    scheduler = start("ec_both", save_after=3)
    assert serve(scheduler, asking("r", params={"ecshare_save": True})) == (1, True)


@pytest.mark.parametrize(
    "params",
    [
        {"ecshare_save": 0},
        {"ecshare_save": "false"},
        {"ecshare_save": None},
        {"ecshare_save": [False]},
        {"kvshare_save": False},
        ["ecshare_save"],
        "ecshare_save",
    ],
)
def test_malformed_ecshare_save_is_ignored(start: Start, params: Any) -> None:
    assert serve(start("ec_both"), asking("r", params=params)) == (1, True)


def test_sightings_are_counted_within_a_window() -> None:
    sightings, exact = Sightings(window=1000), Counter[int]()
    num_wrong = 0
    for number in [*range(300), *range(300), *range(0, 300, 2)]:
        exact[number] += 1
        counted = sightings.add(f"name {number}")
        assert counted >= exact[number]
        num_wrong += counted != exact[number]
    assert num_wrong < 15
    for number in range(2000):
        sightings.add(f"other {number}")
    counted_again = [sightings.add(f"name {number}") for number in range(20)]
    assert counted_again.count(1) > 15, "few names share their cells with others by chance"


def test_sighting_count_does_not_overflow() -> None:
    sightings = Sightings(window=1000)
    assert [sightings.add("name") for _ in range(600)][-1] >= 100
