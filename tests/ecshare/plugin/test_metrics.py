# SPDX-License-Identifier: Apache-2.0
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from ecshare.plugin.metrics import CounterStats, PrometheusCounters, counter_stats


def test_stats_add_up_over_ranks_and_intervals() -> None:
    first = CounterStats(data={"items/loaded": 1.0})
    total = first.aggregate(CounterStats(data={"items/loaded": 2.0, "items/saved": 4.0}))
    assert total.data == {"items/loaded": 3.0, "items/saved": 4.0}
    assert total.reduce() == {"items/loaded": 3, "items/saved": 4}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_no_counts_are_no_stats() -> None:
    assert counter_stats({}) is None
    assert counter_stats(None) is None
    stats = counter_stats({"items/saved": 1.0})
    assert stats is not None
    assert stats.data == {"items/saved": 1.0}


def test_counts_reach_prometheus_under_their_documented_names() -> None:
    registry = CollectorRegistry()
    counters = PrometheusCounters(
        ("items",),
        {Counter: partial(Counter, registry=registry)},  # type: ignore[dict-item]
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    counters.observe({"items/loaded": 2, "blocks/saved": 9}, engine_idx=1)
    counters.observe({"items/loaded": 3}, engine_idx=1)

    def value(engine: str) -> float | None:
        labels = {"model_name": "m", "engine": engine, "event": "loaded"}
        return registry.get_sample_value("ecshare_items_total", labels)

    assert value("1") == 5
    assert value("0") is None
