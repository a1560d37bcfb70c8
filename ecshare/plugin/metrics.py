# SPDX-License-Identifier: Apache-2.0
"""Turns counts into vLLM's connector statistics and Prometheus metrics, for both connectors.

A count is named `family/label/label` (ecshare.transfer.stats). Each connector has a table `METRICS`
of its families, with all values of their labels. docs/metrics.md describes them for users, and a
test compares the three. vLLM's own labels (`model_name`, `engine`) precede ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from ecshare.transfer.stats import BUCKETS_S, is_gauge, is_observed, merged, observations, summed


@dataclass(frozen=True)
class Metric:
    """One family: its name after the connector's prefix, its help text, and its labels' values."""

    name: str
    what: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_histogram: bool = False
    """True if it takes observations in seconds, over BUCKETS_S."""


MetricTable = Mapping[str, Metric]
"""Metrics by family."""

# The failures of a transfer (ecshare.transfer.jobs.Outcome), and two more: "late" did not arrive in
# time, and "unidentified" was computed with a LoRA adapter whose content is not known.
MISS_REASONS = (
    "missing",
    "given_up",
    "corrupt",
    "unavailable",
    "rejected",
    "cancelled",
    "late",
    "unidentified",
)
_MOVES = {"direction": ("read", "write"), "tier": ("host", "store")}
TRANSFER_METRICS = {
    "transfer_bytes": Metric("transfer_bytes", "Bytes moved, by direction and tier.", _MOVES),
    "transfer_seconds": Metric(
        "transfer_seconds", "Seconds that an object took to move.", _MOVES, is_histogram=True
    ),
    "now/save_queue_bytes": Metric(
        "save_queue_bytes", "Bytes of host memory that saves in flight hold."
    ),
    "now/breaker_open": Metric(
        "breaker_open",
        "1 while the circuit breaker is open, by half and direction.",
        {"half": ("scheduler", "worker"), "direction": _MOVES["direction"]},
    ),
}

HALF_METRICS = {
    "gave_up": Metric(
        "gave_up",
        "Halves that gave up after a bug of ours: they share nothing until a restart.",
        {"half": ("scheduler", "worker")},
    ),
}


@dataclass
class CounterStats(KVConnectorStats):
    """Counts of one interval, as vLLM carries them from a connector to its loggers.

    vLLM's EC statistics ask for the same methods, and older releases have no base class for them,
    so this one class serves both connectors.
    """

    def reset(self) -> None:
        """Drop all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "CounterStats":
        """Add the counts of `other`, from another rank or a later interval."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log line."""
        return {
            name: int(count) if float(count).is_integer() else round(count, 3)
            for name, count in sorted(summed(self.data).items())
        }

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


def counter_stats(counts: dict[str, float] | None) -> CounterStats | None:
    """Return `counts` as statistics; None if there are none, so that vLLM sends nothing."""
    return CounterStats(data=counts) if counts else None


def family_and_labels(name: str) -> tuple[str, list[str]]:
    """Split the name of a count into its family and the values of its labels."""
    parts = name.split("/")
    width = 2 if is_gauge(name) else 1
    return "/".join(parts[:width]), parts[width:]


class PrometheusCounters:
    """Adds counts to Prometheus metrics. Both `build_prom_metrics` hooks return one."""

    def __init__(
        self,
        prefix: str,
        metrics: MetricTable,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register every metric of `metrics`, with `prefix` before each name."""
        self._label_values = per_engine_labelvalues
        self._metrics = {
            family: _registered(f"{prefix}_{metric.name}", family, metric, metric_types, labelnames)
            for family, metric in metrics.items()
        }
        self._num_labels = {family: len(metric.labels) for family, metric in metrics.items()}
        self._children: dict[tuple[str, int], Any] = {}
        """The series of counts that have come, by name and engine: looked up in each step."""
        # Create every series at start, at zero: a rate misses the first rise of a later series.
        for family, metric in metrics.items():
            for engine, values in product(per_engine_labelvalues, product(*metric.labels.values())):
                self._metrics[family].labels(*per_engine_labelvalues[engine], *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts to the metrics of engine `engine_idx`."""
        for name, seconds, times in observations(transfer_stats_data):
            child = self._child(name, engine_idx)
            for _ in range(times if child is not None else 0):
                child.observe(seconds)
        for name, count in transfer_stats_data.items():
            child = None if is_observed(name) else self._child(name, engine_idx)
            if child is not None:
                child.set(count) if is_gauge(name) else child.inc(count)

    def _child(self, name: str, engine_idx: int) -> Any:
        """Return the series of a count; None if no metric of ours has that name."""
        child = self._children.get((name, engine_idx))
        if child is not None:
            return child
        family, labels = family_and_labels(name)
        metric = self._metrics.get(family)
        if metric is None or len(labels) != self._num_labels[family]:
            return None
        child = metric.labels(*self._label_values[engine_idx], *labels)
        self._children[name, engine_idx] = child
        return child


def _registered(
    name: str,
    family: str,
    metric: Metric,
    metric_types: dict[type[Any], type[Any]],
    labelnames: list[str],
) -> Any:
    options: dict[str, Any] = {"labelnames": [*labelnames, *metric.labels]}
    if metric.is_histogram:
        options["buckets"] = BUCKETS_S
        return metric_types[Histogram](name=name, documentation=metric.what, **options)
    if not is_gauge(family):
        return metric_types[Counter](name=name, documentation=metric.what, **options)
    # With several API server processes the latest value counts, as for vLLM's own gauges.
    options["multiprocess_mode"] = "mostrecent"
    return metric_types[Gauge](name=name, documentation=metric.what, **options)
