# SPDX-License-Identifier: Apache-2.0
"""Which media items an engine stores, and that it announces no other."""

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
    """Serve a request; return how many items are to be stored, and whether one is announced."""
    assert until_ready(scheduler, asked)
    if not scheduler.has("picture"):
        scheduler.allocated(asked, 0)
    saves = scheduler.orders({asked.request_id: 20}).saves
    assert scheduler.ready(asked, 2 + NUM_EMBEDS)
    return len(saves), "picture" in (scheduler.finished(asked) or {})


def num_declined(scheduler: EncoderScheduler) -> float:
    stats = scheduler.take_stats()
    return stats.data.get("items/declined", 0) if stats else 0


def test_by_default_an_item_is_stored_at_once(start: Start) -> None:
    assert serve(start("ec_both"), asking("first")) == (1, True)


def test_an_item_is_stored_and_announced_when_enough_requests_have_brought_it(
    start: Start,
) -> None:
    scheduler = start("ec_both", save_after=3)
    assert serve(scheduler, asking("first")) == (0, False)
    assert serve(scheduler, asking("second")) == (0, False)
    assert num_declined(scheduler) == 2
    assert serve(scheduler, asking("third")) == (1, True)
    assert num_declined(scheduler) == 0


def test_requests_at_one_time_count_each(start: Start) -> None:
    scheduler = start("ec_both", save_after=2)
    first, second = asking("first"), asking("second")
    assert until_ready(scheduler, first)
    assert scheduler.orders({"first": 20}).saves == ()
    assert until_ready(scheduler, second)
    assert len(scheduler.orders({"second": 20}).saves) == 1
    assert scheduler.orders({"first": 1, "second": 1}).saves == ()
    assert "picture" in (scheduler.finished(first) or {})
    assert "picture" in (scheduler.finished(second) or {})


def test_an_item_that_kv_covers_is_not_announced_if_it_was_not_stored(start: Start) -> None:
    scheduler = start("ec_both", save_after=3)
    assert serve(scheduler, asking("first")) == (0, False)
    covered = asking("second")
    assert scheduler.ready(covered, 2 + NUM_EMBEDS)
    assert "picture" not in (scheduler.finished(covered) or {})


def test_what_somebody_else_has_stored_is_announced(start: Start, store: Store) -> None:
    scheduler = start("ec_both", save_after=3)
    assert serve(scheduler, asking("first")) == (0, False)
    store()
    assert serve(scheduler, asking("second")) == (0, True)


def test_an_engine_that_only_encodes_stores_at_once(start: Start) -> None:
    assert serve(start("ec_producer", save_after=3), asking("first")) == (1, True)


def test_a_single_token_alone_says_nothing(start: Start) -> None:
    assert serve(start("ec_both", save_after=3), asking("score", max_tokens=1)) == (0, False)


@pytest.mark.parametrize("role", ["ec_producer", "ec_both"])
def test_a_request_may_keep_its_items_out_of_the_store(start: Start, role: str) -> None:
    scheduler = start(role)
    private = {"ecshare_save": False}
    assert serve(scheduler, asking("private", params=private)) == (0, False)
    assert num_declined(scheduler) == 1
    assert serve(scheduler, asking("public")) == (1, True)


def test_a_request_may_have_its_items_stored(start: Start) -> None:
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
def test_malformed_wishes_are_ignored(start: Start, params: Any) -> None:
    assert serve(start("ec_both"), asking("r", params=params)) == (1, True)


def test_sightings_are_counted_rightly_for_a_window_and_then_forgotten() -> None:
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
    assert sightings.add("name 0") == 1


def test_a_count_does_not_overflow() -> None:
    sightings = Sightings(window=1000)
    assert [sightings.add("name") for _ in range(600)][-1] >= 100
