# SPDX-License-Identifier: Apache-2.0
"""What the tier counts, in the words of vLLM's offloading metrics."""

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from ecshare.plugin.metrics import (
    TRANSFER_METRICS,
    Metric,
    MetricTable,
    family_and_labels,
)
from ecshare.transfer.stats import is_gauge

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
    return {
        f"{PREFIX}_{metric.name}": (
            OffloadingGaugeMetadata if is_gauge(family) else OffloadingCounterMetadata
        )(documentation=metric.what, labelnames=tuple(metric.labels))
        for family, metric in METRICS.items()
    }


def offloading_stats(counts: Mapping[str, float]) -> OffloadingConnectorStats | None:
    """Return `counts` as vLLM carries them to its loggers; None where there are none."""
    if not counts:
        return None
    stats = OffloadingConnectorStats()
    for name, count in counts.items():
        family, labels = family_and_labels(name)
        metric = f"{PREFIX}_{METRICS[family].name}"
        tell = stats.set_gauge if is_gauge(name) else stats.increase_counter
        tell(metric, count, tuple(labels))
    return stats
