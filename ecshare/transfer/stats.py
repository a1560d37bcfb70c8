# SPDX-License-Identifier: Apache-2.0
"""Counters as plain, mergeable numbers."""

from collections.abc import Mapping


class Stats:
    """Counts since the last `take`, by name.

    A name is a metric and its label, joined by a slash: `items/loaded`. Plain dicts travel between
    processes, add up over ranks and intervals, and mean the same wherever they are read.

    Ownership: one thread adds and takes.
    """

    def __init__(self) -> None:
        """Start with every count at zero."""
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count `amount` (of whatever unit the name says) under `name`."""
        self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Return what was counted since the last call, and start again at zero."""
        taken, self._counts = self._counts, {}
        return taken


def merged(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of two sets of counts, by name; neither is changed."""
    total = dict(first)
    for name, amount in second.items():
        total[name] = total.get(name, 0) + amount
    return total
