# SPDX-License-Identifier: Apache-2.0
"""The metrics of the KV connector."""

from ecshare.plugin.metrics import HALF_METRICS, MISS_REASONS, TRANSFER_METRICS, Metric, MetricTable

METRICS: MetricTable = {
    "blocks": Metric(
        "blocks",
        "KV blocks and prompt tails, by outcome.",
        {"event": ("saved", "loaded", "missed", "failed", "dropped")},
    ),
    "misses": Metric(
        "misses",
        "KV blocks that were not found or not loaded, by reason.",
        # "layout": an engine with another layout of blocks has stored the object.
        {"reason": (*MISS_REASONS, "layout")},
    ),
    "declined": Metric(
        "declined",
        "KV blocks and prompt tails that were not saved, by the rule that excludes them.",
        {
            "rule": (
                *("save_after", "save_min_tokens", "save_answers", "buffer_bytes"),
                *("request", "other_connector"),
            )
        },
    ),
    "tokens": Metric(
        "tokens",
        "Prompt tokens: looked up, found or announced, computed though found, and loaded.",
        {"event": ("queried", "hit", "announced", "computed", "loaded")},
    ),
    "wait_seconds": Metric(
        "wait_seconds",
        "Seconds that requests waited, hit or miss, by what for.",
        {"stage": ("look_up", "load")},
        is_histogram=True,
    ),
    **TRANSFER_METRICS,
    **HALF_METRICS,
}
