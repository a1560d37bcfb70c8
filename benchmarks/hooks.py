# SPDX-License-Identifier: Apache-2.0
"""Time hooks, one call at a time."""

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from benchmarks.measure import Readings, percentile
from benchmarks.report import Cell

P = ParamSpec("P")
R = TypeVar("R")

COLUMNS = ("hook", "connector", "store", "calls", "p50 us", "p99 us", "max us")
BLACK_HOLE = "S3, black hole"
RUNNING = 8  # requests at once
STEP_S = 0.001
SHORT_S = 0.5  # the wait of a request for a store that is gone; 5 s by default


class HookClock:
    """The seconds of single calls, by name."""

    def __init__(self) -> None:
        self.readings: Readings[str] = Readings()
        self.total_s = 0.0
        """The seconds of all calls so far."""

    def time(self, name: str, hook: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `hook` returns, and record its seconds."""
        start_s = time.perf_counter()
        result = hook(*args, **kwargs)
        seconds = time.perf_counter() - start_s
        self.readings.add(name, seconds)
        self.total_s += seconds
        return result

    def rows(self, names: Sequence[str], connector: str, store: str) -> list[tuple[Cell, ...]]:
        """Return table rows of COLUMNS for those of `names` that were timed."""
        rows: list[tuple[Cell, ...]] = []
        for name in names:
            if name in self.readings:
                us = [1e6 * reading for reading in self.readings.values(name)]
                figures = (percentile(us, 50), percentile(us, 99), max(us))
                rows.append((name, connector, store, len(us), *figures))
        return rows
