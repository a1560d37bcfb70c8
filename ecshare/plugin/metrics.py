# SPDX-License-Identifier: Apache-2.0
"""Counts -> vLLM's connector statistics and Prometheus names, once for both connectors.

Counts are named `family/event` (ecshare.transfer.stats). Each family is one Prometheus counter with
the label `event` besides vLLM's own labels:

    ecshare_items_total    media items: encoded, loaded, stored (found, so not encoded), saved,
                           missed, failed (nothing to encode from), dropped (a save given up)
    kvshare_blocks_total   KV blocks and tails: saved, loaded, missed, failed, dropped
    kvshare_tokens_total   prompt tokens: queried, hit, loaded
"""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from ecshare.transfer.stats import merged

_FAMILIES = {
    "items": ("ecshare_items", "Media items, by what became of their embedding."),
    "blocks": ("kvshare_blocks", "KV blocks and prompt tails, by what became of them."),
    "tokens": ("kvshare_tokens", "Prompt tokens, by whether their KV was stored."),
}


@dataclass
class CounterStats(KVConnectorStats):
    """Counts of one interval, as vLLM carries them from a connector to its loggers.

    vLLM's EC statistics ask for the same methods, and older releases have no base class for them,
    so this one class serves both connectors.
    """

    def reset(self) -> None:
        """Forget all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "CounterStats":
        """Add the counts of `other`, from another rank or interval."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log line."""
        return {name: int(count) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def counter_stats(counts: dict[str, float] | None) -> CounterStats | None:
    """Return `counts` as statistics; None where there are none, so that vLLM sends nothing."""
    return CounterStats(data=counts) if counts else None


class PrometheusCounters:
    """Counts -> Prometheus counters; the object both `build_prom_metrics` hooks return."""

    def __init__(
        self,
        families: tuple[str, ...],
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register one counter for each of `families`, by the names of the module's docstring."""
        self._label_values = per_engine_labelvalues
        self._counters = {
            family: metric_types[Counter](
                name=_FAMILIES[family][0],
                documentation=_FAMILIES[family][1],
                labelnames=[*labelnames, "event"],
            )
            for family in families
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts to the counters of engine `engine_idx`."""
        for name, count in transfer_stats_data.items():
            family, _, event = name.partition("/")
            counter = self._counters.get(family)
            if counter is not None:
                counter.labels(*self._label_values[engine_idx], event).inc(count)
