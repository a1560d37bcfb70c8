# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and histograms as plain, mergeable numbers.

A histogram is two counts for each bucket that is not empty: the number of observations, and the sum
of their seconds. So histograms are added over ranks and intervals like any other count.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping

BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)
"""The upper bounds of the buckets, in seconds. One more bucket has no bound."""

_GAUGE = "now/"
_BUCKET = "/bucket="
_NUMBER, _SECONDS = "/number", "/seconds"
_BOUNDS_S = (*BUCKETS_S, math.inf)
# Made once: an observation in a hook costs two additions.
_SUFFIXES = [
    (f"{_BUCKET}{index}{_NUMBER}", f"{_BUCKET}{index}{_SECONDS}") for index in range(len(_BOUNDS_S))
]
_INDEXES = {number: index for index, (number, _) in enumerate(_SUFFIXES)}


def is_gauge(name: str) -> bool:
    """Return whether a later value replaces the number, a gauge. Other numbers are added."""
    return name.startswith(_GAUGE)


class Stats:
    """Counts since the last `take`, by name.

    A name is a metric and the values of its labels, joined by slashes: `items/loaded`. Plain dicts
    can be sent between processes and added over ranks and intervals. Gauges begin with `now/`.

    Ownership: one thread adds and takes.
    """

    def __init__(self) -> None:
        """Start with every count at zero."""
        self._counts: dict[str, float] = {}
        self._gauges: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the count `name`, whose name gives the unit."""
        self._counts[name] = self._counts.get(name, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Add an observation to the histogram `name`."""
        number, total = _SUFFIXES[bisect_left(BUCKETS_S, seconds)]
        self.add(name + number)
        self.add(name + total, seconds)

    def set(self, name: str, value: float) -> None:
        """Set a gauge, which starts at 0. `take` returns it only after a change."""
        if self._gauges.get(name, 0) != value:
            self._gauges[name] = self._counts[name] = value

    def take(self) -> dict[str, float]:
        """Return the counts since the last call, and start again at zero."""
        taken, self._counts = self._counts, {}
        return taken


def merged(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of two sets of counts, by name; neither is changed.

    A gauge of `second`, which is later, replaces that of `first`.
    """
    total = dict(first)
    for name, amount in second.items():
        total[name] = amount if is_gauge(name) else total.get(name, 0) + amount
    return total


def observations(counts: Mapping[str, float]) -> Iterator[tuple[str, float, int]]:
    """Yield the observations of all histograms in `counts`: name, seconds, and how often.

    Each observation of a bucket counts as the bucket's mean: numbers and sums are exact.
    """
    for name, number in counts.items():
        series, bucket, rest = name.partition(_BUCKET)
        index = _INDEXES.get(bucket + rest)
        if index is not None and number >= 1:
            mean_s = counts.get(series + _SUFFIXES[index][1], 0.0) / number
            yield series, _within(index, mean_s), round(number)


def _within(index: int, seconds: float) -> float:
    """Return `seconds`, clamped to its bucket: a sum is rounded, so a mean may lie outside."""
    lowest_s = math.nextafter(_BOUNDS_S[index - 1], math.inf) if index else 0.0
    return min(max(seconds, lowest_s), _BOUNDS_S[index])


def summed(counts: Mapping[str, float]) -> dict[str, float]:
    """Return `counts` with each histogram as its `_count` and its `_sum`, in seconds."""
    sums: dict[str, float] = {}
    for name, amount in counts.items():
        series, bucket, rest = name.partition(_BUCKET)
        total = series + ("_count" if rest.endswith(_NUMBER) else "_sum") if bucket else name
        sums[total] = sums.get(total, 0) + amount
    return sums


def is_observed(name: str) -> bool:
    """Return whether the number belongs to a histogram."""
    return _BUCKET in name
