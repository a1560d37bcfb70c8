# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges as plain, mergeable numbers."""

from collections.abc import Mapping

_GAUGE = "now/"


def is_gauge(name: str) -> bool:
    """Whether the number is a gauge, which a later value replaces. Other numbers are added."""
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

    def set(self, name: str, value: float) -> None:
        """Set a gauge, which starts at 0. `take` returns it only after a change."""
        if self._gauges.get(name, 0) != value:
            self._gauges[name] = self._counts[name] = value

    def take(self) -> dict[str, float]:
        """Return what was counted since the last call, and start again at zero."""
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
