# SPDX-License-Identifier: Apache-2.0
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.kv_offload.base import OffloadingHistogramMetadata

import ecshare.encoder.metrics
import kvshare.metrics
import kvshare.tier.metrics
from ecshare.plugin.metrics import CounterStats, PrometheusCounters, counter_stats
from ecshare.transfer.jobs import Outcome, Tier
from ecshare.transfer.stats import BUCKETS_S, Stats, is_gauge, merged, observations, summed

ROOT = Path(__file__).parents[3]
METRICS = {
    "ecshare": ecshare.encoder.metrics.METRICS,
    "kvshare": kvshare.metrics.METRICS,
    "kvshare_tier": kvshare.tier.metrics.METRICS,
}
ROOMS = {
    "ecshare": ["ecshare/encoder"],
    "kvshare": ["kvshare/scheduler", "kvshare/worker"],
    "kvshare_tier": ["kvshare/tier"],
}
SOURCES = {
    prefix: [path for room in (*rooms, "ecshare/transfer") for path in (ROOT / room).rglob("*.py")]
    for prefix, rooms in ROOMS.items()
}


def series(prefix: str) -> set[str]:
    """Return every name that may be counted."""
    names = set()
    for family, metric in METRICS[prefix].items():
        found = [family]
        for values in metric.labels.values():
            found = [f"{name}/{value}" for name in found for value in values]
        names |= set(found)
    return names


def test_counters_are_summed_and_gauges_replaced() -> None:
    first = CounterStats(data={"items/loaded": 1.0, "now/breaker_open/worker/read": 1.0})
    total = first.aggregate(
        CounterStats(
            data={"items/loaded": 2.0, "gave_up/worker": 0.25, "now/breaker_open/worker/read": 0.0}
        )
    )
    assert total.reduce() == {
        "gave_up/worker": 0.25,
        "items/loaded": 3,
        "now/breaker_open/worker/read": 0,
    }
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_counter_stats_of_no_counts_is_none() -> None:
    assert counter_stats({}) is None
    assert counter_stats(None) is None
    stats = counter_stats({"items/saved": 1.0})
    assert stats is not None
    assert stats.data == {"items/saved": 1.0}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def counters(registry: CollectorRegistry) -> PrometheusCounters:
    types: dict[type[Any], Any] = {
        kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return PrometheusCounters(
        "ecshare", METRICS["ecshare"], types, ["model_name", "engine"], engines
    )


def test_prometheus_metrics_have_their_documented_names(
    registry: CollectorRegistry, counters: PrometheusCounters
) -> None:
    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})

    counters.observe({"items/loaded": 2, "blocks/saved": 9, "items/odd/one": 1}, engine_idx=1)
    counters.observe({"items/loaded": 3, "transfer_bytes/read/host": 7}, engine_idx=1)
    for is_open in (1.0, 0.0):
        counters.observe({"now/breaker_open/worker/read": is_open, "now/save_queue_bytes": 5.0})
    assert value("ecshare_items_total", "1", event="loaded") == 5
    assert value("ecshare_items_total", "0", event="loaded") == 0, "there from the start"
    assert value("ecshare_transfer_bytes_total", "1", direction="read", tier="host") == 7
    assert value("ecshare_breaker_open", "0", half="worker", direction="read") == 0
    assert value("ecshare_save_queue_bytes", "0") == 5


@pytest.mark.parametrize("prefix", SOURCES)
def test_every_counted_name_in_the_code_is_a_metric(prefix: str) -> None:
    counted = set()
    for path in SOURCES[prefix]:
        code = path.read_text()
        for name in re.findall(r"tats\.(?:add|set|observe)\(\s*f?\"([^\"]+)\"", code):
            counted.add(name)
    assert len(counted) > 5
    known = series(prefix)
    for name in counted:
        pattern = re.sub(r"\{[^}]*\}", r"[a-z/]+", name)
        assert any(re.fullmatch(pattern, each) for each in known), name


@pytest.mark.parametrize("prefix", SOURCES)
def test_every_metric_is_documented_with_all_its_labels(prefix: str) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    for family, metric in METRICS[prefix].items():
        suffix = "" if is_gauge(family) or metric.is_histogram else "_total"
        (row,) = re.findall(rf"^\| `{prefix}_{metric.name}{suffix}` \|(.*)\|$", page, re.MULTILINE)
        for label, values in metric.labels.items():
            assert f"`{label}`" in row
            assert all(f"`{value}`" in row for value in values), (metric.name, label)


