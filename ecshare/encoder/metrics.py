# SPDX-License-Identifier: Apache-2.0
"""The metrics of the encoder connector."""

from ecshare.plugin.metrics import HALF_METRICS, MISS_REASONS, TRANSFER_METRICS, Metric, MetricTable

METRICS: MetricTable = {
    "items": Metric(
        "items",
        "Media items, by outcome.",
        {
            "event": (
                "encoded",
                "loaded",
                "stored",
                "saved",
                "declined",
                "missed",
                "failed",
                "dropped",
            )
        },
    ),
    "misses": Metric(
        "misses",
        "Media items that were not found, by reason.",
        {"reason": MISS_REASONS},
    ),
    "encodes_avoided": Metric("encodes_avoided", "Media items that need not be encoded."),
    "wait_seconds": Metric(
        "wait_seconds", "Seconds that requests waited for media items.", is_histogram=True
    ),
    **TRANSFER_METRICS,
    **HALF_METRICS,
}
