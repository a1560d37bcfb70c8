# SPDX-License-Identifier: Apache-2.0
"""The tier's metrics, as vLLM's offloading metrics."""

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from ecshare.plugin.metrics import (
    TRANSFER_METRICS,
    Metric,
    MetricTable,
    family_and_labels,
)
from ecshare.transfer.stats import BUCKETS_S, is_gauge, is_observed, observations

PREFIX = "kvshare_tier"
METRICS: MetricTable = {
    "chunks": Metric(
        "chunks",
        "Chunks of vLLM's CPU tier, by outcome.",
        {"event": ("saved", "loaded", "missed", "failed", "dropped")},
    ),
    **TRANSFER_METRICS,
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return every metric of the tier, by its name."""
    return {f"{PREFIX}_{each.name}": _definition(family, each) for family, each in METRICS.items()}


def _definition(family: str, metric: Metric) -> OffloadingMetricMetadata:
    labels = tuple(metric.labels)
    if metric.is_histogram:
        return OffloadingHistogramMetadata(metric.what, labels, buckets=BUCKETS_S)
    kind = OffloadingGaugeMetadata if is_gauge(family) else OffloadingCounterMetadata
    return kind(metric.what, labels)


def offloading_stats(counts: Mapping[str, float]) -> OffloadingConnectorStats | None:
    """Return `counts` in the form that vLLM passes to its loggers; None if there are none."""
    if not counts:
        return None
    stats = OffloadingConnectorStats()
    for name, seconds, times in observations(counts):
        for _ in range(times):
            stats.observe_histogram(*_series(name, seconds))
    for name, count in counts.items():
        if not is_observed(name):
            record = stats.set_gauge if is_gauge(name) else stats.increase_counter
            record(*_series(name, count))
    return stats


def _series(name: str, value: float) -> tuple[str, float, tuple[str, ...]]:
    family, labels = family_and_labels(name)
    return f"{PREFIX}_{METRICS[family].name}", value, tuple(labels)