TIMES_S = (0.0, 0.001, 0.0011, 0.3, 0.3, 0.5, 0.50001, 7.0, 99.0, 10.0)


def test_histogram_equals_prometheus_own(
    registry: CollectorRegistry, counters: PrometheusCounters
) -> None:
    """Merged over intervals, each time is in its bucket, and the sum is exact."""
    expected = Histogram("expected", "Each time told.", registry=None, buckets=BUCKETS_S)
    counts: dict[str, float] = {}
    for seconds in TIMES_S:
        stats = Stats()
        stats.observe("wait_seconds", seconds)
        stats.observe("transfer_seconds/read/store", seconds)
        counts = merged(counts, stats.take())
        expected.observe(seconds)
    counters.observe(counts, engine_idx=1)
    (family,) = expected.collect()
    for sample in family.samples:
        if sample.name != "expected_created":
            for name, labels in (
                ("ecshare_wait_seconds", {}),
                ("ecshare_transfer_seconds", {"direction": "read", "tier": "store"}),
            ):
                suffix = sample.name.removeprefix("expected")
                of = {"model_name": "m", "engine": "1", **labels, **sample.labels}
                value = registry.get_sample_value(name + suffix, of)
                assert value == pytest.approx(sample.value), (name, sample)


def test_times_at_a_bucket_bound_stay_in_that_bucket() -> None:
    """Rounding of their sum must not move them."""
    for bound_s in BUCKETS_S:
        stats = Stats()
        for _ in range(1000):
            stats.observe("wait_seconds", bound_s)
        ((name, seconds, times),) = observations(stats.take())
        assert (name, times) == ("wait_seconds", 1000)
        assert bound_s * 0.999 < seconds <= bound_s


def test_log_line_shows_histograms_as_count_and_sum() -> None:
    stats = Stats()
    for seconds in (0.25, 3.5):
        stats.observe("wait_seconds/load", seconds)
    stats.add("items/loaded")
    counts = stats.take()
    assert summed(counts) == {
        "wait_seconds/load_count": 2,
        "wait_seconds/load_sum": 3.75,
        "items/loaded": 1,
    }
    said = CounterStats(data=counts).reduce()
    assert said == {"items/loaded": 1, "wait_seconds/load_count": 2, "wait_seconds/load_sum": 3.75}


@pytest.mark.parametrize("name", ["wait_seconds/bucket=x/number", "wait_seconds/bucket=99/number"])
def test_unknown_buckets_are_ignored(name: str, counters: PrometheusCounters) -> None:
    counters.observe({name: 3.0, "wait_seconds/bucket=": 1.0})


def test_tier_reports_histograms_to_vllm() -> None:
    stats = Stats()
    for seconds in (0.25, 0.25, 3.5):
        stats.observe("transfer_seconds/read/store", seconds)
    told = kvshare.tier.metrics.offloading_stats(stats.take())
    assert told is not None
    name = "kvshare_tier_transfer_seconds"
    assert told.data["data"] == {name: {("read", "store"): [0.25, 0.25, 3.5]}}
    assert told.data["types"] == {name: "histogram"}
    definition = kvshare.tier.metrics.definitions()[name]
    assert isinstance(definition, OffloadingHistogramMetadata)
    assert definition.buckets == BUCKETS_S


def test_every_outcome_and_tier_has_its_label() -> None:
    for prefix in ("ecshare", "kvshare"):
        reasons = METRICS[prefix]["misses"].labels["reason"]
        assert {outcome.value for outcome in Outcome if outcome is not Outcome.OK} <= set(reasons)
    tiers = METRICS["ecshare"]["transfer_seconds"].labels["tier"]
    assert {tier.value for tier in Tier} == set(tiers)


def test_gauge_is_reported_only_when_it_changes() -> None:
    stats = Stats()
    stats.set("now/breaker_open/worker/read", 0.0)
    assert stats.take() == {}
    stats.set("now/breaker_open/worker/read", 1.0)
    stats.set("now/breaker_open/worker/read", 1.0)
    assert stats.take() == {"now/breaker_open/worker/read": 1.0}
    stats.set("now/breaker_open/worker/read", 1.0)
    assert stats.take() == {}
    stats.set("now/breaker_open/worker/read", 0.0)
    assert stats.take() == {"now/breaker_open/worker/read": 0.0}
